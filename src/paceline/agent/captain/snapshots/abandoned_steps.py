"""Snapshots that are never used again, because a metric was NaN or infinite at their step or before. No I/O."""

from __future__ import annotations

from typing import Any

from paceline.storage.snapshots.manifest import SnapshotId

MOST = 100  # generations; what earlier ones have abandoned is no longer on any host, nor on the chain


class AbandonedSteps:
    """The snapshots of a generation and of those before it, from a step on.

    >>> steps = AbandonedSteps()
    >>> steps.add(2, 30)
    True
    >>> [steps.cover(SnapshotId(*each)) for each in ((29, 2), (30, 2), (40, 1), (40, 3), (1000, 0))]
    [False, True, True, False, False]
    """

    def __init__(self) -> None:
        self._first: dict[int, int] = {}  # generation -> the first of these steps

    def add(self, generation: int, step: int) -> bool:
        """Returns whether this covers more than before."""
        if step >= self._first.get(generation, step + 1):
            return False
        self._first[generation] = step
        for outdated in sorted(self._first)[:-MOST]:
            del self._first[outdated]
        return True

    def cover(self, snapshot: SnapshotId) -> bool:
        """Never the snapshot of another run that this one started from, whose steps may be counted differently."""
        return any(0 < snapshot.generation <= each and snapshot.step >= step for each, step in self._first.items())

    # ---- notes for the next captain

    def to_notes(self) -> list[list[int]]:
        return [[generation, step] for generation, step in self._first.items()]

    def load_notes(self, notes: Any) -> None:
        self._first = dict(notes)
