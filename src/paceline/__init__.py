"""What a training script may import from Paceline: nothing here is needed to run, and outside a run nothing happens."""

from typing import TYPE_CHECKING, Any

from paceline.runtime.report import report

if TYPE_CHECKING:
    from paceline.runtime.leaving import leaving
    from paceline.runtime.shards import Shards

__version__ = "0.1.0"
__all__ = ["Shards", "leaving", "report"]


def __getattr__(name: str) -> Any:
    """The others are loaded when they are used: every task imports this module."""
    if name == "Shards":
        from paceline.runtime.shards import Shards

        return Shards
    if name == "leaving":
        from paceline.runtime.leaving import leaving

        return leaving
    raise AttributeError(f"module 'paceline' has no attribute {name!r}")
