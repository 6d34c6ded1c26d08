"""Snapshots at a place, committed by hand: for tests of what only reads."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from paceline.storage.manifest import Id, Manifest
from paceline.storage.snapshots import Snapshots, Superseded
from paceline.storage.store import Store

RUN = "digits-3f9a"
AT = "2026-11-15T04:30:05.000Z"
NAMES = ["step-40-g2", "step-20-g2", "step-10-g1"]  # those that count, newest first
DEAD = ["step-30-g1", "step-20-g1"]  # generation 2 began from step 10


def weights(step: int) -> bytes:
    return f"weights of step {step};".encode() * 1000


def commit(store: Store, scratch: Path, step: int, generation: int = 1, run: str = RUN) -> None:
    """By worker-0, as a run does. Who was presumed dead is told so, and has committed all the same."""
    saved = scratch / f"saved-{step}-{generation}"
    (saved / "variables").mkdir(parents=True)
    (saved / "variables" / "weights").write_bytes(weights(step))
    (saved / "step").write_text(str(step))
    id, snapshots = Id(step, generation), Snapshots(store, run)
    parts = (snapshots.send(id, "worker-0", str(saved)),)
    with suppress(Superseded):
        snapshots.commit(Manifest(run, id, 2, parts, {"loss": 1 / step}, {"torch": "2.13.0"}, AT))


def life(store: Store, scratch: Path, run: str = RUN) -> None:
    """Of a run whose second generation began from step 10, although more was committed by the first."""
    snapshots = Snapshots(store, run)
    snapshots.begin(1, None)
    for step in (10, 20, 30):
        commit(store, scratch, step, 1, run)
    snapshots.begin(2, Id(10, 1), [Id(10, 1)])
    for step in (20, 40):
        commit(store, scratch, step, 2, run)
