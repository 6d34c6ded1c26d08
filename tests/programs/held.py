"""`held.py TASK STEP|TEXT PROGRAM ...` runs a program whose task TASK waits, in its first generation, after it has
reported this step, or before it prints a line with this text. A test kills it there, on machines of any speed."""

from __future__ import annotations

import os
import runpy
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from paceline.runtime import report


def hold() -> None:
    """Its other threads go on: a snapshot that has begun is completed."""
    os.write(1, b"held\n")
    threading.Event().wait()


def hold_after(step: int) -> None:
    def reported(reported_step: int | None) -> None:
        if reported_step == step:
            hold()

    report.on_report = reported


def hold_before(text: str, stream: TextIO) -> None:
    write: Callable[[str], int] = stream.write

    def hold_or_write(data: str) -> int:
        if text in data:
            hold()
        return write(data)

    stream.write = hold_or_write  # type: ignore[method-assign]


task, moment, *sys.argv = sys.argv[1:]
if os.environ["PACELINE_TASK"] == task and os.environ["PACELINE_GENERATION"] == "1":
    if moment.isdecimal():
        hold_after(int(moment))
    else:
        hold_before(moment, sys.stdout)
sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
runpy.run_path(sys.argv[0], run_name="__main__")
