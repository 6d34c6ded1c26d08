"""The captain's connection to the process that makes deliveries: started with the run, and restarted if it dies.

The run never waits for it, except at its end, for a limited time."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
from collections.abc import Mapping
from typing import Any, Callable

from paceline.agent.deliveries.schedule import END_S
from paceline.agent.net.loop import Loop
from paceline.agent.options import Options
from paceline.agent.transfers.porter_client import process
from paceline.storage.json_values import parse_json

RESTART_S = 5.0  # seconds until the process is restarted, doubled each time
LONGEST_RESTART_S = 300.0
RESTART_AT_END_S = 1.0
PATIENCE_S = 5.0  # seconds after END_S
_READ_SIZE = 1 << 16
_LONGEST = 1 << 20  # bytes of a line


class Deliveries:
    def __init__(
        self, options: Options, environment: Mapping[str, str], loop: Loop,
        receive: Callable[[dict[str, Any]], None],
    ) -> None:  # fmt: skip
        """`environment`: includes the addresses of receivers. `receive`: called with what the process tells."""
        self._command = process("paceline.agent.deliveries.process", options.to_json())
        self._environment, self._loop, self._receive = environment, loop, receive
        self._process: subprocess.Popen[bytes] | None = None
        self._received = b""
        self._then: Callable[[list[str]], None] | None = None  # set once the run has ended
        self._is_closed = False
        self._restart_s = RESTART_S

    def start(self) -> None:
        if self._process is not None or self._is_closed:
            return
        try:
            child = subprocess.Popen(
                self._command, env={**self._environment}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/",
                start_new_session=True,
            )  # fmt: skip
        except OSError:
            self._start_later()
            return
        assert child.stdout is not None
        os.set_blocking(child.stdout.fileno(), False)
        self._process, self._received = child, b""
        self._loop.watch(child.stdout, selectors.EVENT_READ, self._read)
        if self._then is not None:
            self._announce_end()

    def child_ended(self, pid: int) -> bool:
        if self._process is None or pid != self._process.pid:
            return False
        self._process.returncode = -1  # already reaped
        self._read()  # its last words
        self._clean_up()
        return True

    def end(self, then: Callable[[list[str]], None]) -> None:
        """The run has ended. Calls `then` with what was not delivered, once the rest is delivered or cannot be."""
        self._then = then
        too_long = "deliveries took too long after the end of the run"
        self._loop.after(END_S + PATIENCE_S, lambda: self._finish([too_long]))
        if self._process is None:
            self.start()
        else:
            self._announce_end()

    def give_up(self, reason: str) -> None:
        """The captain must end. After `end`, its `then` is called now, unless it was before."""
        self._finish([reason])

    def close(self) -> None:
        """Immediately."""
        self._is_closed = True
        self._clean_up()

    def _announce_end(self) -> None:
        assert self._process is not None and self._process.stdin is not None
        try:
            os.write(self._process.stdin.fileno(), b"end\n")
        except OSError:
            pass  # the process has ended: its other pipe reports that

    def _finish(self, undelivered: list[str]) -> None:
        then, self._then = self._then, None
        self.close()
        if then is not None:
            then(undelivered)

    def _read(self) -> None:
        if self._process is None or self._process.stdout is None:
            return
        try:
            data = os.read(self._process.stdout.fileno(), _READ_SIZE)
        except BlockingIOError:
            return
        if not data or len(self._received) > _LONGEST:
            self._clean_up()
            return
        *lines, self._received = (self._received + data).split(b"\n")
        for line in lines:
            try:
                message = parse_json(line)
            except ValueError:
                continue
            if "undelivered" in message:
                self._finish(message["undelivered"])
            else:
                self._receive(message)

    def _clean_up(self) -> None:
        """The process has ended, or is killed."""
        child, self._process = self._process, None
        if child is None:
            return
        assert child.stdin is not None and child.stdout is not None
        self._loop.unwatch(child.stdout)
        child.stdin.close()
        child.stdout.close()
        if child.returncode is None:
            try:
                os.killpg(child.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
        child.returncode = -1  # the owner of the loop reaps it
        if not self._is_closed:
            self._start_later()

    def _start_later(self) -> None:
        self._loop.after(RESTART_AT_END_S if self._then is not None else self._restart_s, self.start)
        self._restart_s = min(2 * self._restart_s, LONGEST_RESTART_S)
