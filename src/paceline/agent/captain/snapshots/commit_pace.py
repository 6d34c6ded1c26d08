"""When the next snapshot may be sent to the store: by `snapshots.commit_every` or, by default, by what sending costs.
No I/O.
"""

from __future__ import annotations

QUICK = 1.0  # seconds; what takes less costs nothing worth saving
PAUSE = 3.0  # times as long as the last commit took: commits then take up at most a quarter of the time
LONGEST_RETRY, URGENT_RETRY = 60.0, 5.0  # seconds between attempts if the store fails


class CommitPace:
    def __init__(self, every: float | None) -> None:
        """`every`: seconds between the starts of two commits; None: automatic."""
        self._every = every
        self._began = 0.0
        self._not_before = 0.0
        self._failed_at = 0.0
        self.failures = 0  # in succession, of any snapshots

    def resume(self, now: float) -> None:
        """A captain that returns does not know when the last snapshot was sent."""
        self._not_before = now + (self._every or 0.0)

    def begin(self, now: float) -> None:
        self._began = now

    def fail(self, now: float) -> None:
        self.failures, self._failed_at = self.failures + 1, now

    def end(self, now: float) -> None:
        """A snapshot was committed."""
        self.failures = 0
        took = now - self._began
        pause = PAUSE * took if took >= QUICK else 0.0
        self._not_before = now + pause if self._every is None else self._began + self._every

    def is_due(self, now: float, is_urgent: bool) -> bool:
        """`is_urgent`: the newest snapshot is needed in the store, whenever the last one was sent."""
        pause = min(URGENT_RETRY if is_urgent else LONGEST_RETRY, 2.0**self.failures) if self.failures else 0.0
        return now >= self._failed_at + pause and (is_urgent or now >= self._not_before)

    def __str__(self) -> str:
        if self._every is not None:
            return f"at most every {self._every:g} s (snapshots.commit_every)"
        return "as soon as the previous one is committed, or after a pause if that took long"
