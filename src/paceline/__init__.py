"""The functions that a training script may import from Paceline. All are optional, and do nothing outside a run."""

from typing import TYPE_CHECKING, Any

from paceline.runtime.report import report

if TYPE_CHECKING:
    from paceline.runtime import snapshot_feed as snapshots
    from paceline.runtime.data_fetch import fetch
    from paceline.runtime.group_save import save_now, should_save
    from paceline.runtime.shards import Shards
    from paceline.runtime.task_share import batch_share

__version__ = "0.1.0"
__all__ = ["Shards", "batch_share", "fetch", "report", "save_now", "should_save", "snapshots"]


def __getattr__(name: str) -> Any:
    """Loads the other names on first use, because every task imports this module."""
    if name == "Shards":
        from paceline.runtime.shards import Shards

        return Shards
    if name == "batch_share":
        from paceline.runtime.task_share import batch_share

        return batch_share
    if name == "snapshots":
        from paceline.runtime import snapshot_feed

        return snapshot_feed
    if name == "fetch":
        from paceline.runtime.data_fetch import fetch

        return fetch
    if name in ("save_now", "should_save"):
        from paceline.runtime import group_save

        return getattr(group_save, name)
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")
