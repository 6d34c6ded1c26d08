"""One attempt of a task: its process, its output and its reports."""

from __future__ import annotations

import fcntl
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections import deque
from typing import Any, Callable

from paceline.agent import os_processes
from paceline.agent.captain.events import TaskProgress
from paceline.agent.net.codec import is_finite
from paceline.agent.net.loop import Loop, Timer
from paceline.agent.spares.spare import REPORT_FD
from paceline.agent.tasks.start_timer import StartTimer
from paceline.agent.tasks.task_log import TaskLog
from paceline.agent.tasks.tracebacks import Raised, places
from paceline.plan import Task
from paceline.storage.json_values import parse_json

SAMPLES = 6  # samples of CPU time, one per heartbeat
TEXT_LIMIT = 4000  # characters of one text in a message of a task
MAX_FRAMES = 1000  # innermost frames of an exception that are inspected
EXIT_WITHIN = 5.0  # seconds after an uncaught exception; some programs wait for their peers for minutes
READ_BYTES = 64 * 1024  # of output at a time
PIPE_BYTES = 256 * 1024  # of output that a task can write before it has to wait; a user's pipes share 64 MiB
SET_PIPE_SIZE = 1031  # F_SETPIPE_SZ of Linux; the module fcntl has it since Python 3.10
OFTEN_S = 0.002  # a task that writes again within this time writes often
PAUSE_S = 0.01  # the output of such a task is read this often: waking up for each line would take most of a core


def text_of(value: Any) -> str:
    """The text of a field in a task's message, shortened; empty if it is neither text nor a number."""
    return str(value)[:TEXT_LIMIT] if isinstance(value, (str, int, float)) else ""


def is_small_integer(value: Any) -> bool:
    """Whether the captain accepts it: it would disconnect this host otherwise."""
    return type(value) is int and abs(value) < 2**53


