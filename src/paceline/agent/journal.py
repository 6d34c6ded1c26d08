"""Files a run leaves: lines that are appended and must never stop training, and small files that are replaced whole."""

from __future__ import annotations

import json
import os
import time
from typing import Any, Callable

RETRY_AFTER = 30.0


def stamp(wall: float | None = None) -> str:
    """UTC to the millisecond, as every file of a run has it.

    >>> stamp(0)
    '1970-01-01T00:00:00.000Z'
    """
    wall = time.time() if wall is None else wall
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(wall)) + f".{int(wall % 1 * 1000):03d}Z"


class Appender:
    """Appends bytes to a file. When the disk is full it drops them, says so once, and tries again now and then."""

    def __init__(self, path: str, trouble: Callable[[str], None]) -> None:
        self._path = path
        self._trouble = trouble
        self._fd = -1
        self._silent_until = 0.0
        self._said = False
        self._torn = False  # the last write was cut in the middle of a line

    def write(self, data: bytes) -> None:
        if self._silent_until and time.monotonic() < self._silent_until:
            return
        try:
            if self._fd < 0:
                self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            written = os.write(self._fd, b"\n" + data if self._torn else data)
            self._torn = written < len(data)
            if self._torn:
                raise OSError(28, "no space left on device")
            self._silent_until = 0.0
        except OSError as error:
            self._silent_until = time.monotonic() + RETRY_AFTER
            if not self._said:
                self._said = True
                folder = os.path.dirname(self._path)
                self._trouble(f"cannot write to {folder}: {error.strerror}; training goes on without it")

    def try_again(self) -> None:
        self._silent_until = 0.0

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def replace(path: str, data: dict[str, Any]) -> None:
    """Write a JSON file so that a reader sees the old or the new one, never a part."""
    replace_text(path, json.dumps(data, indent=1))


def replace_text(path: str, text: str) -> None:
    beside = f"{path}.{os.getpid()}.partial"
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(text.encode() + b"\n")
        os.replace(beside, path)
    except OSError:
        try:
            os.unlink(beside)
        except OSError:
            pass
        raise
