"""Terminals for tests of programs that draw on the whole screen: a pty whose screen is emulated here, and tmux."""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import os
import re
import select
import shlex
import signal
import struct
import subprocess
import termios
import threading
import time
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from support.person import LIMIT_S, eventually

SANE_S = 20.0  # for a shell on a busy machine

_UNFINISHED = r"\x1b(?:\[[<>=?]?[0-9;]*[$ ]?|\][^\x07\x1b]*)?"
_TOKENS = re.compile(
    r"\x1b\[([<>=?]?)([0-9;]*)([$ ]?[A-Za-z])|\x1b\][^\x07\x1b]*\x07"
    rf"|(?P<canceled>{_UNFINISHED})(?=\x1b)|\x1b|[\r\n\x08]|[^\x1b\r\n\x08]"
)
_INCOMPLETE = re.compile(f"{_UNFINISHED}$")
# Modes that may be switched on and off, and what is requested of the terminal.
_HARMLESS = {("?", "h"), ("?", "l"), ("?", "$p"), (">", "u"), ("<", "u"), ("", "m")}


class FullScreen(Protocol):
    """A terminal with a program in it."""

    def screen(self) -> list[str]: ...

    def type(self, keys: str) -> None: ...

    def resize(self, columns: int, rows: int) -> None: ...

    def pids(self) -> tuple[int, int]:
        """Of the command, and of the process that it has started."""

    def end(self) -> int:
        """Waits for the command, and returns its exit code."""

    def is_sane(self) -> bool:
        """Whether the terminal is as it was before the command."""


def wait_for(terminal: FullScreen, pattern: str) -> None:
    """Until a part of the screen matches the pattern; ^ and $ match at lines."""

    def describe() -> str:
        shown = "\n".join(terminal.screen())
        return f"{pattern!r} on the screen:\n{shown}"

    eventually(lambda: re.search(pattern, "\n".join(terminal.screen()), re.M), describe)


def wait_until_gone(terminal: FullScreen, pattern: str) -> None:
    """Until no part of the screen matches the pattern: a key is then for what is below."""

    def describe() -> str:
        shown = "\n".join(terminal.screen())
        return f"{pattern!r} is no longer on the screen:\n{shown}"

    eventually(lambda: not re.search(pattern, "\n".join(terminal.screen()), re.M), describe)


def settled(terminal: FullScreen, seconds: float = 2.0) -> list[str]:
    """The screen, once it has not changed for a while."""
    lines, since = terminal.screen(), time.monotonic()

    def is_settled() -> bool:
        nonlocal lines, since
        if (now := terminal.screen()) != lines:
            lines, since = now, time.monotonic()
        return time.monotonic() - since > seconds

    eventually(is_settled, "the screen no longer changes")
    return lines


class Pty:
    """A command in the foreground of a pty. What it writes is interpreted here; an unknown sequence is an error."""

    def __init__(self, command: list[str], folder: Path, env: dict[str, str], size: tuple[int, int] = (80, 24)) -> None:
        self.columns, self.rows = size
        self._master, self._slave = os.openpty()
        self._set_size()
        self._before = termios.tcgetattr(self._slave)
        self.process = subprocess.Popen(
            command, cwd=folder, env=env, stdin=self._slave, stdout=self._slave, stderr=self._slave,
            start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        self.raw = ""
        self._lines = _blank(self.columns, self.rows)
        self._row = self._column = 0
        self.modes: set[str] = set()
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        text = ""
        while not self._closing.is_set():
            if not select.select([self._master], [], [], 0.05)[0]:
                continue
            with self._lock:  # from reading on: `end` finds nothing to read, and waits until all is interpreted
                try:
                    text += decode(os.read(self._master, 65536))
                except OSError:
                    return
                incomplete = _INCOMPLETE.search(text)
                end = incomplete.start() if incomplete else len(text)
                self._interpret(text[:end])
                text = text[end:]

    def _interpret(self, text: str) -> None:
        self.raw += text
        for match in _TOKENS.finditer(text):
            kind, numbers, final = match.group(1, 2, 3)
            token = match[0]
            if final is not None:
                self._control(kind, numbers, final)
            elif match["canceled"]:
                continue  # SIGKILL can interrupt a write; in a terminal, the next sequence cancels the unfinished one
            elif token == "\r":
                self._column = 0
            elif token == "\n":
                self._row = min(self.rows - 1, self._row + 1)
            elif token == "\x08":
                self._column = max(0, self._column - 1)
            elif token.startswith("\x1b"):
                raise AssertionError(f"unexpected sequence: {text[match.start() : match.start() + 20]!r}")
            else:
                self._put(token)

    def _control(self, kind: str, numbers: str, final: str) -> None:
        values = [int(number) if number else 0 for number in numbers.split(";")]
        if (kind, final) == ("", "H"):
            self._row = max(0, (values[0] or 1) - 1)
            self._column = max(0, (values[1] if len(values) > 1 else 1) - 1)
        elif (kind, final) == ("", "J"):
            self._lines = _blank(self.columns, self.rows)
        elif (kind, final) in _HARMLESS:
            if final in ("h", "l"):
                (self.modes.add if final == "h" else self.modes.discard)(numbers)
            if (final, numbers) == ("h", "1049"):
                self._lines = _blank(self.columns, self.rows)
        else:
            raise AssertionError(f"unexpected sequence: {kind}{numbers}{final}")

    def _put(self, letter: str) -> None:
        wide = unicodedata.east_asian_width(letter) in "WF"
        if self._row < self.rows and self._column < self.columns:
            self._lines[self._row][self._column] = letter
            if wide and self._column + 1 < self.columns:
                self._lines[self._row][self._column + 1] = ""
        self._column += 2 if wide else 1

    def screen(self) -> list[str]:
        assert self._reader.is_alive() or self.process.poll() is not None or self._closing.is_set(), "the reader failed"
        with self._lock:
            return ["".join(line).rstrip() for line in self._lines]

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def resize(self, columns: int, rows: int) -> None:
        with self._lock:
            self.columns, self.rows = columns, rows
            self._lines = _blank(columns, rows)
        self._set_size()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGWINCH)

    def _set_size(self) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", self.rows, self.columns, 0, 0))

    def pids(self) -> tuple[int, int]:
        return self.process.pid, child_of(self.process.pid)

    def end(self) -> int:
        code = self.process.wait(LIMIT_S)
        eventually(lambda: not select.select([self._master], [], [], 0)[0], "all output is read")
        with self._lock:
            return code

    def is_sane(self) -> bool:
        """`7` is line wrap and `25` the cursor, which the program switches off and on again."""
        return termios.tcgetattr(self._slave) == self._before and self.modes <= {"7", "25"}

    def hang_up(self) -> None:
        """The terminal closes."""
        self._closing.set()
        self._reader.join(LIMIT_S)  # it must not use the descriptor any more, or the terminal stays open
        for descriptor in (self._master, self._slave):
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(LIMIT_S)
        if not self._closing.is_set():
            self.hang_up()


