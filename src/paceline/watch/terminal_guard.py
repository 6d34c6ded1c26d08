"""Restores the terminal after the view, however it ends: the view runs in a child process, and its parent waits."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import termios
import time
from typing import Any, NoReturn

# Undoes what the view sets, in the order of its own end: keyboard protocol, paste mode, focus events, mouse, line wrap,
# colors, alternate screen, cursor.
RESET = (
    b"\x1b[<u\x1b[?2004l\x1b[?1004l\x1b[?1000l\x1b[?1003l\x1b[?1006l\x1b[?1015l\x1b[?2048l\x1b[?2026l"
    b"\x1b[?7h\x1b[0m\x1b[?1049l\x1b[?25h"
)
_END_WITHIN_S = 15.0  # after a signal; then the view is killed. On a busy machine, its end takes seconds
_WRITE_WITHIN_S = 1.0  # a terminal that is not read, such as that of a lost connection
_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
_PR_SET_PDEATHSIG = 1


def run_in_child() -> None:
    """Returns in a new process, which is to show the view. This process waits for it, restores the terminal, and exits
    with its exit code."""
    terminal = sys.stdout.fileno()
    settings = termios.tcgetattr(terminal)
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)  # until this process can forward them
    child = os.fork()
    if child == 0:
        _end_with(parent)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return
    _wait(child, terminal, settings, mask)


def _end_with(parent: int) -> None:
    """If the parent is killed, this process ends as after SIGTERM, and restores the terminal itself."""
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    except (OSError, AttributeError):
        return
    if os.getppid() != parent:
        os._exit(1)


def restore_after_parent(parent: int, settings: list[Any], own_settings: list[Any] | None) -> None:
    """If the parent was killed: the shell has the terminal again, and most shells have restored its settings. If they
    are still those of the view, none has. `settings`: those before the view."""
    if os.getppid() == parent or own_settings is None:
        return
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # this process is in the background now
    try:
        if termios.tcgetattr(1) == own_settings:
            termios.tcsetattr(1, termios.TCSANOW, settings)
    except termios.error:
        pass


def _wait(child: int, terminal: int, settings: list[Any], mask: set[signal.Signals | int]) -> NoReturn:
    """`mask`: the signals that are blocked from when this process forwards others."""
    forwarded_at: list[float] = []

    def forward(number: int, _: object) -> None:
        forwarded_at.append(time.monotonic())
        _send(child, number)

    signals, written = os.pipe()
    os.set_blocking(written, False)
    signal.set_wakeup_fd(written, warn_on_full_buffer=False)  # ends the wait below
    for number in _FORWARDED:
        signal.signal(number, forward)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.signal(signal.SIGTSTP, signal.SIG_IGN)  # the child handles it, and this process then stops, too
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    while True:
        pid, status = os.waitpid(child, os.WUNTRACED | os.WNOHANG)
        if pid and not os.WIFSTOPPED(status):
            break
        if pid:
            os.kill(os.getpid(), signal.SIGSTOP)  # until the shell continues the whole job
            if _is_stopped(child):  # the view must get this signal only once
                _send(child, signal.SIGCONT)
            continue
        left = forwarded_at[0] + _END_WITHIN_S - time.monotonic() if forwarded_at else None
        if left is not None and left <= 0:
            _send(child, signal.SIGKILL)
            left = None
        if select.select([signals], [], [], left)[0]:
            os.read(signals, 4096)
    code = os.waitstatus_to_exitcode(status)
    if code < 0 and restore(terminal, settings):
        name = signal.Signals(-code).name
        print(f"the view was killed by {name}; runs are not affected", file=sys.stderr, flush=True)
    os._exit(code if code >= 0 else 128 - code)


def _is_stopped(child: int) -> bool:
    try:
        with open(f"/proc/{child}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False


def _send(child: int, number: int) -> None:
    try:
        os.kill(child, number)
    except ProcessLookupError:
        pass


def restore(terminal: int, settings: list[Any]) -> bool:
    """After a process that could not do it. What was typed in the meantime, and replies of the terminal, are dropped.
    Returns False if the terminal no longer exists, or nothing reads what is written to it."""
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    rest, until = RESET, time.monotonic() + _WRITE_WITHIN_S
    try:
        while rest and time.monotonic() < until and select.select([], [terminal], [], _WRITE_WITHIN_S)[1]:
            rest = rest[os.write(terminal, rest) :]
        termios.tcsetattr(terminal, termios.TCSANOW, settings)
        termios.tcflush(terminal, termios.TCIFLUSH)
    except (OSError, termios.error):
        return False
    return not rest
