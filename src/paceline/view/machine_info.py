"""Resources of this machine, found without importing a framework; on macOS and Linux."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from pathlib import Path


def gpus() -> list[str] | None:
    """The names of the GPUs; None if unknown."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    try:
        result = subprocess.run(
            [tool, "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return [line.strip() for line in result.stdout.splitlines() if line.strip()] if result.returncode == 0 else None


def memory() -> int | None:
    """Bytes of memory that this machine has, or that the container may use."""
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None
    limit = _number(Path("/sys/fs/cgroup/memory.max"))
    return min(total, limit) if limit else total


def free_memory() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    fields = [line.split() for line in lines if line.startswith("MemAvailable:")]
    return int(fields[0][1]) * 1024 if fields else None


def processes() -> int | None:
    """How many processes and threads this user, or the container, may have; None if unknown."""
    limits = [_number(Path(path)) for path in ("/proc/sys/kernel/pid_max", "/sys/fs/cgroup/pids.max")]
    own = resource.getrlimit(resource.RLIMIT_NPROC)[0] if os.geteuid() else resource.RLIM_INFINITY
    known = [limit for limit in (*limits, None if own == resource.RLIM_INFINITY else own) if limit is not None]
    return min(known, default=None)


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
