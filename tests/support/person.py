"""Paceline as a user runs it: called in a folder with a program, through pipes or in a real terminal."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

import paceline
from support.environment import without

LIMIT_S = 120.0

# Reports steps until it receives SIGTERM, and prints that it did.
STEADY = """
import os, signal, sys, time
import paceline

def on_sigterm(*_):
    print("asked to end", flush=True)
    sys.exit(0)

signal.signal(signal.SIGTERM, on_sigterm)
signal.signal(signal.SIGINT, on_sigterm)
step = 0
while True:
    step += 1
    paceline.report(step=step, loss=1 / step)
    print("step", step, flush=True)
    time.sleep(0.05)
"""
DEAF = STEADY.replace(", on_sigterm)", ", signal.SIG_IGN)")
SHORT = """
import paceline
for step in range(1, 6):
    paceline.report(step=step, loss=1 / step)
    print("step", step)
"""
BAR = r"""
import sys, time
for percent in range(0, 101, 10):
    sys.stdout.write(f"\r{percent}% of the bar")
    sys.stdout.flush()
    time.sleep(0.12)
sys.stdout.write("\nafter the bar\n")
"""


def eventually(
    condition: Callable[[], object], waiting_for: str | Callable[[], str], limit: float = LIMIT_S, pause: float = 0.02
) -> None:
    until = time.monotonic() + limit
    while not condition():
        if time.monotonic() > until:
            raise AssertionError(
                f"not within {limit:g} s: {waiting_for if isinstance(waiting_for, str) else waiting_for()}"
            )
        time.sleep(pause)


def a_moment_later(start: float) -> None:
    """Waits long enough for two key presses to be separate ones."""
    eventually(lambda: time.monotonic() - start > 0.5, "half a second")


def environment(home: Path, **extra: str) -> dict[str, str]:
    inherited = without("PACELINE", "NO_COLOR", "COLUMNS", "LINES")
    source = str(Path(paceline.__file__).parents[1])
    return {**inherited, "PACELINE_HOME": str(home), "PYTHONPATH": source, "TERM": "xterm-256color", **extra}


def words_of(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "paceline.cli", *arguments]


def processes(home: Path) -> list[psutil.Process]:
    """Every process that belongs to a run of this home, whatever its parent is now."""
    matching = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("PACELINE_HOME") == str(home) and process.status() != psutil.STATUS_ZOMBIE:
                matching.append(process)
    return matching


@contextlib.contextmanager
def nothing_left(home: Path, limit: float = LIMIT_S) -> Iterator[None]:
    try:
        yield
        until = time.monotonic() + limit
        while processes(home) and time.monotonic() < until:
            time.sleep(0.05)
        remaining = processes(home)
        assert not remaining
    finally:
        for process in processes(home):
            with contextlib.suppress(psutil.Error):
                process.kill()


class Person:
    """A user with a folder, a program in it and a home for runs; calls the command line there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.home = folder / "home"
        self.home.mkdir()

    def job(self, program: str, workers: int = 1, more: str = "") -> None:
        (self.folder / "train.py").write_text(program)
        text = "name: digits\nframework: none\ncommand: [python, train.py]\n"
        (self.folder / "job.yaml").write_text(f"{text}roles: {{worker: {{replicas: {workers}}}}}\n{more}")

    def call(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words_of(*arguments), cwd=self.folder, env=environment(self.home, **env), capture_output=True, text=True,
            timeout=LIMIT_S,
        )  # fmt: skip

    def start(self, *arguments: str) -> Started:
        return Started(
            subprocess.Popen(
                words_of(*arguments), cwd=self.folder, env=environment(self.home), stdin=subprocess.DEVNULL, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
            )
        )  # fmt: skip

    def terminal(self, *arguments: str, **env: str) -> Terminal:
        return Terminal(words_of(*arguments), self.folder, environment(self.home, **env))

    def run_folder(self) -> Path:
        return next((self.home / "runs").iterdir())


class Started:
    """A running command; its stderr is read as it is printed."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.said: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with contextlib.suppress(ValueError, OSError):
            self.said.extend(iter(self.process.stderr.readline, ""))

    def wait_for(self, pattern: str) -> None:
        eventually(lambda: re.search(pattern, "".join(self.said)), lambda: f"{pattern!r} in {self.said}")

    def stop_reading(self) -> None:
        """Closes the read end of the pipe. The descriptor number stays in use, because `end` closes it again."""
        assert self.process.stderr is not None
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), self.process.stderr.fileno())

    def end(self) -> tuple[int, str]:
        code = self.process.wait(LIMIT_S)
        self._reader.join(LIMIT_S)
        assert self.process.stdout is not None and self.process.stderr is not None
        out = self.process.stdout.read()
        self.process.stdout.close()
        self.process.stderr.close()
        return code, out


class Terminal:
    """A command in the foreground of its own terminal, a real pty."""

    def __init__(self, command: list[str], folder: Path, env: dict[str, str], columns: int = 100) -> None:
        self._master, slave = os.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
        self.process = subprocess.Popen(
            command, cwd=folder, env=env, stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        os.close(slave)
        self._data = b""
        self._closing = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while not self._closing:
            if not select.select([self._master], [], [], 0.05)[0]:
                continue
            try:
                piece = os.read(self._master, 65536)
            except OSError:
                return
            if not piece:
                return
            self._data += piece

    @property
    def raw(self) -> str:
        return self._data.decode(errors="replace")

    def wait_for(self, pattern: str) -> None:
        eventually(lambda: re.search(pattern, self.raw), lambda: f"{pattern!r} in {self.raw!r}")

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def end(self) -> int:
        code = self.process.wait(LIMIT_S)
        self._reader.join(LIMIT_S)
        os.close(self._master)
        return code

    def hang_up(self) -> int:
        # The reader must stop using the descriptor before it is closed, or the terminal stays open.
        self._closing = True
        self._reader.join(LIMIT_S)
        os.close(self._master)
        return self.process.wait(LIMIT_S)

    @property
    def screen(self) -> list[str]:
        return rendered(self.raw)


def rendered(raw: str) -> list[str]:
    """The lines on the screen in the end, without erased or overwritten text."""
    lines, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", raw):
        if part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part == "\r":
            column = 0
        elif part == "\x1b[J":
            lines = [*lines[:row], lines[row][:column]]
        elif match := re.fullmatch(r"\x1b\[(\d*)A", part):
            row = max(0, row - int(match[1] or 1))
        elif part.startswith("\x1b"):
            assert part.endswith("m"), f"unexpected control sequence: {part!r}"
        else:
            lines[row] = lines[row][:column].ljust(column) + part + lines[row][column + len(part) :]
            column += len(part)
    return [line.rstrip() for line in lines]
