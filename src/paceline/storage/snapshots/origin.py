"""The origin of a run: a snapshot of another run, or a folder of files.

A copy of it becomes the run's first snapshot, of generation 0. The origin is only read, and may be deleted afterwards.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass, replace

from paceline.storage.snapshots.manifest import Damaged, File, Manifest, Newer, Part, SnapshotId, parse_id
from paceline.storage.snapshots.repository import MANIFEST, SnapshotRepository, always
from paceline.storage.stores.locations import open_store
from paceline.storage.stores.protocol import ContinueCheck, StoreError

PLAIN = "given"  # the task name for files of a plain folder
PATIENCE = 8.0  # seconds for one request to a store with all retries
_STEP = re.compile(r"step-(0|[1-9][0-9]{0,15})")


@dataclass(frozen=True)
class Origin:
    address: str  # as shown to the user
    location: str = ""  # location of the run's snapshots; empty: a plain folder
    run: str = ""
    id: SnapshotId | None = None  # None: the newest that can be read


@dataclass(frozen=True)
class Adopted:
    id: SnapshotId  # id of the copy
    origin: str
    size: int
    passed: tuple[str, ...] = ()  # why newer snapshots were skipped


def find(path: str, called: str = "") -> Origin:
    """`called`: the address as the user knows it, if it differs from the path, as for a folder in a volume claim.

    >>> find("s3://training/digits/digits-3f9a/step-120-g3").id
    SnapshotId(step=120, generation=3)
    """
    path = path.rstrip("/") or "/"
    called = called.rstrip("/") or path
    parent, _, name = path.rpartition("/")
    if path.startswith("/"):
        if not os.path.isdir(path):
            raise StoreError(f"the folder {called} to start from does not exist")
        if not _is_run(path) and not os.path.isfile(f"{path}/{MANIFEST}"):
            if runs := [each for each in sorted(os.listdir(path)) if _is_run(f"{path}/{each}")]:
                raise StoreError(
                    f"{called} contains runs but is not one: {', '.join(runs[:5])}", remedy=f"use {called}/{runs[0]}"
                )
            return Origin(called)
    id = parse_id(name)
    if id is None:
        return Origin(called, parent, name)
    location, _, run = parent.rpartition("/")
    return Origin(called, location, run, id)


def _is_run(folder: str) -> bool:
    return os.path.isdir(f"{folder}/generations")


def candidates(origin: Origin, source: SnapshotRepository) -> list[SnapshotId]:
    """Newest first."""
    ids = source.inventory().current() if origin.id is None else [origin.id]
    if not ids:
        raise StoreError(f"no snapshot to start from at {origin.address}")
    return ids


def adopt(
    own: SnapshotRepository, path: str, scratch: str, should_continue: ContinueCheck = always, called: str = ""
) -> Adopted:
    """Copy the origin into `own`. `scratch`: a temporary folder. `called`: as in `find`."""
    origin = find(path, called)
    if not origin.location:
        match = _STEP.fullmatch(os.path.basename(path.rstrip("/")))
        id = SnapshotId(int(match[1]) if match else 0, 0)
        return _adopt_folder(own, path, id, should_continue, origin.address)
    short = SnapshotRepository(open_store(origin.location, PATIENCE), origin.run)
    source = SnapshotRepository(open_store(origin.location), origin.run)
    skipped: list[str] = []
    for id in candidates(origin, short):
        try:
            manifest = short.manifest(id)
            return replace(_copy(own, source, origin, manifest, scratch, should_continue), passed=tuple(skipped))
        except (Damaged, Newer) as error:
            if origin.id is not None:
                raise
            skipped.append(f"the snapshot of step {id.step} is skipped: {error}")
    raise Damaged(f"no snapshot at {origin.address} can be read: {skipped[0]}")


def _adopt_folder(
    own: SnapshotRepository, folder: str, id: SnapshotId, should_continue: ContinueCheck, called: str
) -> Adopted:
    if own.has(id):
        return Adopted(id, called, own.manifest(id).size)
    part = own.send(id, PLAIN, folder, should_continue)
    if not part.files:
        raise StoreError(f"the folder {called} to start from is empty")
    manifest = Manifest(own.run, id, 0, (part,), origin=called)
    own.create(manifest)
    return Adopted(id, called, manifest.size)


def _copy(
    own: SnapshotRepository,
    source: SnapshotRepository,
    origin: Origin,
    manifest: Manifest,
    scratch: str,
    should_continue: ContinueCheck,
) -> Adopted:
    id = SnapshotId(manifest.id.step, 0)
    address = origin.address if origin.id is not None else f"{origin.address}/{manifest.id}"
    if not own.has(id):
        for part in manifest.parts:
            folder = f"{origin.location}/{origin.run}/{manifest.id}/{part.task}"
            if not origin.location.startswith("/"):
                folder = f"{scratch}/{part.task}"
                shutil.rmtree(folder, ignore_errors=True)
                source.fetch(replace(manifest, parts=(part,)), folder, should_continue)
            try:
                _compare(own.send(id, part.task, folder, should_continue), part, f"{address}/{part.task}")
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
        own.create(replace(manifest, run=own.run, id=id, origin=address))
    return Adopted(id, address, manifest.size)


def _compare(sent: Part, committed: Part, folder: str) -> None:
    files: dict[str, File] = {file.path: file for file in sent.files}
    for file in committed.files:
        if files.get(file.path) != file:
            raise Damaged(f"{folder}/{file.path} is {'damaged' if file.path in files else 'missing'}")
