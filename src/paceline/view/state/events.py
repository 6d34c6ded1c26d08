"""Reads the events of a run from events.jsonl, even while they are written, and the file is replaced."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.agent.event_file import NAME, OLD, READ_LIMIT, ROTATED, STORED
from paceline.plan import INGEST
from paceline.view.files.run_files import is_count, is_number, is_time, parse_json, parse_time
from paceline.view.output.tail import CHUNK, Tail

KINDS = (
    "run-started", "member-joined", "member-lost", "waiting", "ingest-started", "ingest-done", "ingest-skipped",
    "ingest-failed", "scaled", "pausing", "pause-canceled", "paused", "resumed", "generation-formed", "task-started",
    "start-times", "step", "resources", "not-finite",
    "spike", "saved", "committed", "evaluated", "task-exited", "hang", "stacks", "restart", "recovered", "spare-ready",
    "captain-returned", "clock-changed", "note", "warning", "ending", "run-ended", ROTATED,
)  # fmt: skip
# Fields that are numbers, or null, in every kind of event that has them.
_NUMBERS = frozenset(
    {
        "step", "pid", "bytes", "files", "memory", "count", "limit", "code", "since_s", "limit_s", "took_s", "silent_s",
        "delay_s", "grace_s", "first_step_after_s", "steps_per_s", "imports_s", "joining_s", "joined_s", "restoring_s",
        "restored_s", "first_step_s", "shift_s", "was", "paused_s",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Event:
    at: str
    kind: str
    generation: int
    data: dict[str, Any]

    def get(self, key: str) -> Any:
        return self.data.get(key)

    def text(self, key: str) -> str:
        value = self.data.get(key)
        return value if isinstance(value, str) else ""

    def number(self, key: str) -> float:
        return number(self.data.get(key)) or 0

    def names(self, key: str) -> list[str]:
        value = self.data.get(key)
        return [str(name) for name in value] if isinstance(value, list) else []


def parse(line: bytes | str) -> Event | None:
    """Parse a line; None if it is not an event (incomplete or damaged)."""
    event = _parsed(line)
    return event if isinstance(event, Event) else None


def _parsed(line: bytes | str) -> Event | str:
    """The event in a line, or why there is none."""
    try:
        data = parse_json(line)
    except ValueError as error:
        return str(error)
    if not isinstance(data, dict):
        return "is damaged: it is not a JSON object"
    kind, at, generation = data.get("event"), data.get("at"), data.get("generation", 0)
    if not isinstance(kind, str):
        return "is damaged: `event` is not a string"
    if not isinstance(at, str) or not is_time(at):
        return "is damaged: `at` is not a time"
    if not is_count(generation):
        return "is damaged: `generation` is not a number"
    for name in _NUMBERS.intersection(data):
        if data[name] is not None and not is_number(data[name]):
            return f"is damaged: `{name}` is not a number"
    return Event(at, kind, generation, data)


class EventTail(Tail):
    """Reads events.jsonl incrementally. If it is replaced, reading continues after the events that the new file repeats
    (see agent/event_file.py)."""

    def __init__(self, folder: Path, limit: int | None = None) -> None:
        """`limit`: bytes; of a larger file, only the beginning and the end are read."""
        super().__init__(folder / NAME)
        self._limit = limit
        self._size = 0  # of what was read
        self.skipped = 0  # bytes

    def read(self) -> list[bytes]:
        lines = super().read()
        if lines or not self.is_replaced():
            return lines
        if lines := super().read():  # written just before it was replaced
            return lines
        self.close()
        self.rest()
        self._size = 0
        return self.skip_repeated()

    def skip_repeated(self) -> list[bytes]:
        """The first lines after those that repeat earlier events."""
        skipped: list[bytes] = []
        while lines := super().read():
            skipped += lines
        marks = [number for number, line in enumerate(skipped) if _MARK in line and _STORED not in line]
        return skipped[marks[-1] + 1 :] if marks else skipped

    def _more(self, size: int = CHUNK) -> bytes | None:
        if self._limit is not None and self._size >= self._limit // 2 and self._file is not None and not self.skipped:
            self._skip_middle(self._limit // 2)
        data = super()._more(size)
        self._size += len(data or b"")
        return data

    def _skip_middle(self, end: int) -> None:
        """`end`: bytes to read at the end of the file."""
        assert self._file is not None
        position = self._file.tell()
        self.skipped = max(0, self._file.seek(0, os.SEEK_END) - end - position)
        self._file.seek(position + self.skipped)
        if self.skipped:
            self._file.readline(CHUNK)  # it is incomplete
            self.rest()


_MARK, _STORED = f'"event": "{ROTATED}"'.encode(), f'"{STORED}": true'.encode()


def follow(folder: Path) -> Tail:
    return EventTail(folder)


def read(folder: Path, report_damage: Callable[[str], None] = lambda problem: None) -> Iterator[Event]:
    """The events in events.jsonl, oldest first: they determine the state of the run. `report_damage`: called once, if
    lines were skipped or the file cannot be read. An incomplete last line is not damage: it is being written, or its
    writer was killed."""
    with closing(EventFile(folder)) as file:
        while lines := file.read():
            yield from (event for event, _ in lines)
        if file.problem:
            report_damage(file.problem)


class EventFile:
    """Reads events.jsonl incrementally, and skips lines that are not events."""

    def __init__(self, folder: Path, old: bool = False, admit: Callable[[Event], bool] | None = None) -> None:
        """`old`: first those of events.old.jsonl. `admit`: for readers that keep what they read: they get only events
        for which it returns True, and of a file that is too large only the beginning and the end."""
        self._tail = EventTail(folder, None if admit is None else READ_LIMIT)
        self._admit = admit
        self._old = Tail(folder / OLD) if old and (folder / OLD).exists() else None
        self._line = self._skipped = 0
        self._first = ""  # what is wrong with the first line that was skipped

    def read(self) -> list[tuple[Event, bytes]]:
        """The next events with their lines; [] if there are none yet."""
        while lines := self._read_lines():
            events = [(event, line) for line in lines if (event := self._event(line)) is not None]
            if events:
                return events
        return []

    def _read_lines(self) -> list[bytes]:
        if self._old is None:
            return self._tail.read()
        if lines := self._old.read():
            return lines
        self._old.close()
        self._old = None
        return self._tail.skip_repeated()

    def _event(self, line: bytes) -> Event | None:
        self._line += 1
        event = _parsed(line) if line else ""  # a writer that had to drop half a line starts with an empty one
        if isinstance(event, Event):
            return event if self._admit is None or self._admit(event) else None
        if event:
            self._skipped += 1
            self._first = self._first or f"events.jsonl: line {self._line} {event}"
        return None

    @property
    def problem(self) -> str:
        """Why events are missing; empty: none are."""
        more = f", and {self._skipped - 1} more lines" if self._skipped > 1 else ""
        return self._tail.problem or (self._first + more)

    @property
    def left_out(self) -> list[str]:
        """What was not read although nothing is wrong with it."""
        skipped = self._tail.skipped
        return [f"{NAME}: {skipped >> 20} MiB in the middle of the file are not read"] if skipped else []

    def close(self) -> None:
        self._tail.close()
        if self._old is not None:
            self._old.close()


def started_tasks(event: Event) -> list[str]:
    """The tasks that start with this event: before it, an announced restart has not taken place."""
    if event.kind in ("ingest-started", "ingest-skipped", "ingest-done"):
        return [INGEST]
    return event.names("tasks") if event.kind == "generation-formed" else []


def seconds(at: str | None) -> float | None:
    """The time of an event as seconds since 1970."""
    time = None if at is None else parse_time(at)
    return None if time is None else time.timestamp()


def number(value: Any) -> float | None:
    return value if is_number(value) else None
