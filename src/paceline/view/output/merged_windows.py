"""Windows of the output of several tasks, interleaved by time, however long it is.

A position is the time of a line in milliseconds and the number of its task, as one number. Lines that a task wrote in
the same millisecond have the same position, and are always part of the same window.
"""

from __future__ import annotations

import calendar
import heapq
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from paceline.storage.log_parts import LogReader, bounds
from paceline.view.output import log_blocks
from paceline.view.output.log_blocks import STAMP, WindowLine
from paceline.view.output.log_windows import Query

_TASKS = 2048  # later ones share the last number
_LATEST_MS = 2**42 - 1  # positions are exact in JavaScript
_SEARCHED = 1 << 25  # bytes of all tasks in memory
_SHOWN = 1 << 16  # bytes read at a time if nothing is searched
_Entry = tuple[int, int, int, bytes]  # position, task, and the line with its position in the log; empty: no match


@dataclass(frozen=True)
class MergedLine:
    position: int
    task: str
    line: WindowLine

    def to_json(self) -> dict[str, Any]:
        """`byte`: the position in the log of the task."""
        return {**self.line.to_json(), "position": self.position, "byte": self.line.position, "task": self.task}


@dataclass(frozen=True)
class MergedWindow:
    """As log_windows.Window."""

    first: int
    end: int
    begin: int
    next: int
    lines: tuple[MergedLine, ...]
    scanned: int
    is_complete: bool

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "lines": [line.to_json() for line in self.lines]}


def position_of(at: str, task: int = 0) -> int:
    """The position of lines with this time."""
    return _milliseconds(at.encode()) * _TASKS + min(task, _TASKS - 1)


def byte_position(path: Path, task: int, position: int) -> int:
    """Where the lines of a task begin that are not before a position."""
    return log_blocks.position_at(path, _since(task, position))


def _since(task: int, position: int) -> str:
    """The time from which on lines of a task are not before a position."""
    at, number = divmod(position, _TASKS)
    return _stamp(at if min(task, _TASKS - 1) >= number else at + 1)


