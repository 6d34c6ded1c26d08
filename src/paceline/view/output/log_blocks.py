"""The log of a task in blocks of whole lines, forward and backward from any position, and its lines as data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.storage.log_parts import LogReader, bounds
from paceline.view.output.merged_logs import LINE
from paceline.view.text.terminal import clean

BLOCK = 1 << 18  # bytes read at a time
LONGEST = 1 << 20  # bytes of a line; what is longer is shown as several lines
SHOWN = 4096  # characters of a line
STAMP = 24  # length of "2026-11-15T04:30:11.123Z"

Block = tuple[int, bytes]  # the position of its first byte, and whole lines


@dataclass(frozen=True)
class WindowLine:
    position: int  # of its first byte, in everything that the task has written
    at: str
    generation: int
    text: str
    progress: bool = False  # the state of a progress bar
    is_cut: bool = False

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True)
class Search:
    """Which lines are wanted. `literal`: what each of them contains, in lower case; empty: unknown."""

    matches: Callable[[str], bool]
    literal: bytes = b""

    def may_match(self, data: bytes) -> bool:
        """Whether a line in these bytes may match. Most blocks of a long log are never decoded."""
        return not self.literal or b"\x1b" in data or self.literal in data.lower()

    def line(self, position: int, data: bytes, shown: int) -> WindowLine | None:
        """The line, if it matches."""
        if not self.may_match(data) or not self.matches(line_of(position, data, LONGEST).text):
            return None
        return line_of(position, data, shown)


def containing(text: str) -> Search:
    """Lines that contain this text, in lower or upper case."""
    folded = text.casefold()
    return Search(lambda line: folded in line.casefold(), text.lower().encode() if text.isascii() else b"")


def line_of(position: int, data: bytes, shown: int = SHOWN) -> WindowLine:
    match = LINE.match(data.rstrip(b"\n"))
    at, generation, kind, body = (
        (match[1].decode(), int(match[2]), match[3], match[4]) if match else ("", 0, b"|", data.rstrip(b"\n"))
    )
    text = body[: 4 * shown].decode("utf-8", "replace")
    is_cut = len(text) > shown or len(body) > 4 * shown
    return WindowLine(position, at, generation, clean(text[:shown], colors=False), kind == b"~", is_cut)


def lines(block: bytes) -> list[bytes]:
    """With their line ends. Only a line feed ends a line."""
    split = [line + b"\n" for line in block.split(b"\n")]
    last = split.pop()[:-1]
    return [*split, last] if last else split


def forward(reader: LogReader, first: int, position: int, is_final: bool, size: int | None = None) -> Iterator[Block]:
    """`is_final`: nothing more will be written: an incomplete last line is a line."""
    position, rest = line_begin(reader, first, position), b""
    while True:
        reader.seek(position + len(rest))
        dropped = reader.dropped
        data = reader.read(size or BLOCK)
        if reader.dropped > dropped:  # deleted in the meantime: what is left of a line is not one
            position, rest = reader.tell() - len(data), b""
        block = rest + data
        end = block.rfind(b"\n") + 1
        if len(block) - end >= LONGEST or (is_final and not data):
            end = len(block)
        if end:
            yield position, block[:end]
        position, rest = position + end, block[end:]
        if not data:
            return


def backward(reader: LogReader, first: int, position: int, size: int | None = None) -> Iterator[Block]:
    end = line_begin(reader, first, position)
    usual = wanted = size or BLOCK
    while end > first:
        begin = max(first, end - wanted)
        reader.seek(begin)
        data = reader.read(end - begin)
        if reader.tell() != end:
            return  # deleted in the meantime
        skipped = 0
        if begin > first:
            skipped = data.find(b"\n", 0, len(data) - 1) + 1
            if not skipped and wanted < LONGEST:
                wanted *= 2
                continue
        wanted = usual
        if skipped < len(data):
            yield begin + skipped, data[skipped:]
        end = begin + skipped


def line_begin(reader: LogReader, first: int, position: int) -> int:
    """The first begin of a line that is not before the position."""
    if position <= first:
        return first
    reader.seek(position - 1)
    reader.readline(LONGEST)
    return reader.tell()


def position_at(path: Path, at: str) -> int:
    """The position of the first line that is not older than this time, by bisection: lines start with their time."""
    first, end = bounds(str(path))
    try:
        reader = LogReader(str(path))
    except FileNotFoundError:
        return 0
    with closing(reader):
        return find_time(reader, first, end, at)


def find_time(reader: LogReader, first: int, end: int, at: str) -> int:
    low, high, target = first, end, at.encode()
    while low < high:
        middle = (low + high) // 2
        reader.seek(line_begin(reader, first, middle))
        stamp = reader.readline(STAMP)
        if stamp and stamp < target:
            low = middle + 1
        else:
            high = middle
    return line_begin(reader, first, low)
