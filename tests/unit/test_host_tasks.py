"""The tasks of a host, without processes: which are started, which are signaled when, and what is reported."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.agent import machine
from paceline.agent.captain import events as ev
from paceline.agent.captain import instructions as ins
from paceline.agent.net import messages
from paceline.agent.net.loop import Loop
from paceline.agent.options import Options
from paceline.agent.spares import spare
from paceline.agent.tasks import attempt as attempts
from paceline.agent.tasks import exit_causes
from paceline.agent.tasks import host_tasks as module
from paceline.agent.tasks.host_tasks import HostTasks
from paceline.agent.tasks.launcher import SPARE_ANSWERS
from paceline.agent.tasks.port_watch import PortWatch
from paceline.agent.transfers import host_snapshots
from paceline.agent.transfers import requests as req
from paceline.agent.transfers.evaluator_copies import EvaluatorCopies
from paceline.agent.transfers.host_snapshots import HostSnapshots
from paceline.agent.transfers.watched_folder import NOTHING_AFTER_S
from paceline.frameworks import amx
from paceline.plan import INGEST, Plan
from support.worlds import make_plan

GRACE = 20.0
KILL, TERM, CONT, ABORT, INT = signal.SIGKILL, signal.SIGTERM, signal.SIGCONT, signal.SIGABRT, signal.SIGINT
TWO = make_plan(2, per_host=2)
SHELL = replace(TWO, roles=tuple(replace(role, command=("sh", "train.sh")) for role in TWO.roles))


class Clock(Loop):
    """The agent's loop with a clock that a test moves."""

    def __init__(self) -> None:
        self.time = 1000.0
        super().__init__()

    def now(self) -> float:
        return self.time

    def run_ready(self) -> None:
        self.once(0.0)

    def pass_time(self, seconds: float) -> None:
        self.time += seconds
        self.run_ready()


class Process:
    """A process of a task: a PID, and its ends of the pipes."""

    def __init__(
        self, environment: Mapping[str, str], output: int, reports: int, argv: Sequence[str] | None = None
    ) -> None:
        self.pid = 0
        self.argv = tuple(argv or ())
        self.environment = dict(environment)
        self.is_group = False
        self._output = os.dup(output)
        self._reports = socket.socket(fileno=os.dup(reports))
        self._reports.setblocking(False)

    @property
    def task(self) -> str:
        return self.environment["PACELINE_TASK"]

    def prints(self, text: str) -> None:
        os.write(self._output, text.encode())

    def reports(self, **fields: Any) -> None:
        self.sends(json.dumps(fields).encode())

    def sends(self, datagram: bytes) -> None:
        self._reports.send(datagram)

    def raises(self, kind: str = "ValueError", text: str = "no", location: str = "train.py:3") -> None:
        self.reports(_="raised", type=kind, text=text, place=location)

    def received(self) -> list[Any]:
        received = []
        while True:
            try:
                received.append(json.loads(self._reports.recv(65536)))
            except BlockingIOError:
                return received

    def close(self) -> None:
        os.close(self._output)
        self._reports.close()


