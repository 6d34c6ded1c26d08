"""When a helper takes snapshots: every so many steps, or every so many seconds.

Clocks differ between tasks, but all must take a snapshot at the same step. So when the time is up, the first task
requests one, and `should_save` returns True in all of them a few steps later. A task that saves alone takes it at once.
"""

from __future__ import annotations

import operator
import os
import re
import time
import warnings
from typing import Callable, SupportsIndex, Union

from paceline.runtime import report
from paceline.runtime.group_save import save_now
from paceline.runtime.snapshot_folders import in_a_run

Every = Union[SupportsIndex, str, None]  # steps, or a duration such as "30s"; None: only on request
_NUMBER = r"(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
_DURATION = re.compile(rf"(?=.)(?:({_NUMBER})h)?(?:({_NUMBER})m)?(?:({_NUMBER})s)?", re.ASCII)


class SaveSchedule:
    def __init__(self, every: Every, clock: Callable[[], float] = time.monotonic) -> None:
        self.steps = None if every is None or isinstance(every, str) else _steps(every)
        self._seconds = _seconds(every) if isinstance(every, str) else None
        if self._seconds is not None and in_a_run() and report.descriptor() < 0:
            # Paceline's own warnings need the same connection. The level is that of the program that uses a helper.
            warnings.warn(
                f"every={every!r}: this process has no connection to Paceline, because a launcher such as torchrun has "
                "closed it, so snapshots cannot be taken by time: give a number of steps, such as every=100",
                stacklevel=3,
            )
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

    def check_time(self) -> bool:
        """Call it after every step: requests a snapshot of all tasks if the time is up. If this task saves alone,
        returns True instead: take one now."""
        if self._seconds is None or not _is_first():
            return False
        now = self._clock()
        if self._since is None:
            self._since = now
        elif now - self._since >= self._seconds:
            self._since = now
            if _is_alone():
                return True
            save_now()
        return False

    def taken(self) -> None:
        """A snapshot was taken, for whatever reason."""
        if self._since is not None:
            self._since = self._clock()


def _is_first() -> bool:
    """Whether this task requests snapshots for all: rank 0, or the chief of a parameter-server job."""
    return os.environ.get("PACELINE_RANK") == "0" or os.environ.get("PACELINE_ROLE") == "chief"


def _is_alone() -> bool:
    """Whether the first task is the only one that saves: it is the only one, or the chief of a parameter-server job,
    which has no rank. Without a connection to the agent, it may consist of several processes of a launcher."""
    is_only_one = os.environ.get("PACELINE_WORLD_SIZE") == "1" or os.environ.get("PACELINE_RANK") != "0"
    return is_only_one and report.descriptor() >= 0


def _steps(every: SupportsIndex) -> int:
    """
    >>> _steps(10)
    10
    """
    try:
        steps = 0 if isinstance(every, bool) else operator.index(every)
    except TypeError:
        steps = 0
    if steps < 1:
        raise ValueError(f"every={every!r}: must be at least 1 step, or a duration such as '30s'")
    return steps


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
