"""Starts task processes: cold, plain, or from a spare (an interpreter that has imported what the program needs)."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import resource
import signal
import socket
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Union

from paceline.agent import os_processes
from paceline.agent.tasks.python_command import Python
from paceline.storage.json_values import parse_json
from paceline.storage.regular_files import open_regular

REPORT_FD = 3  # the report socket of a task
_FIRST_FREE = 64  # our inherited descriptors get high numbers, so that a program gets the usual ones
_MOST_BYTES = 4 << 20
_MOST_MESSAGES = 100  # that are read at once
_PACKAGE = Path(__file__).parents[2]
_SITE = _PACKAGE / "frameworks" / "site"
_HOOK = (
    "agent/spares/import_recorder.py",
    "agent/spares/spare_process.py",
    "agent/spares/gpu_standby_process.py",
    "agent/spares/preloaded_modules.py",
    "agent/spares/import_effects.py",
    "frameworks/jax_cluster.py",
    "frameworks/jax_compile_cache.py",
    "frameworks/keras_files.py",
    "frameworks/keras_fit.py",
    "frameworks/keras_losses.py",
    "frameworks/leader_wait.py",
    "frameworks/stack_signal.py",
    "frameworks/start_stages.py",
    "frameworks/tensorflow_initial_values.py",
    "frameworks/site/sitecustomize.py",
)


@dataclass(frozen=True)
class State:
    """Modules that a program imported in sequence, and the changes that it had made before."""

    environment: Mapping[str, str | None]
    path: tuple[str, ...]
    late: bool
    modules: tuple[str, ...]


Record = tuple[State, ...]


@dataclass(frozen=True)
class ContextOrder:
    """The CUDA context that a standby creates."""

    environment: Mapping[str, str]  # the variables that CUDA and NCCL read
    device: int  # the index among the devices that it sees
    pid: int  # a process of the same program; only if it uses CUDA itself, a context is created
    nccl: bool = False  # load NCCL's kernels, too, if that process uses NCCL
    library: str = "libcuda.so.1"
    file: str = "/dev/nvidia-uvm"  # open in a process that has initialized CUDA, but not if it only queries devices


@dataclass(frozen=True)
class Ready:
    rss: int
    modules: int
    seconds: float


@dataclass(frozen=True)
class Unfit:
    """This spare cannot be used: tasks that it has not started must be started cold."""

    reason: str
    module: str = ""  # the one to which this is due: another spare can do without it


@dataclass(frozen=True)
class Ended:
    """The spare's process has ended: tasks that it has not started must be started cold."""


@dataclass(frozen=True)
class Started:
    pid: int


Message = Union[Ready, Unfit, Ended, Started]


