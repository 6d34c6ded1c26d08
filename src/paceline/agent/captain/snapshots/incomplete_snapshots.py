"""Which incomplete snapshots hosts keep: those that not all tasks have saved their part of. No I/O.

If a task never saves its part, or tasks save different steps, hosts would keep all parts that the others save. The
oldest are kept because a task that is behind saves these steps next, and the newest because a task may save more rarely
than the others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Callable

from paceline.agent.captain.snapshots.drafts import Draft
from paceline.storage.snapshots.manifest import SnapshotId

OLDEST, NEWEST = 2, 2
MOST = OLDEST + NEWEST


class IncompleteSnapshots:
    def __init__(self, tasks: Collection[str], emit: Callable[..., None]) -> None:
        """`tasks`: those that train together."""
        self._tasks, self._emit = tasks, emit
        self._latest: dict[str, SnapshotId] = {}  # task -> what it has saved last, and has not started again since
        self._has_warned = False

    def on_saved(self, task: str, snapshot: SnapshotId) -> None:
        self._latest[task] = snapshot

    def on_attempt_started(self, task: str) -> None:
        """It may save the same steps again."""
        self._latest.pop(task, None)

    def surplus(self, drafts: Mapping[SnapshotId, Draft], live: Collection[str], awaited: int | None) -> list[Draft]:
        """Those to delete. `live`: tasks that run. `awaited`: the step that all tasks have agreed to save."""
        incomplete = sorted(
            (draft for draft in drafts.values() if not draft.is_complete), key=lambda each: each.snapshot
        )
        excess = max(0, len(incomplete) - MOST)
        candidates = [draft for draft in incomplete if draft.snapshot.step != awaited]
        savers = [task for task in live if task in self._tasks or task in self._latest]
        surplus = [draft for draft in candidates if not self._may_complete(draft, savers)][:excess]
        between = [draft for draft in candidates if draft not in surplus][OLDEST:]
        surplus += between[: excess - len(surplus)]
        self._warn(surplus)
        return surplus

    def _may_complete(self, draft: Draft, savers: Iterable[str]) -> bool:
        """Whether enough tasks may still save it: those that have not saved a later step."""
        missing = (self._latest.get(task) for task in savers if task not in draft.parts)
        able = [each for each in missing if each is None or not _is_later(each, draft.snapshot)]
        return len(draft.parts) + len(able) >= draft.part_count

    def _warn(self, surplus: list[Draft]) -> None:
        if surplus and not self._has_warned:
            self._has_warned = True
            draft = surplus[0]
            text = f"the snapshot of step {draft.snapshot.step} is incomplete and was deleted: {draft.shortage()}. "
            text += f"At most {MOST} incomplete snapshots are kept. Each task must save its part of a snapshot, and "
            text += "all tasks must save the same steps"
            self._emit("warning", text=text)


def _is_later(snapshot: SnapshotId, other: SnapshotId) -> bool:
    return snapshot.generation == other.generation and snapshot.step > other.step
