"""Runs in a spare: imports what the program imported last time, and forks a task whenever the agent requests one."""

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


def serve(fd: int, import_recorder: "Any", load: "Callable[..., Any]") -> None:
    """Never returns in the spare; returns in each task, when its program can start."""
    control = _socket.socket(fileno=fd)
    null = os.open(os.devnull, os.O_RDWR)
    for target in {1, 2, _REPORT} - {null}:
        os.dup2(null, target)
    if null > _REPORT:
        os.close(null)
    agent, libc = os.getppid(), ctypes.CDLL(None, use_errno=True)
    began = time.monotonic()
    try:
        order = _read(_receive(control)[0])
        effects = load("agent", "spares", "import_effects.py")
        preloaded = load("agent", "spares", "preloaded_modules.py").Preloaded(order, import_recorder, effects)
        priority = _lower_priority(order["nice"])
        reason = preloaded.load()
        _restore_priority(priority)
        libc.fflush(None)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    if reason:
        _end(control, {"unfit": reason})
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
    if request["argv"] is not None and request["argv"] != preloaded.order["argv"]:
        _set_arguments(request["argv"], preloaded.order)
    preloaded.hook = import_recorder.install_hooks(load)
    preloaded.enter_task(request["environment"], request["again"])


def _receive(control: "_socket.socket") -> "list[int]":
    """Waits for the next request and returns its descriptors. Exits if the agent has closed its end."""
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


def _fork() -> int:
    """Forks a process that the agent adopts. Returns its pid in the spare, and 0 in the task, once it is adopted."""
    pid_read, pid_write = os.pipe()
    gate_read, gate_write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12+ warns about threads, but this spare has none
        intermediate = os.fork()
        if intermediate == 0:
            intermediate = os.getpid()
            try:
                pid = os.fork()
                if pid:
                    os.write(pid_write, b"%d" % pid)
            except OSError:
                os._exit(1)
            if pid:
                os._exit(0)
            os.close(gate_write)
            os.read(gate_read, 1)
            while os.getppid() == intermediate:
                os.sched_yield()
            return 0
    for fd in (pid_write, gate_read, gate_write):
        os.close(fd)
    os.waitpid(intermediate, 0)
    text = os.read(pid_read, 32)
    os.close(pid_read)
    if not text:
        raise OSError("cannot create a process")
    return int(text)


def _become_task(fds: "list[int]", preloaded: "Any", agent: int, libc: "Any") -> "dict[str, Any]":
    os.setsid()
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != agent:
        os._exit(1)
    request = _read(fds[0])
    for target, fd in zip((1, 2, _REPORT), fds[1:]):
        os.dup2(fd, target)
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        if fd > (_REPORT if len(fds) > _REPORT else 2) and fd not in preloaded.module_fds:
            try:
                os.close(fd)
            except OSError:
                pass
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