def read(folder: Path, tasks: Sequence[str], query: Query) -> MergedWindow:
    """Raises OSError if a log cannot be read; tasks without a log are left out."""
    logs = [_Log(folder / f"{task}.log", number) for number, task in enumerate(tasks)]
    limits = [limit for log in logs if (limit := log.limits()) is not None]
    first, end = min((limit[0] for limit in limits), default=0), max((limit[1] for limit in limits), default=-1) + 1
    start = query.position if query.position is not None else end if query.backward else first
    size = max(1 << 12, min(log_blocks.BLOCK, (_SEARCHED if query.search else _SHOWN * 16) // max(1, len(logs))))
    entries = [(log.before if query.backward else log.since)(start, query, size) for log in logs]
    deadline: float | None = None
    selected: list[MergedLine] = []
    scanned, is_complete = start, True
    for position, number, place, data in heapq.merge(*entries, key=_order, reverse=query.backward):
        is_same = bool(selected) and selected[-1].position == position
        if not is_same and len(selected) >= query.limit:
            break
        if deadline is None:  # all logs were opened, which takes some time if there are many
            deadline = time.monotonic() + query.seconds
        elif not is_same and time.monotonic() > deadline:
            is_complete = False
            break
        scanned = position if query.backward else position + 1
        if data:
            line = log_blocks.line_of(place, data, query.shown)
            selected.append(MergedLine(position, tasks[number], line))
    else:
        scanned = first if query.backward else max(scanned, end)
    if query.backward:
        return MergedWindow(first, end, scanned, start, tuple(reversed(selected)), scanned, is_complete)
    return MergedWindow(first, end, start, scanned, tuple(selected), scanned, is_complete)


def around(folder: Path, tasks: Sequence[str], position: int, query: Query) -> MergedWindow:
    """Half of the lines before the position, and half after it."""
    fields = vars(query)
    half = max(1, query.limit // 2)
    before = read(folder, tasks, Query(**{**fields, "position": position, "backward": True, "limit": half}))
    rest = max(1, query.limit - len(before.lines))
    after = read(folder, tasks, Query(**{**fields, "position": position, "backward": False, "limit": rest}))
    return MergedWindow(
        after.first, after.end, before.begin, after.next, before.lines + after.lines, after.scanned,
        before.is_complete and after.is_complete,
    )  # fmt: skip


def _order(entry: _Entry) -> tuple[int, int, int]:
    return entry[:3]


class _Log:
    """The log of one task. Its file is closed between two blocks: there may be more tasks than files can be open."""

    def __init__(self, path: Path, number: int) -> None:
        self._path, self._number = path, number
        self._key = min(number, _TASKS - 1)
        self._bounds = bounds(str(path))
        self._ends: tuple[int, int] | None = None

    def limits(self) -> tuple[int, int] | None:
        """The positions of the first and the last line; None: there is none."""
        first, end = self._bounds
        try:
            reader = LogReader(str(self._path))
        except FileNotFoundError:
            return None
        with closing(reader):
            reader.seek(first)
            stamp = reader.readline(STAMP)
            block = next(log_blocks.backward(reader, first, end, 1 << 12), None)
        if block and stamp:
            self._ends = self._position(stamp), self._position(log_blocks.lines(block[1])[-1])
        return self._ends

    def since(self, start: int, query: Query, size: int) -> Iterator[_Entry]:
        """Lines that are not before a position. After a block without a match: its end, without a line."""
        latest = 0
        for reader, first, begin in self._from(start):
            for place, block in log_blocks.forward(reader, first, begin, query.is_final, size):
                reader.close()
                raw = log_blocks.lines(block)
                for data in raw if query.search is None or query.search.may_match(block) else ():
                    latest = max(latest, self._position(data, latest))
                    if query.search is None or query.search.line(place, data, 1) is not None:
                        yield latest, self._number, place, data
                    place += len(data)
                latest = max(latest, self._position(raw[-1], latest))
                yield latest, self._number, place, b""

    def before(self, start: int, query: Query, size: int) -> Iterator[_Entry]:
        """Lines that are before a position, the last one first."""
        earliest = max(0, start - 1)
        for reader, first, begin in self._from(start):
            for place, block in log_blocks.backward(reader, first, begin, size):
                reader.close()
                raw = log_blocks.lines(block)
                place += len(block)
                for data in reversed(raw) if query.search is None or query.search.may_match(block) else ():
                    place -= len(data)
                    earliest = min(earliest, self._position(data, earliest))
                    if query.search is None or query.search.line(place, data, 1) is not None:
                        yield earliest, self._number, place, data
                earliest = min(earliest, self._position(raw[0], earliest))
                yield earliest, self._number, place, b""

    def _from(self, start: int) -> Iterator[tuple[LogReader, int, int]]:
        """A reader, the first byte that is kept, and where lines begin that are not before a position; nothing if there
        is no such log."""
        first, end = self._bounds
        try:
            reader = LogReader(str(self._path))
        except FileNotFoundError:
            return
        with closing(reader):
            if self._ends is None or start > self._ends[1]:
                begin = end
            elif start <= self._ends[0]:
                begin = first
            else:
                begin = log_blocks.find_time(reader, first, end, _since(self._number, start))
            yield reader, first, begin

    def _position(self, data: bytes, otherwise: int = 0) -> int:
        """Of a line, from its time; a damaged line stays with the one before it."""
        milliseconds = _milliseconds(data[:STAMP])
        return milliseconds * _TASKS + self._key if milliseconds >= 0 else otherwise


def _milliseconds(stamp: bytes) -> int:
    """Since 1970; -1: it is not a time.

    >>> _milliseconds(b"1970-01-01T00:01:00.500Z"), _milliseconds(b"Traceback (most recent c")
    (60500, -1)
    """
    second = _seconds(stamp[:19])
    if second < 0 or not stamp[20:23].isdigit():
        return -1
    return min(_LATEST_MS, second * 1000 + int(stamp[20:23]))


@lru_cache(4096)
def _seconds(stamp: bytes) -> int:
    try:
        return max(-1, calendar.timegm(time.strptime(stamp.decode("ascii"), "%Y-%m-%dT%H:%M:%S")))
    except ValueError:
        return -1


def _stamp(milliseconds: int) -> str:
    second, rest = divmod(milliseconds, 1000)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(second))}.{rest:03}Z"
