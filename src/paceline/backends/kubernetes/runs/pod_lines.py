"""Writes the output of pods to the files that a local run has; lines that were written before are skipped."""

from __future__ import annotations

import fcntl
import json
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.agent.event_file import EventFile
from paceline.agent.run_files import stamp
from paceline.storage.run_archive import TASK_NAME

LOCK = "following"  # locked by the process that updates the folder or submits the run
EVENTS = "events.jsonl"
COMMAND_LINE = "command-line"  # the author of events that the captain did not write
_OUTPUT = re.compile(rf"({TASK_NAME}) (\d{{4}}-\d\d-\d\dT\S+Z g\d{{1,9}} [|~] ?.*)")
_TAIL_BYTES = 64 * 1024


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


class Inbox:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._events = EventFile(str(folder), lambda problem: None)
        self._last: dict[str, tuple[str, set[str]]] = {}  # by file: the newest time, and its lines with that time
        self.formed = False  # a generation has been formed
        self.complete = False  # a generation has been formed, and no host has been lost since
        self.joined: set[str] = set()  # hosts that have joined their captain

    def reader(self, captain: bool) -> Reader:
        return Reader(self, captain)

    def note(self, text: str) -> None:
        """Write an event that this process, not the captain, reports about the cluster."""
        line = json.dumps({"at": stamp(), "event": "note", "generation": 0, "by": COMMAND_LINE, "text": text})
        with self._lock:
            self._write(EVENTS, line)

    def since(self, name: str) -> str:
        """The time of the newest line in a file."""
        with self._lock:
            return self._newest(name)[0]

    def put(self, name: str, line: str, catching_up: bool) -> bool:
        """Whether the line was new."""
        at = stamp_of(line)
        with self._lock:
            newest, lines = self._newest(name)
            if catching_up and (at < newest or (at == newest and line in lines)):
                return False
            self._last[name] = (at, {line}) if at > newest else (newest, lines | {line} if at == newest else lines)
            self._write(name, line)
            return True

    def put_agent_line(self, line: str, catching_up: bool) -> None:
        """Lines about agents have no time: while catching up, a line that is already in the file is a duplicate."""
        with self._lock:
            if not (catching_up and line in self._tail("agents.log")):
                self._write("agents.log", line)

    def _newest(self, name: str) -> tuple[str, set[str]]:
        if name not in self._last:
            times = [(stamp_of(line), line) for line in self._tail(name) if f'"by": "{COMMAND_LINE}"' not in line]
            newest = max((at for at, _ in times), default="")
            self._last[name] = newest, {line for at, line in times if at == newest}
        return self._last[name]

    def _tail(self, name: str) -> list[str]:
        try:
            with (self._folder / name).open("rb") as file:
                begin = max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES)
                file.seek(begin)
                lines = file.read().decode("utf-8", "surrogateescape").split("\n")[:-1]
                return lines[1:] if begin else lines  # the first may be incomplete
        except FileNotFoundError:
            return []

    def _write(self, name: str, line: str) -> None:
        if name == EVENTS:
            self._events.write(f"{line}\n".encode("utf-8", "surrogateescape"), json.loads(line))
            return
        with (self._folder / name).open("a", encoding="utf-8", errors="surrogateescape") as file:
            file.write(line + "\n")


class Reader:
    """Reads the lines of one connection to one pod. Once a line is new, all following lines are."""

    def __init__(self, inbox: Inbox, captain: bool) -> None:
        self._inbox = inbox
        self._captain = captain
        self._caught_up: set[str] = set()  # files with no more duplicates on this connection

    def take(self, line: str) -> None:
        name, text = self._destination(line)
        if not name:
            self._inbox.put_agent_line(line, catching_up=not self._caught_up)
        elif self._inbox.put(name, text, catching_up=name not in self._caught_up):
            self._caught_up.add(name)

    def _destination(self, line: str) -> tuple[str, str]:
        """The file for a line, and its text; empty: it is neither an event nor output of a task."""
        if not self._captain:
            match = _OUTPUT.fullmatch(line)
            return (f"logs/{match[1]}.log", match[2]) if match else ("", "")
        try:
            event = json.loads(line)
            kind = event.get("event")
        except (ValueError, AttributeError, RecursionError):
            return "", ""
        self._inbox.formed = self._inbox.formed or kind == "generation-formed"
        if kind in ("generation-formed", "restart", "member-lost"):
            self._inbox.complete = kind == "generation-formed"
        if kind == "member-joined":
            self._inbox.joined.add(str(event.get("host")))
        return (EVENTS, line) if isinstance(kind, str) else ("", "")


def stamp_of(line: str) -> str:
    """The time in a line of a log or in an event.

    >>> stamp_of('{"at": "2026-11-15T04:30:11.123Z", "event": "note"}')
    '2026-11-15T04:30:11.123Z'
    """
    if line.startswith("{"):
        try:
            return str(json.loads(line).get("at", ""))
        except (ValueError, RecursionError):
            return ""
    return line[:24]
