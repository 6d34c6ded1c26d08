"""Starts tasks: cold, plain, or from a spare, an interpreter that has already imported what the program needs."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Union

from paceline.agent import machine
from paceline.agent.command import Python

REPORT_FD = 3  # under which a task finds its report socket
_FIRST_FREE = 64  # inherited descriptors of ours lie where they do not change the numbers a program gets
_MOST_BYTES = 4 << 20
GONE = "the spare is gone"
_PACKAGE = Path(__file__).parent.parent
_SITE = _PACKAGE / "frameworks" / "site"
_HOOK = (
    "agent/starter.py",
    "agent/preload.py",
    "agent/hidden.py",
    "agent/traces.py",
    "frameworks/jax_cluster.py",
    "frameworks/keras_files.py",
    "frameworks/keras_fit.py",
    "frameworks/keras_losses.py",
    "frameworks/site/sitecustomize.py",
)


@dataclass(frozen=True)
class State:
    """Modules that a program imported one after another, and what it had changed before it did."""

    environment: Mapping[str, str | None]
    path: tuple[str, ...]
    late: bool
    modules: tuple[str, ...]


Record = tuple[State, ...]


@dataclass(frozen=True)
class Ready:
    rss: int
    modules: int
    seconds: float


@dataclass(frozen=True)
class Unfit:
    """This spare cannot be used (any more): starts that it has not answered have to be made cold."""

    reason: str


@dataclass(frozen=True)
class Started:
    pid: int


Message = Union[Ready, Unfit, Started]


class Spare:
    """One spare, for a loop of one thread: nothing here waits for it, except spawn for its exec."""

    def __init__(self, pid: int, control: socket.socket, environment: Mapping[str, str]) -> None:
        self.pid = pid
        self._control = control
        self._environment = dict(environment)
        self._over = False

    @classmethod
    def spawn(cls, python: Python, environment: Mapping[str, str], cwd: str, record: Record, nice: int = 10) -> Spare:
        """A spare for `python`. `environment`: what is the same for every task to be started from it.

        `nice`: how much it gives way to the tasks that run, as long as it imports.
        """
        if not supported():
            raise ValueError("spares need Linux")
        if not record or not python.hooked:
            # A record proves that Python loads our part. Without it, the program itself would run in the spare.
            raise ValueError("no spare without a record")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        unread, pipe = os.pipe()
        try:
            # Pipes, as a task's are, so that Python sets its streams up in the same way; nothing is written to them.
            pid = _spawn(
                python.argv,
                _hooked(environment, "spare", _FIRST_FREE),
                cwd,
                {0: None, 1: pipe, 2: pipe, _FIRST_FREE: theirs.fileno()},
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(unread)
            os.close(pipe)
        ours.setblocking(False)
        spare = cls(pid, ours, environment)
        states = [dataclasses.asdict(state) for state in record]
        order = {
            "kind": python.kind,
            "target": python.target,
            "argv": python.argv,
            "environment": dict(environment),
            "nice": nice,
        }
        with contextlib.suppress(ConnectionError):  # it has ended already, which the agent notices as it does later
            spare._send("preload", {**order, "record": states})
        return spare

    def fileno(self) -> int:
        return self._control.fileno()

    def receive(self) -> list[Message]:
        """What the spare has said since the last call."""
        found: list[Message] = []
        while not self._over:
            try:
                data = self._control.recv(65536)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self._over = True
                found.append(Unfit(GONE))
                break
            message = json.loads(data)
            if "ready" in message:
                found.append(Ready(**message["ready"]))
            elif "started" in message:
                found.append(Started(message["started"]))
            else:
                self._over = True
                found.append(Unfit(message["unfit"]))
        return found

    def start(self, environment: Mapping[str, str], stdout_fd: int, stderr_fd: int, report_fd: int) -> None:
        """Asks for a task with the whole `environment`; Started follows, or Unfit. OSError where the spare is gone."""
        different = {
            name
            for name in {*environment, *self._environment}
            if name.startswith(("PYTHON", "LD_")) and environment.get(name) != self._environment.get(name)
        }
        if different:
            raise ValueError(f"{', '.join(sorted(different))} cannot be set late: Python reads it when it starts")
        again = _hooked(environment, "cold", -1)
        added = {name: value for name, value in again.items() if environment.get(name) != value}
        self._send("start", {"environment": dict(environment), "again": added}, stdout_fd, stderr_fd, report_fd)

    def _send(self, word: str, payload: dict[str, Any], *fds: int) -> None:
        # A file carries what may be large, so that sending never blocks.
        with _memory_file() as file:
            file.write(json.dumps(payload).encode())
            file.flush()
            passed = [file.fileno(), *fds]
            rights = b"".join(fd.to_bytes(4, sys.byteorder) for fd in passed)
            self._control.sendmsg([word.encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])

    def close(self) -> None:
        """The spare ends; the agent still has to wait for `pid`."""
        self._over = True
        self._control.close()

    def kill(self) -> None:
        self.close()
        try:
            os.kill(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def _memory_file() -> IO[bytes]:
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("paceline"), "w+b")
    return tempfile.TemporaryFile()


def supported() -> bool:
    return sys.platform == "linux"


def modules_of(path: Path) -> Record:
    """The record a task wrote. What was cut off or does not belong there is left out."""
    try:
        with path.open("rb") as file:
            lines = file.read(_MOST_BYTES).split(b"\n")[:-1]
    except OSError:
        return ()
    states: list[tuple[dict[str, Any], list[str]]] = []
    for line in lines:
        try:
            item = json.loads(line)
        except ValueError:
            continue
        if isinstance(item, dict) and {"environment", "path", "late"} <= item.keys():
            states.append((item, []))
        elif isinstance(item, str) and states:
            states[-1][1].append(item)
    return tuple(
        State(item["environment"], tuple(item["path"]), item["late"], tuple(modules))
        for item, modules in states
        if modules
    )


def start_cold(
    python: Python,
    environment: Mapping[str, str],
    cwd: str,
    stdout_fd: int,
    stderr_fd: int,
    report_fd: int,
    record_fd: int = -1,
) -> int:
    """Starts a fresh interpreter; with `record_fd`, its imports are written there. The pid, or OSError."""
    fds: dict[int, int | None] = {0: None, 1: stdout_fd, 2: stderr_fd, REPORT_FD: report_fd}
    record = record_fd >= 0 and python.hooked
    if record:
        fds[_FIRST_FREE] = record_fd
    if python.hooked:
        environment = _hooked(environment, "cold", _FIRST_FREE if record else -1)
    return _spawn(python.argv, environment, cwd, fds)


def start_plain(
    argv: Sequence[str], environment: Mapping[str, str], cwd: str, stdout_fd: int, stderr_fd: int, report_fd: int
) -> int:
    """Starts any program as it is; Pythons that it starts find JAX's run, or Keras patched. The pid, or OSError."""
    if environment.get("PACELINE_JAX_COORDINATOR") or environment.get("PACELINE_PATCH_KERAS"):
        paths = [str(site_folder()), *filter(None, [environment.get("PYTHONPATH")])]
        environment = {**environment, "PYTHONPATH": os.pathsep.join(paths)}
    return _spawn(argv, environment, cwd, {0: None, 1: stdout_fd, 2: stderr_fd, REPORT_FD: report_fd})


