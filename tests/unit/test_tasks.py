"""The tasks of a host, without a process: who is started, who is signalled when, and what the captain is told."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.agent import attempt as attempts
from paceline.agent import machine, messages, spare, staging
from paceline.agent import tasks as module
from paceline.agent.following import Following
from paceline.agent.loop import Loop
from paceline.agent.options import Options
from paceline.agent.staging import Staging
from paceline.agent.starting import SPARE_ANSWERS
from paceline.agent.tasks import Tasks
from paceline.frameworks import amx
from paceline.plan import INGEST, Plan
from support.worlds import make_plan

GRACE = 20.0
KILL, TERM, CONT, ABORT = signal.SIGKILL, signal.SIGTERM, signal.SIGCONT, signal.SIGABRT
TWO = make_plan(2, per_host=2)
SHELL = replace(TWO, roles=tuple(replace(role, command=("sh", "train.sh")) for role in TWO.roles))


class Clock(Loop):
    """The agent's loop with a clock that a test moves."""

    def __init__(self) -> None:
        self.time = 1000.0
        super().__init__()

    def now(self) -> float:
        return self.time

    def turn(self) -> None:
        self.once(0.0)

    def pass_time(self, seconds: float) -> None:
        self.time += seconds
        self.turn()


class Process:
    """A process of a task: a number, and the ends that it was given."""

    def __init__(self, environment: Mapping[str, str], output: int, reports: int) -> None:
        self.pid = 0
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

    def reports(self, **words: Any) -> None:
        self._reports.send(json.dumps(words).encode())

    def raises(self, kind: str = "ValueError", text: str = "no", place: str = "train.py:3") -> None:
        self.reports(_="raised", type=kind, text=text, place=place)

    def heard(self) -> list[Any]:
        found = []
        while True:
            try:
                found.append(json.loads(self._reports.recv(65536)))
            except BlockingIOError:
                return found

    def close(self) -> None:
        os.close(self._output)
        self._reports.close()


