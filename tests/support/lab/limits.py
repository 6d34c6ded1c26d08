"""The one setting of the machine that clusters need higher: raised while any is up, and put back after the last."""

from __future__ import annotations

import contextlib
from pathlib import Path

from support.lab.places import Place, cache

# A cluster of three nodes takes about 40; the usual limit is 128 for all processes of root together.
INSTANCES = Path("/proc/sys/fs/inotify/max_user_instances")
ENOUGH = 1024


def raise_them() -> None:
    """Under the lock of clusters that start."""
    before = int(INSTANCES.read_text())
    if before < ENOUGH:
        _noted().write_text(str(before))
        # Where /proc/sys is read-only, the clusters that fit are those that fit.
        with contextlib.suppress(OSError):
            INSTANCES.write_text(str(ENOUGH))


def put_back(gone: Place) -> None:
    """If no other cluster is up."""
    if _noted().exists() and not any(gone.folder.parent.glob("*.lock")):
        with contextlib.suppress(OSError):
            INSTANCES.write_text(_noted().read_text())
        _noted().unlink()


def _noted() -> Path:
    return cache() / "clusters" / "inotify-before"
