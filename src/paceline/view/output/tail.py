"""Reads a growing file incrementally, in complete lines."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import BinaryIO

from paceline.storage.log_parts import LogReader
from paceline.storage.regular_files import open_regular

CHUNK = 1 << 20
_BLOCK = 1 << 16  # bytes read at a time from the end of a file
_HEAD = 64  # bytes of a line that a pattern may look at
_STAMP = 24  # length of "2026-11-15T04:30:11.123Z"; as it is fixed, text order is time order


class Tail:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO | LogReader | None = None
        self._partial = b""  # the incomplete line at the end
        self.problem = ""  # why the file cannot be read

    def read(self) -> list[bytes]:
        """The next complete lines without line ends, about one CHUNK at most; [] if there are none yet."""
        while True:
            data = self._more()
            if not data:
                return []
            lines = (self._partial + data).split(b"\n")
            self._partial = lines.pop()
            if len(self._partial) > CHUNK:
                lines.append(self._partial)
                self._partial = b""
            if lines:
                return lines

    def rest(self) -> bytes:
        """The text after the last line end: a line that its writer never finished."""
        partial, self._partial = self._partial, b""
        return partial

    def seek(self, stamp: str) -> None:
        """Go to the first line that is not older than this time, by bisection: lines start with their time."""
        if self._more(0) is None or self._file is None:
            return
        target = stamp.encode()
        first = low = self._first()
        high = self._file.seek(0, 2)
        while low < high:
            middle = (low + high) // 2
            self._file.seek(middle)
            if middle > first:
                self._file.readline(CHUNK)  # a longer line is damaged: it must not use memory without limit
            at = self._file.readline(_STAMP)
            if at and at < target:
                low = middle + 1
            else:
                high = middle
        self._seek(low)
        if low > first:
            self._file.readline(CHUNK)
        self._partial = b""

    def is_replaced(self) -> bool:
        """Whether another file is at the path now."""
        if self._file is None or isinstance(self._file, LogReader):
            return False
        try:
            return not os.path.samestat(os.fstat(self._file.fileno()), self.path.stat())
        except OSError:
            return False  # it was deleted

    def seek_last(self, count: int, counted: re.Pattern[bytes]) -> None:
        """Go to the line from which on `count` lines match the pattern, by reading backwards from the end of the file;
        not further back than the current position. The pattern sees only the first bytes of a line."""
        if self._more(0) is None or self._file is None:
            return
        try:
            first, end = max(self._file.tell(), self._first()), self._file.seek(0, 2)
            self._seek(self._find_last(self._file, first, end, count, counted))
        except OSError as error:
            self._report(error)
        self._partial = b""

    def _first(self) -> int:
        """The position of the first line that can be read."""
        return 0

    def _seek(self, position: int) -> None:
        if self._file is not None:
            self._file.seek(position)

    def _find_last(
        self, file: BinaryIO | LogReader, first: int, end: int, count: int, counted: re.Pattern[bytes]
    ) -> int:
        head = b""  # the first bytes of the line that begins before the block
        while end > first:
            begin = max(first, end - _BLOCK)
            file.seek(begin)
            block = file.read(end - begin) + head
            line_end = len(block)
            while (newline := block.rfind(b"\n", 0, line_end)) >= 0:
                count -= counted.match(block, newline + 1, line_end) is not None
                if count <= 0:
                    return begin + newline + 1
                line_end = newline
            head, end = block[: min(line_end, _HEAD)], begin
        return first

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _more(self, size: int = CHUNK) -> bytes | None:
        if self._file is None:
            try:
                self._file = self._open()
            except FileNotFoundError:
                return None
            except OSError as error:
                self._report(error)
                return None
        try:
            return self._file.read(size)
        except OSError as error:
            self._report(error)
            return None

    def _open(self) -> BinaryIO | LogReader:
        return os.fdopen(open_regular(str(self.path), follow=True), "rb")

    def _report(self, error: OSError) -> None:
        self.problem = f"{self.path.name}: cannot be read: {error.strerror}"


class LogTail(Tail):
    """Reads the log of a task, whose oldest parts may have been deleted."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._dropped = 0  # bytes that were reported

    def dropped(self) -> int:
        """The number of bytes that were to be read since the last call, but were deleted."""
        total = self._file.dropped if isinstance(self._file, LogReader) else self._dropped
        new, self._dropped = total - self._dropped, total
        return new

    def _open(self) -> LogReader:
        return LogReader(str(self.path))

    def _first(self) -> int:
        return self._file.first() if isinstance(self._file, LogReader) else 0

    def _seek(self, position: int) -> None:
        """What was deleted before the first line is part of what was asked for, unless that begins later."""
        super()._seek(0 if position == self._first() else position)
