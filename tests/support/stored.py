"""Snapshots as tasks write them, committed to a store part by part."""

from __future__ import annotations

from pathlib import Path

from paceline.storage.snapshots.manifest import Manifest, SnapshotId
from paceline.storage.snapshots.repository import SnapshotRepository


def written(folder: Path, step: int, task: str = "worker-0") -> Path:
    """Writes what a task saves: a file in a subfolder, a file at the top, and an empty file."""
    target = folder / f"{task}-step-{step}"
    (target / "variables").mkdir(parents=True)
    (target / "variables" / "weights").write_bytes(f"{task} {step}".encode() * 1000)
    (target / "epoch").write_text(str(step))
    (target / "empty").touch()
    return target


def commit(snapshots: SnapshotRepository, tmp_path: Path, step: int, generation: int = 1, *tasks: str) -> Manifest:
    id = SnapshotId(step, generation)
    parts = []
    for task in tasks or ("worker-0",):
        saved = tmp_path / "saved" / f"g{generation}"
        parts.append(snapshots.send(id, task, str(written(saved, step, task))))
    manifest = Manifest(snapshots.run, id, len(parts), tuple(parts))
    assert snapshots.commit(manifest)
    return manifest
