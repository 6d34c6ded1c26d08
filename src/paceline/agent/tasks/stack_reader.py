"""Reads the Python stacks of one process of a task, without disturbing it: see frameworks/stack_signal.py.

It sends no signal to a process that has no handler for it, which would kill the process. What the process writes is
limited here, too: its program may write to the same file.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass

from paceline.agent import os_processes
from paceline.agent.stack_messages import Frame
from paceline.frameworks.stack_signal import (
    DUMP,
    HEAD_SIZE,
    MOST_BYTES,
    MOST_FRAMES,
    NAME,
    REQUEST_AT,
    SAMPLE,
    SLOT_SIZE,
)

LONGEST_NAME = 500  # characters of a file or a function
DUMP_WITHIN = 0.1  # seconds
IDLE_FOR = 0.02  # seconds in which a thread did not run: then faulthandler can read its frames
_HEADER = "Stack (most recent call first):"
_FRAME = re.compile(r'  File "(.*)", line ([0-9]{1,9}|\?\?\?) in (.*)')
_THREAD = re.compile(r"Thread ([0-9]{1,16})")  # an address if its native id is unknown
_ESCAPED = re.compile(r"\\x([0-9a-f]{2})|\\u([0-9a-f]{4})|\\U([0-9a-f]{8})")
_POLL = 0.0005  # seconds
_UNKNOWN = "???"  # line

Stack = tuple[Frame, ...]  # innermost first
Stacks = dict[int, Stack]  # native id of a thread -> its stack; that of the main thread is the pid


class CannotRead(Exception):
    """A process that shows no stacks; the text is the reason."""


def has_handlers(pid: int) -> bool:
    main = _thread(pid, pid)
    return main is not None and main.handles and _descriptor(pid) is not None


class StackReader:
    """CannotRead: the process has no handlers."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        descriptor = _descriptor(pid)
        if descriptor is None:
            raise CannotRead(_reason_without_handlers(pid))
        self._path = f"/proc/{pid}/fd/{descriptor}"
        self._requests = 0
        try:
            self._file = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise CannotRead(f"its stacks cannot be read: {error.strerror}") from None

    def close(self) -> None:
        os.close(self._file)

    def request(self) -> None:
        """Requests the stacks of all threads, which the main thread writes between two instructions of Python."""
        self._check(_thread(self.pid, self.pid))
        self._requests += 1
        os.pwrite(self._file, self._requests.to_bytes(SLOT_SIZE, "little"), REQUEST_AT)
        os.ftruncate(self._file, HEAD_SIZE)
        if not os_processes.signal_thread(self.pid, self.pid, SAMPLE):
            raise CannotRead("it has ended, or cannot be sent a signal")

    def reply(self) -> Stacks | None:
        """The stacks that were requested last; None if the main thread has not written them yet."""
        return parse_sample(self._written(), self._requests)

    def dump(self, until: float) -> Stacks:
        """The stacks of threads that do not run. Call it only if a request has had no reply for a while: then the main
        thread is in a C call, or waits for the GIL. `until`: when it returns what it has, in monotonic time."""
        threads = [self.pid]
        if _version(self.pid) >= (3, 11):  # faulthandler of earlier versions changes reference counts without the GIL
            threads += self._idle(self._noted_threads())
        stacks = {}
        for thread in threads:
            if time.monotonic() >= until:
                break
            stack = self._dump(thread)
            if stack is not None:
                stacks[thread] = stack
        return stacks

    def _dump(self, thread: int) -> Stack | None:
        state = _thread(self.pid, thread)
        self._check(state)
        if state is None or state.is_busy:
            return None
        os.ftruncate(self._file, HEAD_SIZE)
        if not os_processes.signal_thread(self.pid, thread, DUMP):
            return None
        deadline = time.monotonic() + DUMP_WITHIN
        while state is not None and time.monotonic() < deadline:
            time.sleep(_POLL)
            state = _thread(self.pid, thread)
            if state is not None and not state.is_busy:
                return parse_dump(self._written())
        return None

    def _noted_threads(self) -> list[int]:
        table = os.pread(self._file, REQUEST_AT, 0)
        noted = {int.from_bytes(table[at : at + SLOT_SIZE], "little") for at in range(0, len(table), SLOT_SIZE)}
        return sorted(noted - {0, self.pid})

    def _idle(self, threads: list[int]) -> list[int]:
        """Those that wait for something. Threads that wait for the GIL run every 5 ms."""
        before = {thread: _thread(self.pid, thread) for thread in threads}
        time.sleep(IDLE_FOR)
        after = {thread: _thread(self.pid, thread) for thread, state in before.items() if state is not None}
        return [thread for thread, state in after.items() if state is not None and state == before[thread]]

    def _check(self, state: _Thread | None) -> None:
        if state is None:
            raise CannotRead("it has ended")
        if state.is_suspended:
            raise CannotRead("it is suspended (SIGSTOP)")
        if not state.handles or not _is_linked(self._path, self.pid):
            raise CannotRead(_reason_without_handlers(self.pid))

    def _written(self) -> str:
        return os.pread(self._file, 2 * MOST_BYTES, HEAD_SIZE).decode("utf-8", "replace")


