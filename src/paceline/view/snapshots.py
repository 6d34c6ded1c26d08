"""The snapshots of a run, for a person: which there are, which count and why, found by what a person writes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.storage import chain
from paceline.storage.evaluation import Evaluation
from paceline.storage.manifest import Damaged, Gone, Id, Manifest, Newer
from paceline.storage.snapshots import Known
from paceline.storage.store import Wanted
from paceline.view import runs
from paceline.view.places import Reader, Source
from paceline.view.words import join

AT_ONCE = 8  # manifests that are read at once: from a bucket, each takes a while
_NEAR = 3
_WRITTEN = re.compile(r"(?:step-)?(0|[1-9][0-9]{0,15})(?:-g(0|[1-9][0-9]{0,7}))?")


class NoSnapshot(Exception):
    """The snapshot that was asked for is not there; the message says what is."""


class CannotCopy(Exception):
    """There is no room for a copy, or something in its place."""


@dataclass(frozen=True)
class Found:
    id: Id
    counts: bool
    manifest: Manifest | None  # None where it is damaged
    damaged: str = ""
    evaluation: Evaluation | None = None

    @property
    def metrics(self) -> dict[str, float]:
        """Its own, and those of an evaluator, which count more."""
        own = {} if self.manifest is None else self.manifest.metrics
        return {**own, **(self.evaluation.metrics if self.evaluation is not None else {})}


@dataclass(frozen=True)
class Link:
    """A generation, and the snapshot that it began from."""

    generation: int
    parent: Id | None


# ---- which there are


def look_up(reader: Reader, known: Known, ids: Sequence[Id]) -> list[Found]:
    """All that is known of these, but for those that were deleted meanwhile."""
    counted = known.counted()
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = list(pool.map(lambda id: _found(reader, id, id in counted), ids))
    return [each for each in found if each is not None]


def every(known: Known) -> list[Id]:
    """Newest first, whether they count or not."""
    return sorted(known.committed, key=lambda id: (id.generation, id.step), reverse=True)


def _found(reader: Reader, id: Id, counts: bool) -> Found | None:
    try:
        return Found(id, counts, reader.manifest(id), evaluation=reader.evaluation(id))
    except Gone:
        return None  # the run that trains has let it go meanwhile
    except (Damaged, Newer) as error:
        return Found(id, counts, None, str(error))


def data(found: Found) -> dict[str, Any]:
    told: dict[str, Any] = {
        "snapshot": str(found.id), "step": found.id.step, "generation": found.id.generation, "counts": found.counts,
        "damaged": found.damaged or None,
    }  # fmt: skip
    made, by = found.manifest, found.evaluation
    evaluated = None if by is None else {"task": by.task, "at": by.at, "metrics": dict(by.metrics)}
    return told if made is None else {
        **told, "at": made.at, "bytes": made.size, "files": files(made), "tasks": [part.task for part in made.parts],
        "world": made.world, "metrics": found.metrics, "evaluated": evaluated, "versions": dict(made.versions),
        **({"origin": made.origin} if made.origin else {}),
    }  # fmt: skip


def files(manifest: Manifest) -> int:
    return sum(len(part.files) for part in manifest.parts)


def parts(manifest: Manifest) -> list[dict[str, Any]]:
    return [
        {"task": part.task, "path": file.path, "size": file.size, "sha256": file.sha256}
        for part in manifest.parts
        for file in part.files
    ]


# ---- which one is meant


def newest(source: Source, known: Known) -> Id:
    counted = known.counted()
    if not counted:
        raise NoSnapshot(none_yet(source, known))
    return counted[0]


def best(source: Source, known: Known) -> Id:
    """By the metric that the job names, of those that count."""
    planned = (runs.read_object(source.folder / "plan.json") or {}).get("snapshots") if source.folder else None
    wanted = planned.get("best") if isinstance(planned, dict) else None
    if not wanted:
        raise NoSnapshot(f"nothing here says which snapshot of {source.run} is the best: its job has no snapshots.best")
    metric, lowest = wanted
    found = look_up(source.reader, known, known.counted())
    values = {
        each.id: each.manifest.metrics[metric] for each in found if each.manifest and metric in each.manifest.metrics
    }
    if not values:
        raise NoSnapshot(f"no snapshot of {source.run} has the metric {metric!r}")
    return min(values, key=lambda id: (values[id] if lowest else -values[id], -id.step))


def none_yet(source: Source, known: Known) -> str:
    dead = len(known.committed)
    more = f" that counts ({dead} that no longer {'counts' if dead == 1 else 'count'}: --all)" if dead else ""
    return f"{source.run} has no snapshot{more} at {source.where}"


def find(source: Source, known: Known, written: str) -> Id:
    """`step-120-g3`; `step-120` or `120` where there is one of that step; `newest`; `best`."""
    if written in ("newest", "best"):
        return newest(source, known) if written == "newest" else best(source, known)
    ids = every(known)
    if not ids:
        raise NoSnapshot(none_yet(source, known))
    meant = _WRITTEN.fullmatch(written)
    if meant is None:
        raise NoSnapshot(f"{written!r} is no snapshot: write {ids[0]}, step-{ids[0].step} or {ids[0].step}")
    step, generation = int(meant[1]), int(meant[2] or 0)
    matching = [id for id in ids if id.step == step and generation in (0, id.generation)]
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise NoSnapshot(f"{written!r} is one of several: {join([str(id) for id in matching])}; write one of them")
    near = sorted(ids, key=lambda id: (abs(id.step - step), -id.generation))[:_NEAR]
    raise NoSnapshot(f"{source.run} has no snapshot {written!r}; the nearest: {', '.join(map(str, near))}")


# ---- where it stands


def links(known: Known, id: Id) -> list[Link]:
    """The generation that made it, and those that it goes back to."""
    found: list[Link] = []
    generation = id.generation
    while (record := known.records.get(generation)) is not None:
        found.append(Link(generation, record.parent))
        if record.parent is None:
            break
        generation = record.parent.generation
    return found


def superseded_by(known: Known, id: Id) -> Link | None:
    """The first generation that began without it; None where it counts, or where no record tells."""
    for later in sorted(number for number in known.records if number > id.generation):
        records = {number: record for number, record in known.records.items() if number <= later}
        if id not in chain.counted(records, [id]):
            return Link(later, known.records[later].parent)
    return None


# ---- every byte


def damages(reader: Reader, manifest: Manifest, still: Wanted) -> list[str]:
    """What is wrong with its files, all of them; Gone where it was deleted meanwhile."""
    wrong = []
    for part in manifest.parts:
        for file in part.files:
            try:
                reader.check(manifest.id, part.task, file, still)
            except Damaged as error:
                reader.manifest(manifest.id)  # without it, nothing was damaged: it was deleted
                wrong.append(str(error))
    return wrong


def copy(reader: Reader, manifest: Manifest, folder: Path, still: Wanted) -> None:
    """A verified copy; nothing at all where it cannot be had."""
    import os
    import shutil

    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise CannotCopy(f"{folder} is there already, and not an empty folder")
    with made_for(folder.parent):
        needed, free = sum(file.size for _, file in manifest.files().values()), shutil.disk_usage(folder.parent).free
        if needed > free:
            from paceline.view.words import size

            raise CannotCopy(f"{manifest.id} needs {size(needed)}, and {folder.parent} has {size(free)} left")
        reader.fetch(manifest, os.fspath(folder), still)


@contextmanager
def made_for(folder: Path) -> Iterator[None]:
    """That folder and those above it; where the work fails, those that were made for it are gone again."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for each in missing:
            try:
                each.rmdir()
            except OSError:
                break
        raise


def sizes(found: Sequence[Found]) -> int:
    return sum(each.manifest.size for each in found if each.manifest is not None)
