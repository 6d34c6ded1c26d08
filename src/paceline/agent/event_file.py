"""events.jsonl, whose size is limited. If it is too large, it is replaced by a file that begins with the events that
still determine the state of the run, followed by an event of the kind `rotated`, which has the sums over all events
(see goodput.py and resource_usage.py). What happened before is added to events.old.jsonl, whose size is limited, too.
Steps and resources are left out there: the series contain them (see series_files.py)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any, Callable

from paceline.agent import state_events
from paceline.agent.goodput import Goodput
from paceline.agent.resource_usage import Resources
from paceline.agent.run_files import Appender, replace_bytes, stamp
from paceline.agent.series_files import Series
from paceline.storage.regular_files import append_to_regular, open_regular

NAME = "events.jsonl"
OLD = "events.old.jsonl"
LIMIT = 2 * 1024 * 1024  # bytes of events.jsonl: reading it takes about 0.1 s
READ_LIMIT = 128 * 1024 * 1024  # bytes of events.jsonl that are read at once
KEPT_LIMIT = 16 * 1024 * 1024  # bytes of the events that still determine the state
LARGE_SHARE = 16  # an event that takes more than this part of the limit is large
OLD_LIMIT = 16 * 1024 * 1024  # bytes of events.old.jsonl; the older half is dropped
ROTATED = "rotated"
STORED = "stored"  # a field of that event: earlier events were deleted from the store; see transfers/stored_events.py
FREQUENT = ("step", "resources")  # events that are in the series


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
        if event.get("event") in FREQUENT:
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
        events = state_events.parse(_read_lines(self._path))
        kept = lines_of(state_events.needed(events))
        generation = max((event["generation"] for event in events if type(event.get("generation")) is int), default=0)
        sums = {"goodput": Goodput().add_all(events).to_json(), "resources": Resources().add_all(events).to_json()}
        mark = {"at": stamp(), "event": ROTATED, "generation": generation, **sums}
        self._add_to_old(events)
        self._file.close()
        replace_bytes(self._path, b"".join([*kept, json.dumps(mark).encode() + b"\n"]))
        self._size = _size(self._path)
        self._rotate_at = max(self._limit, 2 * self._size)

    def _add_to_old(self, events: list[dict[str, Any]]) -> None:
        """Adds what has happened since the last rotation."""
        marks = [number for number, event in enumerate(events) if event.get("event") == ROTATED]
        new = events[marks[-1] + 1 if marks else 0 :]
        lines = [json.dumps(event).encode() + b"\n" for event in new if event.get("event") not in FREQUENT]
        with os.fdopen(append_to_regular(self._old), "wb") as file:
            file.writelines(lines)
        if _size(self._old) > OLD_LIMIT:
            with os.fdopen(open_regular(self._old, follow=True), "rb") as file:
                file.seek(-OLD_LIMIT // 2, os.SEEK_END)
                file.readline()  # it is incomplete
                replace_bytes(self._old, file.read())


def read_sums(folder: str) -> tuple[Goodput, Resources]:
    """The time of a run by kind, and what it has used, up to its last event."""
    try:
        events = state_events.parse(_read_lines(f"{folder}/{NAME}"))
    except OSError:
        events = []  # the run begins
    return Goodput().add_all(events), Resources().add_all(events)


def lines_of(events: Iterable[Mapping[str, Any]]) -> list[bytes]:
    """The newest events that determine the state, as lines."""
    return _newest([json.dumps(event).encode() + b"\n" for event in events], KEPT_LIMIT)


def _read_lines(path: str) -> list[bytes]:
    """Of a file that is too large, as an earlier version has written it or it is damaged: its begin and its end."""
    with os.fdopen(open_regular(path, follow=True), "rb") as file:
        begin = file.read(READ_LIMIT // 2).split(b"\n")
        position = max(file.tell(), file.seek(0, os.SEEK_END) - READ_LIMIT // 2)
        file.seek(position)
        end = file.read(READ_LIMIT // 2).split(b"\n")
    is_whole = position <= READ_LIMIT // 2
    return [*begin[:-1], begin[-1] + end[0], *end[1:]] if is_whole else [*begin[:-1], *end[1:]]


def _newest(lines: list[bytes], limit: int) -> list[bytes]:
    """The last lines within this number of bytes; large ones last, so that they do not displace all others. All, unless
    there are thousands of tasks or events are huge.

    >>> _newest([b"first", b"second", b"third"], 11)
    [b'second', b'third']
    >>> _newest([b"x" * 50, b"first", b"x" * 200, b"second"], 160) == [b"x" * 50, b"first", b"second"]
    True
    """
    newest_first = range(len(lines) - 1, -1, -1)
    kept, left = [], limit
    for number in sorted(newest_first, key=lambda number: len(lines[number]) > limit // LARGE_SHARE):
        if len(lines[number]) <= left:
            left -= len(lines[number])
            kept.append(number)
    return [lines[number] for number in sorted(kept)]


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
