"""Task processes for tests of spares: started by Python alone, recorded, or from a spare; the tests play the agent."""

from __future__ import annotations

import ctypes
import json
import os
import select
import socket
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from paceline.agent import os_processes
from paceline.agent.spares import spare as starting
from paceline.agent.spares.spare import Message, Ready, Record, Spare, Started
from paceline.agent.tasks.python_command import Python, parse_command
from support.runs import end_started_since

DEADLINE = 120.0
STATIC = {
    "PATH": os.environ["PATH"],
    "HOME": os.environ.get("HOME", "/"),
    "PYTHONUNBUFFERED": "1",
    "OMP_NUM_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "JAX_PLATFORMS": "cpu",
}
# A record may lack the last few milliseconds of imports: this takes longer, and imports a module afterwards.
SLOW_IMPORT = "import time\ntime.sleep(0.05)\nimport colorsys"
LATE = {"PACELINE_GENERATION": "2", "RANK": "1", "TF_CONFIG": "{}", "PACELINE_REPORT_FD": "3"}


@pytest.fixture(scope="module", autouse=True)
def parent_of_orphans() -> Iterator[None]:
    """This process plays the agent."""
    os_processes.become_subreaper()
    yield
    ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    before = {path.name for path in Path("/proc/self/fd").iterdir()}
    children = set(psutil.Process().children())
    yield
    # Processes that tasks leave behind for a moment (a resource tracker) are now our children.
    assert end_started_since(children, wait=60) == []
    assert {path.name for path in Path("/proc/self/fd").iterdir()} <= before


@dataclass
class Ended:
    code: int
    out: str
    err: str
    reports: list[dict[str, object]]
    pid: int


@dataclass
class Streams:
    """The agent's ends of a task's pipes and report socket."""

    out: int = -1
    err: int = -1
    task_fds: list[int] = field(default_factory=list)
    report: socket.socket = field(init=False)

    def __post_init__(self) -> None:
        self.out, out = os.pipe()
        self.err, err = os.pipe()
        self.report, report = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.task_fds = [out, err, report.detach()]

    def release(self) -> None:
        while self.task_fds:
            os.close(self.task_fds.pop())

    def end(self, pid: int) -> Ended:
        text = {self.out: b"", self.err: b""}
        open_fds, deadline = {self.out, self.err}, time.monotonic() + DEADLINE
        while open_fds:
            readable, _, _ = select.select(open_fds, [], [], max(0.0, deadline - time.monotonic()))
            assert readable, f"still running after {DEADLINE} s: {text}"
            for fd in readable:
                data = os.read(fd, 65536)
                text[fd] += data
                if not data:
                    open_fds.remove(fd)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        reports = []
        while select.select([self.report], [], [], 0)[0]:
            data = self.report.recv(65536)
            if not data:
                break
            reports.append(json.loads(data))
        self.close()
        return Ended(code, text[self.out].decode(), text[self.err].decode(), reports, pid)

    def close(self) -> None:
        self.release()
        os.close(self.out)
        os.close(self.err)
        self.report.close()


def python_of(command: list[str], folder: Path, interpreter: str = sys.executable) -> Python:
    python = parse_command(command, interpreter, cwd=str(folder))
    assert python is not None
    return python


def begin(command: list[str], folder: Path, env: Mapping[str, str], record: Path | None = None) -> tuple[int, Streams]:
    streams = Streams()
    fd = os.open(record, os.O_CREAT | os.O_WRONLY | os.O_TRUNC) if record else -1
    try:
        out, err, report = streams.task_fds
        pid = starting.start_cold(python_of(command, folder), env, str(folder), out, err, report, fd)
    except BaseException:
        streams.close()
        raise
    finally:
        if fd >= 0:
            os.close(fd)
    streams.release()
    return pid, streams


def run_cold(
    command: list[str], folder: Path, env: Mapping[str, str] | None = None, record: Path | None = None
) -> Ended:
    pid, streams = begin(command, folder, env or {**STATIC, **LATE}, record)
    return streams.end(pid)


def recorded(command: list[str], folder: Path, env: Mapping[str, str] | None = None) -> Record:
    run_cold(command, folder, env, folder / "record.jsonl")
    return starting.read_record(folder / "record.jsonl")


def answer(spare: Spare) -> Message:
    deadline = time.monotonic() + DEADLINE
    while True:
        readable, _, _ = select.select([spare], [], [], max(0.0, deadline - time.monotonic()))
        assert readable, "the spare does not answer"
        for message in spare.receive():
            return message


class Warm:
    """A spare that is ready, closed at the end."""

    def __init__(
        self,
        command: list[str],
        folder: Path,
        record: Record,
        env: Mapping[str, str] = STATIC,
        devices: Sequence[str] = (),
    ) -> None:
        self.spare = Spare.spawn(python_of(command, folder), env, str(folder), record, devices=devices)
        self.state = answer(self.spare)

    def __enter__(self) -> Warm:
        return self

    def begin(
        self, env: Mapping[str, str] | None = None, argv: Sequence[str] | None = None, standby: str = ""
    ) -> tuple[int, Streams]:
        assert isinstance(self.state, Ready), self.state
        streams = Streams()
        out, err, report = streams.task_fds
        self.spare.start(env or {**STATIC, **LATE}, out, err, report, argv, standby)
        streams.release()
        message = answer(self.spare)
        assert isinstance(message, Started), message
        return message.pid, streams

    def run(self, env: Mapping[str, str] | None = None) -> Ended:
        pid, streams = self.begin(env)
        return streams.end(pid)

    def __exit__(self, *_: object) -> None:
        self.spare.close()
        os.waitpid(self.spare.pid, 0)


def run_plain(command: list[str], folder: Path, env: Mapping[str, str] | None = None) -> Ended:
    streams = Streams()
    python = python_of(command, folder)
    pid = starting.start_plain(python.argv, env or {**STATIC, **LATE}, str(folder), *streams.task_fds)
    streams.release()
    return streams.end(pid)


def three_ways(command: list[str], folder: Path) -> list[Ended]:
    plain = run_plain(command, folder)
    cold = run_cold(command, folder, record=folder / "record.jsonl")
    with Warm(command, folder, starting.read_record(folder / "record.jsonl")) as warm:
        return [plain, cold, warm.run()]


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path
