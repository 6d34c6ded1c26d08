"""The events of a run, read while it writes them: only new lines, because tests ask for them many times a second."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

Event = dict[str, Any]


class EventLog:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._events: list[Event] = []
        self._inode = self._offset = 0

    def read(self) -> list[Event]:
        """All events so far, in order."""
        with contextlib.suppress(OSError), self._path.open("rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            if inode != self._inode:  # the first time, or the file was replaced
                self._events, self._inode, self._offset = [], inode, 0
            file.seek(self._offset)
            data = file.read()
            lines = data[: data.rfind(b"\n") + 1]
            self._offset += len(lines)
            self._events += [json.loads(line) for line in lines.splitlines() if line]
        return self._events