class Machine:
    """Stands for the kernel: PIDs instead of processes, and a list of the signals."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.started: list[Process] = []
        self.alive: dict[int, Process] = {}
        self.signals: list[tuple[int, signal.Signals]] = []  # a negative number: to a process group
        self.start_error: OSError | None = None
        self.adopted: dict[int, str] = {}  # children of the agent -> their tasks
        self.states: dict[int, tuple[str, float]] = {}
        self.below: dict[int, list[int]] = {}
        self.ports = iter(range(20000, 30000))
        self.killed = 0  # processes, by the kernel for their memory
        self.log = False  # whether the kernel's log names the process
        self.spares: list[Spare] = []
        patch.setenv(amx.OVERRIDE, amx.ABSENT)  # the probe would start a process
        patch.setattr(os, "kill", self._kill)
        patch.setattr(os, "killpg", self._killpg)
        patch.setattr(spare, "start_cold", lambda python, *args: self._start(python.argv, *args))
        patch.setattr(spare, "start_plain", self._start)
        patch.setattr(spare, "read_record", lambda _: (spare.State({}, (), False, ("json",)),))
        patch.setattr(spare.Spare, "spawn", staticmethod(self._spawn))
        patch.setattr(machine, "children", lambda _: [*self.alive, *self.adopted])
        patch.setattr(machine, "environment_of", self._environment_of)
        patch.setattr(machine, "descendants", lambda pid: self.below.get(pid, []))
        patch.setattr(machine, "state", lambda pid: self.states.get(pid, ("S", 0.0)))
        patch.setattr(machine, "was_oom_killed", lambda _: self.log)
        patch.setattr(machine, "free_port", lambda: next(self.ports))
        patch.setattr(machine, "Memory", lambda: self)
        patch.setattr(host_snapshots, "PorterClient", Porter)

    # ---- memory

    def used_and_limit(self) -> tuple[int, int]:
        return 1 << 30, 4 << 30

    def share(self) -> float:
        return 0.25

    def free(self) -> int:
        return 3 << 30

    def oom_kills(self) -> int:
        return self.killed

    # ---- processes

    def begins(self, process: Process, is_group: bool = True) -> int:
        process.pid = 5001 + len(self.started)
        process.is_group = is_group
        self.started.append(process)
        self.alive[process.pid] = process
        return process.pid

    def dies(self, pid: int) -> None:
        """It has ended and was waited for."""
        process = self.alive.pop(pid)
        process.close()

    def _start(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        _: str,
        stdout: int,
        stderr: int,
        reports: int,
        record: int = -1,
    ) -> int:
        if self.start_error is not None:
            raise self.start_error
        return self.begins(Process(environment, stdout, reports, argv))

    def _spawn(self, *_: Any, **__: Any) -> Spare:
        self.spares.append(Spare(self, 4001 + len(self.spares)))
        return self.spares[-1]

    def _environment_of(self, pid: int, name: str) -> str | None:
        assert name == "PACELINE_TASK"
        return self.alive[pid].task if pid in self.alive else self.adopted.get(pid)

    def _kill(self, pid: int, number: int) -> None:
        assert pid > 1, "a signal to the agent's own process group, or to all processes"
        below = {each for pids in self.below.values() for each in pids}
        if pid not in {*self.alive, *self.adopted, *below}:
            raise ProcessLookupError(errno.ESRCH, "No such process")
        self.signals.append((pid, signal.Signals(number)))

    def _killpg(self, pid: int, number: int) -> None:
        assert pid > 1, "a signal to the agent's own process group"
        if pid not in self.alive or not self.alive[pid].is_group:
            raise ProcessLookupError(errno.ESRCH, "No such process")
        self.signals.append((-pid, signal.Signals(number)))


class Spare:
    """A spare that forks when the test says so."""

    def __init__(self, machine: Machine, pid: int) -> None:
        self.pid = pid
        self.requests: list[Process] = []
        self._machine = machine
        self._receiver, self._sender = socket.socketpair()
        self._messages: list[spare.Message] = []

    def fileno(self) -> int:
        return self._receiver.fileno()

    def send(self, message: spare.Message) -> None:
        self._messages.append(message)
        self._sender.send(b".")

    def receive(self) -> list[spare.Message]:
        self._receiver.recv(64)
        received, self._messages = self._messages, []
        return received

    def start(
        self,
        environment: Mapping[str, str],
        stdout: int,
        stderr: int,
        reports: int,
        argv: Sequence[str] | None = None,
    ) -> None:
        self.requests.append(Process(environment, stdout, reports, argv))

    def forks(self, is_group: bool = True) -> Process:
        """The first process that was requested; `is_group`: whether it leads a process group by now."""
        process = self.requests.pop(0)
        self._machine.begins(process, is_group)
        return process

    def kill(self) -> None:
        self._receiver.close()
        self._sender.close()


class Porter:
    """Transfers nothing, and records its requests."""

    def __init__(self, *_: Any) -> None:
        self.requests: list[tuple[req.Request, Callable[[Any], None]]] = []
        self.pid = 0

    def ask(self, request: req.Request, answered: Callable[[Any], None]) -> int:
        self.requests.append((request, answered))
        return len(self.requests)

    def cancel(self, number: int) -> None:
        pass

    def pids(self) -> set[int]:
        return {self.pid} if self.pid else set()

    def child_ended(self, pid: int) -> bool:
        return pid == self.pid


class Connection:
    """The messages to the captain."""

    def __init__(self, host: str) -> None:
        self._host = host
        self.sent: list[dict[str, Any]] = []
        self.texts: list[str] = []
        self.beats = 0

    def send(self, event: ev.MemberEvent) -> None:
        """As the captain receives it."""
        plain = json.loads(json.dumps(messages.member_message(event)))
        assert messages.read_member(plain, self._host) == event
        self.sent.append(plain)

    def notify(self, text: str, warning: bool = False) -> None:
        self.texts.append(text)

    def beat(self) -> None:
        self.beats += 1

    def take(self, kind: str) -> list[dict[str, Any]]:
        """The messages of that kind since the last call."""
        matching = [message for message in self.sent if message["type"] == kind]
        self.sent = [message for message in self.sent if message["type"] != kind]
        return matching


class Host:
    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, plan: Plan, name: str) -> None:
        self.folder, self.plan, self.name = folder, plan, name
        self.machine = Machine(patch)
        self.clock = Clock()
        self.none_left_calls = 0  # calls of `_none_left`
        (folder / "logs").mkdir()
        self.begin_agent()

    def begin_agent(self) -> None:
        """Start an agent; also another one, after the first."""
        self.connection = Connection(self.name)
        connection: Any = self.connection
        options = Options("run", self.name, "", str(self.folder), "", "", work=str(self.folder))
        self.staging = HostSnapshots(self.plan, options, self.clock, connection.send, connection.notify)
        porter: Any = self.staging.porter
        self.porter: Porter = porter
        self.following = EvaluatorCopies(
            self.plan,
            options,
            porter,
            self.clock,
            connection.send,
            connection.notify,
            self.staging.remove,
            lambda *_: None,
        )
        self.tasks = HostTasks(
            self.plan, options, self.clock, connection, self.staging, self.following, None, self._none_left
        )
        self.tasks.roster = {task.name: f"127.0.0.1:{2000 + n}" for n, task in enumerate(self.plan.tasks)}

    def _none_left(self) -> None:
        self.none_left_calls += 1

    def start(self, *names: str, attempt: int = 1, generation: int = 1, **more: Any) -> list[Process]:
        """The processes that this starts."""
        before = len(self.machine.started)
        fields: dict[str, Any] = {"restarts": 0, "restore": None, "data": "", **more}
        self.tasks.start(messages.StartOnHost(generation, tasks=dict.fromkeys(names, attempt), **fields))
        return self.machine.started[before:]

    def start_one(self, name: str = "worker-0", **more: Any) -> Process:
        [process] = self.start(name, **more)
        return process

    def request_from_spare(self, *names: str) -> Spare:
        """The first task makes the host keep a spare, which is asked to start `names`; their PIDs are not known yet."""
        first = self.start_one("worker-0")
        first.reports(step=1)
        self.clock.run_ready()
        self.tasks.look()
        [warm_spare] = self.machine.spares
        warm_spare.send(spare.Ready(1, 1, 0.1))
        self.clock.run_ready()
        self.exits(first, 1 << 8)
        assert self.start(*names, attempt=2) == []
        self.machine.signals.clear()
        self.connection.sent.clear()
        return warm_spare

    def end(self, how: str, grace: float = GRACE, **tasks: int) -> None:
        self.tasks.end(ins.EndTasks(self.name, {n.replace("_", "-"): k for n, k in tasks.items()}, how, grace))

    def exits(self, process: Process, status: int = 0) -> None:
        self.machine.dies(process.pid)
        self.tasks.child_ended(process.pid, status)

    def exit(self) -> dict[str, Any]:
        """The only exit that the captain received since the last call."""
        [message] = self.connection.take("exited")
        fields: dict[str, Any] = message["exit"]
        return fields

    def signals(self) -> list[tuple[int, signal.Signals]]:
        signals, self.machine.signals = self.machine.signals, []
        return signals

    def log(self, task: str = "worker-0") -> list[str]:
        path = self.folder / "logs" / f"{task}.log"
        return [line.split("| ", 1)[1] for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Host]]:
    hosts: list[Host] = []

    def make_host(plan: Plan = TWO, name: str = "worker-host-0") -> Host:
        hosts.append(Host(tmp_path, monkeypatch, plan, name))
        return hosts[-1]

    yield make_host
    for host in hosts:
        for process in host.machine.alive.values():
            process.close()
    signal.set_wakeup_fd(-1)  # set by the loop


@pytest.fixture
def host(make: Callable[..., Host]) -> Host:
    return make()


@contextmanager
def full_disk() -> Iterator[None]:
    """Files can be created and truncated, but nothing can be written to them."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


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
    assert (host.tasks.generation, host.tasks.data) == (3, "")
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
    assert host.tasks.generation == 0 and not host.tasks.attempts


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
    assert (host.tasks.generation, host.tasks.data) == (5, "/data/1")
    assert host.start("worker-0", generation=4) == []