class Machine:
    """Stands for the kernel: numbers instead of processes, and a list of who was signalled."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.started: list[Process] = []
        self.alive: dict[int, Process] = {}
        self.signals: list[tuple[int, signal.Signals]] = []  # a negative number: to a process group
        self.refuses: OSError | None = None
        self.adopted: dict[int, str] = {}  # children of the agent -> whose they were
        self.states: dict[int, tuple[str, float]] = {}
        self.below: dict[int, list[int]] = {}
        self.ports = iter(range(20000, 30000))
        self.killed = 0  # by the kernel, for their memory
        self.log = False  # whether the kernel's log names the process
        self.spares: list[Spare] = []
        patch.setenv(amx.OVERRIDE, amx.ABSENT)  # its probe is a process
        patch.setattr(os, "kill", self._kill)
        patch.setattr(os, "killpg", self._killpg)
        patch.setattr(spare, "start_cold", lambda python, *words: self._start(*words))
        patch.setattr(spare, "start_plain", lambda argv, *words: self._start(*words))
        patch.setattr(spare, "modules_of", lambda _: (spare.State({}, (), False, ("json",)),))
        patch.setattr(spare.Spare, "spawn", staticmethod(self._spawn))
        patch.setattr(machine, "children", lambda _: [*self.alive, *self.adopted])
        patch.setattr(machine, "environment_of", self._environment_of)
        patch.setattr(machine, "descendants", lambda pid: self.below.get(pid, []))
        patch.setattr(machine, "state", lambda pid: self.states.get(pid, ("S", 0.0)))
        patch.setattr(machine, "kernel_killed", lambda _: self.log)
        patch.setattr(machine, "free_port", lambda: next(self.ports))
        patch.setattr(machine, "Memory", lambda: self)
        patch.setattr(staging, "Porting", Porter)

    # ---- memory

    def used_and_limit(self) -> tuple[int, int]:
        return 1 << 30, 4 << 30

    def share(self) -> float:
        return 0.25

    def free(self) -> int:
        return 3 << 30

    def kills(self) -> int:
        return self.killed

    # ---- processes

    def begins(self, process: Process, is_group: bool = True) -> int:
        process.pid = 5001 + len(self.started)
        process.is_group = is_group
        self.started.append(process)
        self.alive[process.pid] = process
        return process.pid

    def dies(self, pid: int) -> None:
        """It is gone, and has been waited for."""
        process = self.alive.pop(pid)
        process.close()

    def _start(
        self, environment: Mapping[str, str], _: str, stdout: int, stderr: int, reports: int, record: int = -1
    ) -> int:
        if self.refuses is not None:
            raise self.refuses
        return self.begins(Process(environment, stdout, reports))

    def _spawn(self, *_: Any, **__: Any) -> Spare:
        self.spares.append(Spare(self, 4001 + len(self.spares)))
        return self.spares[-1]

    def _environment_of(self, pid: int, name: str) -> str | None:
        assert name == "PACELINE_TASK"
        return self.alive[pid].task if pid in self.alive else self.adopted.get(pid)

    def _kill(self, pid: int, number: int) -> None:
        assert pid > 1, "a signal to the agent's own process group, or to all processes"
        below = {each for found in self.below.values() for each in found}
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
        self.asked: list[Process] = []
        self._machine = machine
        self._told, self._tell = socket.socketpair()
        self._messages: list[spare.Message] = []

    def fileno(self) -> int:
        return self._told.fileno()

    def says(self, message: spare.Message) -> None:
        self._messages.append(message)
        self._tell.send(b".")

    def receive(self) -> list[spare.Message]:
        self._told.recv(64)
        found, self._messages = self._messages, []
        return found

    def start(self, environment: Mapping[str, str], stdout: int, stderr: int, reports: int) -> None:
        self.asked.append(Process(environment, stdout, reports))

    def forks(self, is_group: bool = True) -> Process:
        """What it was asked for first; `is_group`: whether that is the leader of a process group by now."""
        process = self.asked.pop(0)
        self._machine.begins(process, is_group)
        return process

    def kill(self) -> None:
        self._told.close()
        self._tell.close()


class Porter:
    """Carries nothing, and remembers what it was asked."""

    def __init__(self, *_: Any) -> None:
        self.asked: list[tuple[dict[str, Any], Callable[[Any], None]]] = []
        self.pid = 0

    def ask(self, request: dict[str, Any], answered: Callable[[Any], None]) -> int:
        self.asked.append((request, answered))
        return len(self.asked)

    def forget(self, number: int) -> None:
        pass

    def pids(self) -> set[int]:
        return {self.pid} if self.pid else set()

    def child_ended(self, pid: int) -> bool:
        return pid == self.pid


class Line:
    """What the captain is told."""

    def __init__(self, host: str) -> None:
        self._host = host
        self.sent: list[dict[str, Any]] = []
        self.texts: list[str] = []
        self.beats = 0

    def send(self, message: dict[str, Any]) -> None:
        plain = json.loads(json.dumps(message))
        assert messages.read_member(plain, self._host) is not None  # the captain understands it
        self.sent.append(plain)

    def said(self, text: str, warning: bool = False) -> None:
        self.texts.append(text)

    def beat(self) -> None:
        self.beats += 1

    def told(self, kind: str) -> list[dict[str, Any]]:
        """Of that kind, since the last call."""
        found = [message for message in self.sent if message["type"] == kind]
        self.sent = [message for message in self.sent if message["type"] != kind]
        return found


class Host:
    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, plan: Plan, name: str) -> None:
        self.folder, self.plan, self.name = folder, plan, name
        self.machine = Machine(patch)
        self.clock = Clock()
        self.gone = 0  # how often it was told that none is left
        (folder / "logs").mkdir()
        self.begin_agent()

    def begin_agent(self) -> None:
        """Also another one, after the first."""
        self.line = Line(self.name)
        line: Any = self.line
        options = Options("run", self.name, "", str(self.folder), "", "", work=str(self.folder))
        self.staging = Staging(self.plan, options, self.clock, line.send, line.said)
        porting: Any = self.staging.porting
        self.porter: Porter = porting
        self.following = Following(
            self.plan, options, porting, self.clock, line.send, line.said, self.staging.remove, lambda *_: None
        )
        self.tasks = Tasks(self.plan, options, self.clock, line, self.staging, self.following, None, self._none_left)
        self.tasks.roster = {task.name: f"127.0.0.1:{2000 + n}" for n, task in enumerate(self.plan.tasks)}

    def _none_left(self) -> None:
        self.gone += 1

    def start(self, *names: str, attempt: int = 1, generation: int = 1, **more: Any) -> list[Process]:
        """Those that began by it."""
        before = len(self.machine.started)
        words = {"restarts": 0, "restore": None, "data": "", **more}
        self.tasks.start({"generation": generation, "tasks": dict.fromkeys(names, attempt), **words})
        return self.machine.started[before:]

    def one(self, name: str = "worker-0", **more: Any) -> Process:
        [process] = self.start(name, **more)
        return process

    def asks_a_spare(self, *names: str) -> Spare:
        """The first task makes the host keep a spare, and that is asked for the next ones, whose pids are not known."""
        first = self.one("worker-0")
        first.reports(step=1)
        self.clock.turn()
        self.tasks.look()
        [made] = self.machine.spares
        made.says(spare.Ready(1, 1, 0.1))
        self.clock.turn()
        self.exits(first, 1 << 8)
        assert self.start(*names, attempt=2) == []
        self.machine.signals.clear()
        self.line.sent.clear()
        return made

    def end(self, how: str, grace: float = GRACE, **tasks: int) -> None:
        self.tasks.end({"how": how, "grace": grace, "tasks": {n.replace("_", "-"): k for n, k in tasks.items()}})

    def exits(self, process: Process, status: int = 0) -> None:
        self.machine.dies(process.pid)
        self.tasks.child_ended(process.pid, status)

    def exit(self) -> dict[str, Any]:
        """The one that the captain was told of since the last call."""
        [told] = self.line.told("exited")
        found: dict[str, Any] = told["exit"]
        return found

    def signals(self) -> list[tuple[int, signal.Signals]]:
        found, self.machine.signals = self.machine.signals, []
        return found

    def log(self, task: str = "worker-0") -> list[str]:
        path = self.folder / "logs" / f"{task}.log"
        return [line.split("| ", 1)[1] for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Host]]:
    hosts: list[Host] = []

    def made(plan: Plan = TWO, name: str = "worker-host-0") -> Host:
        hosts.append(Host(tmp_path, monkeypatch, plan, name))
        return hosts[-1]

    yield made
    for host in hosts:
        for process in host.machine.alive.values():
            process.close()
    signal.set_wakeup_fd(-1)  # the loop's


@pytest.fixture
def host(make: Callable[..., Host]) -> Host:
    return make()


@contextmanager
def full_disk() -> Iterator[None]:
    """Files can be made and emptied, and nothing can be written to them."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


# ---- starting


def test_a_task_is_started_and_the_captain_is_told(host: Host) -> None:
    process = host.one(attempt=3, generation=2, restarts=1)
    assert host.line.sent == [{"type": "started", "task": "worker-0", "attempt": 3, "pid": process.pid, "warm": False}]
    given = process.environment
    assert (given["PACELINE_TASK"], given["PACELINE_GENERATION"], given["PACELINE_RUN"]) == ("worker-0", "2", "run")
    assert given["PACELINE_SNAPSHOT_DIR"] == f"{host.folder}/staging/worker-0/g2"
    process.prints("hello\n")
    host.clock.turn()
    assert host.log() == ["hello"]
    assert host.tasks.attempts["worker-0"].number == 3


