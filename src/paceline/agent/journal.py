"""Files a run leaves: lines that are appended and must never stop training, and small files that are replaced whole."""

from __future__ import annotations

import json
import os
import time
from typing import Any, Callable

RETRY_AFTER = 30.0
MOST_PENDING = 1024 * 1024  # bytes


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


class Echo:
    """Repeats lines on stdout without ever waiting for its reader: what does not fit is dropped, and that is said."""

    def __init__(self) -> None:
        self._pending = b""
        self._dropped = 0
        os.set_blocking(1, False)

    def write(self, data: bytes) -> None:
        if len(self._pending) > MOST_PENDING:
            self._dropped += data.count(b"\n")
            data = b""
        elif self._dropped:
            data = b"paceline: %d lines are missing here: nobody read them in time\n" % self._dropped + data
            self._dropped = 0
        self._pending += data
        try:
            while self._pending:
                self._pending = self._pending[os.write(1, self._pending) :]
        except BlockingIOError:
            pass
        except OSError:
            self._pending = b""


def last_words(path: str, words: dict[str, Any]) -> None:
    """As JSON where the backend shows them; it takes 4 KiB."""
    if path:
        try:
            with open(path, "w") as file:
                file.write(json.dumps({name: _short(value) for name, value in words.items()}))
        except OSError:
            pass


def _short(value: Any) -> Any:
    return value[:1000] if isinstance(value, str) else value


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
