"""`slowed.py FILE STEP PROGRAM ...` runs a program that waits for two seconds after each step from STEP on, while FILE
does not exist. A test changes the run in that time, on machines of any speed."""

from __future__ import annotations

import runpy
import sys
import time
from pathlib import Path

from paceline.runtime import report

file, first = Path(sys.argv[1]), int(sys.argv[2])
sys.argv = sys.argv[3:]


def reported(step: int | None) -> None:
    if step is not None and step >= first and not file.exists():
        time.sleep(2)


report.on_report = reported
sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
runpy.run_path(sys.argv[0], run_name="__main__")