def site_folder() -> Path:
    """The folder that makes Python run our sitecustomize; unpacked once where Paceline itself is one file."""
    global _SITE
    if not _SITE.is_dir():
        from importlib.resources import files

        unpacked = Path(tempfile.mkdtemp(prefix="paceline-"))
        for name in _HOOK:
            target = unpacked / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(files("paceline").joinpath(name).read_bytes())
        _SITE = unpacked / "frameworks" / "site"
    return _SITE


def _hooked(environment: Mapping[str, str], mode: str, fd: int) -> dict[str, str]:
    """The environment under which Python runs our sitecustomize first, which takes these two changes back."""
    own = environment.get("PYTHONPATH")
    paths = [str(site_folder()), *filter(None, [own])]
    starter = f"{mode} {fd} " + ("" if own is None else "=" + own)
    return {**environment, "PYTHONPATH": os.pathsep.join(paths), "PACELINE_STARTER": starter}


def _spawn(argv: Sequence[str], environment: Mapping[str, str], cwd: str, fds: Mapping[int, int | None]) -> int:
    """Runs `argv` in a session of its own with just these descriptors; it dies with this process."""
    agent = os.getpid()
    program = _program(argv[0], environment.get("PATH"), cwd)
    told, low = os.pipe()
    tell = _high(low)
    os.close(low)
    pid = os.fork()
    if pid == 0:
        try:
            _prepare(cwd, fds, agent)
            os.execve(program, list(argv), dict(environment))
        except BaseException as error:
            number = error.errno if isinstance(error, OSError) and error.errno else errno.EIO
            os.write(tell, b"%d" % number)
        finally:
            os._exit(127)
    os.close(tell)
    try:
        failed = os.read(told, 32)
    finally:
        os.close(told)
    if failed:
        os.waitpid(pid, 0)
        number = int(failed)
        raise OSError(number, os.strerror(number), program)
    return pid


def _prepare(cwd: str, fds: Mapping[int, int | None], agent: int) -> None:
    signal.set_wakeup_fd(-1)
    os.setsid()
    high = {place: _high(os.open(os.devnull, os.O_RDWR) if fd is None else fd) for place, fd in fds.items()}
    for place, fd in high.items():
        os.dup2(fd, place)
    for name in os.listdir("/dev/fd"):
        if int(name) not in fds:
            try:
                os.set_inheritable(int(name), False)
            except OSError:
                pass  # the one that listed them
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if supported():
        machine.die_with_parent()
        if os.getppid() != agent:
            os._exit(127)
    os.chdir(cwd)


def _high(fd: int) -> int:
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE + 1)


def _program(name: str, path: str | None, cwd: str) -> str:
    if os.sep in name:
        return name
    for folder in os.get_exec_path({"PATH": path} if path is not None else None):
        candidate = Path(cwd, folder, name)
        if candidate.is_file() and os.access(candidate, os.X_OK):
            return str(candidate)
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