class Spare:
    """One spare, for an event loop: no method blocks, except that `spawn` waits for the exec."""

    def __init__(self, pid: int, control: socket.socket, environment: Mapping[str, str]) -> None:
        self.pid = pid
        self._control = control
        self._environment = dict(environment)
        self._over = False

    @classmethod
    def spawn(
        cls,
        python: Python,
        environment: Mapping[str, str],
        cwd: str,
        record: Record,
        nice: int = 10,
        devices: Sequence[str] = (),
    ) -> Spare:
        """Starts a spare for `python`. `environment`: the variables that all its tasks share.

        `nice`: its niceness while it imports, so that it does not slow down running tasks. `devices`: their GPUs.
        """
        if not supported():
            raise ValueError("spares require Linux")
        if not record or not python.hooked:
            # A record proves that Python loads our sitecustomize. Otherwise the spare would run the program itself.
            raise ValueError("there is no record of the program's imports")
        first_free = _first_free()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        unread, pipe = os.pipe()
        try:
            # Pipes, as for a task, so that Python sets up its streams in the same way; nothing is written to them.
            pid = _spawn(
                python.argv,
                _hooked(environment, "spare", first_free),
                cwd,
                {0: None, 1: pipe, 2: pipe, first_free: theirs.fileno()},
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
            "devices": ",".join(devices),
        }
        with contextlib.suppress(ConnectionError):  # it has already ended, which the agent notices later
            spare._send("preload", {**order, "record": states})
        return spare

    def fileno(self) -> int:
        return self._control.fileno()

    def receive(self) -> list[Message]:
        """The messages since the last call."""
        messages: list[Message] = []
        while not self._over and len(messages) < _MOST_MESSAGES:
            try:
                data = self._control.recv(65536)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self._over = True
                messages.append(Ended())
                break
            message = _read_message(data)
            messages.append(message)
            self._over = isinstance(message, Unfit)
        return messages

    def start(
        self,
        environment: Mapping[str, str],
        stdout_fd: int,
        stderr_fd: int,
        report_fd: int,
        argv: Sequence[str] | None = None,
        standby: str = "",
    ) -> None:
        """Requests a task with this environment; Started, Unfit or Ended follows. OSError: the spare has ended.

        `argv`: the spare's, with other arguments for the program; None: the same arguments. `standby`: the standby that
        becomes the task, if there is such a one.
        """
        different = {
            name
            for name in {*environment, *self._environment}
            if name.startswith(("PYTHON", "LD_")) and environment.get(name) != self._environment.get(name)
        }
        if different:
            raise ValueError(f"{', '.join(sorted(different))} cannot be changed in a spare: Python reads it at startup")
        again = _hooked(environment, "cold", -1)
        added = {name: value for name, value in again.items() if environment.get(name) != value}
        payload = {"environment": dict(environment), "again": added, "argv": argv}
        self._send(f"start {standby}".rstrip(), payload, stdout_fd, stderr_fd, report_fd)

    def prepare(self, standby: str, order: ContextOrder) -> None:
        """Requests a standby, which creates a CUDA context and waits to become a task. There may be none later: it ends
        if it cannot be of use. OSError: the spare has ended."""
        self._send(f"standby {standby}", dataclasses.asdict(order))

    def _send(self, kind: str, payload: dict[str, Any], *fds: int) -> None:
        # The payload may be large: it is sent as a file, so that sending never blocks.
        with _memory_file() as file:
            file.write(json.dumps(payload).encode())
            file.flush()
            passed = [file.fileno(), *fds]
            rights = b"".join(fd.to_bytes(4, sys.byteorder) for fd in passed)
            self._control.sendmsg([kind.encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])

    def close(self) -> None:
        """Ends the spare; the agent still has to wait for `pid`."""
        self._over = True
        self._control.close()

    def kill(self) -> None:
        self.close()
        try:
            os.killpg(self.pid, signal.SIGKILL)  # with its standbys, and forks that are not tasks yet
        except ProcessLookupError:
            pass


def _memory_file() -> IO[bytes]:
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("paceline"), "w+b")
    return tempfile.TemporaryFile()


def supported() -> bool:
    return sys.platform == "linux"


def read_record(path: Path) -> Record:
    """The record that a task wrote. Truncated or invalid lines are skipped."""
    try:
        with open(open_regular(str(path)), "rb") as file:
            lines = file.read(_MOST_BYTES).split(b"\n")[:-1]
    except OSError:
        return ()
    states: list[tuple[dict[str, Any], list[str]]] = []
    for line in lines:
        try:
            item = parse_json(line)
        except ValueError:
            continue
        if isinstance(item, dict) and _is_state(item):
            states.append((item, []))
        elif isinstance(item, str) and states:
            states[-1][1].append(item)
    return tuple(
        State(item["environment"], tuple(item["path"]), item["late"], tuple(modules))
        for item, modules in states
        if modules
    )


def without(record: Record, modules: Collection[str]) -> Record:
    """The record of a program that does not import these modules."""
    kept = [tuple(name for name in state.modules if name not in modules) for state in record]
    return tuple(dataclasses.replace(state, modules=names) for state, names in zip(record, kept) if names)


def _is_state(item: dict[str, Any]) -> bool:
    environment, path, late = (item.get(name) for name in ("environment", "path", "late"))
    return (
        isinstance(environment, dict)
        and all(value is None or isinstance(value, str) for value in environment.values())
        and isinstance(path, list)
        and all(isinstance(each, str) for each in path)
        and isinstance(late, bool)
    )


def _read_message(data: bytes) -> Message:
    """The modules that a spare has imported share its socket and may write anything to it."""
    try:
        message = parse_json(data)
        if "ready" in message:
            ready = Ready(int(message["ready"]["rss"]), int(message["ready"]["modules"]), message["ready"]["seconds"])
            if isinstance(ready.seconds, (int, float)) and 0 <= ready.seconds < 1e9:
                return ready
        elif "started" in message:
            if _may_be_task(message["started"]):
                return Started(message["started"])
        elif isinstance(message["unfit"], str):
            module = message.get("module")
            return Unfit(message["unfit"][:500], module[:500] if isinstance(module, str) else "")
    except (ValueError, TypeError, KeyError, OverflowError):
        pass
    return Unfit("it sent an invalid message")


