"""Runs in a spare: imports what the program imported last time, and forks a task whenever the agent requests one.

Before it is needed, a fork can become a standby, which creates its CUDA context and waits (gpu_standby_process.py).
"""

import _socket
import ctypes
import json
import os
import signal
import sys
import time
import warnings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_REPORT = 3
_PR_SET_PDEATHSIG = 1
_STANDBY_ANSWERS = 3.0  # seconds: it may still be creating its context, which would take a task as long
_STANDBYS_ANSWER = 0.1  # seconds, once one has not: the agent waits 10 s for all tasks that it starts


def serve(fd: int, import_recorder: "Any", load: "Callable[..., Any]") -> None:
    """Never returns in the spare; returns in each task, when its program can start."""
    control = _socket.socket(fileno=fd)
    null = os.open(os.devnull, os.O_RDWR)
    for target in {1, 2, _REPORT} - {null}:
        os.dup2(null, target)
    if null > _REPORT:
        os.close(null)
    agent, libc = os.getppid(), ctypes.CDLL(None, use_errno=True)
    began, module = time.monotonic(), ""
    try:
        order = _read(_receive(control)[1][0])
        effects = load("agent", "spares", "import_effects.py")
        preloaded = load("agent", "spares", "preloaded_modules.py").Preloaded(order, import_recorder, effects)
        priority = _lower_priority(order["nice"])
        reason = preloaded.load()
        module = next(iter(preloaded.openers.values()), "")
        _restore_priority(priority)
        libc.fflush(None)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    if reason:
        _end(control, {"unfit": reason, "module": module})
    ready = {"rss": _rss(), "modules": len(preloaded.hidden), "seconds": round(time.monotonic() - began, 3)}
    control.send(json.dumps({"ready": ready}).encode())
    standbys: dict[str, _Fork] = {}
    while True:
        request, fds = _receive(control)
        kind, _, key = request.decode().partition(" ")
        standby = standbys.pop(key, None)
        if kind == "start" and standby is not None and standby.becomes_task(fds):
            fork = standby
        else:
            if standby is not None:
                standby.kill()
            try:
                fork = _fork()
            except OSError as error:
                _end(control, {"unfit": f"cannot fork: {error}"})
            if fork.pid == 0:
                break
        for other in fds:
            os.close(other)
        if kind == "standby":
            standbys[key] = fork
            continue
        fork.release()
        control.send(json.dumps({"started": fork.pid}).encode())
    for link in (control, *(other.link for other in standbys.values())):
        link.detach()  # the descriptor is closed below; its number may be in use when this object is deleted
    if kind == "standby":
        _close_all_but({0, 1, 2, _REPORT, fds[0], *fork.fds(), *preloaded.module_fds})
        wait = load("agent", "spares", "gpu_standby_process.py").wait
        fds, cuda_fds = wait(fork.link, _read(fds[0]), _received)
        preloaded.module_fds |= cuda_fds
    fork.wait_until_released()
    task = _become_task(fds, preloaded, agent, libc)
    if task["argv"] is not None and task["argv"] != preloaded.order["argv"]:
        _set_arguments(task["argv"], preloaded.order)
    preloaded.hook = import_recorder.install_hooks(load)
    preloaded.enter_task(task["environment"], task["again"])


def _receive(control: "_socket.socket") -> "tuple[bytes, list[int]]":
    """Waits for the next request and returns it with its descriptors. Exits if the agent has closed its end."""
    data, fds = _received(control)
    if not data:
        os._exit(0)
    return data, fds


def _received(link: "_socket.socket") -> "tuple[bytes, list[int]]":
    """The next message with its descriptors; it is empty if the other end is closed."""
    data, ancillary, _, _ = link.recvmsg(256, _socket.CMSG_SPACE(8 * 4))
    fds = [
        int.from_bytes(part[at : at + 4], sys.byteorder)
        for level, kind, part in ancillary
        if (level, kind) == (_socket.SOL_SOCKET, _socket.SCM_RIGHTS)
        for at in range(0, len(part) - 3, 4)
    ]
    return data, fds


def _read(fd: int) -> "dict[str, Any]":
    with os.fdopen(fd, "rb") as file:
        file.seek(0)
        payload: dict[str, Any] = json.loads(file.read())
    return payload


def _end(control: "_socket.socket", message: "dict[str, Any]") -> None:
    control.send(json.dumps(message).encode())
    os._exit(0)


def _lower_priority(nice: int) -> "int | None":
    """Imports must not slow down running tasks. Leaves niceness alone if this user could not restore it."""
    _autogroup(nice)
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    probe = os.fork()
    if probe == 0:
        try:
            os.nice(1)
            os.setpriority(os.PRIO_PROCESS, 0, usual)
        except OSError:
            os._exit(1)
        os._exit(0)
    if os.waitpid(probe, 0)[1] != 0:
        return None
    os.nice(nice)
    return usual


