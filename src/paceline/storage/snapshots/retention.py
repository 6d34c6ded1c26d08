"""Which snapshots to delete: all but the newest few, the best one, and those that are still needed. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from paceline.storage.snapshots.manifest import SnapshotId


def to_delete(
    current: Sequence[SnapshotId],
    committed: Sequence[SnapshotId],
    keep: int,
    metrics: Mapping[SnapshotId, float],
    lowest: bool,
    needed: Collection[SnapshotId] = (),
) -> list[SnapshotId]:
    """`current`: newest first. Superseded snapshots are deleted too; the caller leaves those out of `committed` whose
    generation may still be writing. `needed`: not evaluated yet, and so not candidates for the best.

    >>> ids = [SnapshotId(30, 1), SnapshotId(20, 1), SnapshotId(10, 1)]
    >>> to_delete(ids, ids, 1, {SnapshotId(30, 1): 0.5, SnapshotId(20, 1): 0.9, SnapshotId(10, 1): 0.2}, lowest=True)
    [SnapshotId(step=20, generation=1)]
    """
    keep_ids = {*current[:keep], *needed}
    best_id = best([id for id in current if id not in needed], metrics, lowest)
    return [id for id in committed if id not in keep_ids and id != best_id]


def best(current: Sequence[SnapshotId], metrics: Mapping[SnapshotId, float], lowest: bool) -> SnapshotId | None:
    """The best of these; among equal ones, the newest if the lowest value is best, else the oldest."""
    ranked = sorted((id for id in current if id in metrics), key=lambda id: (metrics[id], -id.step))
    return next(iter(ranked if lowest else ranked[::-1]), None)