class Tmux:
    """A shell in a tmux server of its own, which runs the command. Needs tmux."""

    def __init__(self, command: list[str], folder: Path, env: dict[str, str], size: tuple[int, int] = (80, 24)) -> None:
        self._socket = folder / "tmux"
        self._folder = folder
        variables = {**env, "PS1": "$ ", "HISTFILE": "", "LANG": "C.UTF-8"}
        exported = [f"{name}={value}" for name, value in variables.items() if name not in ("TERM", "TMUX")]
        shell = shlex.join(["env", "-i", *exported, "TERM=screen-256color", "sh"])
        self._call(
            "-f", "/dev/null", "new-session", "-d", "-x", str(size[0]), "-y", str(size[1]), "-c", str(folder), shell
        )
        self._call("set-option", "-g", "status", "off")
        self.resize(*size)
        self._enter("stty -g > before")
        self._exit = folder / "exit"
        script = folder / "command.sh"
        overrides = "".join(f"export {name}={shlex.quote(env[name])}\n" for name in ("TERM",) if env[name] == "vt100")
        script.write_text(f"{overrides}exec {shlex.join(command)}\n")
        self._enter("clear; sh command.sh; echo $? > exit.partial; mv exit.partial exit")

    def _call(self, *arguments: str) -> str:
        result = subprocess.run(
            ["tmux", "-u", "-S", str(self._socket), *arguments], capture_output=True, text=True, timeout=LIMIT_S,
            env={name: value for name, value in os.environ.items() if name != "TMUX"} | {"LANG": "C.UTF-8"}, check=True,
        )  # fmt: skip
        return result.stdout

    def _enter(self, line: str) -> None:
        self._call("send-keys", "-l", line)
        self._call("send-keys", "Enter")

    def screen(self) -> list[str]:
        lines = [line.rstrip() for line in self._call("capture-pane", "-p").splitlines()]
        rows = int(self._call("display-message", "-p", "#{pane_height}"))
        return lines + [""] * (rows - len(lines))

    def type(self, keys: str) -> None:
        self._call("send-keys", "-H", *(f"{byte:02x}" for byte in keys.encode()))

    def resize(self, columns: int, rows: int) -> None:
        self._call("resize-window", "-x", str(columns), "-y", str(rows))

    def pids(self) -> tuple[int, int]:
        shell = int(self._call("display-message", "-p", "#{pane_pid}"))
        parent = child_of(shell)
        return parent, child_of(parent)

    def end(self) -> int:
        eventually(self._exit.exists, "the command ends")
        return int(self._exit.read_text())

    def is_sane(self) -> bool:
        """Waits for the shell, and for tmux to interpret what the program has written."""
        until = time.monotonic() + SANE_S
        while not (is_sane := self._is_sane_now()) and time.monotonic() < until:
            time.sleep(0.02)
        return is_sane

    def _is_sane_now(self) -> bool:
        after = self._folder / "after"
        after.unlink(missing_ok=True)
        self._enter("stty -g > after.partial; mv after.partial after")  # not executed if Enter means nothing
        until = time.monotonic() + 2.0  # then it is typed again: what was typed is dropped when a terminal is restored
        while not after.exists() and time.monotonic() < until:
            time.sleep(0.02)
        modes = self._call(
            "display-message", "-p", "#{alternate_on}#{mouse_any_flag}#{cursor_flag}#{wrap_flag}"
        ).strip()
        return modes == "0011" and after.exists() and after.read_text() == (self._folder / "before").read_text()

    def close(self) -> None:
        with contextlib.suppress(subprocess.SubprocessError):
            self._call("kill-server")


def _blank(columns: int, rows: int) -> list[list[str]]:
    return [[" "] * columns for _ in range(rows)]


def child_of(pid: int) -> int:
    children: list[int] = []

    def has_child() -> bool:
        with contextlib.suppress(OSError):
            children[:] = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
        return bool(children)

    eventually(has_child, f"a child of {pid}")
    return children[0]


@contextlib.contextmanager
def opened(
    kind: str, command: list[str], folder: Path, env: dict[str, str], size: tuple[int, int] = (80, 24)
) -> Iterator[Any]:
    """`kind`: pty or tmux."""
    terminal = (Tmux if kind == "tmux" else Pty)(command, folder, env, size)
    try:
        yield terminal
    finally:
        terminal.close()
