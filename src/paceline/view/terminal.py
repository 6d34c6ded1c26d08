"""Writes lines to a terminal or a pipe; a terminal also has a live area below them."""

from __future__ import annotations

import os
import re
import select
import sys
from collections.abc import Sequence
from typing import TextIO

_COLORS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)
_CONTROL = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_].*?(?:\x07|\x1b\\|$)|\x1b[ -/]*[0-~]?|[\x00-\x08\x0b-\x1f\x7f-\x9f]",
    re.DOTALL,
)


def is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except ValueError:
        return False


def colored(stream: TextIO) -> bool:
    return is_terminal(stream) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def color(text: str, index: int) -> str:
    return f"\x1b[{_COLORS[index % len(_COLORS)]}m{text}\x1b[0m"


def bold(text: str) -> str:
    return f"\x1b[1m{text}\x1b[0m"


def clean(text: str, colors: bool) -> str:
    """Output of a program without control sequences that move the cursor or change the terminal; colors may stay."""
    if text.isprintable():
        return text
    cleaned = _CONTROL.sub(lambda match: match[0] if colors and _is_color(match[0]) else "", text)
    return f"{cleaned}\x1b[0m" if "\x1b" in cleaned else cleaned


def _is_color(sequence: str) -> bool:
    return sequence.startswith("\x1b[") and sequence.endswith("m")


def fit(text: str, width: int) -> str:
    """Text without control sequences, cut to a width."""
    text = clean(text, colors=False).replace("\t", " ")
    if text.isascii():
        return text if len(text) <= width else text[: max(0, width - 3)] + "..."
    from unicodedata import east_asian_width

    room = width
    for index, letter in enumerate(text):
        room -= 2 if east_asian_width(letter) in "WF" else 1
        if room < 0:
            return text[:index]
    return text


class Screen:
    """Permanent lines above a few lines that are replaced. Writes nothing once the reader has closed the stream."""

    def __init__(self, stream: TextIO, live: bool | None = None) -> None:
        self.stream = stream
        self.live = is_terminal(stream) and os.environ.get("TERM") != "dumb" if live is None else live
        self.colors = colored(stream)
        self.gone = False
        self._drawn: list[str] = []

    def show(self, lines: Sequence[str], below: Sequence[str] = ()) -> None:
        live_lines = [fit(line, self.width() - 1) for line in below] if self.live else []
        if not lines and live_lines == self._drawn:
            return
        out = self._erase() + "".join(f"{line}\n" for line in lines) + "\n".join(live_lines)
        self._drawn = live_lines
        self._write(out)

    def line(self, text: str) -> None:
        self.show([text])

    def width(self) -> int:
        try:
            return os.get_terminal_size(self.stream.fileno()).columns or 80
        except (OSError, ValueError):
            return 80

    def closed(self) -> bool:
        """Whether the reader has closed the stream: detected when writing, and on a pipe or a terminal also without."""
        if not self.gone:
            self.gone = hung_up(self.stream)
        return self.gone

    def _erase(self) -> str:
        if not self._drawn:
            return ""
        return "\r" + "\x1b[1A" * (len(self._drawn) - 1) + "\x1b[J"

    def _write(self, text: str) -> None:
        if self.gone or not text:
            return
        try:
            self.stream.write(text)
            self.stream.flush()
        except (OSError, ValueError):
            self.gone = True
            silence(self.stream)


def hung_up(stream: TextIO) -> bool:
    try:
        watch = select.poll()
        watch.register(stream.fileno(), 0)
        return any(events & (select.POLLERR | select.POLLHUP) for _, events in watch.poll(0))
    except (OSError, ValueError):
        return False


def silence(stream: TextIO) -> None:
    """Redirect a closed stream to /dev/null, so that its last flush does not fail."""
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
    except (OSError, ValueError):
        pass


def table(rows: Sequence[Sequence[str]], stream: TextIO | None = None) -> str:
    """Align columns to their widest cell."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if lines and colored(stream or sys.stdout):
        lines[0] = bold(lines[0])
    return "\n".join(lines)
