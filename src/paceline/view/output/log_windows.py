"""Windows of a task's output by byte position, so that a log of any size is shown and searched without loading it."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.storage.log_parts import LogReader, bounds
from paceline.view.output import log_blocks
from paceline.view.output.log_blocks import SHOWN, Block, Search, WindowLine


@dataclass(frozen=True)
class Window:
    first: int  # position of the first byte that is kept
    end: int  # position after the last byte
    begin: int  # position of the first line of this window
    next: int  # position after its last line
    lines: tuple[WindowLine, ...]
    scanned: int  # how far lines were searched
    is_complete: bool  # the window has as many lines as were asked for, or there are no more

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "lines": [line.to_json() for line in self.lines]}


@dataclass(frozen=True)
class Query:
    position: int | None = None  # None: the beginning, or backward the end
    backward: bool = False
    limit: int = 500
    search: Search | None = None
    seconds: float = 1.0  # time limit of a search
    shown: int = SHOWN  # characters of a line
    is_final: bool = False  # nothing more will be written: an incomplete last line is a line
    inside: str = ""  # where a merged window ended within a position: see merged_windows.py


def limits(path: Path) -> tuple[int, int]:
    """The positions of the first byte that is kept, and of the end."""
    return bounds(str(path))


def read(path: Path, query: Query) -> Window:
    """Raises OSError if the log cannot be read; a log that does not exist is empty."""
    first, end = bounds(str(path))
    try:
        reader = LogReader(str(path))
    except FileNotFoundError:
        return Window(0, 0, 0, 0, (), 0, True)
    with closing(reader):
        return _read(reader, first, end, query)


def around(path: Path, position: int, query: Query) -> Window:
    """Half of the lines before the position, and half after it."""
    half = max(1, query.limit // 2)
    before = read(path, _changed(query, position=position, backward=True, limit=half))
    after = read(path, _changed(query, position=before.next, backward=False, limit=query.limit - len(before.lines)))
    return Window(
        after.first, after.end, before.begin, after.next, before.lines + after.lines, after.scanned,
        before.is_complete and after.is_complete,
    )  # fmt: skip


def _changed(query: Query, **changes: Any) -> Query:
    return Query(**{**vars(query), **changes})


def _read(reader: LogReader, first: int, end: int, query: Query) -> Window:
    position = query.position if query.position is not None else end if query.backward else first
    position = min(max(position, first), end)
    blocks = (
        log_blocks.backward(reader, first, position)
        if query.backward
        else log_blocks.forward(reader, first, position, query.is_final)
    )
    deadline = time.monotonic() + query.seconds
    lines: list[WindowLine] = []
    start = scanned = log_blocks.line_begin(reader, first, position)
    is_complete = True
    for block in blocks:
        selected, scanned = _selected(block, query, query.limit - len(lines))
        lines += selected
        if len(lines) >= query.limit:
            break
        if time.monotonic() > deadline:
            is_complete = False
            break
    if query.backward:
        lines.reverse()
        return Window(first, end, scanned, start, tuple(lines), scanned, is_complete)
    return Window(first, end, start, scanned, tuple(lines), scanned, is_complete)


def _selected(block: Block, query: Query, limit: int) -> tuple[list[WindowLine], int]:
    """The wanted lines of a block, in the order in which they are read, and the position up to which it was read."""
    (begin, data), search = block, query.search
    end = begin + len(data)
    if search is not None and not search.may_match(data):
        return [], begin if query.backward else end
    lines: list[WindowLine] = []
    position = end if query.backward else begin
    raw = log_blocks.lines(data)
    for each in reversed(raw) if query.backward else raw:
        position -= len(each) if query.backward else 0
        line = (
            search.line(position, each, query.shown)
            if search is not None
            else log_blocks.line_of(position, each, query.shown)
        )
        position += 0 if query.backward else len(each)
        if line is not None:
            lines.append(line)
            if len(lines) >= limit:
                break
    return lines, position
