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
PATIENCE = 8.0  # seconds for one answer of a store, with all its tries
_STEP = re.compile(r"step-(0|[1-9][0-9]{0,15})")


@dataclass(frozen=True)
class Origin:
    where: str  # as people call it
    place: str = ""  # empty: a folder that is no run's
    run: str = ""
    id: Id | None = None  # None: the newest that can be read


@dataclass(frozen=True)
class Adopted:
    id: Id  # of the copy
    origin: str
    size: int
    passed: tuple[str, ...] = ()  # why newer ones were not taken


def find(where: str, called: str = "") -> Origin:
    """`called`: what people call it, where that is another path, as that of a folder in a volume claim.

    >>> find("s3://training/digits/digits-3f9a/step-120-g3").id
    Id(step=120, generation=3)
    """
    where = where.rstrip("/") or "/"
    called = called.rstrip("/") or where
    above, _, name = where.rpartition("/")
    if where.startswith("/"):
        if not os.path.isdir(where):
            raise StoreError(f"there is no folder {called} to start from")
        if not _is_run(where) and not os.path.isfile(f"{where}/{MANIFEST}"):
            if runs := [each for each in sorted(os.listdir(where)) if _is_run(f"{where}/{each}")]:
                raise StoreError(f"{called} holds runs and is none: {', '.join(runs[:5])}; write {called}/{runs[0]}")
            return Origin(called)
    id = parse_id(name)
    if id is None:
        return Origin(called, above, name)
    place, _, run = above.rpartition("/")
    return Origin(called, place, run, id)


def _is_run(folder: str) -> bool:
    return os.path.isdir(f"{folder}/generations")


def candidates(origin: Origin, source: Snapshots) -> list[Id]:
    """Newest first."""
    found = source.known().counted() if origin.id is None else [origin.id]
    if not found:
        raise StoreError(f"there is no snapshot to start from at {origin.where}")
    return found


def adopt(own: Snapshots, where: str, scratch: str, wanted: Wanted = always, called: str = "") -> Adopted:
    """`scratch`: a folder for what passes through this machine. `called`: as for `find`."""
    origin = find(where, called)
    if not origin.place:
        named = _STEP.fullmatch(os.path.basename(where.rstrip("/")))
        id = Id(int(named[1]) if named else 0, 0)
        return _plain(own, where, id, wanted, origin.where)
    short = Snapshots(open_store(origin.place, PATIENCE), origin.run)
    source = Snapshots(open_store(origin.place), origin.run)
    passed: list[str] = []
    for each in candidates(origin, short):
        try:
            found = short.manifest(each)
            return replace(_copy(own, source, origin, found, scratch, wanted), passed=tuple(passed))
        except (Damaged, Newer) as error:
            if origin.id is not None:
                raise
            passed.append(f"the snapshot of step {each.step} is passed over: {error}")
    raise Damaged(f"no snapshot at {origin.where} can be read: {passed[0]}")


def _plain(own: Snapshots, where: str, id: Id, wanted: Wanted, called: str) -> Adopted:
    if own.has(id):
        return Adopted(id, called, own.manifest(id).size)
    part = own.send(id, PLAIN, where, wanted)
    if not part.files:
        raise StoreError(f"the folder {called}, which the run should start from, is empty")
    made = Manifest(own.run, id, 0, (part,), origin=called)
    own.create(made)
    return Adopted(id, called, made.size)


def _copy(own: Snapshots, source: Snapshots, origin: Origin, found: Manifest, scratch: str, wanted: Wanted) -> Adopted:
    id, name = Id(found.id.step, 0), origin.where if origin.id is not None else f"{origin.where}/{found.id}"
    if not own.has(id):
        for part in found.parts:
            folder = f"{origin.place}/{origin.run}/{found.id}/{part.task}"
            if not origin.place.startswith("/"):
                folder = f"{scratch}/{part.task}"
                shutil.rmtree(folder, ignore_errors=True)
                source.fetch(replace(found, parts=(part,)), folder, wanted)
            try:
                _compare(own.send(id, part.task, folder, wanted), part, f"{name}/{part.task}")
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
        own.create(replace(found, run=own.run, id=id, origin=name))
    return Adopted(id, name, found.size)


def _compare(sent: Part, committed: Part, folder: str) -> None:
    there: dict[str, File] = {file.path: file for file in sent.files}
    for file in committed.files:
        if there.get(file.path) != file:
            raise Damaged(f"{folder}/{file.path} is {'damaged' if file.path in there else 'gone'}")
