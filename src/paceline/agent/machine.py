"""Queries to the operating system: memory, ports, the state of processes; best effort if there is no /proc."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import random
import signal
import socket
import sys

_PORTS = (20000, 30000)  # below the range of ephemeral ports
_ANY_PORT = 0  # any that the kernel chooses
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


def free_port() -> int:
    """A port that is neither in use nor reserved for a task at the moment."""
    for chosen in [*(random.randrange(*_PORTS) for _ in range(1000)), _ANY_PORT]:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind(("", chosen))
            except OSError:
                continue
            port = int(probe.getsockname()[1])
        reservation = port_reservation(port)
        if reservation is not None:
            reservation.close()
            return port
    raise OSError(errno.EADDRINUSE, "no port is free")


def port_reservation(port: int) -> socket.socket | None:
    """An abstract Unix socket of the port's name, which exists once per network namespace, as the port does, and which
    the kernel removes when this process ends. None: another process has reserved the port."""
    holder = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        holder.bind(f"\0paceline-port-{port}")
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            holder.close()
            return None
        # Some sandboxes have no abstract names: the port is probably free nevertheless.
    return holder


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


class Memory:
    """Memory of this process's cgroup, or of the machine if the cgroup has no limit."""

    def __init__(self, snapshots: str = "") -> None:
        """`snapshots`: a folder in memory. What it may use does not count: it was added to what the tasks may use."""
        self._folder, self._is_v2 = _cgroup()
        self._snapshots = snapshots

    def used_and_limit(self) -> tuple[int, int]:
        used, limit, files = self._used_limit_and_files()
        if self._snapshots:
            with contextlib.suppress(OSError):
                status = os.statvfs(self._snapshots)
                # Files of an earlier container do not count as memory of this one.
                files = min(files, (status.f_blocks - status.f_bfree) * status.f_frsize)
                return max(0, used - files), max(0, limit - status.f_blocks * status.f_frsize)
        return used, limit

    def _used_limit_and_files(self) -> tuple[int, int, int]:
        """And how much of it is used by files in memory."""
        total, available = _machine_memory()
        if self._folder:
            current, limit = (
                ("memory.current", "memory.max") if self._is_v2 else ("memory.usage_in_bytes", "memory.limit_in_bytes")
            )
            limit_bytes = _read_int(f"{self._folder}/{limit}")
            used = _read_int(f"{self._folder}/{current}")
            if limit_bytes is not None and used is not None and limit_bytes < total:
                cache = self._memory_stat("inactive_file" if self._is_v2 else "total_inactive_file")
                files = self._memory_stat("shmem" if self._is_v2 else "total_shmem")
                return max(0, used - cache), limit_bytes, files
        return total - available, total, total

    def is_limited(self) -> bool:
        """Whether the cgroup has a limit of its own."""
        return self.used_and_limit()[1] < _machine_memory()[0]

    def share(self) -> float:
        used, limit = self.used_and_limit()
        return round(used / limit, 4) if limit else 0.0

    def free(self) -> int:
        used, limit = self.used_and_limit()
        return max(0, limit - used)

    def oom_kills(self) -> int:
        """How many processes of this cgroup the kernel has killed because it was out of memory."""
        if not self._folder:
            return 0
        name = "memory.events" if self._is_v2 else "memory.oom_control"
        return _fields(f"{self._folder}/{name}").get("oom_kill", 0)

    def _memory_stat(self, name: str) -> int:
        return _fields(f"{self._folder}/memory.stat").get(name, 0)


def was_oom_killed(pid: int) -> bool:
    """Whether the kernel's log (readable by root only) reports an out-of-memory kill of this process."""
    try:
        fd = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    needles = (f"Killed process {pid} ".encode(), f"pid={pid},".encode())
    try:
        while True:
            try:
                record = os.read(fd, 8192)
            except BrokenPipeError:
                continue  # records were overwritten in the meantime
            except OSError:
                return False
            if not record:
                return False
            if (b"oom" in record.lower() or b"out of memory" in record.lower()) and any(n in record for n in needles):
                return True
    finally:
        os.close(fd)


def _cgroup() -> tuple[str, bool]:
    """The folder of this process's memory cgroup (empty if unknown), and whether it is cgroup v2."""
    try:
        with open("/proc/self/cgroup") as file:
            lines = [line.strip().split(":", 2) for line in file]
    except OSError:
        return "", False
    for _, controllers, path in lines:
        if "memory" in controllers.split(","):
            for base in ("/sys/fs/cgroup/memory" + path, "/sys/fs/cgroup/memory"):
                if os.path.exists(base + "/memory.limit_in_bytes"):
                    return base, False
    for _, controllers, path in lines:
        if not controllers:
            for base in ("/sys/fs/cgroup" + path, "/sys/fs/cgroup"):
                if os.path.exists(base + "/memory.max"):
                    return base, True
    return "", False


def _machine_memory() -> tuple[int, int]:
    """Total and available bytes."""
    try:
        with open("/proc/meminfo") as file:
            fields = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in file}
        return fields["MemTotal"], fields["MemAvailable"]
    except (OSError, KeyError, ValueError, IndexError):
        return 0, 0


def _read_int(path: str) -> int | None:
    try:
        with open(path) as file:
            return int(file.read())
    except (OSError, ValueError):
        return None


def _fields(path: str) -> dict[str, int]:
    try:
        with open(path) as file:
            pairs = [line.split() for line in file]
        return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
    except OSError:
        return {}
