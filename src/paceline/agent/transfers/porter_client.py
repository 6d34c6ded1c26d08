"""An agent's connection to its porter: started on first use, asynchronous, restarted if it dies."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Callable

from paceline.agent.net.frames import WireError
from paceline.agent.net.loop import Loop
from paceline.agent.options import Options
from paceline.agent.transfers import requests as req
from paceline.agent.transfers.porter import PorterSettings
from paceline.agent.transfers.requests import Answer, Request
from paceline.plan import CAPTAIN, Plan

# Imports the agent's own `paceline`, not another one in site-packages. The standard library still comes first, as the
# agent's code may itself be in site-packages.
_CODE = """
import sys
packages = [number for number, path in enumerate(sys.path) if path.endswith("-packages")]
sys.path.insert(packages[0] if packages else len(sys.path), sys.argv[1])
from importlib import import_module
sys.exit(import_module(sys.argv[2]).main(sys.argv[3]))
"""
_HERE = os.path.abspath(__file__).rsplit(os.sep, 4)[0]  # a folder or an archive
_READ_SIZE = 1 << 20
INVALID_ANSWER = "the process that transfers snapshots sent an invalid answer"
ENDED = "the process that transfers snapshots ended"
RESTART_S = 1.0  # seconds until a porter that serves other hosts is restarted


def porter_settings(plan: Plan, options: Options) -> PorterSettings:
    to = "" if plan.snapshots.claimed[0] else plan.snapshots.to  # claims exist on a cluster only
    location = options.snapshots or to or f"{options.folder}/snapshots"
    is_member = options.host != CAPTAIN
    return PorterSettings(
        location, options.run, plan.snapshots.rate, options.tls, options.serve, options.obstore, options.folder,
        options.origin or plan.snapshots.origin, options.token, plan.snapshots.to or location,
        plan.snapshots.origin, plan.needs_bucket, held_folders(options) if is_member else (),
        fetched_folder(options) if is_member else "",
    )  # fmt: skip


def held_folders(options: Options) -> tuple[str, ...]:
    """The parts of snapshots that the tasks of this host have saved: in memory (`snapshots.memory`), and on disk."""
    return tuple(f"{root}/held" for root in (options.memory, options.folder) if root)


def fetched_folder(options: Options) -> str:
    """The parts of snapshots that this host has fetched from other hosts."""
    return f"{options.folder}/fetched-parts/{options.host}"


def process(module: str, argument: str) -> list[str]:
    """The command that calls `main(argument)` of one of the agent's own modules in a new process."""
    return [sys.executable, "-I", "-X", "utf8", "-c", _CODE, _HERE, module, argument]


class PorterClient:
    def __init__(self, settings: PorterSettings, environment: Mapping[str, str], loop: Loop) -> None:
        """`environment`: includes what the store needs, such as credentials."""
        self._command = process("paceline.agent.transfers.porter", json.dumps(asdict(settings)))
        self._serves = bool(settings.serve)
        self._environment = environment
        self._loop = loop
        self._process: subprocess.Popen[bytes] | None = None
        self._unsent = bytearray()
        self._received = bytearray()
        self._last_number = 0
        self._is_closed = False
        self._pending: dict[int, Callable[[Answer], None]] = {}

    def ask(self, request: Request, answered: Callable[[Answer], None]) -> int:
        """Sends a request and returns its number. `answered` is called later, with the answer, or with a failure if the
        porter dies."""
        self._last_number += 1
        self._pending[self._last_number] = answered
        self._write(self._last_number, request)
        return self._last_number

    def cancel(self, number: int) -> None:
        """The request is answered with UNWANTED, unless it has completed."""
        if number in self._pending:
            self._write(0, req.Cancel(number))

    def start(self) -> None:
        """Starts the porter without a request, if it serves other hosts."""
        if self._process is None and not self._is_closed:
            self._write(0, req.RemoveFolders())

    def pids(self) -> set[int]:
        return {self._process.pid} if self._process is not None else set()

    def child_ended(self, pid: int) -> bool:
        if self._process is None or pid != self._process.pid:
            return False
        self._process.returncode = -1  # already reaped
        self._clean_up(ENDED)
        return True

    def close(self) -> None:
        """Immediately: pending transfers are dropped."""
        self._is_closed = True
        self._pending = {}
        self._clean_up("")

    def _write(self, number: int, request: Request) -> None:
        if self._process is None:
            try:
                self._start()
            except OSError as error:
                text = f"cannot start the process that transfers snapshots: {sys.executable}: {error.strerror}"
                self._loop.after(0.0, lambda: self._clean_up(text))
                return
        self._unsent += json.dumps({"id": number, **req.request_to_object(request)}).encode() + b"\n"
        self._flush()

    def _start(self) -> None:
        process = self._process = subprocess.Popen(
            self._command, env={**self._environment}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/",
            start_new_session=True,
        )  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        os.set_blocking(process.stdin.fileno(), False)
        os.set_blocking(process.stdout.fileno(), False)
        self._unsent, self._received = bytearray(), bytearray()
        self._loop.watch(process.stdout, selectors.EVENT_READ, self._receive)

    def _flush(self) -> None:
        assert self._process is not None and self._process.stdin is not None
        pipe = self._process.stdin
        try:
            while self._unsent:
                del self._unsent[: os.write(pipe.fileno(), self._unsent)]
        except BlockingIOError:
            self._loop.watch(pipe, selectors.EVENT_WRITE, self._flush)
            return
        except OSError:
            pass  # the process has ended: its other pipe reports that
        self._loop.unwatch(pipe)

    def _receive(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        try:
            data = os.read(self._process.stdout.fileno(), _READ_SIZE)
        except BlockingIOError:
            return
        if not data:
            self._clean_up(ENDED)
            return
        self._received += data
        if b"\n" not in data:
            return  # a part of a long answer
        *lines, self._received = self._received.split(b"\n")
        for line in lines:
            data = json.loads(line)
            answered = self._pending.pop(int(data.pop("id")), None)
            if answered is None:
                continue
            try:
                answer = req.read_answer(data)
            except WireError as error:
                answer = req.Failure(req.HERE, f"{INVALID_ANSWER}: {error}", False)
            answered(answer)

    def _clean_up(self, problem: str) -> None:
        """The process has ended, or is killed: pending requests are answered with `problem`."""
        process, self._process = self._process, None
        if process is not None:
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                self._loop.unwatch(pipe)
                pipe.close()
            if process.returncode is None:
                try:
                    os.killpg(process.pid, signal.SIGKILL)
                except (ProcessLookupError, PermissionError):
                    pass
            process.returncode = -1  # the owner of the loop reaps it
        pending, self._pending = self._pending, {}
        for answered in pending.values():
            answered(req.Failure(req.HERE, problem, True))
        if self._serves and not self._is_closed:
            self._loop.after(RESTART_S, self.start)
