"""Warns if a generation goes on to save lower steps than it has committed: these are never committed. No I/O."""

from __future__ import annotations

from typing import Callable

from paceline.storage.snapshots.manifest import SnapshotId

MOST = 2  # in a row, without a warning: a task that is behind the others may save what they have saved before


class LowSteps:
    def __init__(self, emit: Callable[..., None]) -> None:
        self._emit = emit
        self._snapshots: set[SnapshotId] = set()  # since a snapshot was saved that can be committed
        self._warned_of: SnapshotId | None = None  # the committed snapshot, so that there is one warning for each

    def on_saved(self, snapshot: SnapshotId, committed: SnapshotId | None, is_known: bool) -> None:
        """`committed`: a later snapshot of the same generation, if there is one. `is_known`: the host had it before."""
        if committed is None:
            self._snapshots.clear()
        elif not is_known and self._warned_of != committed:
            self._snapshots.add(snapshot)
            if len(self._snapshots) > MOST:
                self._warn(snapshot, committed)

    def _warn(self, snapshot: SnapshotId, committed: SnapshotId) -> None:
        self._warned_of = committed
        self._snapshots.clear()
        text = f"the snapshot of step {snapshot.step} is not committed, because the later step {committed.step} is. "
        text += "Save snapshots with increasing steps. If that step was a mistake, restart the tasks, for example with "
        text += "`paceline pause --now` and `paceline resume`: then lower steps are committed again"
        self._emit("warning", text=text)
