"""An agent's porter: started when it is first needed, asked without waiting, started again should it die."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Callable

from paceline.agent.loop import Loop
from paceline.agent.options import Options
from paceline.agent.porter import Errand
from paceline.plan import Plan

Answer = Mapping[str, Any]
# Of all packages of this name, it is to be the agent's own; behind the standard library, as that may be site-packages.
_CODE = """
import sys
found = [number for number, path in enumerate(sys.path) if path.endswith("-packages")]
sys.path.insert(found[0] if found else len(sys.path), sys.argv[1])
from importlib import import_module
sys.exit(import_module(sys.argv[2]).main(sys.argv[3]))
"""
_HERE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # a folder, or an archive
_READ = 1 << 20
AGAIN_S = 1.0  # until one that others ask is started again


def errand(plan: Plan, options: Options) -> Errand:
    to = "" if plan.snapshots.claimed[0] else plan.snapshots.to  # there are no claims but on a cluster
    place = options.snapshots or to or f"{options.folder}/snapshots"
    return Errand(
        place, options.run, plan.snapshots.rate, options.tls, options.serve, options.obstore, options.folder,
        options.origin or plan.snapshots.origin, options.token, plan.snapshots.to or place,
        plan.snapshots.origin, plan.needs_bucket,
    )  # fmt: skip


def process(module: str, words: str) -> list[str]:
    """The command of a process of the agent's own."""
    return [sys.executable, "-I", "-c", _CODE, _HERE, module, words]


class Porting:
    def __init__(self, errand: Errand, environment: Mapping[str, str], loop: Loop) -> None:
        """`environment`: with what the place asks for, such as credentials."""
        self._command = process("paceline.agent.porter", json.dumps(asdict(errand)))
        self._serves = bool(errand.serve)
        self._environment = environment
        self._loop = loop
        self._process: subprocess.Popen[bytes] | None = None
        self._unsent = bytearray()
        self._read = bytearray()
        self._asked = 0
        self._closed = False
        self._waiting: dict[int, Callable[[Answer], None]] = {}

    def ask(self, request: Mapping[str, Any], answered: Callable[[Answer], None]) -> int:
        """`answered` is called with the answer, or with an error where the porter dies; never before this returns."""
        self._asked += 1
        self._waiting[self._asked] = answered
        words = {name: value for name, value in request.items() if not name.startswith("_")}
        self._write({**words, "id": self._asked})
        return self._asked

    def forget(self, number: int) -> None:
        """What was asked is not wanted any more; it will be answered so."""
        if number in self._waiting:
            self._write({"do": "forget", "which": number})

    def start(self) -> None:
        """Also without a question: for a porter that others ask."""
        if self._process is None and not self._closed:
            self._write({"id": 0, "do": "remove", "folders": []})

    def pids(self) -> set[int]:
        return {self._process.pid} if self._process is not None else set()

    def child_ended(self, pid: int) -> bool:
        if self._process is None or pid != self._process.pid:
            return False
        self._process.returncode = -1  # it has been waited for
        self._gone("it ended")
        return True

    def close(self) -> None:
        """At once: what was being carried is not wanted any more."""
        self._closed = True
        self._waiting = {}
        self._gone("")

    def _write(self, words: Mapping[str, Any]) -> None:
        if self._process is None:
            try:
                self._start()
            except OSError as error:
                text = f"cannot start {sys.executable}: {error.strerror}"
                self._loop.after(0.0, lambda: self._gone(text))
                return
        self._unsent += json.dumps(words).encode() + b"\n"
        self._flush()

    def _start(self) -> None:
        process = self._process = subprocess.Popen(
            self._command, env={**self._environment}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/",
            start_new_session=True,
        )  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        os.set_blocking(process.stdin.fileno(), False)
        os.set_blocking(process.stdout.fileno(), False)
        self._unsent, self._read = bytearray(), bytearray()
        self._loop.watch(process.stdout, selectors.EVENT_READ, self._answers)

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
            pass  # it is gone, which its other pipe tells
        self._loop.unwatch(pipe)

    def _answers(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        try:
            data = os.read(self._process.stdout.fileno(), _READ)
        except BlockingIOError:
            return
        if not data:
            self._gone("it ended")
            return
        self._read += data
        if b"\n" not in data:
            return  # a long answer comes in many pieces
        *lines, self._read = self._read.split(b"\n")
        for line in lines:
            answer = json.loads(line)
            answered = self._waiting.pop(int(answer.pop("id")), None)
            if answered is not None:
                answered(answer)

    def _gone(self, why: str) -> None:
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
            process.returncode = -1  # whoever owns the loop reaps it
        waiting, self._waiting = self._waiting, {}
        for answered in waiting.values():
            answered({"error": {"kind": "here", "text": f"the process that carries snapshots: {why}", "passing": True}})
        if self._serves and not self._closed:
            self._loop.after(AGAIN_S, self.start)
