"""The exit code of the command line for the outcome of a run."""

from __future__ import annotations

SUCCEEDED, FAILED, STOPPED = 0, 1, 130


def exit_code(status: str, stop_requested: bool) -> int:
    """`status`: that of the run's report. `stop_requested`: the user has pressed Ctrl-C in the meantime."""
    if status == "succeeded":
        return SUCCEEDED
    return STOPPED if stop_requested or status == "stopped" else FAILED
