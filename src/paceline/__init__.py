"""What a training script may import from Paceline: nothing here is needed to run, and outside a run nothing happens."""

from paceline.runtime.leaving import leaving
from paceline.runtime.report import report
from paceline.runtime.shards import Shards

__version__ = "0.1.0"
__all__ = ["Shards", "leaving", "report"]