def test_a_full_disk_does_not_destroy_the_state(host: Host) -> None:
    host.start(generation=5, data="/data/1")
    with full_disk():
        host.start(generation=6, data="/data/2")
        assert (host.tasks.generation, host.tasks.data) == (6, "/data/2")  # this agent still knows
    host.begin_agent()
    assert (host.tasks.generation, host.tasks.data) == (5, "/data/1")
    assert sorted(path.name for path in (host.folder / "logs").iterdir()) == [
        ".worker-host-0.data", ".worker-host-0.generation",
    ]  # fmt: skip


@pytest.mark.parametrize("text", [b"", b"five", b"\xff\xfe"])
def test_unreadable_state_is_ignored(host: Host, text: bytes) -> None:
    for name in ("generation", "data"):
        (host.folder / "logs" / f".worker-host-0.{name}").write_bytes(text)
    host.begin_agent()
    assert host.tasks.generation == 0
    assert host.start_one(generation=1)


# ---- failed starts


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (FileNotFoundError(2, "No such file or directory", "nothing"), "No such file or directory: nothing"),
        (BlockingIOError(11, "Resource temporarily unavailable"), "Resource temporarily unavailable"),
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


def test_a_spare_that_does_not_answer_is_given_up_and_its_tasks_start_cold(host: Host) -> None:
    warm_spare = host.request_from_spare("worker-0")
    host.machine.alive[warm_spare.pid] = warm_spare.requests[0]
    host.clock.pass_time(SPARE_ANSWERS)
    [started] = host.connection.take("started")
    assert started["warm"] is False and "the spare did not respond for 10 s" in host.connection.texts[-1]
    del host.machine.alive[warm_spare.pid]


def test_the_tasks_of_a_spare_that_dies_start_cold_and_no_exit_is_reported(host: Host) -> None:
    warm_spare = host.request_from_spare("worker-0")
    host.tasks.child_ended(warm_spare.pid, KILL)
    [started] = host.connection.take("started")
    assert (started["task"], started["warm"]) == ("worker-0", False)
    assert host.connection.take("exited") == []


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


def with_role(**fields: Any) -> Plan:
    return replace(TWO, roles=tuple(replace(role, **fields) for role in TWO.roles))


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


# ---- exits


def test_a_task_that_succeeds_is_reported_with_an_address_for_the_next_start(host: Host) -> None:
    process = host.start_one()
    host.connection.sent.clear()
    host.exits(process, 0)
    assert [message["type"] for message in host.connection.sent] == ["exited", "ended"]
    exit = host.exit()
    assert (exit["task"], exit["attempt"], exit["code"], exit["signal"]) == ("worker-0", 1, 0, None)
    assert (exit["expected"], exit["cause"], exit["age"]) == (False, "", 0.0)
    [ended] = host.connection.take("ended")
    assert ended["tasks"] == {} and set(ended["offers"]) == {"worker-0", "worker-1"}


@pytest.mark.parametrize(
    ("status", "code", "name", "cause"),
    [(3 << 8, 3, None, "program-error"), (KILL, None, "SIGKILL", "signal"), (TERM, None, "SIGTERM", "preempted")],
)
def test_a_failed_task_is_reported_with_its_cause(
    host: Host, status: int, code: int | None, name: str | None, cause: str
) -> None:
    host.exits(host.start_one(), status)
    exit = host.exit()
    assert (exit["code"], exit["signal"], exit["cause"], exit["expected"]) == (code, name, cause, False)


def test_an_instruction_that_the_cpu_does_not_allow_is_explained(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amx, "likely_reason", lambda _: "it may be AMX")
    host.exits(host.start_one(), signal.SIGILL)
    assert host.exit()["detail"] == "killed by SIGILL: it may be AMX"


def test_the_remaining_output_and_reports_are_read_when_a_task_ends(host: Host) -> None:
    process = host.start_one()
    process.prints("almost done\nand the end")
    process.reports(step=42)
    host.exits(process, 5 << 8)
    assert host.log() == ["almost done", "and the end"]
    assert host.exit()["detail"] == "exit code 5; last line of output: and the end"
    assert host.tasks.reached == 42 and host.connection.beats > 0


def test_the_highest_step_of_all_ended_attempts_counts(host: Host) -> None:
    for attempt, step in enumerate((30, 10), 1):
        process = host.start_one(attempt=attempt)
        process.reports(step=step)
        host.exits(process, 1 << 8)
    assert host.tasks.reached == 30


def test_a_failure_is_as_old_as_its_exception(host: Host) -> None:
    process = host.start_one()
    process.raises()
    host.clock.run_ready()
    host.clock.pass_time(2.0)
    host.exits(process, 1 << 8)
    exit = host.exit()
    assert (exit["cause"], exit["detail"], exit["age"]) == ("program-error", "ValueError: no at train.py:3", 2.0)
    host.clock.pass_time(3.0)
    [last_exit] = host.tasks.exits()
    assert (last_exit.task, last_exit.age, last_exit.detail) == ("worker-0", 5.0, exit["detail"])


def test_exits_are_those_of_tasks_that_do_not_run(host: Host) -> None:
    host.exits(host.start_one("worker-0"), 0)
    host.start_one("worker-1")
    assert [exit.task for exit in host.tasks.exits()] == ["worker-0"]


