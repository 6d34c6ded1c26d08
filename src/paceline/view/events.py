"""Reads the events of a run from events.jsonl, even while they are written, and the file is replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from paceline.agent.event_file import NAME, OLD, ROTATED
from paceline.view.run_files import is_count, is_number, is_time, parse_json
from paceline.view.tail import Tail

KINDS = (
    "run-started", "member-joined", "member-lost", "waiting", "ingest-started", "ingest-done", "ingest-skipped",
    "ingest-failed", "generation-formed", "task-started", "start-times", "step", "resources", "not-finite", "spike",
    "saved", "committed", "evaluated", "task-exited", "hang", "stacks", "restart", "recovered", "spare-ready",
    "captain-returned", "note", "warning", "ending", "run-ended", ROTATED,
)  # fmt: skip
# Fields that are numbers, or null, in every kind of event that has them.
_NUMBERS = frozenset(
    {
        "step", "pid", "bytes", "files", "memory", "count", "limit", "code", "since_s", "limit_s", "took_s", "silent_s",
        "delay_s", "grace_s", "first_step_after_s", "steps_per_s", "imports_s", "joining_s", "joined_s", "restoring_s",
        "restored_s", "first_step_s",
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

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / NAME)

    def read(self) -> list[bytes]:
        lines = super().read()
        if lines or not self.is_replaced():
            return lines
        if lines := super().read():  # written just before it was replaced
            return lines
        self.close()
        self.rest()
        return self.skip_repeated()

    def skip_repeated(self) -> list[bytes]:
        """The first lines after those that repeat earlier events."""
        skipped: list[bytes] = []
        while lines := super().read():
            skipped += lines
        marks = [number for number, line in enumerate(skipped) if _MARK in line]
        return skipped[marks[-1] + 1 :] if marks else skipped


_MARK = f'"event": "{ROTATED}"'.encode()


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

    def __init__(self, folder: Path, old: bool = False) -> None:
        """`old`: first those of events.old.jsonl."""
        self._tail = EventTail(folder)
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
            return event
        if event:
            self._skipped += 1
            self._first = self._first or f"events.jsonl: line {self._line} {event}"
        return None

    @property
    def problem(self) -> str:
        """Why events are missing; empty: none are."""
        more = f", and {self._skipped - 1} more lines" if self._skipped > 1 else ""
        return self._tail.problem or (self._first + more)

    def close(self) -> None:
        self._tail.close()
        if self._old is not None:
            self._old.close()


def seconds(at: str | None) -> float | None:
    """The time of an event as seconds since 1970."""
    return datetime.fromisoformat(at).timestamp() if at is not None and is_time(at) else None


def number(value: Any) -> float | None:
    return value if is_number(value) else None
