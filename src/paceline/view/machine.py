"""What this machine has, asked without importing a framework; on a Mac as on Linux."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path


def gpus() -> list[str] | None:
    """The names of the GPUs; None where nothing can tell."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    try:
        asked = subprocess.run(
            [tool, "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return [line.strip() for line in asked.stdout.splitlines() if line.strip()] if asked.returncode == 0 else None


def cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def memory() -> int | None:
    """Bytes this machine has, or a container may use."""
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
    found = [line.split() for line in lines if line.startswith("MemAvailable:")]
    return int(found[0][1]) * 1024 if found else None


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