def test_a_task_that_raised_and_does_not_exit_is_killed(host: Host) -> None:
    process = host.start_one()
    process.raises()
    host.clock.run_ready()
    host.clock.pass_time(attempts.EXIT_WITHIN - 0.1)
    assert host.signals() == []
    host.clock.pass_time(0.2)
    assert host.signals() == [(-process.pid, KILL)]
    host.exits(process, KILL)
    assert host.exit()["detail"] == "ValueError: no at train.py:3"


@pytest.mark.parametrize(("plan", "survivor"), [(TWO, True), (make_plan(1), False)], ids=["with-peers", "alone"])
def test_the_loss_of_a_peer_is_reported_as_such_if_there_are_peers(
    make: Callable[..., Host], plan: Plan, survivor: bool
) -> None:
    host = make(plan)
    process = host.start_one()
    process.raises("ConnectionError", "Connection reset by peer")
    host.exits(process, 1 << 8)
    assert host.exit()["survivor"] is survivor


def test_the_rest_of_its_process_group_is_killed_when_a_task_ends(host: Host) -> None:
    process = host.start_one()
    host.tasks.child_ended(process.pid, 0)  # the group still exists
    assert host.signals() == [(-process.pid, KILL)]


def test_a_task_without_a_remaining_group_is_not_signaled_by_its_pid(host: Host) -> None:
    process = host.start_one()
    host.machine.dies(process.pid)
    host.machine.adopted[process.pid] = "another program"  # the PID is used again
    host.tasks.child_ended(process.pid, 0)
    assert host.signals() == []


def test_orphans_of_a_task_are_killed_and_those_of_others_are_not(host: Host) -> None:
    first = host.start_one("worker-0")
    host.start_one("worker-1")
    host.machine.adopted = {6001: "worker-0", 6002: "worker-1", 6003: "", 6004: "worker-0"}
    host.porter.pid = 6004
    host.exits(first, 0)
    assert host.signals() == [(6001, KILL)]


def test_the_exit_of_a_later_orphan_kills_the_remaining_orphans(host: Host) -> None:
    host.exits(host.start_one("worker-0"), 0)
    host.start_one("worker-1")
    host.machine.adopted = {6001: "worker-0", 6002: "worker-1"}
    host.tasks.child_ended(6000, 0)
    assert host.signals() == [(6001, KILL)]


def test_the_porter_is_not_a_task(host: Host) -> None:
    host.porter.pid = 6001
    host.machine.adopted = {6002: "worker-0"}
    host.tasks.child_ended(6001, KILL)
    assert host.signals() == [] and host.connection.sent == []


@pytest.mark.parametrize("status", [KILL, (128 + KILL) << 8], ids=["itself", "below-a-shell"])
def test_a_task_that_the_kernel_killed_for_its_memory_is_reported_as_such(host: Host, status: int) -> None:
    process = host.start_one()
    host.machine.killed += 1
    host.exits(process, status)
    exit = host.exit()
    assert (exit["cause"], exit["detail"]) == (
        "out-of-memory", "killed by the kernel: out of memory (the limit is 4096 MiB)",
    )  # fmt: skip


# ---- addresses


def test_each_task_that_does_not_run_is_offered_its_own_address(host: Host) -> None:
    host.machine.ports = iter([20001, 20001, 20001, 20002, 20003])
    assert host.tasks.offers() == {"worker-0": "127.0.0.1:20001", "worker-1": "127.0.0.1:20002"}
    host.start_one("worker-0")
    assert host.tasks.offers() == {"worker-1": "127.0.0.1:20003"}


def test_a_host_that_was_asked_to_leave_offers_no_addresses(host: Host) -> None:
    host.tasks.leave(GRACE)
    assert host.tasks.offers() == {}


def test_another_killed_task_is_not_reported_as_out_of_memory(host: Host) -> None:
    """One kill by the kernel explains the end of one task."""
    first, second = host.start("worker-0", "worker-1")
    host.machine.killed += 1
    host.exits(first, KILL)
    host.exits(second, KILL)
    assert [message["exit"]["cause"] for message in host.connection.take("exited")] == ["out-of-memory", "signal"]


def test_kills_from_before_a_task_started_do_not_count(host: Host) -> None:
    host.machine.killed = 4
    host.exits(host.start_one(), KILL)
    assert host.exit()["cause"] == "signal"


def test_the_log_of_the_kernel_is_used_if_kills_are_not_counted(host: Host) -> None:
    process = host.start_one()
    host.machine.log = True
    host.exits(process, KILL)
    assert host.exit()["cause"] == "out-of-memory"


def test_a_failed_ingest_reports_its_own_reason(make: Callable[..., Host]) -> None:
    host = make(make_plan(1, ingest=True))
    process = host.start_one(INGEST)
    process.reports(_="ingest", stage="failed", cause="ingest-failed", detail="no such bucket")
    host.exits(process, 1 << 8)
    exit = host.exit()
    assert (exit["task"], exit["cause"], exit["detail"]) == (INGEST, "ingest-failed", "no such bucket")
    assert host.connection.take("ingest") == []


# ---- ending tasks


@pytest.mark.parametrize(("plan", "sign"), [(TWO, 1), (SHELL, -1)], ids=["python", "shell"])
def test_a_task_is_asked_to_end_and_killed_after_its_grace(make: Callable[..., Host], plan: Plan, sign: int) -> None:
    """A Python program is signaled alone, as it takes care of its own children; a shell together with its children."""
    host = make(plan)
    process = host.start_one()
    host.end("term", worker_0=1)
    assert host.signals() == [(sign * process.pid, TERM), (-process.pid, CONT)]
    host.clock.pass_time(GRACE - 0.1)
    assert host.signals() == []
    host.clock.pass_time(0.2)
    assert host.signals() == [(-process.pid, KILL)]


def test_ctrl_c_interrupts_a_task_then_asks_it_to_end_then_kills_it(host: Host) -> None:
    process = host.start_one()
    host.end("int", worker_0=1)
    assert host.signals() == [(-process.pid, INT), (-process.pid, CONT)]
    host.end("int", worker_0=1)  # from a captain that has returned
    assert host.signals() == [], "a second SIGINT would interrupt the clean-up"
    host.clock.pass_time(GRACE / 2 - 0.1)
    assert host.signals() == []
    host.clock.pass_time(0.2)
    assert host.signals() == [(process.pid, TERM)]
    host.clock.pass_time(GRACE / 2)
    assert host.signals() == [(-process.pid, KILL)]


