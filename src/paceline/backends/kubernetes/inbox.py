"""Lines of pods, put where a run on this machine has them; what came before, here or in another process, comes once."""

from __future__ import annotations

import fcntl
import json
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.agent.journal import stamp

LOCK = "following"  # held by the process that brings the folder up to date, or submits the run
OURS = "command-line"  # who wrote an event that no captain wrote
_OUTPUT = re.compile(r"(\S+) (\d{4}-\d\d-\d\dT\S+Z g\d+ [|~] ?.*)")
_TAIL = 64 * 1024  # bytes


@contextmanager
def held(folder: Path) -> Iterator[bool]:
    """Whether this process may write to the folder; another one that follows the run does it already, if not."""
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
        self._last: dict[str, tuple[str, set[str]]] = {}  # of each file: the newest time, and its lines of that time
        self.formed = False  # a generation has been formed
        self.complete = False  # and no host has been missed since
        self.joined: set[str] = set()  # hosts that have found their captain

    def reader(self, captain: bool) -> Reader:
        return Reader(self, captain)

    def note(self, text: str) -> None:
        """Something that this process has seen on the cluster."""
        line = json.dumps({"at": stamp(), "event": "note", "generation": 0, "by": OURS, "text": text})
        with self._lock:
            self._write("events.jsonl", line)

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

    def aside(self, line: str, catching_up: bool) -> None:
        """What agents say of themselves has no time: while catching up, what is there is taken for the same."""
        with self._lock:
            if not (catching_up and line in self._tail("agents.log")):
                self._write("agents.log", line)

    def _newest(self, name: str) -> tuple[str, set[str]]:
        if name not in self._last:
            times = [(stamp_of(line), line) for line in self._tail(name) if f'"by": "{OURS}"' not in line]
            newest = max((at for at, _ in times), default="")
            self._last[name] = newest, {line for at, line in times if at == newest}
        return self._last[name]

    def _tail(self, name: str) -> list[str]:
        try:
            with (self._folder / name).open("rb") as file:
                begin = max(0, file.seek(0, os.SEEK_END) - _TAIL)
                file.seek(begin)
                lines = file.read().decode("utf-8", "surrogateescape").split("\n")[:-1]
                return lines[1:] if begin else lines  # the first may be cut in the middle
        except FileNotFoundError:
            return []

    def _write(self, name: str, line: str) -> None:
        with (self._folder / name).open("a", encoding="utf-8", errors="surrogateescape") as file:
            file.write(line + "\n")


class Reader:
    """Takes the lines of one connection to one pod. Once a line is new, all that follow are."""

    def __init__(self, inbox: Inbox, captain: bool) -> None:
        self._inbox = inbox
        self._captain = captain
        self._current: set[str] = set()  # files in which this connection has caught up

    def take(self, line: str) -> None:
        name, text = self._place(line)
        if not name:
            self._inbox.aside(line, catching_up=not self._current)
        elif self._inbox.put(name, text, catching_up=name not in self._current):
            self._current.add(name)

    def _place(self, line: str) -> tuple[str, str]:
        if not self._captain:
            found = _OUTPUT.fullmatch(line)
            return (f"logs/{found[1]}.log", found[2]) if found and "/" not in found[1] else ("", "")
        try:
            event = json.loads(line)
            kind = event.get("event")
        except (ValueError, AttributeError):
            return "", ""
        self._inbox.formed = self._inbox.formed or kind == "generation-formed"
        if kind in ("generation-formed", "restart", "member-lost"):
            self._inbox.complete = kind == "generation-formed"
        if kind == "member-joined":
            self._inbox.joined.add(str(event.get("host")))
        return ("events.jsonl", line) if isinstance(kind, str) else ("", "")


def stamp_of(line: str) -> str:
    """When a line of a log or an event was written, as it says itself.

    >>> stamp_of('{"at": "2026-11-15T04:30:11.123Z", "event": "note"}')
    '2026-11-15T04:30:11.123Z'
    """
    if line.startswith("{"):
        try:
            return str(json.loads(line).get("at", ""))
        except ValueError:
            return ""
    return line[:24]
