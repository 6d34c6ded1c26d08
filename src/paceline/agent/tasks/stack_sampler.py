"""Replies to requests for the stacks of a host's tasks. A thread reads them, so that the agent is not delayed."""

from __future__ import annotations

import json
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import islice
from typing import Callable

from paceline.agent.net.loop import Loop
from paceline.agent.stack_messages import MOST_PROCESSES, PER_SECOND, Frame, StacksTaken, TakeStacks, ThreadSamples
from paceline.agent.tasks.attempt import Attempt
from paceline.agent.tasks.stack_reader import CannotRead, Stack, StackReader, Stacks, has_handlers

REPLY_WITHIN = 0.4  # seconds in which a main thread that runs Python code replies; otherwise it is in a C call
MOST_CHECKED = 1000  # processes of a task: this takes about 0.1 ms each
DUMPS_WITHIN = 2.5  # seconds for all processes of a host
# Of a process, so that a reply is not larger than a message may be, whatever the program has written.
MOST_STACKS, MOST_FRAMES, MOST_THREADS = 2000, 10_000, 200  # different ones
MOST_NAMES = 3 * 1024 * 1024  # bytes of the different frames
_INTERVAL = 1 / PER_SECOND
_POLL = 0.002
_NO_REPLY = "it neither runs Python code nor waits: it may be blocked in the kernel"


class StackSampler:
    def __init__(
        self,
        host: str,
        loop: Loop,
        attempts: Mapping[str, Attempt],
        program_processes: Callable[[int], list[int]],
        redact: Callable[[str], str],
        send: Callable[[StacksTaken], None],
    ) -> None:
        """`attempts`: the running ones, which change. `program_processes`: see TaskLauncher."""
        self._host, self._loop, self._attempts, self._processes_of = host, loop, attempts, program_processes
        self._redact, self._send = redact, send
        self._waiting: deque[TakeStacks] = deque()
        self._current: TakeStacks | None = None
        self._results: list[StacksTaken] = []
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        loop.watch(self._wake_read, selectors.EVENT_READ, self._finish)

    def take(self, message: TakeStacks) -> None:
        if self._current is not None and self._current.seconds:
            self._reply(message, [(task, "another request takes samples at the moment") for task in message.tasks])
        else:
            self._waiting.append(message)
            self._begin_next()

    def _begin_next(self) -> None:
        if self._current is not None or not self._waiting:
            return
        message = self._waiting.popleft()
        processes, problems = self._processes(message.tasks)
        self._reply(message, problems, is_last=not processes)
        if not processes:
            self._begin_next()
            return
        self._current = message
        try:
            threading.Thread(target=self._read, args=(message, processes), daemon=True).start()
        except RuntimeError:  # the machine currently allows no more threads
            self._current = None
            self._reply(message, [(task, "its agent cannot start a thread") for task, _ in processes])
            self._begin_next()

    def _processes(self, tasks: Iterable[str]) -> tuple[list[tuple[str, int]], list[tuple[str, str]]]:
        """The processes to read, with their tasks; and why other tasks have none."""
        processes, problems = [], []
        for task in tasks:
            attempt = self._attempts.get(task)
            if attempt is None or attempt.exited:
                problems.append((task, "it is not running"))
            elif not attempt.pid:
                problems.append((task, "it is starting"))
            else:
                processes += [(task, pid) for pid in self._pids(attempt.pid)]
        return processes, problems

    def _pids(self, pid: int) -> list[int]:
        """Below a shell or a launcher such as torchrun, the Python processes that it has started."""
        pids = filter(has_handlers, self._processes_of(pid)[:MOST_CHECKED])
        return list(islice(pids, MOST_PROCESSES)) or [pid]

    def _reply(self, message: TakeStacks, problems: list[tuple[str, str]], is_last: bool = True) -> None:
        for number, (task, problem) in enumerate(problems, 1):
            last = is_last and number == len(problems)
            self._send(StacksTaken(self._host, message.request, task, problem, last=last))

    # ---- in the thread

    def _read(self, message: TakeStacks, processes: list[tuple[str, int]]) -> None:
        collected: list[_Process] = []
        try:
            for task, pid in processes:
                collected.append(_Process(task, pid))
            _collect(collected, message.seconds)
            self._results = [each.taken(self._host, message.request, self._redact) for each in collected]
        except Exception as error:
            problem = f"its stacks cannot be read: {error!r}"
            self._results = [StacksTaken(self._host, message.request, task, problem) for task, _ in processes]
        finally:
            for each in collected:
                each.close()
            self._wake_write.send(b".")

    # ---- in the loop

    def _finish(self) -> None:
        self._wake_read.recv(16)
        self._current, results, self._results = None, self._results, []
        for number, taken in enumerate(results, 1):
            self._send(replace(taken, last=number == len(results)))
        self._begin_next()