def test_an_interrupted_task_that_ends_gets_no_more_signals_and_has_not_failed(host: Host) -> None:
    process = host.start_one()
    host.end("int", worker_0=1)
    process.prints('Traceback (most recent call last):\n  File "t.py", line 1, in <module>\nKeyboardInterrupt\n')
    host.exits(process, INT)
    host.signals()
    host.clock.pass_time(GRACE)
    assert host.signals() == [] and host.connection.take("exited") == []


@pytest.mark.parametrize("task", ["ps-0", "worker-0", "chief-0"])
def test_ctrl_c_terminates_servers(make: Callable[..., Host], task: str) -> None:
    host = make(make_plan(1, ps=1, chief=True), f"{task[:-2]}-host-0")
    process = host.start_one(task)
    host.tasks.end(ins.EndTasks(host.name, {task: 1}, ins.INTERRUPT, GRACE))
    assert host.signals()[0] == ((-process.pid, INT) if task == "chief-0" else (process.pid, TERM))


def test_an_ingest_is_asked_to_end_together_with_its_command(make: Callable[..., Host]) -> None:
    host = make(make_plan(1, ingest=True))
    process = host.start_one(INGEST)
    host.tasks.end(ins.EndTasks(host.name, {INGEST: 1}, ins.TERMINATE, GRACE))
    assert host.signals()[0] == (-process.pid, TERM)


def test_a_task_that_was_asked_to_end_has_not_failed(host: Host) -> None:
    process = host.start_one()
    process.raises()
    host.end("term", worker_0=1)
    host.connection.sent.clear()
    host.exits(process, 1 << 8)
    [ended] = host.connection.sent
    assert (ended["type"], ended["tasks"]) == ("ended", {"worker-0": 1})
    [exit] = host.tasks.exits()
    assert exit.expected and exit.cause == ""


def test_a_task_that_is_killed_is_reported_with_its_earlier_error(host: Host) -> None:
    process = host.start_one()
    process.raises()
    host.clock.run_ready()
    host.end("kill", worker_0=1)
    assert host.signals() == [(-process.pid, KILL)]
    host.exits(process, KILL)
    exit = host.exit()
    assert (exit["expected"], exit["cause"], exit["detail"]) == (True, "program-error", "ValueError: no at train.py:3")


def test_the_end_is_reported_with_addresses_once_all_tasks_have_ended(host: Host) -> None:
    first, second = host.start("worker-0", "worker-1")
    host.connection.sent.clear()
    host.end("kill", worker_0=1, worker_1=1)
    host.exits(first, KILL)
    assert host.connection.sent == []
    host.exits(second, KILL)
    [ended] = host.connection.sent
    assert ended["tasks"] == {"worker-0": 1, "worker-1": 1}
    assert set(ended["offers"]) == {"worker-0", "worker-1"}
    host.connection.sent.clear()
    process = host.start_one(attempt=2)
    host.end("kill", worker_0=2)
    host.exits(process, KILL)
    assert [message["tasks"] for message in host.connection.take("ended")] == [
        {"worker-0": 2}
    ]  # the first is reported only once


def test_a_task_that_does_not_run_has_ended_immediately(host: Host) -> None:
    process = host.start_one(attempt=2)
    host.connection.sent.clear()
    host.end("kill", worker_0=1, worker_1=7)  # an attempt before this one, and a task that was never started here
    [ended] = host.connection.sent
    assert ended["tasks"] == {"worker-0": 1, "worker-1": 7} and set(ended["offers"]) == {"worker-1"}
    assert host.signals() == [] and host.tasks.attempts["worker-0"].pid == process.pid


def test_a_failure_of_another_task_does_not_complete_an_end(host: Host) -> None:
    first, second = host.start("worker-0", "worker-1")
    host.end("term", worker_0=1)
    host.connection.sent.clear()
    host.exits(second, 1 << 8)
    assert [message.get("tasks") for message in host.connection.take("ended")] == [{}]
    host.exits(first, 0)
    assert [message["tasks"] for message in host.connection.take("ended")] == [{"worker-0": 1}]


def test_a_stopped_task_is_reported_as_such(host: Host) -> None:
    process = host.start_one()
    host.machine.states[process.pid] = "T", 1.0
    host.end("kill", worker_0=1)
    host.exits(process, KILL)
    [ended] = host.connection.take("ended")
    assert ended["states"] == {"worker-0": "stopped"} and ended["stacks"] == {}


@pytest.mark.parametrize(("cpu", "state"), [(9.5, "busy 0.95"), (0.1, "waiting")])
def test_a_hung_task_shows_its_stacks_and_its_state(host: Host, cpu: float, state: str) -> None:
    process = host.start_one()
    process.prints("step 1\nFatal Python error: of another day\n")
    host.clock.run_ready()
    host.clock.pass_time(10.0)
    host.machine.states[process.pid] = "S", cpu
    host.end("abort", worker_0=1)
    assert host.signals() == [(process.pid, ABORT), (process.pid, CONT)]
    process.prints('Fatal Python error: Aborted\n  File "train.py", line 3\n')
    host.exits(process, ABORT)
    [ended] = host.connection.take("ended")
    assert ended["states"] == {"worker-0": state}
    assert ended["stacks"] == {"worker-0": 'Fatal Python error: Aborted\n  File "train.py", line 3'}
    assert host.connection.take("exited") == []


def test_a_hung_task_that_shows_nothing_is_killed(host: Host) -> None:
    process = host.start_one()
    host.clock.pass_time(10.0)
    host.end("abort", worker_0=1)
    host.signals()
    host.clock.pass_time(module.STACKS_WITHIN - 0.1)
    assert host.signals() == []
    host.clock.pass_time(0.2)
    assert host.signals() == [(-process.pid, KILL)]


def test_the_children_of_a_shell_show_their_stacks(make: Callable[..., Host]) -> None:
    host = make(SHELL)
    process = host.start_one()
    host.clock.pass_time(10.0)
    host.machine.below[process.pid] = [6001, 6002]
    host.end("abort", worker_0=1)
    assert [pid for pid, number in host.signals() if number == ABORT] == [6001, 6002]


