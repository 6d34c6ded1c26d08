"""Brings what a run has kept for TensorBoard at its place into a folder here, again and again while the run goes on."""

from __future__ import annotations

import os
from pathlib import Path

from paceline.plan import CAPTAIN
from paceline.storage.curves import FOLDER
from paceline.storage.manifest import fit
from paceline.view.places import Source

EVERY_S = 60.0
LARGE_S = 600.0  # between two looks at more than that:
LARGE = 64 * 1024 * 1024  # bytes


class Fetched:
    def __init__(self, source: Source, folder: Path) -> None:
        self._source, self._folder = source, folder
        self._owner: dict[str, str] = {}  # path here -> name there
        self.pause = EVERY_S
        self.over = False  # nothing comes any more

    def refresh(self) -> int:
        """How many files there are. One that has only grown stays the same file, so that it is read on."""
        self.over = self._source.kept.ended(CAPTAIN)
        store, below = self._source.kept.store, f"{self._source.run}/{FOLDER}/"
        count = size = 0
        for name in store.names(below):
            host, _, path = name[len(below) :].partition("/")
            if not path or not fit(path):
                continue
            target = self._folder / self._path(name, host, path)
            scratch = self._folder.parent / "fetched"
            scratch.unlink(missing_ok=True)
            try:
                store.fetch(name, str(scratch), lambda _: True)
            except KeyError:
                continue  # deleted meanwhile
            count, size = count + 1, size + scratch.stat().st_size
            target.parent.mkdir(parents=True, exist_ok=True)
            _put(scratch, target)
        self.pause = LARGE_S if size > LARGE else EVERY_S
        return count

    def _path(self, name: str, host: str, path: str) -> str:
        """Two hosts may have a file of the same name: whoever is later has it under its own."""
        return path if self._owner.setdefault(path, name) == name else f"{path}.{host}"


def _put(came: Path, target: Path) -> None:
    before = target.read_bytes() if target.exists() else b""
    data = came.read_bytes()
    if before and data.startswith(before):
        with target.open("ab") as file:
            file.write(data[len(before) :])
    else:
        os.replace(came, target)  # noqa: PTH105
