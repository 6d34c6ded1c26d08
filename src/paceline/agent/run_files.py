"""Files that a run writes: logs, whose failures never stop training, and small files that are replaced atomically."""

from __future__ import annotations

import json
import os
import time
from typing import Any, Callable

RETRY_AFTER = 30.0
MOST_PENDING = 1024 * 1024  # bytes


def stamp(wall: float | None = None) -> str:
    """A UTC timestamp in milliseconds, the format in all files of a run.

    >>> stamp(0)
    '1970-01-01T00:00:00.000Z'
    """
    wall = time.time() if wall is None else wall
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(wall)) + f".{int(wall % 1 * 1000):03d}Z"


class Appender:
    """Appends bytes to a file. If writing fails, drops them, reports it once, and retries every RETRY_AFTER seconds."""

    def __init__(self, path: str, report: Callable[[str], None]) -> None:
        self._path = path
        self._report = report
        self._fd = -1
        self._retry_at = 0.0
        self._reported = False
        self._torn = False  # the last write ended in the middle of a line

    def write(self, data: bytes) -> bool:
        """Returns whether the data was written."""
        if self._retry_at and time.monotonic() < self._retry_at:
            return False
        try:
            if self._fd < 0:
                # Without O_NONBLOCK, a pipe that a task has put there would block the agent.
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
                self._fd = os.open(self._path, flags, 0o600)
            lines = b"\n" + data if self._torn else data
            self._torn = os.write(self._fd, lines) < len(lines)
            if self._torn:
                raise OSError(28, "no space left on device")
            self._retry_at = 0.0
            return True
        except OSError as error:
            self._retry_at = time.monotonic() + RETRY_AFTER
            if not self._reported:
                self._reported = True
                folder = os.path.dirname(self._path)
                self._report(f"cannot write to {folder}: {error.strerror}; training continues, but output is lost")
            return False

    def try_again(self) -> None:
        self._retry_at = 0.0

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Echo:
    """Copies lines to stdout without ever blocking: lines that do not fit are dropped, and their number is printed."""

    def __init__(self) -> None:
        self._pending = b""
        self._dropped = 0
        os.set_blocking(1, False)

    def write(self, data: bytes) -> None:
        if len(self._pending) > MOST_PENDING:
            self._dropped += data.count(b"\n")
            data = b""
        elif self._dropped:
            data = b"paceline: %d lines were dropped here: stdout was not read in time\n" % self._dropped + data
            self._dropped = 0
        self._pending += data
        try:
            while self._pending:
                self._pending = self._pending[os.write(1, self._pending) :]
        except BlockingIOError:
            pass
        except OSError:
            self._pending = b""


def write_termination_message(path: str, fields: dict[str, Any]) -> None:
    """Writes JSON to the file that the backend reads when the process has ended; Kubernetes reads up to 4 KiB."""
    if path:
        try:
            with open(path, "w") as file:
                file.write(json.dumps({name: _shortened(value) for name, value in fields.items()}))
        except OSError:
            pass


def _shortened(value: Any) -> Any:
    return value[:1000] if isinstance(value, str) else value


def replace(path: str, data: dict[str, Any]) -> None:
    """Replaces a JSON file atomically: a reader sees the old or the new content, never a mix."""
    replace_text(path, json.dumps(data, indent=1))


def replace_text(path: str, text: str) -> None:
    replace_bytes(path, text.encode("utf-8", "surrogatepass") + b"\n")  # a text may be a path that is not UTF-8


def replace_bytes(path: str, data: bytes) -> None:
    partial = f"{path}.{os.getpid()}.partial"
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
        os.replace(partial, path)
    except OSError:
        try:
            os.unlink(partial)
        except OSError:
            pass
        raise
