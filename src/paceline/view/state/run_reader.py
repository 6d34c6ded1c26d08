"""Reads the events of a run once, and then only new ones: its state, history and timeline, in bounded memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from paceline.agent.event_file import FREQUENT, OLD, ROTATED, STORED
from paceline.view.files import run_folders
from paceline.view.output.tail import Tail
from paceline.view.state.event_limits import MOST_NAMES, EventLimits
from paceline.view.state.events import Event, EventFile, parse
from paceline.view.state.run_state import State, fold
from paceline.view.state.status_reader import Standing, assess
from paceline.view.state.timeline import Timeline
from paceline.view.text.wording import describe

_HISTORY = 24 * 1024 * 1024  # bytes of events; events.jsonl and events.old.jsonl have fewer, except if there are
# thousands of tasks. An event needs memory in addition: if they are very short, there are fewer bytes of them.
_MOST_EVENTS = 250_000
_TRIES = 5  # to read both files while the captain replaces them


@dataclass(frozen=True, slots=True)
class Recorded:
    """An event, as it was recorded. `number`: 1 for the first event that was read."""

    number: int
    kind: str
    line: bytes

    def event(self) -> Event:
        event = parse(self.line)
        assert event is not None  # it was parsed before
        return event

    def to_json(self) -> dict[str, Any]:
        event = self.event()
        return {
            "number": self.number, "at": event.at, "event": event.kind, "generation": event.generation,
            "text": describe(event), "data": event.data,
        }  # fmt: skip


class StateReader:
    """The state of a run, kept up to date."""

    def __init__(self, run: run_folders.Run) -> None:
        self.run = run
        self._begin()

    def _begin(self) -> None:
        self.state, self._limits = State(), EventLimits()
        self._file = EventFile(self.run.folder, admit=self._limits.admit)

    def update(self, on_event: Callable[[Event], None] | None = None) -> int:
        """Reads what is new, and returns the number of events. They are not kept: there may be very many. `on_event`:
        called for each."""
        count = 0
        while lines := self._file.read():
            fold((event for event, _ in lines), self.state)
            self._add(lines)
            if on_event is not None:
                for event, _ in lines:
                    on_event(event)
            count += len(lines)
        return count

    def _add(self, events: list[tuple[Event, bytes]]) -> None:
        """For subclasses: called for all events."""

    def standing(self, alive: bool) -> Standing:
        """`alive`: whether the run was alive before the last `update`."""
        problems = [self._file.problem] if self._file.problem else []
        left_out = [*self._file.left_out, *self._limits.left_out]
        return assess(self.run, self.state, problems, alive, left_out=left_out)

    def close(self) -> None:
        self._file.close()


class RunReader(StateReader):
    """The state, the history and the timeline of a run, kept up to date. The history has no steps and resources."""

    def __init__(self, run: run_folders.Run) -> None:
        planned = run_folders.plan(run.folder).get("tasks", ())[:MOST_NAMES]
        self.hosts = {str(task["name"]): str(task.get("host", "")) for task in planned}
        self._is_begun = False
        super().__init__(run)

    def _begin(self) -> None:
        super()._begin()
        self._is_old_read = False
        self._forget()

    def _forget(self) -> None:
        self.timeline = Timeline(self.hosts)
        self.joined: set[str] = set()  # hosts
        self.history: deque[Recorded] = deque()
        self.count = 0  # events of the history, including those that were dropped
        self._size = 0

    def update(self, on_event: Callable[[Event], None] | None = None) -> int:
        if self._is_begun:
            return super().update(on_event)
        for number in range(_TRIES):
            if number:
                self._file.close()
                self._begin()
            before = self._old_signature()
            count = super().update(on_event)
            if self._old_signature() == before:
                break
        self._is_begun = count > 0
        return count

    def wanted_hosts(self) -> dict[str, list[str]]:
        """The planned hosts with their tasks, without those that `scale` could add or has removed."""
        by_host: dict[str, list[str]] = {}
        for task, host in self.hosts.items():
            if not self.state.tasks or self.state.is_wanted(task):
                by_host.setdefault(host, []).append(task)
        return by_host

    def selected(
        self, after: int = 0, limit: int = 500, kinds: Collection[str] = (), task: str = "", newest: bool = False
    ) -> list[Recorded]:
        """Events with a number above `after`, oldest first; `newest`: the last ones."""
        events = reversed(self.history) if newest else iter(self.history)
        selected: list[Recorded] = []
        for each in events:
            if each.number <= after:
                if newest:
                    break
                continue
            if (not kinds or each.kind in kinds) and (not task or _concerns(each.event(), task)):
                selected.append(each)
                if len(selected) >= limit:
                    break
        return selected[::-1] if newest else selected

    def _add(self, events: list[tuple[Event, bytes]]) -> None:
        for event, line in events:
            is_mark = event.kind == ROTATED and not event.data.get(STORED)
            if is_mark and not self._is_begun and not self._is_old_read:
                self._read_old_events()
            self.timeline.add(event)
            if event.kind == "member-joined":
                self.joined.add(event.text("host"))
            elif event.kind == "member-lost":
                self.joined.discard(event.text("host"))
            if event.kind in FREQUENT or event.kind == ROTATED:
                continue
            self.count += 1
            self._size += len(line)
            self.history.append(Recorded(self.count, event.kind, line))
            while self.history and (self._size > _HISTORY or len(self.history) > _MOST_EVENTS):
                self._size -= len(self.history.popleft().line)

    def _old_signature(self) -> tuple[int, int] | None:
        try:
            status = (self.run.folder / OLD).stat()
        except OSError:
            return None
        return status.st_ino, status.st_size

    def _read_old_events(self) -> None:
        """Those of the older file, in place of what is before the mark in the newer one: it repeats some of them. If
        the older file is lost, they are all that is left."""
        self._is_old_read = True
        is_first = True
        with closing(Tail(self.run.folder / OLD)) as file:
            while lines := file.read():
                events = [(event, line) for line in lines if (event := parse(line)) is not None]
                events = [(event, line) for event, line in events if self._limits.admit(event)]
                if events and is_first:
                    self._forget()
                    is_first = False
                self._add(events)


def _concerns(event: Event, task: str) -> bool:
    return task == event.text("task") or task in event.names("tasks") or task in event.names("scope")
