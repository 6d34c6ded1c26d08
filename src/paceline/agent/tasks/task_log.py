"""A task's log: lines with time and generation, progress bars collapsed, and the last lines kept in memory."""

from __future__ import annotations

import time
from collections import deque
from typing import Callable

from paceline.agent.run_files import Appender, Echo, stamp

LONGEST_LINE = 64 * 1024
TAIL_LINES = 400
BAR_EVERY = 0.5  # seconds between two logged states of a progress bar


class TaskLog:
    def __init__(self, path: str, report: Callable[[str], None], task: str = "", echo: Echo | None = None) -> None:
        self._file = Appender(path, report)
        self._task = task.encode()
        self._echo = echo
        self._partial = b""
        self._bar_at = 0.0
        self.generation = 0
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)

    def begin(self, generation: int) -> None:
        self.generation = generation
        self.tail.clear()
        self._partial = b""

    def feed(self, data: bytes) -> None:
        """Appends output of the task, in pieces of any size."""
        pieces = (self._partial + data).split(b"\n")
        self._partial = pieces.pop()
        lines = [self._line(piece) for piece in pieces]
        if b"\r" in self._partial:
            self._partial = self._bar(self._partial, lines)
        while len(self._partial) > LONGEST_LINE:
            lines.append(self._line(self._partial[:LONGEST_LINE]))
            self._partial = self._partial[LONGEST_LINE:]
        if lines:
            self._write(lines)

    def end(self) -> None:
        """The task has ended: an unterminated line is complete."""
        if self._partial:
            self._write([self._line(self._partial)])
            self._partial = b""

    def close(self) -> None:
        self._file.close()

    def _line(self, raw: bytes) -> bytes:
        visible = raw.rstrip(b"\r").rpartition(b"\r")[2]
        text = visible.decode("utf-8", "replace")
        self.tail.append(text)
        return b"| " + text.encode()

    def _bar(self, partial: bytes, lines: list[bytes]) -> bytes:
        """The latest state of a line that overwrites itself; older states are dropped."""
        before, _, after = partial.rpartition(b"\r")
        state = after or before.rpartition(b"\r")[2]
        now = time.monotonic()
        if state and now - self._bar_at >= BAR_EVERY:
            self._bar_at = now
            lines.append(b"~ " + state.decode("utf-8", "replace").encode())
        return b"\r" + state if not after else b"\r" + after

    def _write(self, lines: list[bytes]) -> None:
        prefix = f"{stamp()} g{self.generation} ".encode()
        self._file.write(b"".join(prefix + line + b"\n" for line in lines))
        if self._echo is not None:
            self._echo.write(b"".join(self._task + b" " + prefix + line + b"\n" for line in lines))
