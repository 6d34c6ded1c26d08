"""Starting a local run: if it fails or is interrupted, there is either a complete run or none."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.backends import local
from paceline.backends.local import detached_start, supervisor
from paceline.job import load as load_job
from paceline.job import planning
from paceline.plan import Plan

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


def start_in_this_process(monkeypatch: pytest.MonkeyPatch, plan: Plan, folder: Path) -> int:
    """Starts a supervisor with the process of `python -m` replaced by a call, in which Python prints something."""

    def run(command: list[str], stdout: int, **_: Any) -> SimpleNamespace:
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
        return detached_start.start_supervisor(
            plan, folder.name, folder, "127.0.0.1:1", shares, "python", lock, recorded, "", ""
        )
    finally:
        for descriptor in (recorded, announce, lock):
            os.close(descriptor)


def test_the_pid_is_read_even_if_python_prints_when_it_starts(
    plan: Plan, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fork", lambda: PID)
    assert start_in_this_process(monkeypatch, plan, folder) == PID
    assert (folder / "agents.log").read_text() == "printed by sitecustomize\n"


def test_the_request_is_read_before_the_supervisor_is_forked(
    plan: Plan, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fork", raises(AssertionError("forked")))
    monkeypatch.setattr(detached_start, "Share", raises(SystemExit(3)))
    with pytest.raises(local.CannotRun, match="its supervisor ended: printed by sitecustomize"):
        start_in_this_process(monkeypatch, plan, folder)
