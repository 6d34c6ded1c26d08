"""Starting a local run: if it fails or is interrupted, there is either a complete run or none."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.agent import free_ports
from paceline.agent.options import Options, endpoint
from paceline.backends import local
from paceline.backends.local import detached_start, supervisor
from paceline.job import load as load_job
from paceline.job import planning
from paceline.plan import CAPTAIN, Plan

JOB = "name: digits\nframework: none\ncommand: [python, train.py]\n"
PID = 4321


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    (tmp_path / "train.py").write_text("")
    (tmp_path / "job.yaml").write_text(JOB)
    return planning.make_plan(load_job(tmp_path / "job.yaml").job)


@pytest.fixture
def folder(plan: Plan) -> Path:
    return local.create(plan, JOB)[1]


@pytest.fixture
def supervisors(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The descriptors on which supervisors wait for run.json. No process is started."""
    waiting: list[int] = []

    def start(*arguments: Any) -> int:
        waiting.append(os.dup(arguments[7]))
        return PID

    monkeypatch.setattr(detached_start, "start_supervisor", start)
    monkeypatch.setattr(supervisor, "RECORDED_WITHIN_S", 0.0)
    return waiting


def raises(error: BaseException, after: Callable[..., object] = lambda *_: None) -> Callable[..., Any]:
    def call(*arguments: Any) -> None:
        after(*arguments)
        raise error

    return call


def test_the_supervisor_continues_once_run_json_is_written(plan: Plan, folder: Path, supervisors: list[int]) -> None:
    local.start_detached(plan, folder.name, folder)
    assert json.loads((folder / "run.json").read_text())["supervisor"] == PID
    assert supervisor.is_recorded(folder, supervisors[0])


