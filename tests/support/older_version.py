"""An older version of Paceline, to run it: its source was recorded by `support.record_runs --source`."""

from __future__ import annotations

import tarfile
from pathlib import Path

from support.record_runs import RECORDED, SOURCE

# The commit 7716b35 of November 17, 2026: later ones use the same version number.
VERSION = "0.1.0"


def unpack(folder: Path) -> Path:
    """The value of PYTHONPATH with which this version runs."""
    with tarfile.open(RECORDED / VERSION / SOURCE) as archive:
        archive.extractall(folder, filter="data")
    return folder / "src"
