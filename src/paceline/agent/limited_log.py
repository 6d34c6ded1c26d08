"""Appends to a log of which a limited number of bytes is kept: the oldest part is deleted first."""

from __future__ import annotations

import os
from typing import Callable

from paceline.agent.run_files import Appender
from paceline.storage import log_parts

PARTS = 8  # a part has at most this fraction of the limit


class LimitedLog:
    def __init__(self, path: str, report: Callable[[str], None], limit: int) -> None:
        """`report`: called with a message if the log cannot be written."""
        self._path, self._limit = path, limit
        self._largest_part = max(1, limit // PARTS)
        self._file = Appender(path, report)
        self._size: int | None = None  # of the part that is written; None: not known

    def write(self, data: bytes) -> bool:
        """`data`: complete lines. Returns whether they were written."""
        while len(data) > self._largest_part:
            length = data.rfind(b"\n", 0, self._largest_part) + 1 or data.find(b"\n") + 1
            if not 0 < length < len(data):
                break  # one line
            self._append(data[:length])
            data = data[length:]
        return self._append(data)

    def _append(self, data: bytes) -> bool:
        if self._size is None:
            self._size = _size(self._path)
        if self._size and self._size + len(data) > self._largest_part:
            self._start_part()
        is_written = self._file.write(data)
        self._size = self._size + len(data) if is_written and self._size is not None else None
        return is_written

    def close(self) -> None:
        self._file.close()

    def _start_part(self) -> None:
        self._size = None
        try:
            complete = log_parts.parts(self._path)
            os.makedirs(log_parts.parts_folder(self._path), mode=0o700, exist_ok=True)
            os.rename(self._path, log_parts.part_path(self._path, complete[-1].end if complete else 0))
            self._file.close()  # the next part is created when it is written
            self._size = 0
        except FileNotFoundError:
            self._file.close()  # somebody has deleted it
        except OSError:  # a task may have put a folder there
            if _size(self._path) > self._limit:
                self._discard()
            return
        self._delete_oldest()

    def _discard(self) -> None:
        """Starts again: the log cannot become a part, and must not fill the disk."""
        try:
            os.truncate(self._path, 0)
        except OSError:
            pass

    def _delete_oldest(self) -> None:
        complete = log_parts.parts(self._path)
        kept = sum(part.end - part.begin for part in complete)
        for part in complete[:-1]:  # where the last one ends is the position of the next
            if kept <= self._limit - self._largest_part:
                break
            try:
                os.unlink(part.path)
                kept -= part.end - part.begin
            except OSError:
                break  # the next time


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
