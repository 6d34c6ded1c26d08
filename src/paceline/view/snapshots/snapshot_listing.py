"""The snapshots of a run, for the user: lists them, determines which are current and why, and finds them by name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import USAGE, Argument, PacelineError
from paceline.storage.snapshots import chain, retention
from paceline.storage.snapshots.evaluation import Evaluation
from paceline.storage.snapshots.manifest import Damaged, Gone, Manifest, Newer, SnapshotId
from paceline.storage.snapshots.repository import Inventory
from paceline.storage.stores.protocol import ContinueCheck
from paceline.view.files import run_files
from paceline.view.snapshots.snapshot_locations import Reader, Source
from paceline.view.text.wording import join

AT_ONCE = 8  # manifests that are read in parallel: each takes a while from a bucket
_NEAR = 3
_NAME = re.compile(r"(?:step-)?(0|[1-9][0-9]{0,15})(?:-g(0|[1-9][0-9]{0,7}))?")


class NoSnapshot(PacelineError):
    """The snapshot does not exist; the message suggests others."""

    exit_code = USAGE


class CannotCopy(PacelineError):
    """The disk has too little space for a copy, or its folder already exists."""


@dataclass(frozen=True)
class SnapshotInfo:
    id: SnapshotId
    is_current: bool  # on the chain of the newest generation
    manifest: Manifest | None  # None if it is damaged
    damaged: str = ""
    evaluation: Evaluation | None = None

    @property
    def metrics(self) -> dict[str, float]:
        """Those of the manifest; those of an evaluator take precedence."""
        own = {} if self.manifest is None else self.manifest.metrics
        return {**own, **(self.evaluation.metrics if self.evaluation is not None else {})}


@dataclass(frozen=True)
class Link:
    """A generation, and the snapshot that it started from."""

    generation: int
    parent: SnapshotId | None


# ---- listing


def look_up(reader: Reader, inventory: Inventory, ids: Sequence[SnapshotId]) -> list[SnapshotInfo]:
    """Details of these snapshots, without those that were deleted in the meantime."""
    current = inventory.current()
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(AT_ONCE) as pool:
        snapshots = list(pool.map(lambda id: _read(reader, id, id in current), ids))
    return [snapshot for snapshot in snapshots if snapshot is not None]


def all_committed(inventory: Inventory) -> list[SnapshotId]:
    """All committed snapshots, newest first, including superseded ones."""
    return sorted(inventory.committed, key=lambda id: (id.generation, id.step), reverse=True)


def _read(reader: Reader, id: SnapshotId, is_current: bool) -> SnapshotInfo | None:
    try:
        return SnapshotInfo(id, is_current, reader.manifest(id), evaluation=reader.evaluation(id))
    except Gone:
        return None  # the live run has deleted it in the meantime
    except (Damaged, Newer) as error:
        return SnapshotInfo(id, is_current, None, str(error))


def data(snapshot: SnapshotInfo) -> dict[str, Any]:
    id, manifest, evaluation = snapshot.id, snapshot.manifest, snapshot.evaluation
    fields: dict[str, Any] = {
        "snapshot": str(id), "step": id.step, "generation": id.generation, "counts": snapshot.is_current,
        "damaged": snapshot.damaged or None,
    }  # fmt: skip
    if manifest is None:
        return fields
    evaluated = None if evaluation is None else {
        "task": evaluation.task, "at": evaluation.at, "metrics": dict(evaluation.metrics)
    }  # fmt: skip
    return {
        **fields, "at": manifest.at, "bytes": manifest.size, "files": files(manifest),
        "tasks": [part.task for part in manifest.parts], "world": manifest.world, "metrics": snapshot.metrics,
        "evaluated": evaluated, "versions": dict(manifest.versions),
        **({"origin": manifest.origin} if manifest.origin else {}),
    }  # fmt: skip


def files(manifest: Manifest) -> int:
    return sum(len(part.files) for part in manifest.parts)


def parts(manifest: Manifest) -> list[dict[str, Any]]:
    return [
        {"task": part.task, "path": file.path, "size": file.size, "sha256": file.sha256}
        for part in manifest.parts
        for file in part.files
    ]


# ---- finding one


def newest(source: Source, inventory: Inventory) -> SnapshotId:
    current = inventory.current()
    if not current:
        raise none_yet(source, inventory)
    return current[0]


def best(source: Source, inventory: Inventory) -> SnapshotId:
    """The best of the current snapshots, by the metric that the job names."""
    planned = run_files.planned(source.folder).get("snapshots", {}) if source.folder else {}
    criterion = planned.get("best")
    if not criterion:
        raise NoSnapshot(f"the best snapshot of {source.run} is not defined here: its job has no snapshots.best")
    metric, lowest = criterion
    current = inventory.current()
    snapshots = look_up(source.reader, inventory, current)
    values = {each.id: each.metrics[metric] for each in snapshots if metric in each.metrics}
    winner = retention.best(current, values, lowest)
    if winner is None:
        raise NoSnapshot(f"no snapshot of {source.run} has the metric {metric!r}")
    return winner


def none_yet(source: Source, inventory: Inventory) -> NoSnapshot:
    superseded = len(inventory.committed)
    if not superseded:
        return NoSnapshot(f"{source.run} has no snapshot at {source.address}")
    remedy = (Argument("include_superseded", True), f" includes {superseded} superseded")
    return NoSnapshot(f"{source.run} has no current snapshot at {source.address}", remedy=remedy)


def find(source: Source, inventory: Inventory, name: str) -> SnapshotId:
    """`step-120-g3`; `step-120` or `120` if that is unique; `newest`; `best`."""
    if name in ("newest", "best"):
        return newest(source, inventory) if name == "newest" else best(source, inventory)
    ids = all_committed(inventory)
    if not ids:
        raise none_yet(source, inventory)
    match = _NAME.fullmatch(name)
    if match is None:
        raise NoSnapshot(
            f"{name!r} is not the name of a snapshot", remedy=f"use {ids[0]}, step-{ids[0].step} or {ids[0].step}"
        )
    step, generation = int(match[1]), int(match[2] or 0)
    matching = [id for id in ids if id.step == step and generation in (0, id.generation)]
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise NoSnapshot(
            f"{name!r} matches several snapshots: {join([str(id) for id in matching])}", remedy="use one of these names"
        )
    near = sorted(ids, key=lambda id: (abs(id.step - step), -id.generation))[:_NEAR]
    raise NoSnapshot(f"{source.run} has no snapshot {name!r}", remedy=f"the nearest: {', '.join(map(str, near))}")


# ---- the chain


def links(inventory: Inventory, id: SnapshotId) -> list[Link]:
    """The generation that saved it, and its ancestors."""
    ancestors: list[Link] = []
    generation = id.generation
    while (record := inventory.records.get(generation)) is not None:
        ancestors.append(Link(generation, record.parent))
        if record.parent is None:
            break
        generation = record.parent.generation
    return ancestors


def superseded_by(inventory: Inventory, id: SnapshotId) -> Link | None:
    """The first generation that started without it; None if it is current, or no record tells."""
    for later in sorted(number for number in inventory.records if number > id.generation):
        records = {number: record for number, record in inventory.records.items() if number <= later}
        if id not in chain.current(records, [id]):
            return Link(later, inventory.records[later].parent)
    return None


# ---- verifying and copying


def damages(reader: Reader, manifest: Manifest, should_continue: ContinueCheck) -> list[str]:
    """Verify all files and return what is wrong; Gone if the snapshot was deleted in the meantime."""
    problems = []
    for part in manifest.parts:
        for file in part.files:
            try:
                reader.check(manifest.id, part.task, file, should_continue)
            except Damaged as error:
                reader.manifest(manifest.id)  # raises Gone if the snapshot was deleted
                problems.append(str(error))
    return problems


def copy(reader: Reader, manifest: Manifest, folder: Path, should_continue: ContinueCheck) -> None:
    """Make a verified copy; if that fails, nothing is left."""
    import os
    import shutil

    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise CannotCopy(f"{folder} already exists and is not an empty folder")
    with created_folder(folder.parent):
        needed, free = sum(file.size for _, file in manifest.files().values()), shutil.disk_usage(folder.parent).free
        if needed > free:
            from paceline.view.text.wording import size

            raise CannotCopy(f"{manifest.id} needs {size(needed)}, but {folder.parent} has only {size(free)} free")
        reader.fetch(manifest, os.fspath(folder), should_continue)


@contextmanager
def created_folder(folder: Path) -> Iterator[None]:
    """Create the folder and its parents; on failure, remove those that were created."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for path in missing:
            try:
                path.rmdir()
            except OSError:
                break
        raise


def sizes(snapshots: Sequence[SnapshotInfo]) -> int:
    return sum(each.manifest.size for each in snapshots if each.manifest is not None)
