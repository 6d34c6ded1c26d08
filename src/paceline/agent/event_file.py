"""events.jsonl, whose size is limited. If it is too large, it is replaced by a file that begins with the events that
still determine the state of the run, followed by an event of the kind `rotated`. What happened before is added to
events.old.jsonl, whose size is limited, too. Steps are left out there: the series contain them (see series.py)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, Callable

from paceline.agent import state_events
from paceline.agent.run_files import Appender, replace_bytes, stamp
from paceline.agent.series import Series
from paceline.storage.regular_files import open_regular

NAME = "events.jsonl"
OLD = "events.old.jsonl"
LIMIT = 2 * 1024 * 1024  # bytes of events.jsonl: reading it takes about 0.1 s
OLD_LIMIT = 16 * 1024 * 1024  # bytes of events.old.jsonl; the older half is dropped
ROTATED = "rotated"


class EventFile:
    def __init__(self, folder: str, report: Callable[[str], None], limit: int = LIMIT) -> None:
        self._folder, self._limit = folder, limit
        self._path, self._old = f"{folder}/{NAME}", f"{folder}/{OLD}"
        self._file = Appender(self._path, report)
        self._series = Series(folder)
        self._size: int | None = None  # None: not known yet
        self._rotate_at = limit

    def write(self, line: bytes, event: Mapping[str, Any]) -> bool:
        """`line`: the event as JSON, with a line end. Returns whether it was written."""
        if event.get("event") == "step":
            self._series.add(event)
        is_written = self._file.write(line)
        self._size = self._size + len(line) if self._size is not None else _size(self._path)
        if is_written and self._size >= self._rotate_at:
            try:
                self._rotate()
            except OSError:  # the disk is full
                self._rotate_at = self._size + self._limit
        return is_written

    def try_again(self) -> None:
        self._file.try_again()

    def close(self) -> None:
        self._file.close()

    def _rotate(self) -> None:
        with os.fdopen(open_regular(self._path, follow=True), "rb") as file:
            lines = file.read().splitlines(keepends=True)
        events = state_events.parse(lines)
        kept = [json.dumps(event).encode() + b"\n" for event in state_events.needed(events)]
        generation = max((event["generation"] for event in events if type(event.get("generation")) is int), default=0)
        mark = {"at": stamp(), "event": ROTATED, "generation": generation}
        self._add_to_old(events)
        self._file.close()
        replace_bytes(self._path, b"".join([*kept, json.dumps(mark).encode() + b"\n"]))
        self._size = _size(self._path)
        self._rotate_at = max(self._limit, 2 * self._size)

    def _add_to_old(self, events: list[dict[str, Any]]) -> None:
        """Adds what has happened since the last rotation."""
        marks = [number for number, event in enumerate(events) if event.get("event") == ROTATED]
        new = events[marks[-1] + 1 if marks else 0 :]
        lines = [json.dumps(event).encode() + b"\n" for event in new if event.get("event") != "step"]
        fd = os.open(self._old, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.writelines(lines)
        if _size(self._old) > OLD_LIMIT:
            with open(self._old, "rb") as file:
                file.seek(-OLD_LIMIT // 2, os.SEEK_END)
                file.readline()  # it is incomplete
                replace_bytes(self._old, file.read())


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
