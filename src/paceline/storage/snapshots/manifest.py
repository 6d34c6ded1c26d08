"""The manifest of a committed snapshot: its id, and the files that tasks wrote, with sizes and digests."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.errors import PacelineError
from paceline.storage.json_values import parse_json

VERSION = 1
MOST_BYTES = 64 * 1024 * 1024  # bytes of a manifest
FILE_BYTES = 100  # bytes of a file in a manifest, besides its path
PATH_LIMIT = 1024
SIZE_LIMIT = 2**63  # bytes of a file; no file system supports more
# What reading fields of the wrong types raises; 1e400, for example, is a valid number in JSON, but no integer.
INVALID_FIELDS = (KeyError, TypeError, ValueError, AttributeError, OverflowError)
_DIGEST = re.compile(r"[0-9a-f]{64}")
_ID = re.compile(r"step-(0|[1-9][0-9]{0,15})-g(0|[1-9][0-9]{0,7})")


class Damaged(PacelineError):
    """A file differs from what was written; the text names the file and the difference."""


class Gone(Damaged):
    """A file no longer exists: lost, or deleted in the meantime."""


class Newer(PacelineError):
    """A newer version of Paceline wrote it, in a format that this version does not support."""


@dataclass(frozen=True, order=True)
class SnapshotId:
    """Two generations may both have a snapshot of the same step."""

    step: int
    generation: int  # 0: the snapshot that the run was started from

    def __str__(self) -> str:
        """
        >>> str(SnapshotId(120, 3))
        'step-120-g3'
        """
        return f"step-{self.step}-g{self.generation}"


def parse_id(text: str) -> SnapshotId | None:
    """
    >>> parse_id("step-120-g3")
    SnapshotId(step=120, generation=3)
    """
    match = _ID.fullmatch(text)
    return SnapshotId(int(match[1]), int(match[2])) if match else None


def pair(id: SnapshotId) -> list[int]:
    """The form used in messages; `SnapshotId(*pair)` converts it back."""
    return [id.step, id.generation]


@dataclass(frozen=True)
class File:
    path: str  # relative to the folder that the task wrote
    size: int
    sha256: str


@dataclass(frozen=True)
class Part:
    """The files of one task."""

    task: str
    files: tuple[File, ...]


@dataclass(frozen=True)
class Manifest:
    run: str
    id: SnapshotId
    world: int  # number of tasks that trained together
    parts: tuple[Part, ...]  # in the order of the tasks
    metrics: Mapping[str, float] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)  # of Paceline and of the framework
    at: str = ""
    origin: str = ""  # generation 0 only: the address it was copied from

    @property
    def size(self) -> int:
        return sum(file.size for part in self.parts for file in part.files)

    def files(self) -> dict[str, tuple[str, File]]:
        """path -> task and file, merged into one folder: if two tasks wrote the same path, the first one wins."""
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
        return (
            json.dumps(data).replace('{"path"', '\n{"path"').encode()
        )  # one line per file; `indent` is ten times slower


def parse(data: bytes, name: str) -> Manifest:
    """`name`: for error messages."""
    fields = read_object(data, name)
    try:
        parts = tuple(Part(str(task), tuple(map(file_of, files))) for task, files in fields["parts"].items())
        manifest = Manifest(
            str(fields["run"]), SnapshotId(int(fields["step"]), int(fields["generation"])), int(fields["world"]), parts,
            {str(key): float(value) for key, value in fields["metrics"].items()},
            {str(key): str(value) for key, value in fields["versions"].items()}, str(fields["at"]),
            str(fields.get("origin", "")),
        )  # fmt: skip
    except INVALID_FIELDS as error:
        raise Damaged(f"{name} is not a valid manifest: {error!r}") from None
    _check_paths(manifest, name)
    return manifest


def read_object(data: bytes, name: str) -> dict[str, Any]:
    """A JSON object of this version."""
    try:
        fields = parse_json(data)
        version = int(fields["version"])
    except INVALID_FIELDS:
        raise Damaged(f"{name} is damaged: it is not JSON with a version") from None
    if version != VERSION:
        raise Newer(
            f"{name} has format version {version}, but this Paceline supports only version {VERSION}",
            remedy="use a newer Paceline",
        )
    if not isinstance(fields, dict):
        raise Damaged(f"{name} is damaged: it is not a JSON object")
    return fields


def file_of(fields: Any) -> File:
    file = File(str(fields["path"]), int(fields["size"]), str(fields["sha256"]))
    if not is_size(file.size) or not is_digest(file.sha256):
        raise ValueError(f"{file.path!r} has no valid size and digest")
    return file


def is_size(value: int) -> bool:
    """Larger numbers cannot be converted to decimals, or to floats: sums of sizes are printed."""
    return 0 <= value < SIZE_LIMIT


def is_digest(text: str) -> bool:
    return bool(_DIGEST.fullmatch(text))


def _check_paths(manifest: Manifest, name: str) -> None:
    for part in manifest.parts:
        for path in (part.task, *(file.path for file in part.files)):
            if not is_safe_path(path):
                raise Damaged(f"{name} contains the path {path!r}, which is not below its folder")
    if clash := clashing(manifest.files()):
        raise Damaged(f"{name} lists {clash!r} both as a file and as a folder")


def clashing(paths: Iterable[str]) -> str | None:
    """A path that is also the parent folder of another path."""
    files = set(paths)
    for path in files:
        steps = path.split("/")
        for length in range(1, len(steps)):
            if (parent := "/".join(steps[:length])) in files:
                return parent
    return None


def is_safe_path(path: str) -> bool:
    """Whether the path stays below its folder, and is valid in every store.

    >>> [is_safe_path(path) for path in ("variables/variables.index", "../other", "/etc/passwd", "a//b")]
    [True, False, False, False]
    """
    try:
        path.encode()
    except UnicodeError:
        return False
    steps = path.split("/")
    return len(path) <= PATH_LIMIT and all(step not in ("", ".", "..") and step.isprintable() for step in steps)