def test_a_start_of_an_older_generation_is_ignored(host: Host) -> None:
    host.one("worker-0", generation=3)
    assert host.start("worker-1", generation=2, data="/old") == []
    assert (host.tasks.generation, host.tasks.data) == (3, "")
    assert [process.task for process in host.start("worker-1", generation=3)] == ["worker-1"]


def test_a_task_of_another_host_is_ignored(host: Host) -> None:
    assert [process.task for process in host.start("worker-7", "evaluator-0", "worker-1")] == ["worker-1"]
    assert list(host.tasks.attempts) == ["worker-1"]


def test_a_task_that_runs_is_not_started_again(host: Host) -> None:
    host.one("worker-0")
    assert [process.task for process in host.start("worker-0", "worker-1", attempt=2)] == ["worker-1"]
    assert host.tasks.attempts["worker-0"].number == 1


def test_a_task_that_has_ended_can_be_started_again(host: Host) -> None:
    host.exits(host.one(), 1 << 8)
    assert host.one(attempt=2).task == "worker-0"
    assert host.tasks.exits() == ()


def test_a_host_that_was_told_to_go_starts_nothing(host: Host) -> None:
    host.tasks.leave(GRACE)
    assert host.start("worker-0", generation=4) == []
    assert host.tasks.generation == 0 and not host.tasks.attempts


def test_tasks_of_a_group_go_on_from_the_snapshot(host: Host) -> None:
    process = host.one(generation=2, restore="step-10-g1")
    assert process.environment["PACELINE_RESTORE"] == f"{host.folder}/restored/worker-host-0/step-10-g1"


@pytest.mark.parametrize(("name", "restores"), [("chief-host-0", True), ("worker-host-0", False), ("ps-host-0", False)])
def test_with_parameter_servers_the_chief_alone_does(make: Callable[..., Host], name: str, restores: bool) -> None:
    host = make(make_plan(1, ps=1, chief=True), name)
    process = host.one(host.plan.host(name).tasks[0], restore="step-10-g1")
    assert bool(process.environment["PACELINE_RESTORE"]) == restores


def test_where_the_data_is_is_given_to_tasks_also_when_the_captain_does_not_know_any_more(host: Host) -> None:
    first = host.one("worker-0", data="/data/1")
    second = host.one("worker-1", data="")
    assert first.environment["PACELINE_DATA"] == second.environment["PACELINE_DATA"] == "/data/1"


def test_without_data_no_variable_names_it(host: Host) -> None:
    assert "PACELINE_DATA" not in host.one().environment


def test_an_ingest_is_started_with_what_it_needs_and_is_no_part_of_the_beat(make: Callable[..., Host]) -> None:
    host = make(make_plan(1, ingest=True))
    process = host.one(INGEST, restore="step-1-g1")
    assert process.environment["PACELINE_ROLE"] == "ingest" and "PACELINE_RESTORE" not in process.environment
    assert host.tasks.beat()["tasks"] == {}


# ---- what is remembered


def test_an_agent_after_another_one_knows_generation_and_data(host: Host) -> None:
    host.one(generation=5, data="/data/1")
    host.begin_agent()
    assert (host.tasks.generation, host.tasks.data) == (5, "/data/1")
    assert host.start("worker-0", generation=4) == []


def test_a_full_disk_takes_nothing_of_what_was_remembered(host: Host) -> None:
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
def test_what_cannot_be_read_counts_as_nothing(host: Host, text: bytes) -> None:
    for name in ("generation", "data"):
        (host.folder / "logs" / f".worker-host-0.{name}").write_bytes(text)
    host.begin_agent()
    assert host.tasks.generation == 0
    assert host.one(generation=1)


# ---- what cannot be started


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (FileNotFoundError(2, "No such file or directory", "nothing"), "No such file or directory: nothing"),
        (BlockingIOError(11, "Resource temporarily unavailable"), "Resource temporarily unavailable"),
        (OSError("no spare memory"), "no spare memory"),
    ],
)
def test_a_task_that_cannot_start_says_why_in_its_log(host: Host, error: OSError, line: str) -> None:
    host.machine.refuses = error
    assert host.start("worker-0", "worker-1") == []
    assert host.log("worker-0") == host.log("worker-1") == [line]
    exits = [told["exit"] for told in host.line.told("exited")]
    assert [(exit["task"], exit["code"], exit["cause"]) for exit in exits] == [
        ("worker-0", 127, "program-error"), ("worker-1", 127, "program-error"),
    ]  # fmt: skip
    assert exits[0]["detail"] == f"exit code 127; its last line: {line}"
    assert not host.tasks.attempts and host.signals() == [] and host.line.told("started") == []


def test_a_folder_for_snapshots_that_cannot_be_made_is_such_a_reason(host: Host) -> None:
    (host.folder / "staging").write_text("")
    host.start("worker-0")
    assert host.log() == [f"Not a directory: {host.folder}/staging/worker-0"]
    assert host.exit()["code"] == 127


# ---- from a spare


def test_a_task_from_a_spare_is_told_of_once_its_process_is_known(host: Host) -> None:
    made = host.asks_a_spare("worker-0")
    assert host.line.sent == [] and "worker-0" in host.tasks.attempts
    process = made.forks()
    made.says(spare.Started(process.pid))
    host.clock.turn()
    assert host.line.sent == [{"type": "started", "task": "worker-0", "attempt": 2, "pid": process.pid, "warm": True}]


