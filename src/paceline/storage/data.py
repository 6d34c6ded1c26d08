"""Data at its place: the files of one ingest in a folder of their own, and the manifest last. Without it, none exists.

<to>/<fingerprint>/...             the first that was made of these inputs
<to>/<fingerprint>-2/...           the next: nothing is written over, and nothing deleted
<to>/<fingerprint>.manifest.json   which files, and that they are all there: beside, as programs read all in a folder
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass

from paceline.storage.files import digest, sync
from paceline.storage.folder import Folder
from paceline.storage.manifest import (
    FILE_BYTES,
    MOST_BYTES,
    VERSION,
    Damaged,
    File,
    clashing,
    file_of,
    fit,
    read_object,
)  # fmt: skip
from paceline.storage.snapshots import Unfit, always, files_of
from paceline.storage.store import Sent, Store, StoreError, Wanted

MANIFEST = ".manifest.json"  # after the name of the folder
TURNS = ".turns"
_BEING_MADE = ".ingest-"
_NAME = re.compile(r"[0-9a-f]{16}(-[1-9][0-9]{0,5})?")


@dataclass(frozen=True)
class Made:
    """What an ingest has made."""

    name: str  # of its folder
    run: str  # that made it
    at: str
    files: tuple[File, ...]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    def to_bytes(self) -> bytes:
        words = {"version": VERSION, "name": self.name, "run": self.run, "at": self.at}
        files = [{"path": file.path, "size": file.size, "sha256": file.sha256} for file in self.files]
        return json.dumps({**words, "files": files}).replace('{"path"', '\n{"path"').encode()


def parse(data: bytes, name: str) -> Made:
    """`name`: for the words of an error."""
    found = read_object(data, name)
    try:
        made = Made(str(found["name"]), str(found["run"]), str(found["at"]), tuple(map(file_of, found["files"])))
    except (KeyError, TypeError, ValueError) as error:
        raise Damaged(f"{name} is no manifest of data: {error}") from None
    for file in made.files:
        if not fit(file.path):
            raise Damaged(f"{name} names the path {file.path!r}, which is none below its folder")
    if clash := clashing(file.path for file in made.files):
        raise Damaged(f"{name} names {clash!r} as a file and as a folder")
    return made


def is_name(text: str) -> bool:
    """Whether a folder of that name may be data that was made by an ingest.

    >>> is_name("0123456789abcdef-2"), is_name("digits")
    (True, False)
    """
    return _NAME.fullmatch(text) is not None


class Data:
    """Of one fingerprint at one place."""

    def __init__(self, store: Store, to: str, fingerprint: str) -> None:
        self._store, self._to, self._fingerprint = store, to, fingerprint
        self._pattern = re.compile(re.escape(fingerprint) + r"(?:-([1-9][0-9]{0,5}))?")

    def newest(self) -> Made | None:
        """None: there is none that is complete."""
        for number in sorted(self._numbers(), reverse=True):
            name = f"{self._name(number)}{MANIFEST}"
            data = self._store.read(name, MOST_BYTES)
            if data is not None:
                return parse(data, name)
        return None

    def next_name(self) -> str:
        """Of a folder that nobody has written to."""
        return self._name(max(self._numbers(), default=0) + 1)

    def _numbers(self) -> list[int]:
        found = map(self._pattern.fullmatch, self._store.folders(""))
        return [int(each[1] or 1) for each in found if each]

    def _name(self, number: int) -> str:
        return self._fingerprint if number == 1 else f"{self._fingerprint}-{number}"

    def address(self, name: str) -> str:
        """As tasks are told it: a folder, or what begins the names of its files in a bucket."""
        place = self._to.rstrip("/")
        return f"{place}/{name}" if isinstance(self._store, Folder) else f"{place}/{name}/"

    # ---- while it is made

    def scratch(self, otherwise: str) -> str:
        """An empty folder to write to: where the data will be, if that is a folder, so that it need not be copied. What
        an ingest that was killed has left there goes: it was never data. `otherwise`: for what goes to a bucket."""
        above = self._to.rstrip("/") if isinstance(self._store, Folder) else otherwise
        begins = f"{_BEING_MADE}{self._fingerprint}-"
        try:
            os.makedirs(above, exist_ok=True)
            for name in os.listdir(above):
                if name.startswith(begins):
                    shutil.rmtree(f"{above}/{name}", ignore_errors=True)
            folder = f"{above}/{begins}{os.urandom(4).hex()}"
            os.mkdir(folder)
        except OSError as error:
            raise StoreError(f"cannot write to {above}: {error.strerror}") from None
        return folder

    def put(self, folder: str, name: str, sent: Sent, wanted: Wanted = always) -> tuple[File, ...]:
        """All that is in that folder, under this name; it is not complete yet. `sent`: what an earlier try has sent."""
        paths = sorted(files_of(folder, "data"))
        if not paths:
            raise Unfit("the command has ended well, and PACELINE_INGEST_DIR is empty")
        if sum(map(len, paths)) + FILE_BYTES * len(paths) > MOST_BYTES:
            raise Unfit(f"{len(paths)} files are more than a manifest has room for: put them into fewer")
        if isinstance(self._store, Folder):
            return self._move(folder, paths, name, wanted)
        names = {path: f"{name}/{path}" for path in paths}
        self._store.send_all([(f"{folder}/{path}", there) for path, there in names.items()], wanted, sent)
        return tuple(File(path, *sent[there]) for path, there in names.items())

    def _move(self, folder: str, paths: list[str], name: str, wanted: Wanted) -> tuple[File, ...]:
        try:
            files = tuple(File(path, *digest(f"{folder}/{path}", wanted)) for path in paths)
            for each in {*paths, *map(os.path.dirname, paths)}:
                sync(f"{folder}/{each}")
            os.rename(folder, f"{self._to.rstrip('/')}/{name}")
            sync(self._to)
        except OSError as error:
            raise StoreError(f"cannot write {error.filename}: {error.strerror}") from None
        return files

    def complete(self, made: Made, still: Callable[[], None]) -> None:
        """From here on it is there. `still`: raises where it is not ours to say."""
        still()
        self._store.create(f"{made.name}{MANIFEST}", made.to_bytes())