class _Process:
    """What the thread has read of one process."""

    def __init__(self, task: str, pid: int) -> None:
        self.task, self.pid = task, pid
        self.problem = ""
        self.samples: dict[int, list[int]] = {}  # thread -> indexes of its stacks
        self.waits = False  # whether a request has no reply yet
        self._ticks = 0  # intervals for which the next reply stands
        self._frames: dict[Frame, int] = {}
        self._names = 0  # bytes of them
        self._stacks: dict[tuple[int, ...], int] = {}  # indexes of frames -> index
        self._reader: StackReader | None = None
        try:
            self._reader = StackReader(pid)
        except (CannotRead, OSError) as error:
            self.problem = _problem(error)

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()

    def request(self) -> None:
        self._ticks += 1
        if self._reader is not None and not self.problem and not self.waits:
            try:
                self._reader.request()
                self.waits = True
            except (CannotRead, OSError) as error:
                self.problem = _problem(error)

    def look(self) -> None:
        """Looks for a reply."""
        if self._reader is not None and self.waits:
            try:
                self._add(self._reader.reply())
            except OSError as error:
                self.problem, self.waits = _problem(error), False

    def dump(self, until: float) -> None:
        """Instead of a reply that did not come: the main thread is in a C call."""
        if self._reader is not None and self.waits:
            try:
                self._add(self._reader.dump(until) or self._reader.reply() or {})
            except (CannotRead, OSError) as error:
                self.problem = _problem(error)
            if not self.samples and not self.problem:
                self.problem = _NO_REPLY

    def _add(self, stacks: Stacks | None) -> None:
        if stacks is None:
            return
        for thread, stack in stacks.items():
            if thread in self.samples or len(self.samples) < MOST_THREADS:
                number = self._number_of(stack)
                if number is not None:
                    self.samples.setdefault(thread, []).extend([number] * self._ticks)
        self._ticks, self.waits = 0, False

    def _number_of(self, stack: Stack) -> int | None:
        """None: there are too many different ones."""
        frames = tuple(number for number in map(self._number_of_frame, stack) if number is not None)
        number = self._stacks.get(frames)
        if number is None and frames and len(self._stacks) < MOST_STACKS:
            number = self._stacks[frames] = len(self._stacks)
        return number

    def _number_of_frame(self, frame: Frame) -> int | None:
        number = self._frames.get(frame)
        if number is None and len(self._frames) < MOST_FRAMES:
            size = len(json.dumps(frame.to_wire()))
            if self._names + size <= MOST_NAMES:
                self._names += size
                number = self._frames[frame] = len(self._frames)
        return number

    def taken(self, host: str, request: int, redact: Callable[[str], str]) -> StacksTaken:
        if not self.samples:
            return StacksTaken(host, request, self.task, self.problem or _NO_REPLY, self.pid)
        frames = tuple(replace(each, file=redact(each.file), function=redact(each.function)) for each in self._frames)
        threads = tuple(
            ThreadSamples(thread, tuple(samples), len(samples) * _INTERVAL)
            for thread, samples in sorted(self.samples.items(), key=lambda item: (item[0] != self.pid, item[0]))
        )
        return StacksTaken(host, request, self.task, "", self.pid, frames, tuple(self._stacks), threads)


def _collect(processes: list[_Process], seconds: float) -> None:
    """Requests of all processes are made at the same time."""
    begin = time.monotonic()
    for process in processes:
        process.request()
    tick = 1
    while (due := begin + tick * _INTERVAL) < begin + seconds:
        time.sleep(max(0.0, due - time.monotonic()))
        for process in processes:
            process.look()
            process.request()
        tick += 1
    deadline = time.monotonic() + REPLY_WITHIN
    while any(process.waits for process in processes) and time.monotonic() < deadline:
        time.sleep(_POLL)
        for process in processes:
            process.look()
    until = time.monotonic() + DUMPS_WITHIN
    for process in processes:
        process.dump(until)


def _problem(error: CannotRead | OSError) -> str:
    return str(error) if isinstance(error, CannotRead) else f"its stacks cannot be read: {error.strerror or error}"