def _restore_priority(usual: "int | None") -> None:
    _autogroup(0)
    if usual is not None:
        os.setpriority(os.PRIO_PROCESS, 0, usual)


def _autogroup(nice: int) -> None:
    try:
        with open("/proc/self/autogroup", "w") as file:
            file.write(str(nice))
    except OSError:
        pass


def _rss() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class _Fork:
    """A fork of the spare. Once it is released, the agent adopts it, because the process between the two ends."""

    answers_within = _STANDBY_ANSWERS  # of all standbys

    def __init__(self, pid: int, parent: int, gate: int, link: "_socket.socket") -> None:
        """`pid`: 0 in the fork itself. `gate`: an end of a pipe, closed to release the fork."""
        self.pid = pid
        self.link = link
        self._parent = parent
        self._gate = gate

    def fds(self) -> "set[int]":
        return {self._gate, self.link.fileno()}

    def release(self) -> None:
        os.close(self._gate)
        self.link.close()
        os.waitpid(self._parent, 0)

    def wait_until_released(self) -> None:
        self.link.detach()
        os.read(self._gate, 1)
        while os.getppid() == self._parent:
            os.sched_yield()

    def becomes_task(self, fds: "list[int]") -> bool:
        """Whether this standby has taken the request; it ends if it cannot be of use."""
        rights = b"".join(fd.to_bytes(4, sys.byteorder) for fd in fds)
        try:
            self.link.settimeout(_Fork.answers_within)
            self.link.sendmsg([b"start"], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)])
            return bool(self.link.recv(16))
        except _socket.timeout:
            _Fork.answers_within = _STANDBYS_ANSWER
            return False
        except OSError:
            return False

    def kill(self) -> None:
        try:
            os.kill(self.pid, signal.SIGKILL)  # its parent does not wait for it, so the pid is still its own
        except ProcessLookupError:
            pass
        self.release()


def _fork() -> _Fork:
    """Forks a process that the agent adopts once it is released."""
    pid_read, pid_write = os.pipe()
    gate_read, gate_write = os.pipe()
    ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12+ warns about threads, but this spare has none
        parent = os.fork()
        if parent == 0:
            parent = os.getpid()
            try:
                pid = os.fork()
            except OSError:
                os._exit(1)
            if pid:
                os.write(pid_write, b"%d" % pid)
                _close_all_but({gate_read})
                os.read(gate_read, 1)
                os._exit(0)
            for fd in (pid_read, pid_write, gate_write):
                os.close(fd)
            ours.close()
            return _Fork(0, parent, gate_read, theirs)
    theirs.close()
    for fd in (pid_write, gate_read):
        os.close(fd)
    text = os.read(pid_read, 32)
    os.close(pid_read)
    fork = _Fork(int(text or b"0"), parent, gate_write, ours)
    if not text:
        fork.release()
        raise OSError("cannot create a process")
    return fork


def _close_all_but(kept: "set[int]") -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            try:
                os.close(int(name))
            except OSError:
                pass  # the descriptor of the listing itself


def _become_task(fds: "list[int]", preloaded: "Any", agent: int, libc: "Any") -> "dict[str, Any]":
    os.setsid()
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != agent:
        os._exit(1)
    request = _read(fds[0])
    for target, fd in zip((1, 2, _REPORT), fds[1:]):
        os.dup2(fd, target)
    _close_all_but({0, 1, 2, *({_REPORT} if len(fds) > _REPORT else ()), *preloaded.module_fds})
    request["environment"] = {**request["environment"], **preloaded.python_set}
    preloaded.effects.set_environment(request["environment"])
    _refresh_process_state(preloaded)
    return request


def _set_arguments(argv: "list[str]", order: "dict[str, Any]") -> None:
    """The arguments of the task's program, which are as many as those with which the spare was started."""
    for arguments in (sys.argv, getattr(sys, "orig_argv", [])):
        count = min(len(arguments) - 1, len(argv))
        arguments[len(arguments) - count :] = argv[len(argv) - count :]
    order["argv"] = argv


def _refresh_process_state(preloaded: "Any") -> None:
    """Resets state that two new interpreters would not share, such as random seeds."""
    numpy_random = preloaded.module("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    threading = sys.modules.get("threading")
    if threading is not None:
        threading.main_thread()._set_native_id()
    process = sys.modules.get("multiprocessing.process")
    if process is not None:
        process.current_process().authkey = os.urandom(32)
    logging = sys.modules.get("logging")
    if logging is not None:
        vars(logging)["_startTime"] = time.time_ns() if isinstance(vars(logging)["_startTime"], int) else time.time()