def test_a_task_whose_end_comes_before_its_pid_has_ended(host: Host) -> None:
    made = host.asks_a_spare("worker-0", "worker-1")
    first, second = made.forks(), made.forks()
    host.exits(first, 3 << 8)
    assert host.line.told("exited") == []
    made.says(spare.Started(first.pid))
    made.says(spare.Started(second.pid))
    host.clock.turn()
    exit = host.exit()
    assert (exit["task"], exit["code"], exit["expected"]) == ("worker-0", 3, False)
    assert list(host.tasks.attempts) == ["worker-1"]


def test_an_end_that_belonged_to_nobody_is_not_taken_for_that_of_a_later_task(host: Host) -> None:
    made = host.asks_a_spare("worker-0")
    first = made.forks()
    host.tasks.child_ended(first.pid + 1, 1 << 8)  # an orphan, whose number the next task gets
    made.says(spare.Started(first.pid))
    host.clock.turn()
    host.start("worker-1", attempt=2)
    second = made.forks()
    assert second.pid == first.pid + 1
    made.says(spare.Started(second.pid))
    host.clock.turn()
    assert sorted(host.tasks.attempts) == ["worker-0", "worker-1"] and host.line.told("exited") == []


@pytest.mark.parametrize("how", ["abort", "kill", "term"])
def test_asking_a_task_without_a_process_to_end_signals_nobody_until_there_is_one(host: Host, how: str) -> None:
    made = host.asks_a_spare("worker-0")
    host.end(how, worker_0=2)
    host.clock.pass_time(GRACE / 4)  # no time for the spare to be given up
    assert host.signals() == [] and host.line.told("ended") == []
    process = made.forks()
    made.says(spare.Started(process.pid))
    host.clock.turn()
    assert host.signals() == [(-process.pid, KILL)]
    host.exits(process, KILL)
    [ended] = host.line.told("ended")
    assert ended["tasks"] == {"worker-0": 2} and host.line.told("exited") == []


def test_a_task_that_begins_after_its_host_was_told_to_go_is_ended(host: Host) -> None:
    made = host.asks_a_spare("worker-0")
    host.tasks.leave(GRACE)
    host.tasks.terminate()
    process = made.forks()
    made.says(spare.Started(process.pid))
    host.clock.turn()
    assert host.signals() == [(-process.pid, KILL)]
    host.exits(process, KILL)
    assert (host.exit()["cause"], host.gone) == ("preempted", 1)


def test_a_task_that_has_no_process_group_yet_is_killed_all_the_same(host: Host) -> None:
    """A spare tells of the process that it has forked before that has made a group of its own."""
    made = host.asks_a_spare("worker-0")
    host.end("kill", worker_0=2)
    process = made.forks(is_group=False)
    made.says(spare.Started(process.pid))
    host.clock.turn()
    assert host.signals() == [(process.pid, KILL)]


def test_who_ended_before_its_pid_was_known_is_not_signalled(host: Host) -> None:
    made = host.asks_a_spare("worker-0")
    host.end("kill", worker_0=2)
    process = made.forks(is_group=False)
    host.exits(process, 0)
    host.machine.adopted[process.pid] = "another program"  # the number is used again
    made.says(spare.Started(process.pid))
    host.clock.turn()
    assert host.signals() == []
    assert host.line.told("ended")[-1]["tasks"] == {"worker-0": 2}


def test_a_spare_that_does_not_answer_is_given_up_and_its_tasks_start_cold(host: Host) -> None:
    made = host.asks_a_spare("worker-0")
    host.machine.alive[made.pid] = made.asked[0]
    host.clock.pass_time(SPARE_ANSWERS)
    [started] = host.line.told("started")
    assert started["warm"] is False and "it did not answer for 10 s" in host.line.texts[-1]
    del host.machine.alive[made.pid]


def test_a_spare_that_dies_starts_its_tasks_cold_and_counts_as_no_task(host: Host) -> None:
    made = host.asks_a_spare("worker-0")
    host.tasks.child_ended(made.pid, KILL)
    [started] = host.line.told("started")
    assert (started["task"], started["warm"]) == ("worker-0", False)
    assert host.line.told("exited") == []


def test_a_program_that_no_spare_can_run_has_none_from_then_on(host: Host) -> None:
    process = host.one()
    process.reports(_="cold", why="it reads its own frames")
    host.exits(process, 0)
    assert host.line.texts == ["worker-0 starts cold from now on: it reads its own frames"]
    again = host.one(attempt=2)
    again.reports(step=1)
    host.clock.turn()
    host.tasks.look()
    assert host.machine.spares == []


# ---- how they end


def test_a_task_that_succeeds_is_told_of_with_an_address_for_the_next_start(host: Host) -> None:
    process = host.one()
    host.line.sent.clear()
    host.exits(process, 0)
    assert [message["type"] for message in host.line.sent] == ["exited", "ended"]
    exit = host.exit()
    assert (exit["task"], exit["attempt"], exit["code"], exit["signal"]) == ("worker-0", 1, 0, None)
    assert (exit["expected"], exit["cause"], exit["age"]) == (False, "", 0.0)
    [ended] = host.line.told("ended")
    assert ended["tasks"] == {} and set(ended["offers"]) == {"worker-0", "worker-1"}


@pytest.mark.parametrize(
    ("status", "code", "name", "cause"),
    [(3 << 8, 3, None, "program-error"), (KILL, None, "SIGKILL", "signal"), (TERM, None, "SIGTERM", "preempted")],
)
def test_how_a_task_failed(host: Host, status: int, code: int | None, name: str | None, cause: str) -> None:
    host.exits(host.one(), status)
    exit = host.exit()
    assert (exit["code"], exit["signal"], exit["cause"], exit["expected"]) == (code, name, cause, False)


