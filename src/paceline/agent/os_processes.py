"""What the operating system knows of processes, and signals for them; best effort if there is no /proc."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_libc = ctypes.CDLL(None) if sys.platform == "linux" else None  # loaded before any fork
_TGKILL = {"x86_64": 234, "aarch64": 131, "riscv64": 131, "ppc64le": 250, "s390x": 241}  # numbers of the system call
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


def become_subreaper() -> None:
    """Adopt orphaned descendants, so that no process started by a task escapes."""
    _prctl(36)


def name_process(name: str) -> None:
    """Set the name that `top` and `ps -o comm` show."""
    _prctl(15, name.encode()[:15])


def die_with_parent(number: int = signal.SIGKILL) -> None:
    _prctl(1, number)


def _prctl(option: int, value: int | bytes = 1) -> None:
    if _libc is not None:
        _libc.prctl(option, value, 0, 0, 0)


def cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def children(pid: int) -> list[int]:
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return [int(word) for word in file.read().split()]
    except OSError:
        return []


def descendants(pid: int, most: int = 1000) -> list[int]:
    """Children first. `most`: a program may start thousands of processes, and finding each one takes 0.1 ms."""
    pids = children(pid)
    for each in pids:  # the list grows while it is read
        if len(pids) >= most:
            break
        pids += children(each)
    return pids[:most]


def send_signal(pid: int, number: int) -> None:
    """To a process that may have ended, or may be another user's."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass


def signal_thread(pid: int, thread: int, number: int) -> bool:
    """Send a signal to one thread of a process. False: it has ended, or this system cannot do that."""
    tgkill = getattr(_libc, "tgkill", None)
    if tgkill is not None:
        return bool(tgkill(pid, thread, number) == 0)
    call = _TGKILL.get(os.uname().machine)  # musl, or glibc before 2.30
    if _libc is None or call is None:
        return False
    return bool(_libc.syscall(call, pid, thread, number) == 0)


def environment_of(pid: int, name: str) -> str | None:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            for item in file.read().split(b"\0"):
                key, _, value = item.partition(b"=")
                if key == name.encode():
                    return value.decode("utf-8", "replace")
    except OSError:
        pass
    return None


def command_of(pid: int) -> str:
    """The command line of a process; empty if it has ended."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read(4096).rstrip(b"\0").replace(b"\0", b" ").decode("utf-8", "replace")
    except OSError:
        return ""


def state(pid: int) -> tuple[str, float]:
    """The kernel's state letter of a process, and the CPU seconds it has used."""
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:  # a process may have any name
            fields = file.read().rpartition(")")[2].split()
        return fields[0], (int(fields[11]) + int(fields[12])) / _TICKS
    except (OSError, IndexError, ValueError):
        return "", 0.0


def waited_for_core(pid: int) -> float:
    """Seconds in which the first thread of the process could have run, but had no core; 0 if unknown."""
    try:
        with open(f"/proc/{pid}/schedstat") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def resident(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0


def peak_resident(pid: int) -> int:
    """The most memory that the process has used so far, in bytes; 0: unknown."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            for line in file:
                if line.startswith(b"VmHWM:"):
                    return int(line.split()[1]) * 1024
    except (OSError, IndexError, ValueError):
        pass
    return 0


def cpu_with_children(pid: int) -> float:
    """CPU seconds that a process has used, including its children that have ended."""
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:  # a process may have any name
            fields = file.read().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / _TICKS
    except (OSError, ValueError):
        return 0.0
