"""When the next snapshot may be sent to the store: by `snapshots.commit_every` or, by default, by what sending costs.
No I/O.
"""

from __future__ import annotations

QUICK = 1.0  # seconds; what takes less costs nothing worth saving
PAUSE = 3.0  # times as long as the last commit took: commits then take up at most a quarter of the time


class CommitPace:
    def __init__(self, every: float | None) -> None:
        """`every`: seconds between the starts of two commits; None: automatic."""
        self._every = every
        self._began = 0.0
        self._not_before = 0.0

    def begin(self, now: float) -> None:
        self._began = now

    def end(self, now: float) -> None:
        """A snapshot was committed."""
        took = now - self._began
        pause = PAUSE * took if took >= QUICK else 0.0
        self._not_before = now + pause if self._every is None else self._began + self._every

    def is_due(self, now: float) -> bool:
        return now >= self._not_before

    def __str__(self) -> str:
        if self._every is not None:
            return f"every {self._every:g} s (snapshots.commit_every)"
        return "as soon as the last one is committed, or after a pause if that took long"