class Attempt:
    def __init__(
        self,
        task: Task,
        number: int,
        generation: int,
        log: TaskLog,
        loop: Loop,
        framework: str,
        on_first_step: Callable[[Attempt], None],
        on_message: Callable[[Attempt, dict[str, Any]], None],
    ) -> None:
        """`framework`: the one whose import and group the process reports; empty: another process runs the program."""
        now = loop.now()
        self.task = task
        self.number = number
        self.generation = generation
        self.log = log
        self.pid = 0
        self.warm = False
        self.requested_end = ""  # how it was asked to end: KILL, TERMINATE, INTERRUPT or ABORT; empty: not yet
        self.started = now
        self.started_wall = time.time()
        self.output_at = now
        self.first_output_at: float | None = None
        self.step: int | None = None
        self.step_at = now
        self.metrics: dict[str, float] = {}
        self.start_timer = StartTimer(now, framework)
        self.gpu_variables: dict[str, str] | None = None  # of CUDA and NCCL, as of its first step; None: no GPU
        self.on_profile: Callable[[dict[str, Any]], None] | None = None  # called with its messages about a profile
        self._has_saved = False  # whether there may be snapshots that the agent has not collected
        self.polls_for_saves = False  # whether it checks once a step if it should take a snapshot
        self.cold_because = ""  # why it could not be started from a spare
        self.raised: Raised | None = None
        self.ingest_failure: tuple[str, str] | None = None  # cause and detail, as reported by an ingest process
        self.raised_at = 0.0
        self.start_failure = ""  # why it has no process, if the machine or a limit was exhausted
        self.exited = False  # the process has ended and was reaped: its pid may be reused
        self.exited_at = now
        self._deadline: tuple[float, Timer] | None = None
        self.gives_up: Callable[[], None] | None = None  # cancels the work that remains after its process has ended
        self.state = ""
        self._cpu = deque([(now, 0.0)], maxlen=SAMPLES)
        self._loop = loop
        self._on_first_step = on_first_step
        self._on_message = on_message
        self._output, self.output_end = os.pipe()
        self._pipe_bytes = _enlarge(self._output)
        self._resume: Timer | None = None  # set while output is not watched
        self._reports, self.report_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.report_end.setblocking(False)
        self._reports.setblocking(False)
        os.set_blocking(self._output, False)
        loop.watch(self._output, selectors.EVENT_READ, self.read_output)
        loop.watch(self._reports, selectors.EVENT_READ, self.read_reports)
        log.begin(generation)

    def environment(self) -> dict[str, str]:
        inode = os.fstat(self.report_end.fileno()).st_ino
        return {"PACELINE_REPORT_FD": str(REPORT_FD), "PACELINE_REPORT_INODE": str(inode)}

    def began(self, pid: int, warm: bool) -> None:
        """The process has started; it has its own copies of the ends of the pipe and the socket."""
        self.pid, self.warm = pid, warm
        self.close_ends()

    def tell(self, message: dict[str, Any]) -> None:
        """Sends a message to the process."""
        try:
            self._reports.send(json.dumps(message).encode())
        except OSError:
            pass  # it has ended, or does not read messages

    def close_ends(self) -> None:
        if self.output_end >= 0:
            os.close(self.output_end)
            self.output_end = -1
            self.report_end.close()

    def signal(self, number: int, whole_group: bool) -> None:
        """Sends a signal to the task's process only, or to its whole process group."""
        if not self.pid:
            return
        try:
            if whole_group:
                os.killpg(self.pid, number)
            elif not self.exited:
                os.kill(self.pid, number)
        except ProcessLookupError:
            if whole_group:  # a spare has just forked it: it does not have its own process group yet
                self.signal(number, whole_group=False)
        except PermissionError:
            pass

    def kill(self) -> None:
        self.signal(signal.SIGKILL, whole_group=True)
        if self.gives_up is not None:
            self.gives_up()

    def kill_within(self, seconds: float) -> None:
        """Kills the task after that time unless it has ended; the earliest of several deadlines applies."""
        at = self._loop.now() + seconds
        if self._deadline is None or at < self._deadline[0]:
            self.cancel_deadline()
            self._deadline = at, self._loop.after(seconds, self.kill)

    def cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline[1].cancel()
            self._deadline = None

    def read_output(self) -> None:
        before, count = self.output_at, 0
        for _ in range(64):
            try:
                data = os.read(self._output, READ_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self._loop.unwatch(self._output)
                return
            count += len(data)
            self.output_at = self._loop.now()
            if self.first_output_at is None:
                self.first_output_at = self.output_at
            self.log.feed(data)
        if self.output_at - before < OFTEN_S and count <= self._pipe_bytes // 2:
            self._pause()

    def _pause(self) -> None:
        """The pipe holds what is written in the meantime."""
        if self._resume is None and not self.exited:
            self._loop.unwatch(self._output)
            self._resume = self._loop.after(PAUSE_S, self._watch_output)

    def _watch_output(self) -> None:
        self._resume = None
        self._loop.watch(self._output, selectors.EVENT_READ, self.read_output)

    def read_reports(self) -> None:
        before_first_step = self.step is None
        for _ in range(4096):
            try:
                datagram = self._reports.recv(65536)
            except BlockingIOError:
                break
            except OSError:
                self._loop.unwatch(self._reports)
                break
            self._handle_report(datagram)
        if self._has_saved:  # once, however often it says so: looking through its folder takes a while
            self._has_saved = False
            self._on_message(self, {"_": "saved"})
        if before_first_step and self.step is not None:
            self.start_timer.on_first_step(self.step_at)
            self._on_first_step(self)

    def _handle_report(self, datagram: bytes) -> None:
        """Tasks may send anything: what is not a valid message is ignored."""
        try:
            message = parse_json(datagram)
        except ValueError:
            return
        if not isinstance(message, dict):
            return
        if message.get("_") == "cold":
            self.cold_because = text_of(message.get("why"))[:500]
            self.start_timer.restart()
            return
        if message.get("_") == "start":
            self.start_timer.on_report(message, self._loop.now())
            return
        if message.get("_") == "gpu":
            self.gpu_variables = _texts(message.get("environment"))
            return
        if message.get("_") == "saved":
            self._has_saved = True
            return
        if message.get("_") in ("warning", "asks", "save", "agree", "follow", "ingest", "not-finite"):
            self._on_message(self, message)
            return
        if message.get("_") == "profile":
            if self.on_profile is not None:
                self.on_profile(message)
            return
        if message.get("_") == "raised" and self.raised is None:
            self.raised = _raised(message)
            self.raised_at = self._loop.now()
            if not self.requested_end:
                self.kill_within(EXIT_WITHIN)
            return
        step = message.pop("step", None)
        if is_small_integer(step):
            self.step, self.step_at = step, self._loop.now()
        for name, value in message.items():
            if is_finite(value) and len(self.metrics) < 100:
                self.metrics[name[:100]] = value
            elif isinstance(value, float):
                self._on_message(self, {"_": "not-finite", "metric": name, "value": value, "step": self.step})

    def sample(self) -> None:
        """Records the CPU time of the process, to distinguish a hang from an endless loop."""
        if self.pid:
            self._cpu.append((self._loop.now(), self._busy_seconds()))

    def _busy_seconds(self) -> float:
        """Including the time in which it waited for a core: on a busy machine, an endless loop uses little CPU time."""
        return os_processes.state(self.pid)[1] + os_processes.waited_for_core(self.pid)

    def is_stopped(self) -> bool:
        return os_processes.state(self.pid)[0] in ("T", "t")

    def has_ended(self) -> bool:
        """Whether its process has ended, even if the agent has not noticed yet. Its children may still run."""
        return self.exited or (bool(self.pid) and os_processes.state(self.pid)[0] == "Z")

    def doing(self) -> str:
        """What a hung task is doing: "stopped", "waiting", or "busy" with the share of the time in which it was."""
        if self.is_stopped():
            return "stopped"
        now_busy = self._busy_seconds()
        # Over several seconds, but only since its last step.
        at, before = next((sample for sample in self._cpu if sample[0] >= self.step_at), self._cpu[-1])
        seconds = self._loop.now() - at
        if seconds < 0.1:
            time.sleep(0.1)  # the last sample is too recent; a hung group can wait this long
            seconds, now_busy = self._loop.now() - at, self._busy_seconds()
        share = (now_busy - before) / seconds
        return f"busy {share:.2f}" if share > 0.2 else "waiting"

    def finish(self) -> None:
        """The process has ended: reads its remaining output and reports, and closes them."""
        if self._resume is not None:
            self._resume.cancel()
        self.read_output()
        self.read_reports()
        self.log.end()
        self.cancel_deadline()
        self.close_ends()
        self._loop.unwatch(self._output)
        self._loop.unwatch(self._reports)
        os.close(self._output)
        self._reports.close()

    def progress(self, now: float) -> TaskProgress:
        return TaskProgress(self.step, round(now - self.step_at, 4), round(now - self.output_at, 4), self.metrics)


def _texts(data: Any) -> dict[str, str]:
    return {str(name): text_of(value) for name, value in data.items()} if isinstance(data, dict) else {}


def _enlarge(pipe: int) -> int:
    """The number of bytes that the pipe holds, after making it larger if possible."""
    if sys.platform != "linux":
        return 0
    try:
        return fcntl.fcntl(pipe, SET_PIPE_SIZE, PIPE_BYTES)
    except OSError:
        return 64 * 1024  # the user's limit is reached


def _raised(message: dict[str, Any]) -> Raised:
    """The uncaught exception that the process of a task reports."""
    reported = message.get("frames")
    reported = reported[-MAX_FRAMES:] if isinstance(reported, list) else []
    frames = [(text_of(each[0]), text_of(each[1])) for each in reported if isinstance(each, list) and len(each) == 2]
    error, text, place = (text_of(message.get(name)) for name in ("type", "text", "place"))
    return Raised(error, text, *places(frames)) if frames else Raised(error, text, place)