def test_the_children_of_torchrun_show_their_stacks(make: Callable[..., Host]) -> None:
    torch = replace(with_role(command=("python", "-m", "torch.distributed.run", "train.py")), framework="torch")
    host = make(torch)
    process = host.start_one()
    host.clock.pass_time(1.0)
    host.machine.below[process.pid] = [77]
    host.end(ins.ABORT, worker_0=1)
    assert [pid for pid, number in host.signals() if number == ABORT] == [77]


def test_only_the_end_of_long_stacks_is_reported(host: Host) -> None:
    process = host.start_one()
    host.clock.pass_time(10.0)
    host.end("abort", worker_0=1)
    process.prints("Fatal Python error: Aborted\n" + "x" * 2 * module.STACKS_LIMIT + "\n")
    host.exits(process, ABORT)
    [ended] = host.connection.take("ended")
    assert ended["stacks"] == {"worker-0": "x" * module.STACKS_LIMIT}


def test_the_deadlines_of_a_task_that_has_ended_send_no_signal(host: Host) -> None:
    """Its PID may be used again by then. It has several deadlines: by its exception, by its host, by the captain."""
    process = host.start_one()
    host.tasks.leave(GRACE)
    process.raises()
    host.clock.run_ready()
    host.tasks.leave(GRACE)
    host.end("term", worker_0=1)
    host.exits(process, 1 << 8)
    host.signals()
    host.machine.alive[process.pid] = process  # another process with the same PID and its own group
    host.clock.pass_time(2 * GRACE)
    del host.machine.alive[process.pid]
    assert host.signals() == []


def test_the_first_of_several_deadlines_counts(host: Host) -> None:
    process = host.start_one()
    host.tasks.leave(GRACE)
    process.raises()
    host.clock.run_ready()
    host.end("term", grace=2 * GRACE, worker_0=1)
    host.signals()
    host.clock.pass_time(attempts.EXIT_WITHIN + 0.1)
    assert host.signals() == [(-process.pid, KILL)]


def test_an_exception_does_not_shorten_the_grace_of_a_task_that_was_asked_to_end(host: Host) -> None:
    process = host.start_one()
    host.end("term", worker_0=1)
    process.raises()
    host.clock.run_ready()
    host.signals()
    host.clock.pass_time(attempts.EXIT_WITHIN + 0.1)
    assert host.signals() == []


def test_an_exception_does_not_extend_the_grace_of_a_leaving_host(host: Host) -> None:
    process = host.start_one()
    host.tasks.leave(1.0)
    process.raises()
    host.clock.run_ready()
    host.clock.pass_time(1.1)
    assert host.signals() == [(-process.pid, KILL)]


def test_tasks_without_a_captain_are_killed_and_reported_when_it_is_back(host: Host) -> None:
    first, second = host.start("worker-0", "worker-1", attempt=4)
    host.connection.sent.clear()
    host.tasks.kill_unasked()
    assert host.signals() == [(-first.pid, KILL), (-second.pid, KILL)]
    host.exits(first, KILL)
    assert host.connection.sent == []
    host.exits(second, KILL)
    assert [message["tasks"] for message in host.connection.sent] == [{"worker-0": 4, "worker-1": 4}]
    assert [(exit.task, exit.expected) for exit in host.tasks.exits()] == [("worker-0", True), ("worker-1", True)]


def test_how_a_task_was_asked_to_end_is_not_forgotten_when_it_is_killed(host: Host) -> None:
    process = host.start_one()
    host.end("term", worker_0=1)
    process.raises()
    host.tasks.kill()
    host.exits(process, KILL)
    assert host.connection.take("exited") == []  # it was asked to end, so its exception is not a failure


# ---- leaving


def test_a_leaving_host_is_done_once_its_last_task_has_ended(host: Host) -> None:
    first, second = host.start("worker-0", "worker-1")
    host.tasks.leave(GRACE)
    assert host.signals() == []
    host.tasks.terminate()
    assert host.signals() == [(first.pid, TERM), (second.pid, TERM)]
    host.exits(first, 0)
    assert (host.exit()["cause"], host.none_left_calls) == ("preempted", 0)
    host.clock.pass_time(GRACE)
    assert host.signals() == [(-second.pid, KILL)]
    host.exits(second, KILL)
    assert (host.exit()["cause"], host.none_left_calls) == ("preempted", 1)
    assert host.connection.take("ended") == []  # no addresses for a next start


def test_a_leaving_host_reports_the_tasks_that_the_captain_asked_to_end(host: Host) -> None:
    process = host.start_one()
    host.tasks.leave(GRACE)
    host.end("term", worker_0=1)
    host.exits(process, 0)
    [ended] = host.connection.take("ended")
    assert (ended["tasks"], ended["offers"], host.none_left_calls) == ({"worker-0": 1}, {}, 1)


# ---- a watched folder


def watched(make: Callable[..., Host]) -> tuple[Host, Process]:
    host = make(replace(make_plan(1), snapshots=replace(make_plan(1).snapshots, watch="checkpoints")))
    return host, host.start_one()


def test_the_end_of_a_task_is_reported_once_its_last_checkpoint_is_captured(make: Callable[..., Host]) -> None:
    host, process = watched(make)
    host.exits(process, 0)
    assert host.connection.take("exited") == [] and list(host.tasks.attempts) == ["worker-0"]
    [(request, answered)] = [each for each in host.porter.requests if isinstance(each[0], req.CaptureWatched)]
    assert request == replace(request, leader="")
    answered(req.WatchedCaptured(False))
    assert host.exit()["cause"] == "" and not host.tasks.attempts


def test_aborting_a_task_whose_last_checkpoint_is_being_captured_sends_no_signal(make: Callable[..., Host]) -> None:
    host, process = watched(make)
    host.exits(process, 0)
    host.end("abort", worker_0=1)
    host.clock.run_ready()
    assert host.signals() == []
    assert host.connection.take("ended")[-1]["tasks"] == {"worker-0": 1}
    assert "it did not finish in time" in host.connection.texts[-1]


# ---- messages from and to tasks


