"""Reads a growing file incrementally, in complete lines."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import BinaryIO

from paceline.storage.regular_files import open_regular

CHUNK = 1 << 20
_BLOCK = 1 << 16  # bytes read at a time from the end of a file
_HEAD = 64  # bytes of a line that a pattern may look at
_STAMP = 24  # length of "2026-11-15T04:30:11.123Z"; as it is fixed, text order is time order


class Tail:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO | None = None
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
        low, high = 0, self._file.seek(0, 2)
        while low < high:
            middle = (low + high) // 2
            self._file.seek(middle)
            if middle:
                self._file.readline()
            at = self._file.readline(_STAMP)
            if at and at < target:
                low = middle + 1
            else:
                high = middle
        self._file.seek(low)
        if low:
            self._file.readline()
        self._partial = b""

    def is_replaced(self) -> bool:
        """Whether another file is at the path now."""
        if self._file is None:
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
            first, end = self._file.tell(), self._file.seek(0, 2)
            self._file.seek(self._find_last(self._file, first, end, count, counted))
        except OSError as error:
            self._report(error)
        self._partial = b""

    def _find_last(self, file: BinaryIO, first: int, end: int, count: int, counted: re.Pattern[bytes]) -> int:
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
                self._file = os.fdopen(open_regular(str(self.path), follow=True), "rb")
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

    def _report(self, error: OSError) -> None:
        self.problem = f"{self.path.name}: cannot be read: {error.strerror}"
