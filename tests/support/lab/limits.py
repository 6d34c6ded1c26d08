"""The one machine limit that clusters need to raise: raised while any cluster runs, and restored after the last."""

from __future__ import annotations

import contextlib
from pathlib import Path

from support.lab.places import Place, cache

# A cluster of three nodes uses about 40; the default limit is 128 for all processes of root together.
INSTANCES = Path("/proc/sys/fs/inotify/max_user_instances")
ENOUGH = 1024


def raise_them() -> None:
    """The caller must hold the lock for starting clusters."""
    before = int(INSTANCES.read_text())
    if before < ENOUGH:
        _saved_limit().write_text(str(before))
        # If /proc/sys is read-only, the limit stays, and fewer clusters can run.
        with contextlib.suppress(OSError):
            INSTANCES.write_text(str(ENOUGH))


def put_back(ended: Place) -> None:
    """Restores the limit if no other cluster is running."""
    if _saved_limit().exists() and not any(ended.folder.parent.glob("*.lock")):
        with contextlib.suppress(OSError):
            INSTANCES.write_text(_saved_limit().read_text())
        _saved_limit().unlink()


def _saved_limit() -> Path:
    return cache() / "clusters" / "inotify-before"
