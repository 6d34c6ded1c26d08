"""What a run starts from: a snapshot of another run, or a folder of files.

A copy of it becomes the first of its own, of generation 0: what was given is only read, and may go away afterwards.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass, replace

from paceline.storage.manifest import Damaged, File, Id, Manifest, Newer, Part, parse_id
from paceline.storage.places import open_store
from paceline.storage.snapshots import MANIFEST, Snapshots, always
from paceline.storage.store import StoreError, Wanted

PLAIN = "given"  # the task that files of a folder are said to be of
_STEP = re.compile(r"step-(0|[1-9][0-9]{0,15})")


@dataclass(frozen=True)
class Origin:
    where: str  # as it was written
    place: str = ""  # empty: a folder that is no run's
    run: str = ""
    id: Id | None = None  # None: the newest that can be read


@dataclass(frozen=True)
class Adopted:
    id: Id  # of the copy
    origin: str
    size: int
    passed: tuple[str, ...] = ()  # why newer ones were not taken


def find(where: str) -> Origin:
    """
    >>> find("s3://training/digits/digits-3f9a/step-120-g3").id
    Id(step=120, generation=3)
    """
    above, _, name = where.rstrip("/").rpartition("/")
    if where.startswith("/"):
        if not os.path.isdir(where):
            raise StoreError(f"there is no folder {where} to start from")
        if not _is_run(where) and not os.path.isfile(f"{where}/{MANIFEST}"):
            if runs := [each for each in sorted(os.listdir(where)) if _is_run(f"{where}/{each}")]:
                raise StoreError(f"{where} holds runs and is none: {', '.join(runs[:5])}; write {where}/{runs[0]}")
            return Origin(where)
    id = parse_id(name)
    if id is None:
        return Origin(where, above, name)
    place, _, run = above.rpartition("/")
    return Origin(where, place, run, id)


def _is_run(folder: str) -> bool:
    return os.path.isdir(f"{folder}/generations")


def candidates(origin: Origin, source: Snapshots) -> list[Id]:
    """Newest first."""
    found = source.known().counted() if origin.id is None else [origin.id]
    if not found:
        raise StoreError(f"there is no snapshot to start from at {origin.where}")
    return found


def adopt(own: Snapshots, where: str, scratch: str, wanted: Wanted = always) -> Adopted:
    """`scratch`: a folder for what passes through this machine."""
    origin = find(where)
    if not origin.place:
        named = _STEP.fullmatch(os.path.basename(where.rstrip("/")))
        id = Id(int(named[1]) if named else 0, 0)
        return _plain(own, where, id, wanted)
    source = Snapshots(open_store(origin.place), origin.run)
    passed: list[str] = []
    for each in candidates(origin, source):
        try:
            found = source.manifest(each)
            return replace(_copy(own, source, origin, found, scratch, wanted), passed=tuple(passed))
        except (Damaged, Newer) as error:
            if origin.id is not None:
                raise
            passed.append(f"the snapshot of step {each.step} is passed over: {error}")
    raise Damaged(f"no snapshot at {where} can be read: {passed[0]}")


def _plain(own: Snapshots, where: str, id: Id, wanted: Wanted) -> Adopted:
    if own.has(id):
        return Adopted(id, where, own.manifest(id).size)
    part = own.send(id, PLAIN, where, wanted)
    if not part.files:
        raise StoreError(f"the folder {where}, which the run should start from, is empty")
    made = Manifest(own.run, id, 0, (part,), origin=where)
    own.create(made)
    return Adopted(id, where, made.size)


def _copy(own: Snapshots, source: Snapshots, origin: Origin, found: Manifest, scratch: str, wanted: Wanted) -> Adopted:
    id, name = Id(found.id.step, 0), f"{origin.place}/{origin.run}/{found.id}"
    if not own.has(id):
        for part in found.parts:
            folder = f"{name}/{part.task}"
            if not origin.place.startswith("/"):
                folder = f"{scratch}/{part.task}"
                shutil.rmtree(folder, ignore_errors=True)
                source.fetch(replace(found, parts=(part,)), folder, wanted)
            try:
                _compare(own.send(id, part.task, folder, wanted), part, folder)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
        own.create(replace(found, run=own.run, id=id, origin=name))
    return Adopted(id, name, found.size)


def _compare(sent: Part, committed: Part, folder: str) -> None:
    there: dict[str, File] = {file.path: file for file in sent.files}
    for file in committed.files:
        if there.get(file.path) != file:
            raise Damaged(f"{folder}/{file.path} is {'damaged' if file.path in there else 'gone'}")