# ---- what the signals write


def parse_sample(text: str, request: int) -> Stacks | None:
    """The stacks of a reply to this request; None if it is not complete."""
    _, begin, rest = text.rpartition(f"Begin {request}\n")
    body, end, _ = rest.partition(f"\nEnd {request}\n")
    if not begin or not end:
        return None
    frames: dict[int, list[Frame]] = {}
    thread = 0
    for line in body.splitlines():
        if (match := _THREAD.fullmatch(line)) is not None:
            thread = int(match[1])
        elif (frame := _frame(line)) is not None:
            stack = frames.setdefault(thread, [])
            if len(stack) < MOST_FRAMES:
                stack.append(frame)
    return {thread: tuple(stack) for thread, stack in frames.items()}


def parse_dump(text: str) -> Stack | None:
    """One stack, as faulthandler writes it; None if the thread runs no Python code."""
    begin, end = text.find("Begin "), text.find("End ")
    if 0 <= begin < end:  # a reply that came late
        text = text[:begin] + text[end:].partition("\n")[2]
    lines = text.splitlines()
    if lines[:1] != [_HEADER] or lines.count(_HEADER) > 1:
        return None
    return tuple(filter(None, map(_frame, map(_unescaped, lines[1 : MOST_FRAMES + 1])))) or None


def _frame(line: str) -> Frame | None:
    match = _FRAME.fullmatch(line)
    if match is None:
        return None
    file, number, function = match.groups()
    return Frame(file[:LONGEST_NAME], 0 if number == _UNKNOWN else int(number), function[:LONGEST_NAME])


def _unescaped(line: str) -> str:
    """faulthandler writes ASCII only."""
    return _ESCAPED.sub(_character, line) if "\\" in line else line


def _character(match: re.Match[str]) -> str:
    code = int(next(filter(None, match.groups())), 16)
    return chr(code) if code <= 0x10FFFF and not 0xD800 <= code <= 0xDFFF else match[0]


# ---- the process


@dataclass(frozen=True)
class _Thread:
    is_suspended: bool
    handles: bool  # whether the process has handlers for our signals
    is_busy: bool  # whether DUMP is pending or blocked; the kernel blocks it while the handler runs
    switches: str  # how often the thread has begun and ceased to run


def _thread(pid: int, thread: int) -> _Thread | None:
    """The state of a thread; None if it has ended."""
    try:
        with open(f"/proc/{pid}/task/{thread}/status", errors="replace") as file:
            fields = dict(line.split(":\t", 1) for line in file if ":\t" in line)
        state = fields["State"][:1]
        pending, shared, blocked, handled = (
            int(fields[name], 16) for name in ("SigPnd", "ShdPnd", "SigBlk", "SigCgt")
        )  # fmt: skip
        switches = fields["voluntary_ctxt_switches"] + fields["nonvoluntary_ctxt_switches"]
    except (OSError, KeyError, ValueError):
        return None
    if state in "ZX":
        return None
    both = _bit(SAMPLE) | _bit(DUMP)
    is_busy = bool((pending | shared | blocked) & _bit(DUMP))
    return _Thread(state in "Tt", handled & both == both, is_busy, f"{state} {switches}")


def _bit(number: int) -> int:
    return 1 << (number - 1)


def _descriptor(pid: int) -> int | None:
    """The descriptor that the handlers of this process write to. A process that was forked from it has the parent's
    handlers and file; that file has the parent's pid in its name."""
    folder = f"/proc/{pid}/fd"
    try:
        names = [name for name in os.listdir(folder) if _is_linked(f"{folder}/{name}", pid)]
        return next((int(name) for name in names if _appends(pid, name)), None)
    except OSError:
        return None


def _is_linked(path: str, pid: int) -> bool:
    try:
        return os.readlink(path) in (f"/memfd:{NAME}-{pid} (deleted)", f"/tmp/{NAME}-{pid} (deleted)")
    except OSError:
        return False


def _appends(pid: int, descriptor: str) -> bool:
    with open(f"/proc/{pid}/fdinfo/{descriptor}") as file:
        flags = next((line for line in file if line.startswith("flags:")), "flags: 0")
    return bool(int(flags.split()[1], 8) & os.O_APPEND)


def _program(pid: int) -> str:
    try:
        return os.path.basename(os.readlink(f"/proc/{pid}/exe"))
    except OSError:
        return ""


def _version(pid: int) -> tuple[int, int]:
    """Of its Python, from the name of its program; (0, 0): unknown."""
    match = re.match(r"python(\d)\.(\d+)", _program(pid))
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _reason_without_handlers(pid: int) -> str:
    program = _program(pid)
    if not program:
        return "it has ended, or its process cannot be inspected"
    if not program.startswith("python"):
        return f"it runs {program}, which is not Python"
    return "its Python has just started, was started without Paceline's hook (as with -I, -E or -S), or has replaced it"
