"""Ingested data in a store: files in a separate folder; a manifest, written last, makes the data valid.

<to>/<fingerprint>/...             the first data built from these inputs
<to>/<fingerprint>-2/...           the next: nothing is overwritten or deleted
<to>/<fingerprint>.manifest.json   lists the files; next to the folder, as programs read everything in it
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass

from paceline.storage.local_files import digest, sync
from paceline.storage.snapshots.manifest import (
    FILE_BYTES,
    INVALID_FIELDS,
    MOST_BYTES,
    VERSION,
    Damaged,
    File,
    clashing,
    file_of,
    is_safe_path,
    read_object,
)  # fmt: skip
from paceline.storage.snapshots.repository import Unfit, always, files_of
from paceline.storage.stores.folder import FolderStore
from paceline.storage.stores.protocol import ContinueCheck, Sent, Store, StoreError

MANIFEST = ".manifest.json"  # suffix to the name of the folder
LEASES = ".turns"
_SCRATCH = ".ingest-"
_NAME = re.compile(r"[0-9a-f]{16}(-[1-9][0-9]{0,5})?")


@dataclass(frozen=True)
class DatasetManifest:
    """The files that an ingest has built."""

    name: str  # name of the folder
    run: str  # the run that built it
    at: str
    files: tuple[File, ...]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    def to_bytes(self) -> bytes:
        fields = {"version": VERSION, "name": self.name, "run": self.run, "at": self.at}
        files = [{"path": file.path, "size": file.size, "sha256": file.sha256} for file in self.files]
        return json.dumps({**fields, "files": files}).replace('{"path"', '\n{"path"').encode()


def parse(data: bytes, name: str) -> DatasetManifest:
    """`name`: for error messages."""
    fields = read_object(data, name)
    try:
        files = tuple(map(file_of, fields["files"]))
        manifest = DatasetManifest(str(fields["name"]), str(fields["run"]), str(fields["at"]), files)
    except INVALID_FIELDS as error:
        raise Damaged(f"{name} is not a valid data manifest: {error!r}") from None
    for file in manifest.files:
        if not is_safe_path(file.path):
            raise Damaged(f"{name} contains the path {file.path!r}, which is not below its folder")
    if clash := clashing(file.path for file in manifest.files):
        raise Damaged(f"{name} lists {clash!r} both as a file and as a folder")
    return manifest


def is_name(text: str) -> bool:
    """Whether a folder with this name may be the output of an ingest.

    >>> is_name("0123456789abcdef-2"), is_name("digits")
    (True, False)
    """
    return _NAME.fullmatch(text) is not None


class DatasetStore:
    """Data of one fingerprint at one location."""

    def __init__(self, store: Store, to: str, fingerprint: str) -> None:
        self._store, self._to, self._fingerprint = store, to, fingerprint
        self._pattern = re.compile(re.escape(fingerprint) + r"(?:-([1-9][0-9]{0,5}))?")

    def newest(self) -> DatasetManifest | None:
        """None: no data is complete."""
        for number in sorted(self._numbers(), reverse=True):
            name = f"{self._name(number)}{MANIFEST}"
            data = self._store.read(name, MOST_BYTES)
            if data is not None:
                return parse(data, name)
        return None

    def next_name(self) -> str:
        """Name of a folder that does not exist yet."""
        return self._name(max(self._numbers(), default=0) + 1)

    def _numbers(self) -> list[int]:
        matches = map(self._pattern.fullmatch, self._store.folders(""))
        return [int(match[1] or 1) for match in matches if match]

    def _name(self, number: int) -> str:
        return self._fingerprint if number == 1 else f"{self._fingerprint}-{number}"

    def address(self, name: str) -> str:
        """The address that tasks receive: a folder, or the prefix of the files in a bucket."""
        location = self._to.rstrip("/")
        return f"{location}/{name}" if isinstance(self._store, FolderStore) else f"{location}/{name}/"

    # ---- building

    def scratch(self, otherwise: str) -> str:
        """Create an empty folder to write to: at the location itself if it is a folder, so that nothing is copied.
        Leftovers of a killed ingest are deleted. `otherwise`: the parent folder if the location is a bucket."""
        parent = self._to.rstrip("/") if isinstance(self._store, FolderStore) else otherwise
        prefix = f"{_SCRATCH}{self._fingerprint}-"
        try:
            os.makedirs(parent, exist_ok=True)
            for name in os.listdir(parent):
                if name.startswith(prefix):
                    shutil.rmtree(f"{parent}/{name}", ignore_errors=True)
            folder = f"{parent}/{prefix}{os.urandom(4).hex()}"
            os.mkdir(folder)
        except OSError as error:
            raise StoreError(f"cannot write to {parent}: {error.strerror}") from None
        return folder

    def put(self, folder: str, name: str, sent: Sent, should_continue: ContinueCheck = always) -> tuple[File, ...]:
        """Move or send all files of the folder; the data is not complete yet. `sent`: files sent earlier."""
        paths = sorted(files_of(folder, "data"))
        if not paths:
            raise Unfit("the command succeeded, but PACELINE_INGEST_DIR is empty")
        if sum(map(len, paths)) + FILE_BYTES * len(paths) > MOST_BYTES:
            raise Unfit(f"{len(paths)} files do not fit into a manifest: write fewer, larger files")
        if isinstance(self._store, FolderStore):
            return self._move(folder, paths, name, should_continue)
        names = {path: f"{name}/{path}" for path in paths}
        self._store.send_all([(f"{folder}/{path}", target) for path, target in names.items()], should_continue, sent)
        return tuple(File(path, *sent[target]) for path, target in names.items())

    def _move(self, folder: str, paths: list[str], name: str, should_continue: ContinueCheck) -> tuple[File, ...]:
        try:
            files = tuple(File(path, *digest(f"{folder}/{path}", should_continue)) for path in paths)
            for path in {*paths, *map(os.path.dirname, paths)}:
                sync(f"{folder}/{path}")
            os.rename(folder, f"{self._to.rstrip('/')}/{name}")
            sync(self._to)
        except OSError as error:
            raise StoreError(f"cannot write {error.filename}: {error.strerror}") from None
        return files

    def complete(self, manifest: DatasetManifest, check_lease: Callable[[], None]) -> None:
        """Make the data available. `check_lease`: raises if the lease is lost."""
        check_lease()
        self._store.create(f"{manifest.name}{MANIFEST}", manifest.to_bytes())