def test_without_run_json_the_supervisor_ends_and_the_folder_is_removed(
    plan: Plan, folder: Path, supervisors: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    full = OSError(28, "No space left on device")
    monkeypatch.setattr(local, "replace", raises(full))
    with pytest.raises(local.CannotRun, match="cannot start the run: No space left on device"):
        local.start_detached(plan, folder.name, folder)
    assert not folder.exists() and not supervisor.is_recorded(folder, supervisors[0])


def test_an_interrupt_leaves_a_complete_run_or_none(
    plan: Plan, folder: Path, supervisors: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    replace, start = local.replace, detached_start.start_supervisor
    monkeypatch.setattr(local, "replace", raises(KeyboardInterrupt(), after=replace))
    with pytest.raises(KeyboardInterrupt):
        local.start_detached(plan, folder.name, folder)
    assert supervisor.is_recorded(folder, supervisors[0])
    monkeypatch.setattr(local, "replace", replace)
    monkeypatch.setattr(detached_start, "start_supervisor", raises(KeyboardInterrupt(), after=start))
    second = local.create(plan, JOB)[1]
    with pytest.raises(KeyboardInterrupt):
        local.start_detached(plan, second.name, second)
    assert not second.exists() and not supervisor.is_recorded(second, supervisors[1])


def test_a_supervisor_waits_for_run_json_only_for_a_while(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "RECORDED_WITHIN_S", 0.01)
    recorded, announce = os.pipe()
    assert not supervisor.is_recorded(folder, recorded)
    os.close(announce)


def start_in_this_process(
    monkeypatch: pytest.MonkeyPatch, plan: Plan, folder: Path, ports: Sequence[int] = ()
) -> tuple[int, Sequence[int]]:
    """Starts a supervisor with the process of `python -m` replaced by a call, in which Python prints something. Returns
    its pid and the descriptors that the process inherits."""
    passed: list[int] = []

    def run(command: list[str], stdout: int, pass_fds: Sequence[int], **_: Any) -> SimpleNamespace:
        passed.extend(pass_fds)
        os.write(stdout, b"printed by sitecustomize\n")
        with pytest.raises(SystemExit) as end:
            detached_start.main([str(os.dup(int(command[-1])))])
        return SimpleNamespace(returncode=end.value.code)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(os, "_exit", lambda code: raises(SystemExit(code))())
    recorded, announce = os.pipe()
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT)
    try:
        shares = local.assign(plan)
        pid = detached_start.start_supervisor(
            plan, folder.name, folder, "127.0.0.1:1", shares, "python", lock, recorded, "", "", ports
        )
        return pid, passed
    finally:
        for descriptor in (recorded, announce, lock):
            os.close(descriptor)


def test_the_pid_is_read_even_if_python_prints_when_it_starts(
    plan: Plan, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fork", lambda: PID)
    assert start_in_this_process(monkeypatch, plan, folder)[0] == PID
    assert (folder / "agents.log").read_text() == "printed by sitecustomize\n"


def test_the_request_is_read_before_the_supervisor_is_forked(
    plan: Plan, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fork", raises(AssertionError("forked")))
    monkeypatch.setattr(detached_start, "Share", raises(SystemExit(3)))
    with pytest.raises(local.CannotRun, match="its supervisor ended: printed by sitecustomize"):
        start_in_this_process(monkeypatch, plan, folder)


# ---- ports


@pytest.fixture
def page() -> str:
    return f"127.0.0.1:{free_ports.free_port()}"


def are_reserved(folder: Path) -> list[bool]:
    """Whether the ports of the captain, of its metrics and of TensorBoard are reserved."""
    info = json.loads((folder / "run.json").read_text())
    addresses = [info["captain"], *(info[name].split("/")[2] for name in ("metrics_url", "tensorboard"))]
    assert len(set(addresses)) == 3
    return [is_reserved(endpoint(address)[1]) for address in addresses]


def is_reserved(port: int) -> bool:
    reservation = free_ports.port_reservation(port)
    if reservation is not None:
        reservation.close()
    return reservation is None


def reservations() -> set[int]:
    """The descriptors of this process that reserve ports."""
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        if path.exists() and path.is_socket():
            with socket.socket(fileno=os.dup(int(path.name))) as each:
                if each.family == socket.AF_UNIX and b"paceline-port-" in (each.getsockname() or b""):
                    found.add(int(path.name))
    return found


def test_the_ports_of_a_run_stay_reserved_while_its_supervisor_exists(
    plan: Plan, folder: Path, page: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its agents listen a moment after they were chosen: another run must not choose them in the meantime."""
    inherited: list[int] = []

    def start(*arguments: Any) -> int:
        inherited.extend(map(os.dup, arguments[-1]))
        return PID

    monkeypatch.setattr(detached_start, "start_supervisor", start)
    local.start_detached(replace(plan, metrics=True), folder.name, folder, page)
    assert are_reserved(folder) == [True, True, True] and len(inherited) == 3
    for descriptor in inherited:
        os.close(descriptor)
    assert are_reserved(folder) == [False, False, False]


def test_a_supervisor_that_is_forked_inherits_the_ports_of_its_run(
    plan: Plan, folder: Path, page: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, inherited = reservations(), list[int]()

    def fork() -> int:
        inherited.extend(map(os.dup, reservations() - before))
        return PID

    monkeypatch.setattr(os, "fork", fork)
    local.start(replace(plan, metrics=True), folder.name, folder, detach=True, page=page)
    assert are_reserved(folder) == [True, True, True] and len(inherited) == 3
    for descriptor in inherited:
        os.close(descriptor)
    assert are_reserved(folder) == [False, False, False]


def test_the_process_of_a_detached_supervisor_inherits_the_ports(
    plan: Plan, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But the programs that it starts do not."""
    monkeypatch.setattr(os, "fork", lambda: PID)
    ports = free_ports.PortReservations()
    ports.reserve()
    for descriptor in ports.descriptors():
        os.set_inheritable(descriptor, True)  # as `pass_fds` does for the new process
    _, passed = start_in_this_process(monkeypatch, plan, folder, ports.descriptors())
    assert set(ports.descriptors()) < set(passed)
    assert [os.get_inheritable(descriptor) for descriptor in ports.descriptors()] == [False]
    ports.release(())


def test_a_port_of_tensorboard_that_another_run_has_reserved_prevents_nothing(page: str) -> None:
    port = endpoint(page)[1]
    first, second = free_ports.PortReservations(), free_ports.PortReservations()
    first.add(port)
    second.add(port)
    assert (len(first.descriptors()), second.descriptors()) == (1, [])
    first.release(())
    assert not is_reserved(port)


@pytest.mark.parametrize("is_used", [True, False])
def test_a_captain_whose_port_is_used_ends_the_run_with_a_reason_that_names_it(is_used: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1] if is_used else 0}"
        reason = supervisor.why_it_crashes(Options("run", CAPTAIN, "", "", "", address))
        assert "keeps crashing" in supervisor.why_it_crashes(Options("run", "worker-host-0", "", "", "", address))
    in_use = f"the captain cannot listen on {address}: Address already in use; another program may use this port"
    assert reason.startswith(in_use if is_used else "the agent of captain keeps crashing")
