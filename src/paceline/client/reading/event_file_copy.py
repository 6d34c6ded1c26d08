"""Copies a run's TensorBoard files from its store to a local folder, repeatedly while the run continues."""

from __future__ import annotations

import os
from pathlib import Path

from paceline.plan import CAPTAIN
from paceline.storage.snapshots.manifest import is_safe_path
from paceline.storage.tensorboard_event_files import FOLDER
from paceline.view.snapshots.snapshot_locations import Source

INTERVAL_S = 60.0
LARGE_INTERVAL_S = 600.0  # if there are more bytes than this:
LARGE = 64 * 1024 * 1024


class EventFileCopy:
    def __init__(self, source: Source, folder: Path) -> None:
        self._source, self._folder = source, folder
        self._owner: dict[str, str] = {}  # local path -> name in the store
        self.interval = INTERVAL_S  # seconds until the next refresh
        self.is_complete = False  # the run has ended: there will be no more files

    def refresh(self) -> int:
        """Returns the number of files. A file that has only grown is appended to, so that readers continue in it."""
        self.is_complete = self._source.archive.ended(CAPTAIN)
        store, prefix = self._source.archive.store, f"{self._source.run}/{FOLDER}/"
        count = size = 0
        for name in store.names(prefix):
            host, _, path = name[len(prefix) :].partition("/")
            if not path or not is_safe_path(path):
                continue
            target = self._folder / self._path(name, host, path)
            scratch = self._folder.parent / "fetched"
            scratch.unlink(missing_ok=True)
            try:
                store.fetch(name, str(scratch), lambda _: True)
            except KeyError:
                continue  # deleted in the meantime
            count, size = count + 1, size + scratch.stat().st_size
            target.parent.mkdir(parents=True, exist_ok=True)
            _update(scratch, target)
        self.interval = LARGE_INTERVAL_S if size > LARGE else INTERVAL_S
        return count

    def _path(self, name: str, host: str, path: str) -> str:
        """Two hosts may have a file of the same name: the second one gets its host as suffix."""
        return path if self._owner.setdefault(path, name) == name else f"{path}.{host}"


def _update(fetched: Path, target: Path) -> None:
    previous = target.read_bytes() if target.exists() else b""
    data = fetched.read_bytes()
    if previous and data.startswith(previous):
        with target.open("ab") as file:
            file.write(data[len(previous) :])
    else:
        os.replace(fetched, target)  # noqa: PTH105
