"""A log in parts, of which the oldest may be deleted, read as one file while it is written.

`worker-0.log` is appended to. Once it is large enough, it becomes `worker-0.log.parts/<position>`, the position of its
first byte, and a new `worker-0.log` begins. Positions count from the first byte that was ever written to the log, so a
position means the same whatever was deleted. A log that was never large enough is only a file.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass

from paceline.storage.regular_files import open_regular

_NAME = re.compile(r"[0-9]{20}")
_CHUNK = 1 << 16
_TRIES = 100  # until a part is opened while others are renamed or deleted


@dataclass(frozen=True)
class Part:
    """A part that is not written any more."""

    begin: int
    end: int
    path: str


def parts_folder(path: str) -> str:
    return f"{path}.parts"


def part_path(path: str, begin: int) -> str:
    return f"{parts_folder(path)}/{begin:020d}"


def parts(path: str) -> list[Part]:
    """The parts of the log before the file at `path`, oldest first."""
    folder = parts_folder(path)
    try:
        names = sorted(name for name in os.listdir(folder) if _NAME.fullmatch(name))
    except OSError:
        return []
    complete = []
    for name in names:
        try:
            status = os.lstat(f"{folder}/{name}")
        except OSError:
            continue  # deleted in the meantime
        if stat.S_ISREG(status.st_mode):
            complete.append(Part(int(name), int(name) + status.st_size, f"{folder}/{name}"))
    return complete


def bounds(path: str) -> tuple[int, int]:
    """The positions of the first byte that is kept, and of the end."""
    for _ in range(_TRIES):
        before = parts(path)
        try:
            size = os.stat(path).st_size
        except OSError:
            size = 0
        if parts(path) == before:  # else `size` may be that of another part
            break
    begin = before[-1].end if before else 0
    return (before[0].begin if before else 0), begin + size


class LogReader:
    """Reads on from a position. Of what was deleted, it counts the bytes, and continues with what is kept."""

    def __init__(self, path: str) -> None:
        """Raises OSError if there is no such log, or it cannot be read."""
        self._fd = -1
        self._path = path
        self._begin = 0  # position of the first byte of the open file
        self._is_current = False  # the open file was the one that is appended to
        self._position = 0
        self.dropped = 0  # bytes that should have been read, but were deleted
        if not self._open():
            raise FileNotFoundError(2, "no such log", path)

    def read(self, size: int) -> bytes:
        """At most that many bytes, fewer only at the end, or before a gap; empty: there are no more yet."""
        data = b""
        while len(data) < size and (self._fd >= 0 or self._open()):
            if self._begin > self._position:
                if data:
                    break
                self.dropped += self._begin - self._position
                self._position = self._begin
            is_complete = not self._is_current or self._is_renamed()  # asked first: nothing is added after that
            more = os.pread(self._fd, size - len(data), self._position - self._begin)
            data += more
            self._position += len(more)
            if not more and not is_complete:
                break
            if not more:
                self.close()
        return data

    def readline(self, limit: int = -1) -> bytes:
        """To the end of the line, or of the file; at most `limit` bytes, if that is not negative."""
        line = b""
        while limit < 0 or len(line) < limit:
            data = self.read(_CHUNK if limit < 0 else limit - len(line))
            newline = data.find(b"\n") + 1
            if newline:
                self._position -= len(data) - newline
                if self._position < self._begin:
                    self.close()  # it is in an earlier part
                return line + data[:newline]
            line += data
            if not data:
                break
        return line

    def first(self) -> int:
        """The position of the first byte that is kept."""
        return bounds(self._path)[0]

    def seek(self, position: int, whence: int = os.SEEK_SET) -> int:
        self._position = bounds(self._path)[1] + position if whence == os.SEEK_END else position
        if self._position < self._begin:
            self.close()  # it is in an earlier part
        return self._position

    def tell(self) -> int:
        return self._position

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close()

    def _is_renamed(self) -> bool:
        try:
            return not os.path.samestat(os.fstat(self._fd), os.stat(self._path))
        except OSError:
            return os.fstat(self._fd).st_nlink > 0  # renamed, and the next part does not exist yet

    def _open(self) -> bool:
        """Open the file that contains the position, or the next one that is kept."""
        for _ in range(_TRIES):
            before = parts(self._path)
            part: Part | None = next((each for each in before if each.end > self._position), None)
            try:
                fd = open_regular(self._path if part is None else part.path, follow=True)
            except FileNotFoundError:
                if part is None and parts(self._path) == before:
                    return False
                continue
            if part is None and parts(self._path) != before:
                os.close(fd)  # it may be another file than the one after these parts
                continue
            self._fd, self._is_current = fd, part is None
            self._begin = part.begin if part is not None else before[-1].end if before else 0
            return True
        return False


def read_range(path: str, begin: int, end: int) -> bytes:
    """Raises OSError if a part of it does not exist (any more)."""
    reader = LogReader(path)
    try:
        reader.seek(begin)
        pieces = []
        while begin < end:
            data = reader.read(end - begin)
            if not data:
                raise OSError(0, "the file was truncated", path)
            if reader.dropped:
                raise OSError(0, "the oldest part of the file was deleted", path)
            pieces.append(data)
            begin += len(data)
    finally:
        reader.close()
    return b"".join(pieces)