def test_an_instruction_that_the_cpu_does_not_allow_is_explained(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(amx, "likely_reason", lambda _: "it may be AMX")
    host.exits(host.one(), signal.SIGILL)
    assert host.exit()["detail"] == "killed by SIGILL: it may be AMX"


def test_the_last_of_the_output_and_of_the_reports_is_read_when_a_task_ends(host: Host) -> None:
    process = host.one()
    process.prints("almost done\nand the end")
    process.reports(step=42)
    host.exits(process, 5 << 8)
    assert host.log() == ["almost done", "and the end"]
    assert host.exit()["detail"] == "exit code 5; its last line: and the end"
    assert host.tasks.reached == 42 and host.line.beats > 0


def test_the_furthest_step_of_all_that_have_ended_counts(host: Host) -> None:
    for attempt, step in enumerate((30, 10), 1):
        process = host.one(attempt=attempt)
        process.reports(step=step)
        host.exits(process, 1 << 8)
    assert host.tasks.reached == 30


def test_a_failure_is_as_old_as_its_exception(host: Host) -> None:
    process = host.one()
    process.raises()
    host.clock.turn()
    host.clock.pass_time(2.0)
    host.exits(process, 1 << 8)
    exit = host.exit()
    assert (exit["cause"], exit["detail"], exit["age"]) == ("program-error", "ValueError: no at train.py:3", 2.0)
    host.clock.pass_time(3.0)
    [known] = host.tasks.exits()
    assert (known.task, known.age, known.detail) == ("worker-0", 5.0, exit["detail"])


def test_exits_are_of_those_that_do_not_run(host: Host) -> None:
    host.exits(host.one("worker-0"), 0)
    host.one("worker-1")
    assert [exit.task for exit in host.tasks.exits()] == ["worker-0"]


def test_a_task_that_raised_and_does_not_leave_is_killed(host: Host) -> None:
    process = host.one()
    process.raises()
    host.clock.turn()
    host.clock.pass_time(attempts.LAST_ACTS - 0.1)
    assert host.signals() == []
    host.clock.pass_time(0.2)
    assert host.signals() == [(-process.pid, KILL)]
    host.exits(process, KILL)
    assert host.exit()["detail"] == "ValueError: no at train.py:3"


@pytest.mark.parametrize(("plan", "survivor"), [(TWO, True), (make_plan(1), False)], ids=["with-peers", "alone"])
def test_the_loss_of_a_peer_is_told_as_such_where_there_are_peers(
    make: Callable[..., Host], plan: Plan, survivor: bool
) -> None:
    host = make(plan)
    process = host.one()
    process.raises("ConnectionError", "Connection reset by peer")
    host.exits(process, 1 << 8)
    assert host.exit()["survivor"] is survivor


def test_what_is_left_of_its_process_group_is_killed_when_a_task_ends(host: Host) -> None:
    process = host.one()
    host.tasks.child_ended(process.pid, 0)  # the group is still there
    assert host.signals() == [(-process.pid, KILL)]


def test_a_task_that_has_left_no_group_is_not_signalled_by_its_number(host: Host) -> None:
    process = host.one()
    host.machine.dies(process.pid)
    host.machine.adopted[process.pid] = "another program"  # the number is used again
    host.tasks.child_ended(process.pid, 0)
    assert host.signals() == []


def test_orphans_of_a_task_are_swept_away_and_those_of_others_are_not(host: Host) -> None:
    first = host.one("worker-0")
    host.one("worker-1")
    host.machine.adopted = {6001: "worker-0", 6002: "worker-1", 6003: "", 6004: "worker-0"}
    host.porter.pid = 6004
    host.exits(first, 0)
    assert host.signals() == [(6001, KILL)]


def test_an_orphan_that_comes_later_brings_the_rest_with_it(host: Host) -> None:
    host.exits(host.one("worker-0"), 0)
    host.one("worker-1")
    host.machine.adopted = {6001: "worker-0", 6002: "worker-1"}
    host.tasks.child_ended(6000, 0)
    assert host.signals() == [(6001, KILL)]


def test_the_porter_is_no_task(host: Host) -> None:
    host.porter.pid = 6001
    host.machine.adopted = {6002: "worker-0"}
    host.tasks.child_ended(6001, KILL)
    assert host.signals() == [] and host.line.sent == []


@pytest.mark.parametrize("status", [KILL, (128 + KILL) << 8], ids=["itself", "below-a-shell"])
def test_a_task_that_the_kernel_killed_for_its_memory_says_so(host: Host, status: int) -> None:
    process = host.one()
    host.machine.killed += 1
    host.exits(process, status)
    exit = host.exit()
    assert (exit["cause"], exit["detail"]) == (
        "out-of-memory", "killed by the kernel for want of memory (4096 MiB is the limit)",
    )  # fmt: skip


# ---- addresses


def test_each_task_that_does_not_run_is_offered_an_address_of_its_own(host: Host) -> None:
    host.machine.ports = iter([20001, 20001, 20001, 20002, 20003])
    assert host.tasks.offers() == {"worker-0": "127.0.0.1:20001", "worker-1": "127.0.0.1:20002"}
    host.one("worker-0")
    assert host.tasks.offers() == {"worker-1": "127.0.0.1:20003"}


def test_a_host_that_was_told_to_go_offers_none(host: Host) -> None:
    host.tasks.leave(GRACE)
    assert host.tasks.offers() == {}


def test_another_that_is_killed_is_not_said_to_have_been(host: Host) -> None:
    """One kill by the kernel is the end of one task."""
    first, second = host.start("worker-0", "worker-1")
    host.machine.killed += 1
    host.exits(first, KILL)
    host.exits(second, KILL)
    assert [told["exit"]["cause"] for told in host.line.told("exited")] == ["out-of-memory", "signal"]


def test_kills_from_before_a_task_began_do_not_count(host: Host) -> None:
    host.machine.killed = 4
    host.exits(host.one(), KILL)
    assert host.exit()["cause"] == "signal"


def test_where_kills_are_not_counted_the_log_of_the_kernel_does(host: Host) -> None:
    process = host.one()
    host.machine.log = True
    host.exits(process, KILL)
    assert host.exit()["cause"] == "out-of-memory"


def test_an_ingest_that_failed_says_why_itself(make: Callable[..., Host]) -> None:
    host = make(make_plan(1, ingest=True))
    process = host.one(INGEST)
    process.reports(_="ingest", stage="failed", cause="ingest-failed", detail="no such bucket")
    host.exits(process, 1 << 8)
    exit = host.exit()
    assert (exit["task"], exit["cause"], exit["detail"]) == (INGEST, "ingest-failed", "no such bucket")
    assert host.line.told("ingest") == []


# ---- being ended


@pytest.mark.parametrize(("plan", "sign"), [(TWO, 1), (SHELL, -1)], ids=["python", "shell"])
def test_a_task_is_asked_to_end_and_killed_after_its_grace(make: Callable[..., Host], plan: Plan, sign: int) -> None:
    """A Python program is told alone, as what it started is its own affair; a shell is told with what it runs."""
    host = make(plan)
    process = host.one()
    host.end("term", worker_0=1)
    assert host.signals() == [(sign * process.pid, TERM), (-process.pid, CONT)]
    host.clock.pass_time(GRACE - 0.1)
    assert host.signals() == []
    host.clock.pass_time(0.2)
    assert host.signals() == [(-process.pid, KILL)]


def test_an_ingest_is_asked_to_end_together_with_its_command(make: Callable[..., Host]) -> None:
    host = make(make_plan(1, ingest=True))
    process = host.one(INGEST)
    host.tasks.end({"how": "term", "grace": GRACE, "tasks": {INGEST: 1}})
    assert host.signals()[0] == (-process.pid, TERM)


def test_a_task_that_was_asked_to_end_has_not_failed(host: Host) -> None:
    process = host.one()
    process.raises()
    host.end("term", worker_0=1)
    host.line.sent.clear()
    host.exits(process, 1 << 8)
    [ended] = host.line.sent
    assert (ended["type"], ended["tasks"]) == ("ended", {"worker-0": 1})
    [exit] = host.tasks.exits()
    assert exit.expected and exit.cause == ""


def test_a_task_that_is_killed_tells_of_the_error_that_it_had_met(host: Host) -> None:
    process = host.one()
    process.raises()
    host.clock.turn()
    host.end("kill", worker_0=1)
    assert host.signals() == [(-process.pid, KILL)]
    host.exits(process, KILL)
    exit = host.exit()
    assert (exit["expected"], exit["cause"], exit["detail"]) == (True, "program-error", "ValueError: no at train.py:3")


def test_the_end_is_told_once_all_are_gone_with_addresses(host: Host) -> None:
    first, second = host.start("worker-0", "worker-1")
    host.line.sent.clear()
    host.end("kill", worker_0=1, worker_1=1)
    host.exits(first, KILL)
    assert host.line.sent == []
    host.exits(second, KILL)
    [ended] = host.line.sent
    assert ended["tasks"] == {"worker-0": 1, "worker-1": 1}
    assert set(ended["offers"]) == {"worker-0", "worker-1"}
    host.line.sent.clear()
    process = host.one(attempt=2)
    host.end("kill", worker_0=2)
    host.exits(process, KILL)
    assert [told["tasks"] for told in host.line.told("ended")] == [{"worker-0": 2}]  # and of the first only once


def test_what_does_not_run_has_ended_at_once(host: Host) -> None:
    process = host.one(attempt=2)
    host.line.sent.clear()
    host.end("kill", worker_0=1, worker_1=7)  # an attempt before this one, and a task that was never started here
    [ended] = host.line.sent
    assert ended["tasks"] == {"worker-0": 1, "worker-1": 7} and set(ended["offers"]) == {"worker-1"}
    assert host.signals() == [] and host.tasks.attempts["worker-0"].pid == process.pid


def test_a_failure_beside_an_end_does_not_end_that(host: Host) -> None:
    first, second = host.start("worker-0", "worker-1")
    host.end("term", worker_0=1)
    host.line.sent.clear()
    host.exits(second, 1 << 8)
    assert [message.get("tasks") for message in host.line.told("ended")] == [{}]
    host.exits(first, 0)
    assert [message["tasks"] for message in host.line.told("ended")] == [{"worker-0": 1}]


def test_a_stopped_task_is_told_as_such(host: Host) -> None:
    process = host.one()
    host.machine.states[process.pid] = "T", 1.0
    host.end("kill", worker_0=1)
    host.exits(process, KILL)
    [ended] = host.line.told("ended")
    assert ended["states"] == {"worker-0": "stopped"} and ended["stacks"] == {}


@pytest.mark.parametrize(("cpu", "state"), [(9.5, "busy 0.95"), (0.1, "waiting")])
def test_a_hung_task_shows_its_stacks_and_what_it_did(host: Host, cpu: float, state: str) -> None:
    process = host.one()
    process.prints("step 1\nFatal Python error: of another day\n")
    host.clock.turn()
    host.clock.pass_time(10.0)
    host.machine.states[process.pid] = "S", cpu
    host.end("abort", worker_0=1)
    assert host.signals() == [(process.pid, ABORT), (process.pid, CONT)]
    process.prints('Fatal Python error: Aborted\n  File "train.py", line 3\n')
    host.exits(process, ABORT)
    [ended] = host.line.told("ended")
    assert ended["states"] == {"worker-0": state}
    assert ended["stacks"] == {"worker-0": 'Fatal Python error: Aborted\n  File "train.py", line 3'}
    assert host.line.told("exited") == []


def test_a_hung_task_that_shows_nothing_is_killed(host: Host) -> None:
    process = host.one()
    host.clock.pass_time(10.0)
    host.end("abort", worker_0=1)
    host.signals()
    host.clock.pass_time(module.STACKS_WITHIN - 0.1)
    assert host.signals() == []
    host.clock.pass_time(0.2)
    assert host.signals() == [(-process.pid, KILL)]


def test_below_a_shell_those_that_it_runs_show_their_stacks(make: Callable[..., Host]) -> None:
    host = make(SHELL)
    process = host.one()
    host.clock.pass_time(10.0)
    host.machine.below[process.pid] = [6001, 6002]
    host.end("abort", worker_0=1)
    assert [pid for pid, number in host.signals() if number == ABORT] == [6001, 6002]


def test_long_stacks_are_told_from_their_end(host: Host) -> None:
    process = host.one()
    host.clock.pass_time(10.0)
    host.end("abort", worker_0=1)
    process.prints("Fatal Python error: Aborted\n" + "x" * 2 * module.STACKS_LIMIT + "\n")
    host.exits(process, ABORT)
    [ended] = host.line.told("ended")
    assert ended["stacks"] == {"worker-0": "x" * module.STACKS_LIMIT}


def test_the_deadlines_of_a_task_that_has_ended_signal_nobody(host: Host) -> None:
    """Its number may be another's by then. It has several: by its exception, by its host, by the captain."""
    process = host.one()
    host.tasks.leave(GRACE)
    process.raises()
    host.clock.turn()
    host.tasks.leave(GRACE)
    host.end("term", worker_0=1)
    host.exits(process, 1 << 8)
    host.signals()
    host.machine.alive[process.pid] = process  # another one of the same number, with a group of its own
    host.clock.pass_time(2 * GRACE)
    del host.machine.alive[process.pid]
    assert host.signals() == []


def test_the_first_of_several_deadlines_counts(host: Host) -> None:
    process = host.one()
    host.tasks.leave(GRACE)
    process.raises()
    host.clock.turn()
    host.end("term", grace=2 * GRACE, worker_0=1)
    host.signals()
    host.clock.pass_time(attempts.LAST_ACTS + 0.1)
    assert host.signals() == [(-process.pid, KILL)]


def test_an_exception_takes_no_time_from_a_task_that_was_asked_to_end(host: Host) -> None:
    process = host.one()
    host.end("term", worker_0=1)
    process.raises()
    host.clock.turn()
    host.signals()
    host.clock.pass_time(attempts.LAST_ACTS + 0.1)
    assert host.signals() == []


def test_an_exception_gives_no_more_time_than_its_host_has(host: Host) -> None:
    process = host.one()
    host.tasks.leave(1.0)
    process.raises()
    host.clock.turn()
    host.clock.pass_time(1.1)
    assert host.signals() == [(-process.pid, KILL)]


def test_tasks_without_a_captain_are_killed_and_told_of_when_it_is_back(host: Host) -> None:
    first, second = host.start("worker-0", "worker-1", attempt=4)
    host.line.sent.clear()
    host.tasks.kill_unasked()
    assert host.signals() == [(-first.pid, KILL), (-second.pid, KILL)]
    host.exits(first, KILL)
    assert host.line.sent == []
    host.exits(second, KILL)
    assert [message["tasks"] for message in host.line.sent] == [{"worker-0": 4, "worker-1": 4}]
    assert [(exit.task, exit.expected) for exit in host.tasks.exits()] == [("worker-0", True), ("worker-1", True)]


def test_how_a_task_was_asked_to_end_is_not_forgotten_when_it_is_killed(host: Host) -> None:
    process = host.one()
    host.end("term", worker_0=1)
    process.raises()
    host.tasks.kill()
    host.exits(process, KILL)
    assert host.line.told("exited") == []  # it was asked to, and had its reasons to complain


# ---- leaving


def test_a_host_that_goes_is_through_once_its_last_task_is_gone(host: Host) -> None:
    first, second = host.start("worker-0", "worker-1")
    host.tasks.leave(GRACE)
    assert host.signals() == []
    host.tasks.terminate()
    assert host.signals() == [(first.pid, TERM), (second.pid, TERM)]
    host.exits(first, 0)
    assert (host.exit()["cause"], host.gone) == ("preempted", 0)
    host.clock.pass_time(GRACE)
    assert host.signals() == [(-second.pid, KILL)]
    host.exits(second, KILL)
    assert (host.exit()["cause"], host.gone) == ("preempted", 1)
    assert host.line.told("ended") == []  # no addresses for a next start


def test_a_host_that_goes_tells_of_those_that_the_captain_asked_to_end(host: Host) -> None:
    process = host.one()
    host.tasks.leave(GRACE)
    host.end("term", worker_0=1)
    host.exits(process, 0)
    [ended] = host.line.told("ended")
    assert (ended["tasks"], ended["offers"], host.gone) == ({"worker-0": 1}, {}, 1)


# ---- a folder that is watched


def watched(make: Callable[..., Host]) -> tuple[Host, Process]:
    host = make(replace(make_plan(1), snapshots=replace(make_plan(1).snapshots, watch="checkpoints")))
    return host, host.one()


def test_the_end_of_a_task_is_told_once_its_last_checkpoint_is_taken(make: Callable[..., Host]) -> None:
    host, process = watched(make)
    host.exits(process, 0)
    assert host.line.told("exited") == [] and list(host.tasks.attempts) == ["worker-0"]
    [(request, answered)] = [each for each in host.porter.asked if each[0]["do"] == "take"]
    assert request["leader"] == ""
    answered({"taken": False})
    assert host.exit()["cause"] == "" and not host.tasks.attempts


def test_aborting_a_task_whose_last_checkpoint_is_being_taken_signals_nobody(make: Callable[..., Host]) -> None:
    host, process = watched(make)
    host.exits(process, 0)
    host.end("abort", worker_0=1)
    host.clock.turn()
    assert host.signals() == []
    assert host.line.told("ended")[-1]["tasks"] == {"worker-0": 1}
    assert "there was no time for it" in host.line.texts[-1]


# ---- what tasks say, and are told


def test_what_tasks_report_is_in_the_beat(host: Host) -> None:
    process = host.one()
    process.reports(step=7, loss=0.5)
    host.clock.turn()
    assert host.line.beats == 1  # the first step is told at once
    host.clock.pass_time(2.0)
    process.reports(step=8)
    host.clock.turn()
    assert host.line.beats == 1
    host.clock.pass_time(1.0)
    step, step_age, output_age, metrics = host.tasks.beat()["tasks"]["worker-0"]
    assert (step, step_age, output_age, metrics) == (8, 1.0, 3.0, {"loss": 0.5})
    assert host.tasks.beat()["memory"] == 0.25 and "asking" not in host.tasks.beat()


def test_a_task_that_asks_for_snapshots_is_named_in_the_beat(host: Host) -> None:
    host.one("worker-0").reports(_="asks")
    host.one("worker-1")
    host.clock.turn()
    assert host.tasks.beat()["asking"] == ["worker-0"] and host.line.beats == 1


def test_what_a_task_has_saved_is_taken_at_once(host: Host) -> None:
    process = host.one()
    (host.folder / "staging/worker-0/g1/step-10").mkdir()
    process.reports(_="saved")
    host.clock.turn()
    [saved] = host.line.told("saved")
    assert (saved["task"], saved["snapshot"]) == ("worker-0", [10, 1])


def test_its_last_snapshot_is_told_before_its_end(host: Host) -> None:
    process = host.one()
    (host.folder / "staging/worker-0/g1/step-10").mkdir()
    host.line.sent.clear()
    host.exits(process, 0)
    assert [message["type"] for message in host.line.sent] == ["saved", "exited", "ended"]


def test_warnings_are_passed_on_and_cut(host: Host) -> None:
    host.one().reports(_="warning", text="x" * 3000)
    host.clock.turn()
    assert host.line.texts == ["worker-0: " + "x" * 2000]


def test_a_task_may_ask_for_a_snapshot(host: Host) -> None:
    host.one().reports(_="save")
    host.clock.turn()
    assert host.line.told("save") == [{"type": "save", "task": "worker-0"}]


@pytest.mark.parametrize(("said", "step"), [({}, 6), ({"step": 9}, 9), ({"step": 0}, 0)])
def test_a_task_may_agree_on_a_step(host: Host, said: dict[str, int], step: int) -> None:
    process = host.one()
    process.reports(step=6)
    process.reports(_="agree", say="here", which=1, count=2, **said)
    host.clock.turn()
    words = {"task": "worker-0", "say": "here", "which": 1, "count": 2, "step": step}
    assert host.line.told("agree") == [{"type": "agree", **words}]


def test_a_task_may_follow_snapshots(make: Callable[..., Host]) -> None:
    host = make(make_plan(1, evaluator=1), "evaluator-host-0")
    host.one("evaluator-0").reports(_="follow", wants=True)
    host.clock.turn()
    assert host.line.told("follow") == [{"type": "follow", "task": "evaluator-0"}]


def test_one_that_has_ended_follows_no_more(make: Callable[..., Host]) -> None:
    host = make(make_plan(1, evaluator=1), "evaluator-host-0")
    process = host.one("evaluator-0")
    process.reports(_="follow", wants=True)
    host.clock.turn()
    assert host.following.follows() == {"evaluator-0": None}
    host.exits(process, 1 << 8)
    assert host.following.follows() == {}


def test_where_an_ingest_has_put_the_data_is_told_and_remembered(make: Callable[..., Host]) -> None:
    host = make(make_plan(1, ingest=True))
    process = host.one(INGEST)
    process.reports(_="ingest", stage="making")
    host.clock.turn()
    nothing = {"data": "", "run": "", "made": False, "files": 0, "size": 0}
    assert host.line.told("ingest") == [{"type": "ingest", **nothing, "stage": "making"}]
    assert host.tasks.data == ""
    words = {"stage": "there", "data": "/data/3f9a", "run": "run", "made": True, "files": 2, "size": 10}
    process.reports(_="ingest", **words, more="is left out")
    host.clock.turn()
    assert host.line.told("ingest") == [{"type": "ingest", **words}]
    host.begin_agent()
    assert host.tasks.data == "/data/3f9a"


@pytest.mark.parametrize("datagram", [b"nonsense", b"[]", b'{"_": "novel"}', b'{"step": true}', b'{"step": 1e400}'])
def test_a_report_that_makes_no_sense_is_left_out(host: Host, datagram: bytes) -> None:
    process = host.one()
    host.line.sent.clear()
    process._reports.send(datagram)
    host.clock.turn()
    assert host.tasks.attempts["worker-0"].step is None and host.line.sent == [] and host.line.beats == 0


def test_the_captain_has_words_told_to_those_that_run(host: Host) -> None:
    first, second = host.start("worker-0", "worker-1")
    host.tasks.tell({"tasks": ["worker-1", "worker-7"], "words": {"agreed": 12}})
    assert (first.heard(), second.heard()) == ([], [{"agreed": 12}])


def test_a_task_that_does_not_listen_holds_nobody_up(host: Host) -> None:
    process = host.one()
    host.tasks.attempts["worker-0"]._reports.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    for number in range(10_000):
        host.tasks.tell({"tasks": ["worker-0"], "words": {"agreed": number}})
    assert 0 < len(process.heard()) < 10_000
