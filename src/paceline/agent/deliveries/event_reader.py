"""Reads the events of a run, except frequent ones, each once: the position in the file outlives the process.

If events.jsonl was replaced in the meantime (see event_file.py), reading continues in events.old.jsonl, after the last
event that was read. Frequent events are not there, so they must not be that last one."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from typing import Any

from paceline.agent.deliveries.saved_state import save_position, saved_offset
from paceline.agent.event_file import FREQUENT, NAME, OLD, ROTATED
from paceline.agent.fast_dataclass import record
from paceline.storage.json_values import parse_json, read_json
from paceline.storage.regular_files import open_regular
from paceline.storage.snapshots.manifest import INVALID_FIELDS

Event = dict[str, Any]
BEFORE = 512  # bytes before a position by which it is recognized: events have times
CHUNK = 4 * 1024 * 1024  # bytes read at a time; events.jsonl is rarely larger
_TRIES = 5  # to read both files while none is replaced


@record
class Position:
    """After which event reading continues."""

    offset: int = 0  # in events.jsonl
    before: str = ""  # digest of the bytes before `offset`: another file has others there, even with the same inode
    last: str = ""  # digest of the last event; empty: none was read


class EventReader:
    def __init__(self, folder: str, state_file: str) -> None:
        """`state_file`: of the position; empty: reading begins with the oldest event."""
        self._path, self._old, self._state_file = f"{folder}/{NAME}", f"{folder}/{OLD}", state_file
        self.position = self._load()
        self._saved = self.position

    def read(self) -> list[tuple[Event, Position]]:
        """The next events, each with the position after it; [] if there are none yet."""
        for _ in range(_TRIES):
            try:
                with os.fdopen(open_regular(self._path, follow=True), "rb") as file:
                    inode = os.fstat(file.fileno()).st_ino
                    begin = max(0, self.position.offset - BEFORE)
                    file.seek(begin)
                    data = file.read(CHUNK)
                    skipped = self.position.offset - begin
                    if self.position.before and digest(data[:skipped]) == self.position.before:
                        return self._after_frequent(list(_events(data, begin, skipped)), data, begin)
                    # Read first: when events.jsonl is replaced, what it contained is in the other file already.
                    file.seek(0)
                    data = file.read()
                events = self._after_last(self._earlier(), list(_events(data, 0, 0)))
                if os.stat(self._path).st_ino == inode:
                    return self._after_frequent(events, data, 0)
            except OSError:
                return []  # it does not exist yet
        return []

    def _after_frequent(
        self, events: list[tuple[Event, Position]], data: bytes, begin: int
    ) -> list[tuple[Event, Position]]:
        """Without events, there are only frequent ones, which are not read again."""
        if not events:
            end = data.rfind(b"\n") + 1
            self.position = Position(begin + end, digest(data[max(0, end - BEFORE) : end]), self.position.last)
        return events

    def advance(self, position: Position) -> None:
        self.position = position

    def save(self) -> None:
        if self.position != self._saved and save_position(self._state_file, vars(self.position)):
            self._saved = self.position

    def _load(self) -> Position:
        try:
            state = read_json(self._state_file)
            return Position(saved_offset(state), str(state["before"]), str(state["last"]))
        except (OSError, *INVALID_FIELDS):
            return Position()

    def _earlier(self) -> list[Event]:
        try:
            with os.fdopen(open_regular(self._old, follow=True), "rb") as file:
                return [event for event in map(_parse, file) if event is not None]
        except OSError:
            return []

    def _after_last(self, earlier: list[Event], new: list[tuple[Event, Position]]) -> list[tuple[Event, Position]]:
        """The events after the last one that was read. If that was dropped, all that are left are later."""
        marks = [number for number, (event, _) in enumerate(new) if event.get("event") == ROTATED]
        new = new[marks[-1] + 1 :] if marks else new
        entries = [(event, Position(0, "", _digest(event))) for event in earlier] + new
        if self.position.last:
            read = [number for number, (_, position) in enumerate(entries) if position.last == self.position.last]
            entries = entries[read[-1] + 1 :] if read else entries
        return entries


def _events(data: bytes, begin: int, skipped: int) -> Iterator[tuple[Event, Position]]:
    """The events in `data`, which is at `begin` in the file; the first `skipped` bytes were read before."""
    end = skipped
    for line in data[skipped : data.rfind(b"\n") + 1].splitlines(keepends=True):
        end += len(line)
        event = _parse(line)
        if event is not None and event.get("event") not in FREQUENT:
            before = digest(data[max(0, end - BEFORE) : end])
            yield event, Position(begin + end, before, _digest(event))


def _parse(line: bytes) -> Event | None:
    try:
        event = parse_json(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None


def _digest(event: Event) -> str:
    return digest(json.dumps(event).encode())


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]
