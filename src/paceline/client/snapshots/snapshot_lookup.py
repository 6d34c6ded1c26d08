"""Finds snapshots of a run by name, and restores them for programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from paceline.client.reading.find_run import HERE, Notify, Target, find_source, ignore
from paceline.view.snapshots import snapshot_listing

if TYPE_CHECKING:
    from paceline.client.snapshots.restored_snapshots import RestoredSnapshot
    from paceline.storage.snapshots.manifest import Manifest, SnapshotId
    from paceline.storage.snapshots.repository import Inventory
    from paceline.storage.stores.protocol import ContinueCheck
    from paceline.view.snapshots.snapshot_locations import Source


@contextmanager
def opened(run: str | None, target: Target = HERE, notify: Notify = ignore) -> Iterator[Source]:
    source = find_source(run, target, notify)
    try:
        yield source
    finally:
        source.close()


def find_snapshot(source: Source, inventory: Inventory, name: str | None) -> SnapshotId:
    """`name`: as the user gives it, such as step-120 or best; None: the newest."""
    if name is None:
        return snapshot_listing.newest(source, inventory)
    return snapshot_listing.find(source, inventory, name)


@contextmanager
def restored(
    source: Source, snapshot: str | None, progress: Callable[[Manifest], ContinueCheck]
) -> Iterator[tuple[RestoredSnapshot, Manifest]]:
    """Yields the snapshot, restored to a local folder. `progress`: its result is called with the bytes received."""
    from paceline.client.snapshots.restored_snapshots import restore

    manifest = source.reader.manifest(find_snapshot(source, source.reader.inventory(), snapshot))
    restored_snapshot = restore(source, manifest, progress(manifest))
    try:
        yield restored_snapshot, manifest
    finally:
        restored_snapshot.close()
