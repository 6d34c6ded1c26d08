"""The tasks of a host: which are started, how, and what a failed start leads to."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.agent.spares import spare
from paceline.agent.tasks import host_tasks as module
from paceline.agent.tasks.launcher import SPARE_ANSWERS
from paceline.agent.tasks.port_watch import PortWatch
from paceline.agent.transfers import requests as req
from paceline.agent.transfers.watched_checkpoints import NOTHING_AFTER_S
from paceline.plan import INGEST, Plan
from support.task_hosts import GRACE, KILL, TWO, Host, full_disk, with_role
from support.worlds import make_plan

# ---- checkpoints of programs


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize(("watch", "file"), [("ckpt", "ckpt/1"), ("snapshot.pt", "snapshot.pt"), ("*.pt", "model.pt")])
def test_a_warning_if_there_is_nothing_to_capture(
    make: Callable[..., Host], watch: str, file: str, exists: bool
) -> None:
    host = make(make_plan(1, watch=watch))
    (host.folder / "watched" / "tasks").mkdir(parents=True)
    if exists:
        (host.folder / file).parent.mkdir(exist_ok=True)
        (host.folder / file).write_text("x")
    host.start_one()

    def capture() -> list[str]:
        host.staging.watched.capture(host.tasks.attempts)
        host.porter.requests[-1][1](req.WatchedCaptured(False))
        return host.connection.texts

    host.clock.pass_time(NOTHING_AFTER_S - 1)
    assert capture() == []
    host.clock.pass_time(2)
    texts = capture()
    assert texts == capture(), "it is not repeated"
    path = f"{host.folder}/{watch}"
    expected = f"no snapshot has been taken: there is nothing at {path} (snapshots.watch) after 10 minutes"
    assert [text.partition(";")[0] for text in texts] == ([] if exists else [expected])


# ---- hints


def legacy(plan: Plan) -> Plan:
    return replace(plan, roles=tuple(replace(role, env={"TF_USE_LEGACY_KERAS": "1"}) for role in plan.roles))


@pytest.mark.parametrize(
    ("plan", "is_hinted"), [(TWO, True), (legacy(TWO), False), (replace(TWO, framework="none"), False)]
)
def test_an_error_of_code_for_keras_2_leads_to_a_hint(
    make: Callable[..., Host], monkeypatch: pytest.MonkeyPatch, plan: Plan, is_hinted: bool
) -> None:
    monkeypatch.delenv("TF_USE_LEGACY_KERAS", raising=False)
    host = make(plan)
    process = host.start_one()
    process.raises("AttributeError", "'SGD' object has no attribute 'minimize'", "train.py:3")
    host.exits(process, 1 << 8)
    detail = host.exit()["detail"]
    assert detail.startswith("AttributeError: 'SGD' object has no attribute 'minimize' at train.py:3")
    assert ("; written for Keras 2? set tensorflow: {keras: legacy}" in detail) is is_hinted


# ---- starting


def test_a_task_is_started_and_reported_to_the_captain(host: Host) -> None:
    process = host.start_one(attempt=3, generation=2, restarts=1)
    assert host.connection.sent == [
        {"type": "started", "task": "worker-0", "attempt": 3, "pid": process.pid, "warm": False}
    ]
    environment = process.environment
    assert (environment["PACELINE_TASK"], environment["PACELINE_GENERATION"], environment["PACELINE_RUN"]) == (
        "worker-0",
        "2",
        "run",
    )
    assert environment["PACELINE_SNAPSHOT_DIR"] == f"{host.folder}/staging/worker-0/g2"
    process.prints("hello\n")
    host.clock.run_ready()
    assert host.log() == ["hello"]
    assert host.tasks.attempts["worker-0"].number == 3


def test_a_start_of_an_older_generation_is_ignored(host: Host) -> None:
    host.start_one("worker-0", generation=3)
    assert host.start("worker-1", generation=2, data="/old") == []
    assert (host.tasks.notes.generation, host.tasks.notes.data) == (3, "")
    assert [process.task for process in host.start("worker-1", generation=3)] == ["worker-1"]


def test_a_task_of_another_host_is_ignored(host: Host) -> None:
    assert [process.task for process in host.start("worker-7", "evaluator-0", "worker-1")] == ["worker-1"]
    assert list(host.tasks.attempts) == ["worker-1"]


def test_a_task_that_runs_is_not_started_again(host: Host) -> None:
    host.start_one("worker-0")
    assert [process.task for process in host.start("worker-0", "worker-1", attempt=2)] == ["worker-1"]
    assert host.tasks.attempts["worker-0"].number == 1


def test_a_task_that_has_ended_can_be_started_again(host: Host) -> None:
    host.exits(host.start_one(), 1 << 8)
    assert host.start_one(attempt=2).task == "worker-0"
    assert host.tasks.exits() == ()


def test_a_host_that_was_asked_to_leave_starts_nothing(host: Host) -> None:
    host.tasks.leave(GRACE)
    assert host.start("worker-0", generation=4) == []
    assert host.tasks.notes.generation == 0 and not host.tasks.attempts


def test_tasks_of_a_group_resume_from_the_snapshot(host: Host) -> None:
    process = host.start_one(generation=2, restore="step-10-g1")
    assert process.environment["PACELINE_RESTORE"] == f"{host.folder}/restored/worker-host-0/step-10-g1"


@pytest.mark.parametrize(("name", "restores"), [("chief-host-0", True), ("worker-host-0", False), ("ps-host-0", False)])
def test_with_parameter_servers_only_the_chief_resumes_from_the_snapshot(
    make: Callable[..., Host], name: str, restores: bool
) -> None:
    host = make(make_plan(1, ps=1, chief=True), name)
    process = host.start_one(host.plan.host(name).tasks[0], restore="step-10-g1")
    assert bool(process.environment["PACELINE_RESTORE"]) == restores


def test_tasks_get_the_location_of_the_data_even_if_the_captain_no_longer_knows_it(host: Host) -> None:
    first = host.start_one("worker-0", data="/data/1")
    second = host.start_one("worker-1", data="")
    assert first.environment["PACELINE_DATA"] == second.environment["PACELINE_DATA"] == "/data/1"


def test_without_data_there_is_no_variable_for_it(host: Host) -> None:
    assert "PACELINE_DATA" not in host.start_one().environment


def test_an_ingest_is_started_with_its_variables_and_is_not_part_of_the_heartbeat(make: Callable[..., Host]) -> None:
    host = make(make_plan(1, ingest=True))
    process = host.start_one(INGEST, restore="step-1-g1")
    assert process.environment["PACELINE_ROLE"] == "ingest" and "PACELINE_RESTORE" not in process.environment
    assert host.tasks.heartbeat(1).tasks == {}


# ---- state on disk


def test_a_later_agent_knows_generation_and_data(host: Host) -> None:
    host.start_one(generation=5, data="/data/1")
    host.begin_agent()
    assert (host.tasks.notes.generation, host.tasks.notes.data) == (5, "/data/1")
    assert host.start("worker-0", generation=4) == []


def test_a_damaged_generation_does_not_keep_a_host_from_starting_tasks(host: Host) -> None:
    (host.folder / "logs" / ".worker-host-0.generation").write_text("10000000")
    host.begin_agent()
    assert host.tasks.notes.generation == 10_000_000
    assert host.start_one("worker-0", generation=4)
    host.begin_agent()
    assert host.tasks.notes.generation == 4


def test_the_location_of_the_data_need_not_be_utf_8(host: Host) -> None:
    location = os.fsdecode(b"/data/\xe9")
    host.start_one(generation=5, data=location)
    host.begin_agent()
    assert host.tasks.notes.data == location


def test_a_full_disk_does_not_destroy_the_state(host: Host) -> None:
    host.start(generation=5, data="/data/1")
    with full_disk():
        host.start(generation=6, data="/data/2")
        assert (host.tasks.notes.generation, host.tasks.notes.data) == (6, "/data/2")  # this agent still knows
    host.begin_agent()
    assert (host.tasks.notes.generation, host.tasks.notes.data) == (5, "/data/1")
    assert sorted(path.name for path in (host.folder / "logs").iterdir()) == [
        ".worker-host-0.data", ".worker-host-0.generation",
    ]  # fmt: skip


@pytest.mark.parametrize("text", [b"", b"five", b"\xff\xfe"])
def test_unreadable_state_is_ignored(host: Host, text: bytes) -> None:
    for name in ("generation", "data"):
        (host.folder / "logs" / f".worker-host-0.{name}").write_bytes(text)
    host.begin_agent()
    assert host.tasks.notes.generation == 0
    assert host.start_one(generation=1)


# ---- failed starts


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (FileNotFoundError(2, "No such file or directory", "nothing"), "No such file or directory: nothing"),
        (OSError("no spare memory"), "no spare memory"),
    ],
)
def test_a_task_that_cannot_start_says_why_in_its_log(host: Host, error: OSError, line: str) -> None:
    host.machine.start_error = error
    assert host.start("worker-0", "worker-1") == []
    assert host.log("worker-0") == host.log("worker-1") == [line]
    exits = [message["exit"] for message in host.connection.take("exited")]
    assert [(exit["task"], exit["code"], exit["cause"]) for exit in exits] == [
        ("worker-0", 127, "program-error"), ("worker-1", 127, "program-error"),
    ]  # fmt: skip
    assert exits[0]["detail"] == f"exit code 127; last line of output: {line}"
    assert not host.tasks.attempts and host.signals() == [] and host.connection.take("started") == []


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENOSPC, errno.EDQUOT])
def test_a_machine_that_is_exhausted_is_not_an_error_of_the_program(host: Host, number: int) -> None:
    host.machine.start_error = OSError(number, os.strerror(number), "/a/file")
    assert host.start("worker-0") == []
    exit = host.exit()
    assert (exit["code"], exit["cause"]) == (127, "start-failed")
    assert exit["detail"] == f"could not be started: {os.strerror(number)}: /a/file"
    assert host.log() == [f"{os.strerror(number)}: /a/file"]


def test_a_variable_that_no_process_can_have_is_an_error_of_the_task(host: Host) -> None:
    host.machine.start_error = ValueError("embedded null byte")
    assert host.start("worker-0", data="/data\0") == []
    assert host.log() == ["invalid environment: embedded null byte"]
    assert host.exit()["code"] == 127


def test_the_record_of_imports_of_another_host_may_contain_anything(host: Host) -> None:
    host.tasks.learn_imports('"torch"\n"\ud800"\n')
    assert (host.folder / "logs" / ".worker-host-0.imports").read_text() == '"torch"\n"?"\n'


def test_a_task_cannot_start_if_its_folder_for_snapshots_cannot_be_created(host: Host) -> None:
    (host.folder / "staging").write_text("")
    host.start("worker-0")
    assert host.log() == [f"Not a directory: {host.folder}/staging/worker-0"]
    assert host.exit()["code"] == 127


# ---- from a spare


def test_a_task_from_a_spare_is_reported_once_its_process_is_known(host: Host) -> None:
    warm_spare = host.request_from_spare("worker-0")
    assert host.connection.sent == [] and "worker-0" in host.tasks.attempts
    process = warm_spare.forks()
    warm_spare.send(spare.Started(process.pid))
    host.clock.run_ready()
    assert host.connection.sent == [
        {"type": "started", "task": "worker-0", "attempt": 2, "pid": process.pid, "warm": True}
    ]


def test_a_task_whose_exit_arrives_before_its_pid_has_ended(host: Host) -> None:
    warm_spare = host.request_from_spare("worker-0", "worker-1")
    first, second = warm_spare.forks(), warm_spare.forks()
    host.exits(first, 3 << 8)
    assert host.connection.take("exited") == []
    warm_spare.send(spare.Started(first.pid))
    warm_spare.send(spare.Started(second.pid))
    host.clock.run_ready()
    exit = host.exit()
    assert (exit["task"], exit["code"], exit["expected"]) == ("worker-0", 3, False)
    assert list(host.tasks.attempts) == ["worker-1"]


def test_the_exit_of_an_orphan_is_not_mistaken_for_that_of_a_later_task(host: Host) -> None:
    warm_spare = host.request_from_spare("worker-0")
    first = warm_spare.forks()
    host.tasks.child_ended(first.pid + 1, 1 << 8)  # an orphan, whose PID the next task gets
    warm_spare.send(spare.Started(first.pid))
    host.clock.run_ready()
    host.start("worker-1", attempt=2)
    second = warm_spare.forks()
    assert second.pid == first.pid + 1
    warm_spare.send(spare.Started(second.pid))
    host.clock.run_ready()
    assert sorted(host.tasks.attempts) == ["worker-0", "worker-1"] and host.connection.take("exited") == []


@pytest.mark.parametrize("how", ["abort", "kill", "term"])
def test_a_task_without_a_process_that_is_asked_to_end_is_signaled_once_there_is_one(host: Host, how: str) -> None:
    warm_spare = host.request_from_spare("worker-0")
    host.end(how, worker_0=2)
    host.clock.pass_time(GRACE / 4)  # too short for the spare to be given up
    assert host.signals() == [] and host.connection.take("ended") == []
    process = warm_spare.forks()
    warm_spare.send(spare.Started(process.pid))
    host.clock.run_ready()
    assert host.signals() == [(-process.pid, KILL)]
    host.exits(process, KILL)
    [ended] = host.connection.take("ended")
    assert ended["tasks"] == {"worker-0": 2} and host.connection.take("exited") == []


def test_a_task_that_starts_after_its_host_was_asked_to_leave_is_killed(host: Host) -> None:
    warm_spare = host.request_from_spare("worker-0")
    host.tasks.leave(GRACE)
    host.tasks.terminate()
    process = warm_spare.forks()
    warm_spare.send(spare.Started(process.pid))
    host.clock.run_ready()
    assert host.signals() == [(-process.pid, KILL)]
    host.exits(process, KILL)
    assert (host.exit()["cause"], host.none_left_calls) == ("preempted", 1)


def test_a_task_that_has_no_process_group_yet_is_killed_too(host: Host) -> None:
    """A spare reports a process that it has forked before the process has created its own group."""
    warm_spare = host.request_from_spare("worker-0")
    host.end("kill", worker_0=2)
    process = warm_spare.forks(is_group=False)
    warm_spare.send(spare.Started(process.pid))
    host.clock.run_ready()
    assert host.signals() == [(process.pid, KILL)]


def test_a_task_that_ended_before_its_pid_was_known_is_not_signaled(host: Host) -> None:
    warm_spare = host.request_from_spare("worker-0")
    host.end("kill", worker_0=2)
    process = warm_spare.forks(is_group=False)
    host.exits(process, 0)
    host.machine.adopted[process.pid] = "another program"  # the PID is used again
    warm_spare.send(spare.Started(process.pid))
    host.clock.run_ready()
    assert host.signals() == []
    assert host.connection.take("ended")[-1]["tasks"] == {"worker-0": 2}


def test_a_spare_that_does_not_answer_is_replaced_and_its_tasks_start_cold(host: Host) -> None:
    warm_spare = host.request_from_spare("worker-0")
    host.machine.alive[warm_spare.pid] = warm_spare.requests[0]
    host.clock.pass_time(SPARE_ANSWERS)
    [started] = host.connection.take("started")
    assert started["warm"] is False and "it did not respond for 10 s" in host.connection.texts[-1]
    del host.machine.alive[warm_spare.pid]
    host.trains(host.machine.started[-1])
    assert len(host.machine.spares) == 2


def test_the_tasks_of_a_spare_that_dies_start_cold_and_no_exit_is_reported(host: Host) -> None:
    warm_spare = host.request_from_spare("worker-0")
    host.tasks.child_ended(warm_spare.pid, KILL)
    [started] = host.connection.take("started")
    assert (started["task"], started["warm"]) == ("worker-0", False)
    assert host.connection.take("exited") == []


@pytest.mark.parametrize("answers, gets_another", [([0, 0, 0], False), ([0, 0, 1, 0, 0], True)])
def test_spares_are_given_up_once_three_in_a_row_have_ended(host: Host, answers: list[int], gets_another: bool) -> None:
    process = host.start_one()
    for attempt, does_answer in enumerate(answers, 2):
        host.trains(process)
        warm_spare = host.machine.spares[-1]
        warm_spare.send(spare.Ready(1, 1, 0.1))
        host.clock.run_ready()
        host.exits(process, 1 << 8)
        host.start("worker-0", attempt=attempt)
        if does_answer:
            process = warm_spare.forks()
            warm_spare.send(spare.Started(process.pid))
            host.clock.run_ready()
        else:
            host.tasks.child_ended(warm_spare.pid, KILL)
            process = host.machine.started[-1]
    before = len(host.machine.spares)
    host.trains(process)
    assert len(host.machine.spares) - before == gets_another


def test_a_program_that_no_spare_can_run_gets_no_more_spares(host: Host) -> None:
    process = host.start_one()
    process.reports(_="cold", why="it reads its own frames")
    host.exits(process, 0)
    assert host.connection.texts == ["worker-0 starts without a spare from now on: it reads its own frames"]
    again = host.start_one(attempt=2)
    again.reports(step=1)
    host.clock.run_ready()
    host.tasks.look()
    assert host.machine.spares == []


def test_references_to_variables_of_the_task_are_expanded(make: Callable[..., Host]) -> None:
    env = {"LABEL": "${PACELINE_TASK}-of-$PACELINE_RUN", "DATA": "$PACELINE_DATA/x", "PRICE": "$5, $$PACELINE_RANK"}
    host = make(with_role(command=("python", "train.py", "--rank=$PACELINE_RANK", "$HOME"), env=env))
    first, second = host.start("worker-0", "worker-1")
    assert [process.environment["LABEL"] for process in (first, second)] == ["worker-0-of-run", "worker-1-of-run"]
    assert first.environment["PRICE"] == "$5, $PACELINE_RANK"
    assert "DATA" not in first.environment  # the job has no data
    assert [process.argv[1:] for process in (first, second)] == [
        ("train.py", "--rank=0", "$HOME"),
        ("train.py", "--rank=1", "$HOME"),
    ]


def test_a_task_from_a_spare_gets_its_own_arguments(make: Callable[..., Host]) -> None:
    host = make(with_role(command=("python", "train.py", "--rank=$PACELINE_RANK")))
    warm_spare = host.request_from_spare("worker-0")
    assert warm_spare.forks().argv[1:] == ("train.py", "--rank=0")


def test_a_shell_expands_references_itself(make: Callable[..., Host]) -> None:
    host = make(with_role(command=("sh", "-c", "echo '$PACELINE_RANK' $1", "sh", "$PACELINE_RANK")))
    [process] = host.start("worker-1")
    assert process.argv == ("sh", "-c", "echo '$PACELINE_RANK' $1", "sh", "1")


def test_a_program_that_is_only_beside_the_interpreter_is_found(
    make: Callable[..., Host], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "bin" / "own-tool"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(tmp_path / "bin" / "python"))
    host = make(with_role(command=("own-tool", "x")))
    assert host.start_one().argv == (str(tool), "x")


@pytest.mark.parametrize(("port_is_used", "beats", "listened"), [(True, 1, True), (False, 9, False), (False, 1, None)])
def test_the_exit_of_rank_0_says_whether_any_task_used_its_address(
    host: Host, monkeypatch: pytest.MonkeyPatch, port_is_used: bool, beats: int, listened: bool | None
) -> None:
    table = host.folder / "tcp"
    table.write_text(f"  0: 0100007F:{2000 if port_is_used else 2001:04X} 00000000:0000 0A 00000000:00000000 00:0\n")
    monkeypatch.setattr(module, "PortWatch", lambda port: PortWatch(port, (str(table), "/no/such/table")))
    first, second = host.start("worker-0", "worker-1")
    for _ in range(beats):
        host.tasks.look()
    host.exits(first)
    assert host.exit()["listened"] is listened
    host.exits(second)
    assert host.exit()["listened"] is None


def test_without_tables_it_is_unknown_whether_a_port_was_used() -> None:
    watch = PortWatch(2000, ("/no/such/table",))
    for _ in range(100):
        watch.look()
    assert watch.finish() is None


def test_a_connection_that_was_closed_just_before_is_found() -> None:
    """The kernel lists it: the program may have ended between two looks."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(server.getsockname()), server.accept()[0]:
            pass
    assert PortWatch(port).finish() is True


def test_the_share_of_a_task_that_has_started_the_run_does_not_count(
    make: Callable[..., Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_SHARE", "2")
    assert "PACELINE_SHARE" not in make(TWO).start_one().environment
