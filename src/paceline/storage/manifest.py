"""What a committed snapshot is: the files that tasks wrote, with sizes and digests, and where it stands in the run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

VERSION = 1
MOST_BYTES = 64 * 1024 * 1024  # of a manifest
FILE_BYTES = 100  # that a file takes in it, besides its path
PATH_LIMIT = 1024
_DIGEST = re.compile(r"[0-9a-f]{64}")
_ID = re.compile(r"step-(0|[1-9][0-9]{0,15})-g(0|[1-9][0-9]{0,7})")


class Damaged(Exception):
    """Not what was written; the text says which file, and what is wrong with it."""


class Gone(Damaged):
    """It was there, and is not any more: damaged, or deleted meanwhile."""


class Newer(Exception):
    """Written by a version of Paceline that this one does not know."""


@dataclass(frozen=True, order=True)
class Id:
    """Two generations may have a snapshot of the same step: they are two snapshots."""

    step: int
    generation: int  # 0: what the run was started from

    def __str__(self) -> str:
        """
        >>> str(Id(120, 3))
        'step-120-g3'
        """
        return f"step-{self.step}-g{self.generation}"


def parse_id(text: str) -> Id | None:
    """
    >>> parse_id("step-120-g3")
    Id(step=120, generation=3)
    """
    found = _ID.fullmatch(text)
    return Id(int(found[1]), int(found[2])) if found else None


def pair(id: Id) -> list[int]:
    """As messages have it; `Id(*pair)` is the way back."""
    return [id.step, id.generation]


@dataclass(frozen=True)
class File:
    path: str  # below the folder that the task wrote
    size: int
    sha256: str


@dataclass(frozen=True)
class Part:
    """What one task wrote."""

    task: str
    files: tuple[File, ...]


@dataclass(frozen=True)
class Manifest:
    run: str
    id: Id
    world: int  # how many tasks trained together
    parts: tuple[Part, ...]  # in the order of the tasks
    metrics: Mapping[str, float] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)  # of Paceline and of the framework
    at: str = ""
    origin: str = ""  # of generation 0: where it was copied from

    @property
    def size(self) -> int:
        return sum(file.size for part in self.parts for file in part.files)

    def files(self) -> dict[str, tuple[str, File]]:
        """path -> task and file, as one folder: where two tasks wrote the same path, that of the first counts."""
        merged: dict[str, tuple[str, File]] = {}
        for part in self.parts:
            for file in part.files:
                merged.setdefault(file.path, (part.task, file))
        return merged

    def to_bytes(self) -> bytes:
        data = {
            "version": VERSION, "run": self.run, "step": self.id.step, "generation": self.id.generation,
            "world": self.world, "at": self.at, "metrics": dict(self.metrics), "versions": dict(self.versions),
            "parts": {
                part.task: [{"path": file.path, "size": file.size, "sha256": file.sha256} for file in part.files]
                for part in self.parts
            },
            **({"origin": self.origin} if self.origin else {}),
        }  # fmt: skip
        return json.dumps(data).replace('{"path"', '\n{"path"').encode()  # a line a file; `indent` is ten times slower


def parse(data: bytes, name: str) -> Manifest:
    """`name`: for the words of an error."""
    found = read_object(data, name)
    try:
        parts = tuple(Part(str(task), tuple(map(file_of, files))) for task, files in found["parts"].items())
        manifest = Manifest(
            str(found["run"]), Id(int(found["step"]), int(found["generation"])), int(found["world"]), parts,
            {str(key): float(value) for key, value in found["metrics"].items()},
            {str(key): str(value) for key, value in found["versions"].items()}, str(found["at"]),
            str(found.get("origin", "")),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Damaged(f"{name} is no manifest: {error}") from None
    _check_paths(manifest, name)
    return manifest


def read_object(data: bytes, name: str) -> dict[str, Any]:
    """A JSON object of this version."""
    try:
        found = json.loads(data)
        version = int(found["version"])
    except (KeyError, TypeError, ValueError, RecursionError):
        raise Damaged(f"{name} is damaged: it is no JSON with a version") from None
    if version != VERSION:
        raise Newer(f"{name} has version {version}, and this Paceline knows version {VERSION}")
    if not isinstance(found, dict):
        raise Damaged(f"{name} is damaged: it is no JSON object")
    return found


def file_of(given: Any) -> File:
    file = File(str(given["path"]), int(given["size"]), str(given["sha256"]))
    if file.size < 0 or not is_digest(file.sha256):
        raise ValueError(f"{file.path!r} has no size and digest")
    return file


def is_digest(text: str) -> bool:
    return bool(_DIGEST.fullmatch(text))


def _check_paths(manifest: Manifest, name: str) -> None:
    for part in manifest.parts:
        for path in (part.task, *(file.path for file in part.files)):
            if not fit(path):
                raise Damaged(f"{name} names the path {path!r}, which is none below its folder")
    if clash := clashing(manifest.files()):
        raise Damaged(f"{name} names {clash!r} as a file and as a folder")


def clashing(paths: Iterable[str]) -> str | None:
    """A path that is another's folder."""
    known = set(paths)
    for path in known:
        steps = path.split("/")
        for length in range(1, len(steps)):
            if (above := "/".join(steps[:length])) in known:
                return above
    return None


def fit(path: str) -> bool:
    """Whether it stays below the folder that it is put into, and is one that every store can have.

    >>> fit("variables/variables.index"), fit("../other"), fit("/etc/passwd"), fit("a//b")
    (True, False, False, False)
    """
    try:
        path.encode()
    except UnicodeError:
        return False
    steps = path.split("/")
    return len(path) <= PATH_LIMIT and all(step not in ("", ".", "..") and step.isprintable() for step in steps)