def test_reports_of_tasks_are_in_the_heartbeat(host: Host) -> None:
    process = host.start_one()
    process.reports(step=7, loss=0.5)
    host.clock.run_ready()
    assert host.connection.beats == 1  # the first step is reported immediately
    host.clock.pass_time(2.0)
    process.reports(step=8)
    host.clock.run_ready()
    assert host.connection.beats == 1
    host.clock.pass_time(1.0)
    step, step_age, output_age, metrics = host.tasks.heartbeat(1).tasks["worker-0"].to_wire()
    assert (step, step_age, output_age, metrics) == (8, 1.0, 3.0, {"loss": 0.5})
    assert host.tasks.heartbeat(1).memory == 0.25 and host.tasks.heartbeat(1).asking == ()


def test_a_task_that_asks_for_snapshots_is_named_in_the_heartbeat(host: Host) -> None:
    host.start_one("worker-0").reports(_="asks")
    host.start_one("worker-1")
    host.clock.run_ready()
    assert host.tasks.heartbeat(1).asking == ("worker-0",) and host.connection.beats == 1


def test_a_saved_snapshot_is_reported_immediately(host: Host) -> None:
    process = host.start_one()
    (host.folder / "staging/worker-0/g1/step-10").mkdir()
    process.reports(_="saved")
    host.clock.run_ready()
    [saved] = host.connection.take("saved")
    assert (saved["task"], saved["snapshot"]) == ("worker-0", [10, 1])


def test_the_last_snapshot_of_a_task_is_reported_before_its_end(host: Host) -> None:
    process = host.start_one()
    (host.folder / "staging/worker-0/g1/step-10").mkdir()
    host.connection.sent.clear()
    host.exits(process, 0)
    assert [message["type"] for message in host.connection.sent] == ["saved", "exited", "ended"]


def test_warnings_are_passed_on_and_truncated(host: Host) -> None:
    host.start_one().reports(_="warning", text="x" * 3000)
    host.clock.run_ready()
    assert host.connection.texts == ["worker-0: " + "x" * 2000]


def test_a_task_may_request_a_snapshot(host: Host) -> None:
    host.start_one().reports(_="save")
    host.clock.run_ready()
    assert host.connection.take("save") == [{"type": "save", "task": "worker-0"}]


@pytest.mark.parametrize(("fields", "step"), [({}, 6), ({"step": 9}, 9), ({"step": 0}, 0)])
def test_a_task_may_agree_on_a_step(host: Host, fields: dict[str, int], step: int) -> None:
    process = host.start_one()
    process.reports(step=6)
    process.reports(_="agree", say="here", which=1, count=2, **fields)
    host.clock.run_ready()
    reply = {"task": "worker-0", "say": "here", "which": 1, "count": 2, "step": step}
    assert host.connection.take("agree") == [{"type": "agree", **reply}]


def test_a_task_may_follow_snapshots(make: Callable[..., Host]) -> None:
    host = make(make_plan(1, evaluator=1), "evaluator-host-0")
    host.start_one("evaluator-0").reports(_="follow", wants=True)
    host.clock.run_ready()
    assert host.connection.take("follow") == [{"type": "follow", "task": "evaluator-0"}]


def test_a_task_that_has_ended_no_longer_follows(make: Callable[..., Host]) -> None:
    host = make(make_plan(1, evaluator=1), "evaluator-host-0")
    process = host.start_one("evaluator-0")
    process.reports(_="follow", wants=True)
    host.clock.run_ready()
    assert host.following.follows() == {"evaluator-0": None}
    host.exits(process, 1 << 8)
    assert host.following.follows() == {}


def test_the_data_location_of_an_ingest_is_reported_and_stored(make: Callable[..., Host]) -> None:
    host = make(make_plan(1, ingest=True))
    process = host.start_one(INGEST)
    process.reports(_="ingest", stage="making")
    host.clock.run_ready()
    nothing = {"data": "", "run": "", "made": False, "files": 0, "size": 0}
    assert host.connection.take("ingest") == [{"type": "ingest", **nothing, "stage": "making"}]
    assert host.tasks.data == ""
    fields = {"stage": "there", "data": "/data/3f9a", "run": "run", "made": True, "files": 2, "size": 10}
    process.reports(_="ingest", **fields, more="is left out")
    host.clock.run_ready()
    assert host.connection.take("ingest") == [{"type": "ingest", **fields}]
    host.begin_agent()
    assert host.tasks.data == "/data/3f9a"


@pytest.mark.parametrize("datagram", [b"nonsense", b"[]", b'{"_": "novel"}', b'{"step": true}', b'{"step": 1e400}'])
def test_an_invalid_report_is_ignored(host: Host, datagram: bytes) -> None:
    process = host.start_one()
    host.connection.sent.clear()
    process._reports.send(datagram)
    host.clock.run_ready()
    assert host.tasks.attempts["worker-0"].step is None and host.connection.sent == [] and host.connection.beats == 0


def test_messages_of_the_captain_reach_the_tasks_that_run(host: Host) -> None:
    first, second = host.start("worker-0", "worker-1")
    host.tasks.tell(["worker-1", "worker-7"], {"agreed": 12})
    assert (first.received(), second.received()) == ([], [{"agreed": 12}])


def test_a_task_that_does_not_listen_blocks_nothing(host: Host) -> None:
    process = host.start_one()
    host.tasks.attempts["worker-0"]._reports.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    for number in range(10_000):
        host.tasks.tell(["worker-0"], {"agreed": number})
    assert 0 < len(process.received()) < 10_000


# ---- secrets


def secretive(make: Callable[..., Host], monkeypatch: pytest.MonkeyPatch) -> Host:
    """A host whose tasks have a token from a Secret and one from the job file."""
    monkeypatch.setenv("STORE_TOKEN", "from-a-secret-" + "x" * 20)
    roles = tuple(replace(role, env={**role.env, "API_KEY": "from-the-job-file"}) for role in TWO.roles)
    return make(replace(TWO, roles=roles))