def _may_be_task(pid: Any) -> bool:
    """Whether the agent may send signals to it: it would kill itself otherwise."""
    return type(pid) is int and 1 < pid < 2**31 and pid not in (os.getpid(), os.getppid(), os.getpgrp())


def start_cold(
    python: Python,
    environment: Mapping[str, str],
    cwd: str,
    stdout_fd: int,
    stderr_fd: int,
    report_fd: int,
    record_fd: int = -1,
) -> int:
    """Starts a new interpreter and returns its pid, or raises OSError. Its imports are recorded to `record_fd`."""
    fds: dict[int, int | None] = {0: None, 1: stdout_fd, 2: stderr_fd, REPORT_FD: report_fd}
    records = record_fd >= 0 and python.hooked
    if records:
        fds[_first_free()] = record_fd
    if python.hooked:
        environment = _hooked(environment, "cold", _first_free() if records else -1)
    return _spawn(python.argv, environment, cwd, fds)


def start_plain(
    argv: Sequence[str], environment: Mapping[str, str], cwd: str, stdout_fd: int, stderr_fd: int, report_fd: int
) -> int:
    """Starts any program and returns its pid, or raises OSError. Python processes that it starts get the hooks for JAX
    and Keras."""
    site, paths = str(site_folder()), environment.get("PYTHONPATH", "").split(os.pathsep)
    if site not in paths and (environment.get("PACELINE_JAX_COORDINATOR") or environment.get("PACELINE_PATCH_KERAS")):
        environment = {**environment, "PYTHONPATH": os.pathsep.join([site, *filter(None, paths)])}
    return _spawn(argv, environment, cwd, {0: None, 1: stdout_fd, 2: stderr_fd, REPORT_FD: report_fd})


def site_folder() -> Path:
    """The folder with our sitecustomize, for PYTHONPATH; extracted once if Paceline itself is an archive."""
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
    """The environment with which Python first runs our sitecustomize, which undoes these two changes."""
    python_path = environment.get("PYTHONPATH")
    paths = [str(site_folder()), *filter(None, [python_path])]
    starter = f"{mode} {fd} " + ("" if python_path is None else "=" + python_path)
    return {**environment, "PYTHONPATH": os.pathsep.join(paths), "PACELINE_STARTER": starter}


def _spawn(argv: Sequence[str], environment: Mapping[str, str], cwd: str, fds: Mapping[int, int | None]) -> int:
    """Runs `argv` in a new session with only these descriptors; it is killed when this process ends."""
    agent = os.getpid()
    program = _program(argv[0], environment.get("PATH"), cwd)
    error_read, low = os.pipe()
    error_write = _high(low)
    os.close(low)
    pid = os.fork()
    if pid == 0:
        try:
            _prepare(cwd, fds, agent)
            os.execve(program, list(argv), dict(environment))
        except BaseException as error:
            number = error.errno if isinstance(error, OSError) and error.errno else errno.EIO
            os.write(error_write, b"%d" % number)
        finally:
            os._exit(127)
    os.close(error_write)
    try:
        failure = os.read(error_read, 32)
    finally:
        os.close(error_read)
    if failure:
        os.waitpid(pid, 0)
        number = int(failure)
        raise OSError(number, os.strerror(number), program)
    return pid


def _prepare(cwd: str, fds: Mapping[int, int | None], agent: int) -> None:
    signal.set_wakeup_fd(-1)
    os.setsid()
    high = {target: _high(os.open(os.devnull, os.O_RDWR) if fd is None else fd) for target, fd in fds.items()}
    for target, fd in high.items():
        os.dup2(fd, target)
    for name in os.listdir("/dev/fd"):
        if int(name) not in fds:
            try:
                os.set_inheritable(int(name), False)
            except OSError:
                pass  # the descriptor of the listing itself
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if supported():
        os_processes.die_with_parent()
        if os.getppid() != agent:
            os._exit(127)
    os.chdir(cwd)


def _high(fd: int) -> int:
    """A duplicate with a number that is not used for inherited descriptors."""
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _first_free() + 1)


def _first_free() -> int:
    """_FIRST_FREE, or less where the limit of open files is so low that it has no such number."""
    return min(_FIRST_FREE, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)


def _program(name: str, path: str | None, cwd: str) -> str:
    if os.sep in name:
        return name
    for folder in os.get_exec_path({"PATH": path} if path is not None else None):
        candidate = Path(cwd, folder, name)
        if candidate.is_file() and os.access(candidate, os.X_OK):
            return str(candidate)
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
