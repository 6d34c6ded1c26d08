"""What happened below a launcher such as torchrun: it reports that a process failed, not why. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.agent.tasks.tracebacks import Raised, traceback, tracebacks

_EXIT = re.compile(r"exitcode\s*:\s*(-?\d+)")  # of ChildFailedError; negative: the number of a signal
_STATUS = re.compile(r"exit status (\d+)|died with <Signals\.\w+: (\d+)>")  # of CalledProcessError
_ROOT = "Root Cause"  # the last section of ChildFailedError
# Lines of torchrun itself, such as "E1117 15:58:15.373000 24821 torch/distributed/elastic/..."
_OWN_LINE = re.compile(r"[IWE]\d{4} .*torch/distributed/")


@dataclass(frozen=True)
class Below:
    """How the process below a launcher ended."""

    exceptions: tuple[Raised, ...]  # in the log, oldest first
    signal: int  # that killed it; 0: none
    code: int  # its exit code
    last_line: str  # of its output


def find(tail: Sequence[str], raised: Raised | None) -> Below | None:
    """None: this is no error of a launcher. `raised`: the exception that the task reported; if None, its log is
    searched for one."""
    error = traceback(tail) if raised is None else raised
    if error is None or not _is_of_launcher(error):
        return None
    exceptions = tuple(each for each in tracebacks(tail) if not _is_of_launcher(each))
    end = error.text[error.text.find(_ROOT) :] if _ROOT in error.text else error.text
    match, status = _EXIT.search(end), _STATUS.search(end)
    code = int(match[1]) if match else -int(status[2]) if status and status[2] else int(status[1]) if status else 1
    return Below(exceptions, max(0, -code), max(0, code), _last_line(tail))


def _is_of_launcher(error: Raised) -> bool:
    name = error.type.rpartition(".")[2]
    return name == "ChildFailedError" or (name == "CalledProcessError" and error.library.startswith("accelerate/"))


def _last_line(tail: Sequence[str]) -> str:
    """The last line before those of the launcher."""
    for number, line in enumerate(tail):
        if _OWN_LINE.match(line) or line.startswith("Traceback "):
            tail = tail[:number]
            break
    return next((line.strip() for line in reversed(tail) if line.strip()), "")
