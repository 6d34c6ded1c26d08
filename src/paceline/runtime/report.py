"""Tell Paceline how far training is: `report(step=12, loss=0.5)`."""

from __future__ import annotations

import json
import os
import stat
from typing import Any

_UNKNOWN = -2
_NONE = -1
_descriptor = _UNKNOWN


def report(step: int | None = None, **metrics: Any) -> None:
    """Say that `step` is done, with any numbers worth showing. Never blocks, takes microseconds, a no-op outside a run.

    >>> report(step=12, loss=0.5)
    """
    if _descriptor == _NONE or (_descriptor == _UNKNOWN and _open() == _NONE):
        return
    message = {} if step is None else {"step": int(step)}
    for name, value in metrics.items():
        try:
            message[name] = float(value)  # type: ignore[assignment]  # tensors and arrays of one number become floats
        except (TypeError, ValueError):
            continue
    try:
        os.write(_descriptor, json.dumps(message).encode())
    except OSError:
        pass  # the agent is busy or gone: training must not notice


def _open() -> int:
    """The inherited socket, unless this process was given another file under its number."""
    global _descriptor
    _descriptor = _NONE
    try:
        number, inode = os.environ["PACELINE_REPORT_FD"], os.environ["PACELINE_REPORT_INODE"]
        found = os.fstat(int(number))
        if stat.S_ISSOCK(found.st_mode) and str(found.st_ino) == inode:
            _descriptor = int(number)
    except (KeyError, ValueError, OSError):
        pass
    return _descriptor
