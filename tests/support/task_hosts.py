"""A host for its tasks, without processes: the test decides what they report and when they end."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.agent import free_ports, memory_limits, os_processes
from paceline.agent.captain import events as ev
from paceline.agent.captain import instructions as ins
from paceline.agent.net import messages
from paceline.agent.net.loop import Loop
from paceline.agent.options import Options
from paceline.agent.spares import spare
from paceline.agent.tasks.host_tasks import HostTasks
from paceline.agent.transfers import host_snapshots
from paceline.agent.transfers import requests as req
from paceline.agent.transfers.evaluator_copies import EvaluatorCopies
from paceline.agent.transfers.host_snapshots import HostSnapshots
from paceline.frameworks import amx_probe
from paceline.plan import Plan
from support.worlds import make_plan

GRACE = 20.0
OWN_PID = 3001  # of the agent
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
        self.start_error: OSError | ValueError | None = None
        self.adopted: dict[int, str] = {}  # children of the agent -> their tasks
        self.states: dict[int, tuple[str, float]] = {}
        self.waits_for_core: dict[int, float] = {}
        self.below: dict[int, list[int]] = {}
        self.ports = iter(range(20000, 30000))
        self.killed = 0  # processes, by the kernel for their memory
        self.log = False  # whether the kernel's log names the process
        self.spares: list[Spare] = []
        patch.setenv(amx_probe.OVERRIDE, amx_probe.ABSENT)  # the probe would start a process
        patch.setattr(os, "getpid", lambda: OWN_PID)  # the real one may be that of a simulated process
        patch.setattr(os, "kill", self._kill)
        patch.setattr(os, "killpg", self._killpg)
        patch.setattr(spare, "start_cold", lambda python, *args: self._start(python.argv, *args))
        patch.setattr(spare, "start_plain", self._start)
        patch.setattr(spare, "read_record", lambda _: (spare.State({}, (), False, ("json",)),))
        patch.setattr(spare.Spare, "spawn", staticmethod(self._spawn))
        patch.setattr(os_processes, "children", self._children)
        patch.setattr(os_processes, "environment_of", self._environment_of)
        patch.setattr(os_processes, "descendants", lambda pid: self.below.get(pid, []))
        patch.setattr(os_processes, "state", lambda pid: self.states.get(pid, ("S", 0.0)))
        patch.setattr(os_processes, "waited_for_core", lambda pid: self.waits_for_core.get(pid, 0.0))
        patch.setattr(memory_limits, "was_oom_killed", lambda _: self.log)
        patch.setattr(free_ports, "free_port", lambda: next(self.ports))
        # Other processes that run tests use the same numbers.
        patch.setattr(free_ports, "port_reservation", lambda _: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        patch.setattr(memory_limits, "Memory", lambda _: self)
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

    def _children(self, pid: int) -> list[int]:
        return [*self.alive, *self.adopted] if pid == OWN_PID else self.below.get(pid, [])

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
        standby: str = "",
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

    def trains(self, process: Process) -> None:
        """It reports its first step: its host may start a spare."""
        process.reports(step=1)
        self.clock.run_ready()
        self.tasks.look()

    def request_from_spare(self, *names: str) -> Spare:
        """The first task makes the host keep a spare, which is asked to start `names`; their PIDs are not known yet."""
        first = self.start_one("worker-0")
        self.trains(first)
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


@contextmanager
def full_disk() -> Iterator[None]:
    """Files can be created and truncated, but nothing can be written to them."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def with_role(**fields: Any) -> Plan:
    return replace(TWO, roles=tuple(replace(role, **fields) for role in TWO.roles))
