"""When a helper takes snapshots: every so many steps, or every so many seconds.

Clocks differ between tasks, but all must take a snapshot at the same step. So when the time is up, the first task
requests one, and `should_save` returns True in all of them a few steps later.
"""

from __future__ import annotations

import os
import re
import time
from typing import Callable, Union

from paceline.runtime.group_save import save_now

Every = Union[int, str, None]  # steps, or a duration such as "30s"; None: only on request
_NUMBER = r"(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
_DURATION = re.compile(rf"(?=.)(?:({_NUMBER})h)?(?:({_NUMBER})m)?(?:({_NUMBER})s)?", re.ASCII)


class SaveSchedule:
    def __init__(self, every: Every, clock: Callable[[], float] = time.monotonic) -> None:
        self.steps = None if isinstance(every, str) else every
        self._seconds = _seconds(every) if isinstance(every, str) else None
        if self.steps is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
            raise ValueError(f"every={every!r}: must be at least 1 step, or a duration such as '30s'")
        self._clock = clock
        self._since: float | None = None  # when the last snapshot was taken or requested, or the first step was done

    @property
    def is_periodic(self) -> bool:
        return self.steps is not None or self._seconds is not None

    def is_due(self, n: int, previous: int | None = None) -> bool:
        """Whether a snapshot is due after step `n`. `previous`: the last step before it, if some are not reported."""
        if self.steps is None:
            return False
        return n // self.steps > (n - 1 if previous is None else previous) // self.steps

    def check_time(self) -> None:
        """Call it after every step: requests a snapshot of all tasks if the time is up."""
        if self._seconds is None or not _is_first():
            return
        now = self._clock()
        if self._since is None:
            self._since = now
        elif now - self._since >= self._seconds:
            self._since = now
            save_now()

    def taken(self) -> None:
        """A snapshot was taken, for whatever reason."""
        if self._since is not None:
            self._since = self._clock()


def _is_first() -> bool:
    """Whether this task requests snapshots for all: rank 0, or the chief of a parameter-server job."""
    return os.environ.get("PACELINE_RANK") == "0" or os.environ.get("PACELINE_ROLE") == "chief"


def _seconds(text: str) -> float:
    """
    >>> _seconds("90s"), _seconds("1m30s"), _seconds("0.5h")
    (90.0, 90.0, 1800.0)
    """
    match = _DURATION.fullmatch(text)
    seconds = 0.0 if match is None else sum(float(n or 0) * unit for n, unit in zip(match.groups(), (3600, 60, 1)))
    if not seconds:
        raise ValueError(f"every={text!r}: must be a duration such as '30s', '5m' or '1h30m', or a number of steps")
    return seconds
