"""Snapshots that are never used again, because a metric was NaN or infinite at their step or before. No I/O."""

from __future__ import annotations

from typing import Any

from paceline.storage.snapshots.manifest import SnapshotId

MOST = 100  # generations; what earlier ones have abandoned is no longer on any host, nor on the chain


class AbandonedSteps:
    """The snapshots of a generation and of those before it, from a step on; but not what it has resumed from.

    >>> steps = AbandonedSteps()
    >>> steps.add(2, 30)
    True
    >>> [steps.cover(SnapshotId(*each)) for each in ((29, 2), (30, 2), (40, 1), (40, 3), (1000, 0))]
    [False, True, True, False, False]

    A generation that has resumed from step 30 cannot say that an earlier one was wrong at step 20:

    >>> steps = AbandonedSteps()
    >>> steps.add(2, 20, resumed=30)
    True
    >>> [steps.cover(SnapshotId(*each)) for each in ((20, 2), (20, 1), (30, 1), (31, 1))]
    [True, False, False, True]
    """

    def __init__(self) -> None:
        self._first: dict[int, int] = {}  # generation -> the first of these steps, of it and of earlier ones
        self._own: dict[int, int] = {}  # generation -> the first of these steps, of it alone

    def add(self, generation: int, step: int, resumed: int | None = -1) -> bool:
        """`resumed`: the step that the generation has resumed from; None: unknown, so that no earlier generation is
        covered. Returns whether this covers more than before."""
        covers_more = _lower(self._own, generation, step)
        if resumed is not None:
            covers_more = _lower(self._first, generation, max(step, resumed + 1)) or covers_more
        return covers_more

    def cover(self, snapshot: SnapshotId) -> bool:
        """Never the snapshot of another run that this one started from, whose steps may be counted differently."""
        if snapshot.generation == 0:
            return False
        if snapshot.step >= self._own.get(snapshot.generation, snapshot.step + 1):
            return True
        return any(snapshot.generation <= each and snapshot.step >= step for each, step in self._first.items())

    # ---- notes for the next captain

    def to_notes(self) -> list[list[int]]:
        return [[generation, step] for generation, step in self._first.items()]

    def generation_steps_to_notes(self) -> list[list[int]]:
        return [[generation, step] for generation, step in self._own.items()]

    def load_notes(self, notes: Any, own: Any) -> None:
        """`own`: not in the notes of earlier versions."""
        self._first, self._own = dict(notes), dict(own)


def _lower(steps: dict[int, int], generation: int, step: int) -> bool:
    if step >= steps.get(generation, step + 1):
        return False
    steps[generation] = step
    for outdated in sorted(steps)[:-MOST]:
        del steps[outdated]
    return True
