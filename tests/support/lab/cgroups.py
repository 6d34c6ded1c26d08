"""The cgroups of a cluster: one folder in every hierarchy, with a subfolder for each node."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
GONE_S = 60.0


def name(cluster: str, node: str = "") -> str:
    return f"/paceline-{cluster}/{node}".rstrip("/")


def available() -> bool:
    """Whether this machine has the hierarchies of cgroup v1."""
    return (ROOT / "cpuset/cpuset.cpus").exists()


def create(path: str) -> None:
    for hierarchy in _hierarchies():
        (hierarchy / path.strip("/")).mkdir(parents=True, exist_ok=True)
    # A new cpuset has no CPUs, and no process can join it.
    folder = ROOT / "cpuset"
    for part in Path(path.strip("/")).parts:
        for value in ("cpuset.cpus", "cpuset.mems"):
            (folder / part / value).write_text((folder / value).read_text())
        folder /= part


def remove(path: str) -> None:
    """Removes the cgroup and all below it; its processes have ended or are about to."""
    until = time.monotonic() + GONE_S
    while _remove_once(path) and time.monotonic() < until:
        time.sleep(0.02)


def _remove_once(path: str) -> bool:
    """Returns whether something remains."""
    remains = False
    for top in (hierarchy / path.strip("/") for hierarchy in _hierarchies()):
        below = sorted((folder for folder in top.rglob("*/") if folder.is_dir()), reverse=True)
        for folder in [*below, top]:
            with contextlib.suppress(OSError):
                folder.rmdir()
        remains |= top.exists()
    return remains


def _hierarchies() -> list[Path]:
    return [path for path in ROOT.iterdir() if path.is_dir() and not path.is_symlink()]
