"""Reads a growing file incrementally, in complete lines."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

from paceline.storage.regular_files import open_regular

CHUNK = 1 << 20
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
                self.problem = f"{self.path.name}: cannot be read: {error.strerror}"
                return None
        try:
            return self._file.read(size)
        except OSError as error:
            self.problem = f"{self.path.name}: cannot be read: {error.strerror}"
            return None
