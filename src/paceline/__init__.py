"""What a training script may import from Paceline: nothing here is needed to run, and outside a run nothing happens."""

from typing import TYPE_CHECKING, Any

from paceline.runtime.report import report

if TYPE_CHECKING:
    from paceline.runtime import snapshots
    from paceline.runtime.fetching import fetch
    from paceline.runtime.leaving import leaving, save_now
    from paceline.runtime.shards import Shards

__version__ = "0.1.0"
__all__ = ["Shards", "fetch", "leaving", "report", "save_now", "snapshots"]


def __getattr__(name: str) -> Any:
    """The others are loaded when they are used: every task imports this module."""
    if name == "Shards":
        from paceline.runtime.shards import Shards

        return Shards
    if name == "snapshots":
        from paceline.runtime import snapshots

        return snapshots
    if name == "fetch":
        from paceline.runtime.fetching import fetch

        return fetch
    if name in ("leaving", "save_now"):
        # Not through the module of that name, which takes the place of the function here once it is imported.
        from paceline.runtime import leaving as module

        return getattr(module, name)
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")