@pytest.mark.parametrize("how", ["raised", "traceback", "last line"])
def test_why_a_task_ended_is_reported_without_its_secrets(
    how: str, make: Callable[..., Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the text is cut within a secret."""
    host = secretive(make, monkeypatch)
    process = host.start_one()
    text = f"{'no ' * 92}{os.environ['STORE_TOKEN']} nor from-the-job-file"
    if how == "raised":
        process.raises(text=f"from-the-job-file {text}")
    elif how == "traceback":
        process.prints(f'Traceback (most recent call last):\n  File "train.py", line 3\nValueError: {text}\n')
    else:
        process.prints(f"{text}\n")
    host.clock.run_ready()
    host.exits(process, 1 << 8)
    detail = host.exit()["detail"]
    assert "***" in detail and "from-" not in detail
    assert how == "raised" or "from-the-job-file" in host.log()[-1], "the log is what the program wrote"


def test_warnings_and_stacks_are_reported_without_secrets(
    make: Callable[..., Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    host = secretive(make, monkeypatch)
    process = host.start_one()
    process.reports(_="warning", text=f"slow: {os.environ['STORE_TOKEN']} https://me:pw@host/x")
    host.clock.run_ready()
    assert host.connection.texts[-1] == "worker-0: slow: *** https://***@host/x"
    host.clock.pass_time(10.0)
    host.end("abort", worker_0=1)
    process.prints("Fatal Python error: Aborted\n  from-the-job-file\n")
    host.exits(process, ABORT)
    (ended,) = host.connection.take("ended")
    assert ended["stacks"]["worker-0"].splitlines()[1] == "  ***"


# ---- what a task may write


DEEP = b"[" * 900 + b"]" * 900
DEEPER = b"[" * 30_000 + b"]" * 30_000
ODD_VALUES = (
    b"1" * 4000, b"-1", b"1e999", b"NaN", b"-Infinity", b"true", b"null", b'""', b'"' + b"\x7f" * 60_000 + b'"',
    rb'"\ud800"', b'"\xc2\x80"', b"[]", b"{}", DEEP, DEEPER, b"9007199254740992",
)  # fmt: skip
KINDS = (b"saved", b"warning", b"asks", b"save", b"agree", b"follow", b"ingest", b"cold", b"raised", b"x")
FIELDS = (
    b"step", b"text", b"say", b"which", b"count", b"stage", b"data", b"run", b"made", b"files", b"size", b"why",
    b"type", b"place", b"done", b"wants", b"metrics", b"loss", b"cause", b"detail",
)  # fmt: skip


@pytest.mark.parametrize("name", ["worker-0", INGEST])
def test_nothing_that_a_task_reports_harms_its_agent(make: Callable[..., Host], name: str) -> None:
    """The captain accepts every message that follows: `Connection.send` checks that."""
    host = make(make_plan(1, ingest=True))
    process = host.start_one(name)
    datagrams = [b"", b"\xff\xfe", b"nonsense", b"{", b"[1]", b"1", DEEP, DEEPER, b"\0" * 60_000]
    for kind in KINDS:
        head = b'{"_":"' + kind + b'",'
        agree = b'"say":"yes","which":1,"count":1,' if kind == b"agree" else b""
        datagrams += [head + agree + b'"' + field + b'":' + value + b"}" for field in FIELDS for value in ODD_VALUES]
    datagrams += [b'{"' + field + b'":' + value + b"}" for field in FIELDS for value in ODD_VALUES]
    for datagram in datagrams:
        process.sends(datagram)
        host.clock.run_ready()
        host.connection.send(host.tasks.heartbeat(1))
        host.connection.sent.clear()
    process.reports(step=7, loss=0.5)
    host.clock.run_ready()
    assert host.tasks.attempts[name].step == 7
    host.exits(process, 1 << 8)
    assert host.exit()["task"] == name


def test_a_training_task_cannot_report_data_as_ingested(make: Callable[..., Host]) -> None:
    host = make(make_plan(1, ingest=True))
    host.start_one().reports(_="ingest", stage="there", data="/elsewhere")
    host.clock.run_ready()
    assert host.connection.take("ingest") == [] and host.tasks.data == ""


HOSTILE_OUTPUT = {
    "an endless name of an exception": 'Traceback (most recent call last):\n  File "x", line 1\n' + 65_000 * "A" + " !",
    "many possible survivors": "task " * 13_000 + "\n",
    "400 long lines": ("gloo" * 16_000 + "\n") * 400,
    "null characters and escapes": "\0\x1b[2J\r" * 10_000 + "\n",
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("case", HOSTILE_OUTPUT)
def test_the_cause_is_found_quickly_in_any_output(case: str) -> None:
    """An agent that is busy for seconds is killed."""
    lines = [line[:65536] for line in HOSTILE_OUTPUT[case].splitlines()[-400:]]
    began = time.process_time()
    assert exit_causes.classify(1 << 8, lines).kind
    exit_causes.own_error(lines)
    assert time.process_time() - began < 4


INVALID_SPARE_MESSAGES = (
    b"\xff", b"{", b"1", b'"ready"', b"[]", b"{}", b'{"ready":1}', b'{"ready":{"rss":1,"modules":1,"seconds":"x"}}',
    b'{"ready":{"rss":1,"modules":1,"seconds":1e999}}', b'{"started":"x"}', b'{"started":true}', b'{"started":1}',
    b'{"started":-1}', b'{"unfit":[1]}', b'{"unfit":' + DEEPER + b"}", DEEPER, str({"started": os.getpid()}).encode(),
    json.dumps({"started": os.getpid()}).encode(), json.dumps({"started": 10**30}).encode(),
)  # fmt: skip


@pytest.mark.parametrize("data", INVALID_SPARE_MESSAGES, ids=range(len(INVALID_SPARE_MESSAGES)))  # some contain a pid
def test_a_spare_that_sends_an_invalid_message_is_not_used(data: bytes) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        ours.setblocking(False)
        agent_side = spare.Spare(12345, ours, {})
        theirs.send(data)
        assert [type(message) for message in agent_side.receive()] == [spare.Unfit]
        agent_side.close()


def test_any_record_of_imports_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "record"
    state = b'{"environment":{},"path":["/x"],"late":false}'
    lines = [
        b'{"environment":1,"path":[],"late":false}', b'{"environment":{"a":1},"path":[],"late":false}',
        b'{"environment":{},"path":5,"late":false}', b'{"environment":{},"path":[1],"late":false}',
        b'{"environment":{},"path":[],"late":"x"}', b'"json"', DEEPER, b"\xff", b"{", state, b'"numpy"', b"5", DEEP,
    ]  # fmt: skip
    path.write_bytes(b"\n".join(lines) + b"\n")
    assert spare.read_record(path) == (spare.State({}, ("/x",), False, ("numpy",)),)
    path.unlink()
    os.mkfifo(path)
    assert spare.read_record(path) == (), "a pipe without a writer"
