"""The memory that this container or machine has and uses, and kills because it was used up; best effort if there is no
/proc."""

from __future__ import annotations

import contextlib
import os


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
