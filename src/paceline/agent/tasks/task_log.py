"""A task's log: lines with time and generation, progress bars collapsed, and the last lines kept in memory.

A task may write 100,000 lines a second: complete lines are handled together, not one by one.
"""

from __future__ import annotations

from collections import deque
from typing import Callable

from paceline.agent.limited_log import LimitedLog
from paceline.agent.run_files import Echo, stamp
from paceline.agent.tasks.overwritten_lines import OverwrittenLine, valid_utf8, visible
from paceline.plan import LOG_LIMIT

LONGEST_LINE = 64 * 1024
TAIL_LINES = 400


class TaskLog:
    def __init__(
        self, path: str, report: Callable[[str], None], task: str = "", echo: Echo | None = None,
        limit: int = LOG_LIMIT,
    ) -> None:  # fmt: skip
        """`limit`: bytes of it that are kept."""
        self._file = LimitedLog(path, report, limit)
        self._task = task.encode()
        self._echo = echo
        self._partial = b""
        self._overwritten = OverwrittenLine()
        self.generation = 0
        self._recent: deque[tuple[bytes, int]] = deque()  # lines, separated by line ends, and their number
        self._recent_lines = 0

    def begin(self, generation: int) -> None:
        self.generation = generation
        self.clear_tail()
        self._partial = b""

    def feed(self, data: bytes) -> None:
        """Appends output of the task, in pieces of any size."""
        if b"\r" in data or b"\r" in self._partial:
            self._feed_overwritten(data)
        else:
            complete, newline, rest = data.rpartition(b"\n")
            if newline:
                lines, self._partial = valid_utf8(self._partial + complete), rest
                self._write([lines])
            else:
                self._partial += rest
        if len(self._partial) > LONGEST_LINE:
            pieces = []
            while len(self._partial) > LONGEST_LINE:
                pieces.append(valid_utf8(self._partial[:LONGEST_LINE]))
                self._partial = self._partial[LONGEST_LINE:]
            self._write(pieces)

    def end(self) -> None:
        """The task has ended: an unterminated line is complete."""
        if self._partial:
            self._write([visible(self._partial)])
            self._partial = b""

    def close(self) -> None:
        self._file.close()

    @property
    def tail(self) -> list[str]:
        """The last lines of this generation."""
        lines = [line for chunk, _ in self._recent for line in chunk.decode("utf-8", "replace").split("\n")]
        return lines[-TAIL_LINES:]

    def clear_tail(self) -> None:
        self._recent.clear()
        self._recent_lines = 0

    def _feed_overwritten(self, data: bytes) -> None:
        pieces = (self._partial + data).split(b"\n")
        self._partial = pieces.pop()
        self._write([visible(piece) for piece in pieces])
        if b"\r" in self._partial:
            self._partial, state = self._overwritten.collapse(self._partial)
            if state:
                self._append(state, b"~ ")

    def _write(self, chunks: list[bytes]) -> None:
        """Each chunk is a line, or several with line ends between them."""
        if not chunks:
            return
        lines = b"\n".join(chunks)
        count = lines.count(b"\n") + 1
        self._recent.append((lines, count))
        self._recent_lines += count
        while self._recent_lines - self._recent[0][1] >= TAIL_LINES:
            self._recent_lines -= self._recent.popleft()[1]
        self._append(lines, b"| ")

    def _append(self, lines: bytes, mark: bytes) -> None:
        prefix = f"{stamp()} g{self.generation} ".encode() + mark
        self._file.write(_prefixed(lines, prefix))
        if self._echo is not None:
            self._echo.write(_prefixed(lines, self._task + b" " + prefix))


def _prefixed(lines: bytes, prefix: bytes) -> bytes:
    return prefix + lines.replace(b"\n", b"\n" + prefix) + b"\n"
