"""Tell Paceline how far training is: `report(step=12, loss=0.5)`."""

from __future__ import annotations

import atexit
import json
import os
import stat
import sys
import time
from typing import Any

_UNKNOWN = -2
_NONE = -1
_AT_ONCE = 32  # reports that go out at once, so that a start is seen as it is
_EVERY = 0.5  # seconds between later ones: each wakes the agent, which may share a core with the program
_descriptor = _UNKNOWN
_pending: dict[str, float] = {}
_due = 0.0
_sent = 0


def report(step: int | None = None, **metrics: Any) -> None:
    """Say that `step` is done, with any numbers worth showing. Never blocks, takes microseconds, a no-op outside a run.

    >>> report(step=12, loss=0.5)
    """
    if _descriptor == _NONE or (_descriptor == _UNKNOWN and _open() == _NONE):
        return
    if step is not None:
        _pending["step"] = int(step)
    for name, value in metrics.items():
        found = number(value)
        if found is not None:
            _pending[name] = found
    if time.monotonic() >= _due:
        _send()


def number(value: Any) -> float | None:
    """Tensors and arrays of one number become floats; a torch tensor warns unless it is asked for its item."""
    try:
        return float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError):
        return None


def tell(words: dict[str, Any]) -> None:
    """To the agent, at once; for the runtime itself."""
    if descriptor() == _NONE:
        return
    try:
        os.write(_descriptor, json.dumps(words).encode())
    except OSError:
        pass  # the agent is busy or gone, and looks for itself


def say(text: str) -> None:
    """To the person, as a warning of the run; on stderr where no agent passes it on."""
    if descriptor() == _NONE:
        print(f"paceline: {text}", file=sys.stderr, flush=True)
    tell({"_": "warning", "text": text})


def descriptor() -> int:
    """Of the socket to the agent; negative where there is none."""
    return _open() if _descriptor == _UNKNOWN else _descriptor


def _send() -> None:
    """What has been reported since the last message; kept for the next one where the agent is busy or gone."""
    global _due, _sent
    if not _pending:
        return
    try:
        os.write(_descriptor, json.dumps(_pending).encode())
        _pending.clear()
        _sent += 1
        _due = time.monotonic() + _EVERY if _sent >= _AT_ONCE else 0.0
    except OSError:
        pass  # training must not notice


def _open() -> int:
    """The inherited socket, unless this process was given another file under its number."""
    global _descriptor
    _descriptor = _NONE
    try:
        number, inode = os.environ["PACELINE_REPORT_FD"], os.environ["PACELINE_REPORT_INODE"]
        found = os.fstat(int(number))
        if stat.S_ISSOCK(found.st_mode) and str(found.st_ino) == inode:
            _descriptor = int(number)
            os.set_blocking(_descriptor, False)
            atexit.register(_send)
    except (KeyError, ValueError, OSError):
        pass
    return _descriptor
