"""Snapshots committed to a store directly, without a run: for tests of code that only reads."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from paceline.storage.snapshots.generation_records import Superseded
from paceline.storage.snapshots.manifest import Manifest, SnapshotId
from paceline.storage.snapshots.repository import SnapshotRepository
from paceline.storage.stores.protocol import Store

RUN = "digits-3f9a"
AT = "2026-11-15T04:30:05.000Z"
NAMES = ["step-40-g2", "step-20-g2", "step-10-g1"]  # the current chain, newest first
DEAD = ["step-30-g1", "step-20-g1"]  # generation 2 began from step 10


def weights(step: int) -> bytes:
    return f"weights of step {step};".encode() * 1000


def commit(store: Store, scratch: Path, step: int, generation: int = 1, run: str = RUN) -> None:
    """Commits as worker-0, the way a run does. A superseded generation gets an error, but has committed anyway."""
    saved = scratch / f"saved-{step}-{generation}"
    (saved / "variables").mkdir(parents=True)
    (saved / "variables" / "weights").write_bytes(weights(step))
    (saved / "step").write_text(str(step))
    id, snapshots = SnapshotId(step, generation), SnapshotRepository(store, run)
    parts = (snapshots.send(id, "worker-0", str(saved)),)
    with suppress(Superseded):
        snapshots.commit(Manifest(run, id, 2, parts, {"loss": 1 / step}, {"torch": "2.13.0"}, AT))


def life(store: Store, scratch: Path, run: str = RUN) -> None:
    """Commits the snapshots of a run whose second generation began at step 10, although the first had reached 30."""
    snapshots = SnapshotRepository(store, run)
    snapshots.begin(1, None)
    for step in (10, 20, 30):
        commit(store, scratch, step, 1, run)
    snapshots.begin(2, SnapshotId(10, 1), [SnapshotId(10, 1)])
    for step in (20, 40):
        commit(store, scratch, step, 2, run)
