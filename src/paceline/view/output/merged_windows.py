"""Windows of the output of several tasks, interleaved by time, however long it is.

A position is the time of a line in milliseconds and the number of its task, as one number. Lines that a task wrote in
the same millisecond have the same position, and are part of the same window. Only if there are very many, a window ends
within their position: `begin_inside` or `next_inside` then says where, as `<task>:<byte>`, and the next query needs it.
"""

from __future__ import annotations

import calendar
import heapq
import re
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
_SAME = 400  # lines with the same position that a window may have beyond its limits
_UNDATED = 1 << 20  # bytes of lines without a time
_SHOWN = 1 << 16  # bytes read at a time if nothing is searched
_Inside = tuple[int, int]  # the number of a task, and a position in its log
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
    begin_inside: str = ""  # the window begins with this line of the position `begin`; empty: with the first one
    next_inside: str = ""  # the next window begins with this line of the position `next`

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
    return _read(folder, tasks, query, with_undated=False)


def _read(folder: Path, tasks: Sequence[str], query: Query, with_undated: bool) -> MergedWindow:
    logs = [_Log(folder / f"{task}.log", number) for number, task in enumerate(tasks)]
    limits = [limit for log in logs if (limit := log.limits()) is not None]
    first, end = min((limit[0] for limit in limits), default=0), max((limit[1] for limit in limits), default=-1) + 1
    start = query.position if query.position is not None else end if query.backward else first
    size = max(1 << 12, min(log_blocks.BLOCK, (_SEARCHED if query.search else _SHOWN * 16) // max(1, len(logs))))
    inside = _parse_inside(query.inside, tasks)
    entries = [
        log.before(start, inside, query, size)
        if query.backward
        else log.since(start, inside, query, size, with_undated)
        for log in logs
    ]
    deadline: float | None = None
    selected: list[MergedLine] = []
    most_same = _SAME if query.shown <= log_blocks.SHOWN else 0
    same, scanned, is_complete = 0, start, True
    continues_at = previous = ""  # within the position `scanned`
    for position, number, place, data in heapq.merge(*entries, key=_order, reverse=query.backward):
        same = same + 1 if selected and selected[-1].position == position else 0
        is_kept_together = 0 < same <= most_same
        is_late = deadline is not None and time.monotonic() > deadline
        if not is_kept_together and (len(selected) >= query.limit or is_late):
            is_complete = not is_late or len(selected) >= query.limit
            if query.backward:
                continues_at = previous
            elif previous and scanned == position + 1:
                scanned, continues_at = position, f"{tasks[number]}:{place}"
            break
        if deadline is None:  # all logs were opened, which takes some time if there are many
            deadline = time.monotonic() + query.seconds
        scanned, previous = position if query.backward else position + 1, f"{tasks[number]}:{place}"
        if data:
            line = log_blocks.line_of(place, data, query.shown)
            selected.append(MergedLine(position, tasks[number], line))
    else:
        scanned = first if query.backward else max(scanned, end)
    if query.backward:
        lines = tuple(reversed(selected))
        return MergedWindow(first, end, scanned, start, lines, scanned, is_complete, continues_at, query.inside)
    lines = tuple(selected)
    return MergedWindow(first, end, start, scanned, lines, scanned, is_complete, query.inside, continues_at)


def around(folder: Path, tasks: Sequence[str], position: int, query: Query) -> MergedWindow:
    """Half of the lines before the position, and half after it."""
    fields = vars(query)
    half = max(1, query.limit // 2)
    before = read(folder, tasks, Query(**{**fields, "position": position, "backward": True, "limit": half}))
    rest = max(1, query.limit - len(before.lines))
    after = _read(folder, tasks, Query(**{**fields, "position": position, "backward": False, "limit": rest}), True)
    return MergedWindow(
        after.first, after.end, before.begin, after.next, before.lines + after.lines, after.scanned,
        before.is_complete and after.is_complete, before.begin_inside, after.next_inside,
    )  # fmt: skip


def _parse_inside(text: str, tasks: Sequence[str]) -> _Inside | None:
    task, _, place = text.rpartition(":")
    is_valid = task in tasks and re.fullmatch("[0-9]{1,17}", place)
    return (tasks.index(task), int(place)) if is_valid else None


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

    def since(
        self, start: int, inside: _Inside | None, query: Query, size: int, with_undated: bool
    ) -> Iterator[_Entry]:
        """Lines that are not before a position. After a block without a match: its end, without a line. `with_undated`:
        also lines without a time between the line before the position and the next one."""
        start, byte = self._start(start, inside)
        latest = 0 if byte is None and not with_undated else start
        for reader, first, begin in self._from(start, byte):
            is_found = first < begin < self._bounds[1]
            for place, block in log_blocks.forward(reader, first, begin, query.is_final, size):
                reader.close()
                end = place + len(block)
                raw = log_blocks.lines(block)
                for data in raw if query.search is None or query.search.may_match(block) else ():
                    latest = max(latest, self._position(data, latest))
                    is_before = is_found and latest < start  # it has no time, and belongs to the line before it
                    if not is_before and (query.search is None or query.search.line(place, data, 1) is not None):
                        yield latest, self._number, place, data
                    place += len(data)
                latest = max(latest, self._position(raw[-1], latest))
                yield latest, self._number, end, b""

    def before(self, start: int, inside: _Inside | None, query: Query, size: int) -> Iterator[_Entry]:
        """Lines that are before a position, the last one first."""
        start, byte = self._start(start, inside)
        earliest = max(0, start - 1) if byte is None else start
        for reader, first, begin in self._from(start, byte):
            for block_begin, block in log_blocks.backward(reader, first, begin, size):
                reader.close()
                raw = log_blocks.lines(block)
                place = block_begin + len(block)
                for data in reversed(raw) if query.search is None or query.search.may_match(block) else ():
                    place -= len(data)
                    earliest = min(earliest, self._position(data, earliest))
                    if query.search is None or query.search.line(place, data, 1) is not None:
                        yield earliest, self._number, place, data
                earliest = min(earliest, self._position(raw[0], earliest))
                yield earliest, self._number, block_begin, b""

    def _start(self, start: int, inside: _Inside | None) -> tuple[int, int | None]:
        """Where lines of this task begin if those of a task within the position begin at `inside`; and the byte, if it
        is this task."""
        if inside is None or start % _TASKS != self._key or self._number > inside[0]:
            return start, None
        return (start, inside[1]) if self._number == inside[0] else (start + 1, None)

    def _from(self, start: int, byte: int | None) -> Iterator[tuple[LogReader, int, int]]:
        """A reader, the first byte that is kept, and where lines begin that are not before a position, or this byte;
        nothing if there is no such log."""
        first, end = self._bounds
        try:
            reader = LogReader(str(self._path))
        except FileNotFoundError:
            return
        with closing(reader):
            if byte is not None:
                begin = min(max(byte, first), end)
            elif self._ends is None or start > self._ends[1]:
                begin = end
            elif start <= self._ends[0]:
                begin = first
            else:
                begin = log_blocks.find_time(reader, first, end, _since(self._number, start))
                begin = _begin_of_undated(reader, first, begin)
            yield reader, first, begin

    def _position(self, data: bytes, otherwise: int = 0) -> int:
        """Of a line, from its time; a damaged line stays with the one before it."""
        milliseconds = _milliseconds(data[:STAMP])
        return milliseconds * _TASKS + self._key if milliseconds >= 0 else otherwise


def _begin_of_undated(reader: LogReader, first: int, position: int) -> int:
    """Where the lines without a time begin that end at a position, so that it does not matter which of them a search
    for a time has found. Not further back than some of them: only damaged logs have many."""
    begin = position
    for place, block in log_blocks.backward(reader, first, position, 1 << 10):
        begin = place + len(block)
        for data in reversed(log_blocks.lines(block)):
            if _milliseconds(data[:STAMP]) >= 0 or position - begin > _UNDATED:
                return begin
            begin -= len(data)
    return begin


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
