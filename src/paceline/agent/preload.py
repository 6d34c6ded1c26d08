"""The inside of a spare: imports what the program imported last time, and forks a task whenever the agent asks."""

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


def serve(fd: int, starter: "Any", load: "Callable[..., Any]") -> None:
    """Never returns in the spare; returns in each task, as soon as its program may begin."""
    control = _socket.socket(fileno=fd)
    null = os.open(os.devnull, os.O_RDWR)
    for taken in {1, 2, _REPORT} - {null}:
        os.dup2(null, taken)
    if null > _REPORT:
        os.close(null)
    agent, libc = os.getppid(), ctypes.CDLL(None, use_errno=True)
    began = time.monotonic()
    try:
        order = _read(_receive(control)[0])
        preloaded = load("agent", "hidden.py").Preloaded(order, starter, load("agent", "traces.py"))
        priority = _lower_priority(order["nice"])
        why = preloaded.load()
        _restore_priority(priority)
        libc.fflush(None)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
    if why:
        _end(control, {"unfit": why})
    ready = {"rss": _rss(), "modules": len(preloaded.hidden), "seconds": round(time.monotonic() - began, 3)}
    control.send(json.dumps({"ready": ready}).encode())
    while True:
        fds = _receive(control)
        try:
            pid = _fork()
        except OSError as error:
            _end(control, {"unfit": f"cannot fork: {error}"})
        if pid == 0:
            break
        for other in fds:
            os.close(other)
        control.send(json.dumps({"started": pid}).encode())
    control.detach()
    request = _become_task(fds, preloaded, agent, libc)
    preloaded.told = {name: load("frameworks", told) for name, told in starter.watch(load).items()}
    preloaded.enter_task(request["environment"], request["again"])


def _receive(control: "_socket.socket") -> "list[int]":
    """The descriptors that came with the next request; the end where the agent has closed its side."""
    data, ancillary, _, _ = control.recvmsg(256, _socket.CMSG_SPACE(8 * 4))
    fds = [
        int.from_bytes(part[at : at + 4], sys.byteorder)
        for level, kind, part in ancillary
        if (level, kind) == (_socket.SOL_SOCKET, _socket.SCM_RIGHTS)
        for at in range(0, len(part) - 3, 4)
    ]
    if not data:
        os._exit(0)
    return fds


def _read(fd: int) -> "dict[str, Any]":
    with os.fdopen(fd, "rb") as file:
        file.seek(0)
        found: dict[str, Any] = json.loads(file.read())
    return found


def _end(control: "_socket.socket", message: "dict[str, Any]") -> None:
    control.send(json.dumps(message).encode())
    os._exit(0)


def _lower_priority(nice: int) -> "int | None":
    """Imports must not slow down the tasks that run. Not by nice where an ordinary user could not take it back."""
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


def _fork() -> int:
    """A fork whose parent is the agent. In the spare: its pid. In the task: 0, once the agent is its parent."""
    told, tell = os.pipe()
    gate, gone = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12+ warns of threads, which would have made this spare unfit
        between = os.fork()
        if between == 0:
            between = os.getpid()
            try:
                pid = os.fork()
                if pid:
                    os.write(tell, b"%d" % pid)
            except OSError:
                os._exit(1)
            if pid:
                os._exit(0)
            os.close(gone)
            os.read(gate, 1)
            while os.getppid() == between:
                os.sched_yield()
            return 0
    for fd in (tell, gate, gone):
        os.close(fd)
    os.waitpid(between, 0)
    text = os.read(told, 32)
    os.close(told)
    if not text:
        raise OSError("no process could be made")
    return int(text)


def _become_task(fds: "list[int]", preloaded: "Any", agent: int, libc: "Any") -> "dict[str, Any]":
    os.setsid()
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != agent:
        os._exit(1)
    request = _read(fds[0])
    for place, fd in zip((1, 2, _REPORT), fds[1:]):
        os.dup2(fd, place)
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        if fd > (_REPORT if len(fds) > _REPORT else 2) and fd not in preloaded.kept:
            try:
                os.close(fd)
            except OSError:
                pass
    request["environment"] = {**request["environment"], **preloaded.given}
    preloaded.traces.set_environment(request["environment"])
    _renew(preloaded)
    return request


def _renew(preloaded: "Any") -> None:
    """What a fresh interpreter would not share with another."""
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
