"""Snapshots as tasks write them, committed to a store part by part."""

from __future__ import annotations

from pathlib import Path

from paceline.storage.manifest import Id, Manifest
from paceline.storage.snapshots import Snapshots


def written(folder: Path, step: int, task: str = "worker-0") -> Path:
    """What a task saves: one file in a folder, one beside it, one that is empty."""
    place = folder / f"{task}-step-{step}"
    (place / "variables").mkdir(parents=True)
    (place / "variables" / "weights").write_bytes(f"{task} {step}".encode() * 1000)
    (place / "epoch").write_text(str(step))
    (place / "empty").touch()
    return place


def commit(snapshots: Snapshots, tmp_path: Path, step: int, generation: int = 1, *tasks: str) -> Manifest:
    id = Id(step, generation)
    parts = []
    for task in tasks or ("worker-0",):
        place = tmp_path / "saved" / f"g{generation}"
        parts.append(snapshots.send(id, task, str(written(place, step, task))))
    made = Manifest(snapshots.run, id, len(parts), tuple(parts))
    assert snapshots.commit(made)
    return made
