"""One attempt of a task: its process, its output and its reports."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import time
from collections import deque
from typing import Any, Callable

from paceline.agent import machine
from paceline.agent.causes import Raised
from paceline.agent.logs import TaskLog
from paceline.agent.loop import Loop, Timer
from paceline.agent.spare import REPORT_FD
from paceline.plan import Task

SAMPLES = 6  # of CPU time, one a beat
LAST_ACTS = 5.0  # seconds between an uncaught exception and the end; some wait for their peers for minutes


class Attempt:
    def __init__(
        self,
        task: Task,
        number: int,
        generation: int,
        log: TaskLog,
        loop: Loop,
        stepped: Callable[[], None],
        told: Callable[[Attempt, dict[str, Any]], None],
    ) -> None:
        now = loop.now()
        self.task = task
        self.number = number
        self.generation = generation
        self.log = log
        self.pid = 0
        self.warm = False
        self.asked = ""  # how it was asked to end
        self.started = now
        self.output_at = now
        self.step: int | None = None
        self.step_at = now
        self.metrics: dict[str, float] = {}
        self.asks = False  # whether it asks once a step if it should take a snapshot
        self.cold_because = ""
        self.raised: Raised | None = None
        self.failed: tuple[str, str] | None = None  # what an ingest says of its failure: its cause and its detail
        self.raised_at = 0.0
        self.exited = False  # and waited for: its number may be another's
        self._deadline: tuple[float, Timer] | None = None
        self.gives_up: Callable[[], None] | None = None  # what is still done for it once its process is gone
        self.state = ""
        self._cpu = deque([(now, 0.0)], maxlen=SAMPLES)
        self._loop = loop
        self._stepped = stepped
        self._told = told
        self._output, self.output_end = os.pipe()
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
        """The process is there; the ends that it was given are its own now."""
        self.pid, self.warm = pid, warm
        self.close_ends()

    def tell(self, words: dict[str, Any]) -> None:
        try:
            self._reports.send(json.dumps(words).encode())
        except OSError:
            pass  # it is gone, or does not listen

    def close_ends(self) -> None:
        if self.output_end >= 0:
            os.close(self.output_end)
            self.output_end = -1
            self.report_end.close()

    def signal(self, number: int, whole_group: bool) -> None:
        """To the task alone, or with all it started that stayed in its process group."""
        if not self.pid:
            return
        try:
            if whole_group:
                os.killpg(self.pid, number)
            elif not self.exited:
                os.kill(self.pid, number)
        except ProcessLookupError:
            if whole_group:  # a spare has just forked it, and it has no group of its own yet
                self.signal(number, whole_group=False)
        except PermissionError:
            pass

    def kill(self) -> None:
        self.signal(signal.SIGKILL, whole_group=True)
        if self.gives_up is not None:
            self.gives_up()

    def kill_within(self, seconds: float) -> None:
        """The first of several deadlines counts; none does once it has ended."""
        at = self._loop.now() + seconds
        if self._deadline is None or at < self._deadline[0]:
            self.cancel_deadline()
            self._deadline = at, self._loop.after(seconds, self.kill)

    def cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline[1].cancel()
            self._deadline = None

    def read_output(self) -> None:
        for _ in range(64):
            try:
                data = os.read(self._output, 65536)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._loop.unwatch(self._output)
                return
            self.output_at = self._loop.now()
            self.log.feed(data)

    def read_reports(self) -> None:
        first = self.step is None
        for _ in range(4096):
            try:
                datagram = self._reports.recv(65536)
            except BlockingIOError:
                break
            except OSError:
                datagram = b""
            if not datagram:
                self._loop.unwatch(self._reports)
                break
            self._take(datagram)
        if first and self.step is not None:
            self._stepped()

    def _take(self, datagram: bytes) -> None:
        try:
            message = json.loads(datagram)
        except ValueError:
            return
        if not isinstance(message, dict):
            return
        if message.get("_") == "cold":
            self.cold_because = str(message.get("why", ""))[:500]
            return
        if message.get("_") in ("saved", "warning", "asks", "save", "agree", "follow", "ingest"):
            self._told(self, message)
            return
        if message.get("_") == "raised" and self.raised is None:
            self.raised = Raised(*(str(message.get(name, "")) for name in ("type", "text", "place")))
            self.raised_at = self._loop.now()
            if not self.asked:
                self.kill_within(LAST_ACTS)
            return
        step = message.pop("step", None)
        if isinstance(step, int) and not isinstance(step, bool) and abs(step) < 2**53:
            self.step, self.step_at = step, self._loop.now()
        for name, value in message.items():
            if (
                isinstance(value, (int, float))
                and value == value
                and abs(value) != float("inf")
                and len(self.metrics) < 100
            ):
                self.metrics[str(name)[:100]] = value

    def sample(self) -> None:
        """Note how much the process has computed, so that a hang can be told from an endless loop."""
        if self.pid:
            self._cpu.append((self._loop.now(), machine.state(self.pid)[1]))

    def is_stopped(self) -> bool:
        return machine.state(self.pid)[0] in ("T", "t")

    def doing(self) -> str:
        """For a hang: "stopped", "waiting", or "busy" with the share of a core it has used of late."""
        if self.is_stopped():
            return "stopped"
        cpu = machine.state(self.pid)[1]
        # Over some seconds, since on a full machine a task may wait for its turn; but not before its last step.
        at, before = next((sample for sample in self._cpu if sample[0] >= self.step_at), self._cpu[-1])
        seconds = self._loop.now() - at
        if seconds < 0.1:
            time.sleep(0.1)  # too soon after the last sample to judge; a hung group can wait for it
            seconds, (_, cpu) = self._loop.now() - at, machine.state(self.pid)
        share = (cpu - before) / seconds
        return f"busy {share:.2f}" if share > 0.2 else "waiting"

    def finish(self) -> None:
        """The process is gone: take what it left, and close."""
        self.read_output()
        self.read_reports()
        self.log.end()
        self.cancel_deadline()
        self.close_ends()
        self._loop.unwatch(self._output)
        self._loop.unwatch(self._reports)
        os.close(self._output)
        self._reports.close()

    def progress(self, now: float) -> tuple[int | None, float, float, dict[str, float]]:
        return self.step, round(now - self.step_at, 4), round(now - self.output_at, 4), self.metrics
