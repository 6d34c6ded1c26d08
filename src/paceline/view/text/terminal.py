"""Writes lines to a terminal or a pipe; a terminal also has a live area below them.

Much of what is shown was written by programs and by other users. On its way to a terminal, everything but printable
text, line ends, tabs and colors becomes visible characters: it cannot move the cursor, set the clipboard or hide text.
"""

from __future__ import annotations

import errno
import os
import re
import select
import sys
from collections.abc import Sequence
from typing import Any, TextIO, cast
from unicodedata import category

_COLORS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)
_RESET = "\x1b[0m"
_COLOR = r"\x1b\[[0-9;]{0,100}m"
_LAST_COLOR = re.compile(rf".*({_COLOR})", re.DOTALL)
_UNUSUAL = re.compile(rf"({_COLOR})|[^\x20-\x7e\n\t]")
_CLOSED = (errno.EPIPE, errno.ECONNRESET, errno.EBADF)  # errors of a stream that nobody reads any more,
_HUNG_UP = (errno.EIO, errno.ENXIO)  # and of a terminal
_JOINERS = "\u200c\u200d"  # invisible, but some scripts and emoji need them
# How progress bars redraw their line. Each state of a bar is a line of its own here, so this is just dropped.
_REDRAWING = re.compile(r"\x1b\[[0-9]{0,4}[ABCDGK]|\x1b\[0?J|\x1b\[\?25[hl]|\x08+")


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


def visible(text: str, colors: bool) -> str:
    """The text with control characters and invisible characters spelled out; colors stay, or are dropped.

    >>> visible("\\x1b]52;c;bHM=\\x07 \\x1b[31mred\\x1b[0m \\u202etxt.exe", colors=False)
    '\\\\x1b]52;c;bHM=\\\\x07 red \\\\u202etxt.exe'
    """
    if text.isprintable():
        return text
    return _UNUSUAL.sub(lambda match: (match[1] if colors else "") if match[1] else _spelled_out(match[0]), text)


def _spelled_out(letter: str) -> str:
    if letter.isprintable() or letter in _JOINERS or category(letter) == "Zs":
        return letter
    code = ord(letter)
    if code < 0x20:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def clean(text: str, colors: bool) -> str:
    """A line of a program's output: without the redrawing of progress bars, and with its colors closed."""
    if text.isprintable():
        return text
    shown = visible(_REDRAWING.sub("", text), colors)
    return f"{shown}{_RESET}" if "\x1b" in shown else shown


class SafeTerminal:
    """A terminal that receives only visible text, whatever is written to it. A color ends with its line."""

    def __init__(self, stream: TextIO) -> None:
        self.unguarded = stream
        self._colors = colored(stream)
        self._color_is_open = False

    def write(self, text: str) -> int:
        shown = visible(text, self._colors)
        self.unguarded.write(self._with_closed_colors(shown) if self._color_is_open or "\x1b" in shown else shown)
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def _with_closed_colors(self, text: str) -> str:
        closed = []
        for line in text.splitlines(keepends=True):
            if match := _LAST_COLOR.match(line):
                self._color_is_open = match[1] not in (_RESET, "\x1b[m")
            if self._color_is_open and line.endswith("\n"):
                line, self._color_is_open = f"{line[:-1]}{_RESET}\n", False
            closed.append(line)
        return "".join(closed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unguarded, name)


def guard(stream: TextIO) -> TextIO:
    """The stream, or what to write to instead if it is a terminal."""
    is_guarded = isinstance(stream, SafeTerminal) or not is_terminal(stream)
    return stream if is_guarded else cast(TextIO, SafeTerminal(stream))


def fit(text: str, width: int) -> str:
    """One line of text without control sequences, cut to a width."""
    text = clean(text, colors=False).replace("\t", " ").replace("\n", "\\n")
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
        self._is_terminal = is_terminal(stream)
        self._out: TextIO = stream.unguarded if isinstance(stream, SafeTerminal) else stream  # it moves the cursor
        self._drawn: list[str] = []

    def show(self, lines: Sequence[str], below: Sequence[str] = ()) -> None:
        live_lines = [fit(line, self.width() - 1) for line in below] if self.live else []
        if not lines and live_lines == self._drawn:
            return
        shown = [_closed(visible(line, self.colors)) for line in lines] if self._is_terminal else lines
        out = self._erase() + "".join(f"{line}\n" for line in shown) + "\n".join(live_lines)
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
            self._out.write(text)
            self._out.flush()
        except (OSError, ValueError) as error:
            # Anything else, such as a full disk below a redirected stream, loses these lines, but ends no run.
            number = error.errno if isinstance(error, OSError) else errno.EBADF
            if number in _CLOSED or (self._is_terminal and number in _HUNG_UP):
                self.gone = True
                silence(self.stream)


def _closed(line: str) -> str:
    return f"{line}{_RESET}" if "\x1b" in line and not line.endswith(_RESET) else line


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
    """Align columns to their widest cell. A cell is one line, without colors."""
    rows = [[visible(cell, colors=False).replace("\n", "\\n") for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    if lines and colored(stream or sys.stdout):
        lines[0] = bold(lines[0])
    return "\n".join(lines)
