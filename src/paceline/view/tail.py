"""Reads a growing file of lines bit by bit: only whole lines, never the whole file."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

CHUNK = 1 << 20
_STAMP = 24  # "2026-11-15T04:30:11.123Z": equally long, so text order is time order


class Tail:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO | None = None
        self._rest = b""

    def read(self) -> list[bytes]:
        """The next whole lines without their line ends, at most about a CHUNK; [] when there are none now."""
        while True:
            data = self._more()
            if not data:
                return []
            lines = (self._rest + data).split(b"\n")
            self._rest = lines.pop()
            if len(self._rest) > CHUNK:
                lines.append(self._rest)
                self._rest = b""
            if lines:
                return lines

    def rest(self) -> bytes:
        """What stands behind the last line end: a line that its writer never finished."""
        rest, self._rest = self._rest, b""
        return rest

    def seek(self, stamp: str) -> None:
        """Goes to the first line that is not older than this time, by bisection: lines begin with their time."""
        if self._more(0) is None or self._file is None:
            return
        wanted = stamp.encode()
        low, high = 0, self._file.seek(0, 2)
        while low < high:
            middle = (low + high) // 2
            self._file.seek(middle)
            if middle:
                self._file.readline()
            at = self._file.readline(_STAMP)
            if at and at < wanted:
                low = middle + 1
            else:
                high = middle
        self._file.seek(low)
        if low:
            self._file.readline()
        self._rest = b""

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _more(self, size: int = CHUNK) -> bytes | None:
        if self._file is None:
            try:
                self._file = open(self.path, "rb")  # noqa: SIM115
            except FileNotFoundError:
                return None
        return self._file.read(size)
