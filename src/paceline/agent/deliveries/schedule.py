"""When deliveries are attempted: regularly during the run, for a limited time after its end."""

from __future__ import annotations

import threading
import time

POLL_S = 1.0  # seconds between looks at the files of the run
LONGEST_S = 60.0  # seconds between two attempts
LONGEST_AT_END_S = 4.0
END_S = 30.0  # seconds after the end of the run in which the rest is delivered


class Schedule:
    """Shared by the threads of a process."""

    def __init__(self, end_s: float = END_S, poll_s: float = POLL_S) -> None:
        self._end_s, self._poll_s = end_s, poll_s
        self._ending = threading.Event()
        self._closed = threading.Event()
        self._deadline = float("inf")

    @staticmethod
    def now() -> float:
        return time.monotonic()

    @property
    def is_ending(self) -> bool:
        """Whether the run has ended: nothing is written any more."""
        return self._ending.is_set()

    def end(self) -> None:
        """The run has ended."""
        self._deadline = self.now() + self._end_s
        self._ending.set()

    def close(self) -> None:
        """No attempt is made from now on."""
        self._closed.set()
        self._ending.set()

    def time_left(self) -> float:
        return self._deadline - self.now()

    def wait(self, seconds: float | None = None) -> None:
        """Until there may be something new, or the run has ended."""
        self._ending.wait(self._poll_s if seconds is None else seconds)

    def wait_to_retry(self, attempt: int, delay: float = 0.0) -> bool:
        """Waits after the failed attempt with this number. `delay`: the server asked for at least so many seconds.
        False: no time is left for another attempt."""
        seconds = max(delay, min(2.0 ** min(attempt - 1, 10), LONGEST_S))
        if not self.is_ending:
            self._ending.wait(seconds)
        else:
            self._closed.wait(min(seconds, LONGEST_AT_END_S, max(0.0, self.time_left())))
        return not self._closed.is_set() and self.time_left() > 0
