"""Writes the output of pods to the files that a local run has; lines that were written before are skipped.

How far the output of each pod was read is a position in that output. Times of different pods are never compared: the
clocks of their nodes, and that of this machine, may differ.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import threading
from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from paceline.agent.event_file import EventFile
from paceline.agent.limited_log import LimitedLog
from paceline.agent.run_files import replace, stamp
from paceline.plan import LOG_LIMIT
from paceline.storage.json_values import parse_json
from paceline.storage.log_parts import LogReader
from paceline.storage.stored_run_files import TASK_NAME
from paceline.view.files import run_folders
from paceline.view.state.events import seconds

LOCK = "following"  # locked by the process that updates the folder or submits the run
EVENTS, AGENTS = "events.jsonl", "agents.log"
COMMAND_LINE = "command-line"  # the author of events that the captain did not write
_OUTPUT = re.compile(rf"({TASK_NAME}) (\d{{4}}-\d\d-\d\dT\S+Z g\d{{1,9}} [|~] ?.*)")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", re.ASCII)
DEEPEST = 16  # levels of an event
POSITIONS = "positions.json"
OVERLAP_S = 60  # seconds of a log that are read twice: the clock of a node may be set back by this much
_TAIL_BYTES = 1024 * 1024  # what a process may have written since it last saved its positions
_MOST_OPEN = 64  # files


@contextmanager
def try_lock(folder: Path) -> Iterator[bool]:
    """Yields whether this process has the lock to write to the folder. False: another process follows the run."""
    lock = os.open(folder / LOCK, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(lock)


@dataclass(frozen=True)
class Position:
    """In the output of a container: after the last line that was read."""

    at: str  # the time of that line, by the clock of its node
    lines: int  # how many lines with that time were read, one after the other


class Inbox:
    def __init__(self, folder: Path, tasks: Collection[str] | None = None, log_limit: int = LOG_LIMIT) -> None:
        """`tasks`: those whose output is written; None: all. `log_limit`: bytes that are kept of the output of each."""
        self._folder, self._log_limit = folder, log_limit
        self._tasks = None if tasks is None else frozenset(tasks)
        limit = run_folders.copy_limit(folder)
        self._limit = math.inf if limit is None else limit  # bytes of output to keep
        self._left = math.inf if limit is None else limit - _size_of_output(folder)  # bytes to write, at least
        self._is_full = False
        self._lock = threading.Lock()
        self._events = EventFile(str(folder), lambda problem: None)
        self._logs: dict[str, LimitedLog] = {}
        self._positions = _load_positions(folder)
        self._saved_positions = dict(self._positions)
        self.formed = False  # a generation has been formed
        self.complete = False  # a generation has been formed, and no host has been lost since
        self.joined: set[str] = set()  # hosts that have joined their captain

    def has_task(self, name: str) -> bool:
        return self._tasks is None or name in self._tasks

    def reader(self, captain: bool, container: str = "") -> Reader:
        """`container`: identifies the container whose output is read, to continue where it was read before."""
        return Reader(self, captain, container)

    def note(self, text: str) -> None:
        """Write an event that this process, not the captain, reports about the cluster."""
        with self._lock:
            self._note(text)

    def _note(self, text: str) -> None:
        event = {"at": stamp(), "event": "note", "generation": 0, "by": COMMAND_LINE, "text": text}
        self._write(EVENTS, json.dumps(event))

    def position(self, container: str) -> Position | None:
        return self._positions.get(container)

    def since(self, container: str) -> str | None:
        """From when on the output of a container is to be read, by the clock of its node. None: all of it."""
        position = self._positions.get(container)
        read_until = seconds(position.at) if position is not None else None
        return stamp(max(0.0, read_until - OVERLAP_S)) if read_until is not None else None

    def save_positions(self, containers: Container[str]) -> None:
        """`containers`: those that still exist."""
        with self._lock:
            positions = {each: position for each, position in self._positions.items() if each in containers}
        if positions != self._saved_positions:
            with suppress(OSError):
                replace(str(self._folder / POSITIONS), {"positions": {k: astuple(v) for k, v in positions.items()}})
                self._saved_positions = positions

    def put(self, name: str, line: str) -> None:
        with self._lock:
            self._write(name, line)

    def advance(self, container: str, at: str) -> None:
        """A line with this time was read, and is in its file."""
        with self._lock:
            before = self._positions.get(container)
            repeated = before.lines if before is not None and before.at == at else 0
            self._positions[container] = Position(at, repeated + 1)

    def close(self) -> None:
        """Close the files; they are opened again if something is written."""
        with self._lock:
            self._events.close()
            self._close_logs()

    def last_lines(self, name: str) -> Counter[str]:
        with self._lock:
            return Counter(self._tail(name))

    def _tail(self, name: str) -> list[str]:
        try:
            file = LogReader(str(self._folder / name))
        except OSError:
            return []
        try:
            begin = max(file.first(), file.seek(0, os.SEEK_END) - _TAIL_BYTES)
            file.seek(begin)
            text = file.read(_TAIL_BYTES)
        except OSError:
            return []
        finally:
            file.close()
        lines = text.decode("utf-8", "surrogateescape").split("\n")[:-1]
        return lines[1:] if begin else lines  # the first may be incomplete

    def _write(self, name: str, line: str) -> None:
        data = f"{line}\n".encode("utf-8", "surrogateescape")
        if name == EVENTS:
            self._events.write(data, json.loads(line))
            return
        if len(data) > self._left and not self._is_full:
            self._left = self._limit - _size_of_output(self._folder)  # the oldest parts of logs are deleted
        if len(data) > self._left:
            self._report_full()
            return
        self._left -= len(data)
        if name not in self._logs:
            if len(self._logs) >= _MOST_OPEN:
                self._close_logs()
            self._logs[name] = LimitedLog(str(self._folder / name), lambda problem: None, self._log_limit)
        self._logs[name].write(data)

    def _close_logs(self) -> None:
        for log in self._logs.values():
            log.close()
        self._logs.clear()

    def _report_full(self) -> None:
        if not self._is_full:
            self._is_full = True
            self._note(
                "no more output of this run is copied: it is another user's, and has written more than "
                f"{run_folders.COPY_LIMIT >> 30} GiB, or than half of the free space; use kubectl logs"
            )


def _size_of_output(folder: Path) -> int:
    """Bytes of the files other than events, whose size is limited anyway."""
    patterns = "logs/*.log", "logs/*.log.parts/*", AGENTS, f"{AGENTS}.parts/*"
    files = [path for pattern in patterns for path in folder.glob(pattern)]
    return sum(path.stat().st_size for path in files if path.is_file())


def _load_positions(folder: Path) -> dict[str, Position]:
    saved = (run_folders.read_object(folder / POSITIONS) or {}).get("positions")
    return {
        container: Position(*each)
        for container, each in (saved.items() if isinstance(saved, dict) else ())
        if isinstance(each, list) and [type(field) for field in each] == [str, int] and seconds(each[0]) is not None
    }


class Reader:
    """Reads the lines of one connection to one pod. Once a line is new, all following lines are.

    First it skips what is before the position of the container; then lines that are already in their file: another
    process may have been killed before it saved how far it has read."""

    def __init__(self, inbox: Inbox, captain: bool, container: str = "") -> None:
        self._inbox = inbox
        self._captain = captain
        self._container = container
        self._resume = inbox.position(container)
        self._present: dict[str, Counter[str] | None] = {}  # by file: lines that it has; None: all following are new

    def take(self, line: str) -> None:
        name, text = self._destination(line)
        at = stamp_of(text) if name else ""
        if not name:
            name, text = AGENTS, line
        was_read = self._is_before_position(at)
        is_present = self._is_present(name, text, was_read)
        if was_read:
            return
        if not is_present:
            self._inbox.put(name, text)
        if at and self._container:
            self._inbox.advance(self._container, at)

    def _is_before_position(self, at: str) -> bool:
        if self._resume is None or at > self._resume.at:
            self._resume = None
            return False
        if at == self._resume.at:
            left = self._resume.lines - 1
            self._resume = Position(at, left) if left else None
        return True

    def _is_present(self, name: str, text: str, was_read: bool) -> bool:
        """Whether the file already has the line; if it has several such lines, as many are duplicates."""
        if name not in self._present:
            self._present[name] = self._inbox.last_lines(name)
        present = self._present[name]
        if present is None:
            return False
        if present[text] > 0:
            present[text] -= 1
            return True
        if not was_read:
            self._present[name] = None
        return False

    def _destination(self, line: str) -> tuple[str, str]:
        """The file for a line, and its text; empty: it is neither an event nor output of a task."""
        if not self._captain:
            match = _OUTPUT.fullmatch(line)
            return (f"logs/{match[1]}.log", match[2]) if match and self._inbox.has_task(match[1]) else ("", "")
        event = _event_in(line)
        if event is None:
            return "", ""
        kind = event["event"]
        self._inbox.formed = self._inbox.formed or kind == "generation-formed"
        if kind in ("generation-formed", "restart", "member-lost"):
            self._inbox.complete = kind == "generation-formed"
        if kind == "member-joined":
            self._inbox.joined.add(str(event.get("host")))
        return EVENTS, line


def _event_in(line: str) -> dict[str, Any] | None:
    """None: it is not an event, as the captain of another user may write anything."""
    try:
        event = parse_json(line)
    except ValueError:
        return None
    if not isinstance(event, dict) or not isinstance(event.get("event"), str) or not _is_flat(event):
        return None
    return event if _TIME.fullmatch(str(event.get("at"))) else None


def _is_flat(event: Any) -> bool:
    """Whether it is nested as little as events are: deep nesting makes some readers fail."""
    level = [event]
    for _ in range(DEEPEST):
        level = [each for value in level for each in _children(value)]
    return not level


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def stamp_of(line: str) -> str:
    """The time in a line of a log or in an event.

    >>> stamp_of('{"at": "2026-11-15T04:30:11.123Z", "event": "note"}')
    '2026-11-15T04:30:11.123Z'
    """
    if line.startswith("{"):
        try:
            return str(parse_json(line).get("at", ""))
        except ValueError:
            return ""
    return line[:24]
