"""Starting tasks: what each is given, from a spare where one is ready, else from a fresh interpreter."""

from __future__ import annotations

import os
import selectors
import signal
import sys
from pathlib import Path
from typing import Callable

from paceline.agent import machine, spare
from paceline.agent.attempt import Attempt
from paceline.agent.command import understand
from paceline.agent.loop import Loop
from paceline.agent.options import Options
from paceline.agent.porting import process
from paceline.agent.wire import Message
from paceline.frameworks import amx, environment, server
from paceline.plan import Plan

SETTLED = 3.0  # seconds without an import after which a program has what it needs
SPARE_DEATHS = 3
SPARE_ANSWERS = 10.0  # seconds it may take to fork
SPARE_NICE = 5  # training goes first, but a spare that is never ready helps nobody
MARGIN = 256 * 1024 * 1024


class Starting:
    def __init__(
        self,
        plan: Plan,
        options: Options,
        loop: Loop,
        tell: Callable[[Message], None],
        said: Callable[..., None],
        began: Callable[[Attempt], None],
        failed: Callable[[Attempt, OSError], None],
    ) -> None:
        self._plan = plan
        self._options = options
        self._loop = loop
        self._tell = tell
        self._said = said
        self._began = began
        self._failed = failed
        host = plan.host(options.host)
        self._role = plan.role(host.role)
        self._command = list(self._role.command or server.COMMAND)
        self._work = options.work or plan.code
        self._interpreter = options.interpreter or sys.executable
        self.python = understand(self._command, self._interpreter)
        self._static = self._static_environment(len(host.tasks))
        self._record_path = f"{options.folder}/logs/.{options.host}.imports"
        self._record_seen = 0, 0.0  # as it was last found, and since when
        self._spare: spare.Spare | None = None
        self._spare_ready = False
        self._spare_deaths = 0
        self._wanted = plan.restart.warm and self.python is not None
        self._pending: list[Attempt] = []
        self._pending_environments: dict[str, dict[str, str]] = {}

    def _static_environment(self, tasks: int) -> dict[str, str]:
        """What is the same for all tasks of this host in all generations."""
        threads = environment.threads(self._options.cores, tasks)
        given = {**os.environ, **self._role.env}
        paths = [*filter(None, [given.get("PYTHONPATH"), self._options.library])]
        limits = amx.environment(given)
        if limits:
            self._said(f"{amx.FINDING}; tasks are given {amx.VARIABLE}={amx.LIMIT}")
        return {
            "PYTHONUNBUFFERED": "1",
            **{name: value for name, value in threads.items() if name not in os.environ},
            **given,
            **limits,
            **({"PYTHONPATH": os.pathsep.join(paths)} if self._options.library else {}),
            "PYTHONFAULTHANDLER": "1",
            "PACELINE_TENSORBOARD_DIR": f"{self._options.folder}/tensorboard",
        }

    def start(self, attempt: Attempt, roster: dict[str, str], restarts: int, more: dict[str, str]) -> None:
        """Begin the attempt; `began` is called when its process is there. OSError: the command cannot be started."""
        task = attempt.task
        given = {
            **self._static,
            **environment.late(self._plan, task, roster, self._options.run, attempt.generation, restarts),
            **environment.gpus(self._plan, task, self._options.devices),
            **attempt.environment(),
            **more,
        }
        if self._spare is not None and self._spare_ready:
            try:
                self._spare.start(given, attempt.output_end, attempt.output_end, attempt.report_end.fileno())
            except (OSError, ValueError) as error:
                self.no_spares(f"{self._options.host}: no spare is used: {error}")
            else:
                self._pending.append(attempt)
                self._pending_environments[task.name] = given
                self._loop.after(SPARE_ANSWERS, lambda: self._unanswered(attempt))
                return
        self._start_cold(attempt, given)

    def start_ingest(self, attempt: Attempt, more: dict[str, str]) -> None:
        """The process of the agent's own that has the command run."""
        given = {
            **self._static,
            "PACELINE_RUN": self._options.run,
            "PACELINE_TASK": attempt.task.name,
            "PACELINE_ROLE": attempt.task.role,
            "PACELINE_INDEX": str(attempt.task.index),
            "CUDA_VISIBLE_DEVICES": ",".join(self._options.devices),
            **attempt.environment(),
            **more,
        }
        command = process("paceline.agent.ingest", self._options.to_json())
        out, reports = attempt.output_end, attempt.report_end.fileno()
        attempt.began(spare.start_plain(command, given, self._work, out, out, reports), warm=False)
        self._began(attempt)

    def _start_cold(self, attempt: Attempt, given: dict[str, str]) -> None:
        out, reports = attempt.output_end, attempt.report_end.fileno()
        if self.python is None:
            pid = spare.start_plain(self._command, given, self._work, out, out, reports)
        else:
            record = -1
            if self._wanted and self._spare is None and attempt.task.local_index == 0:
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
                try:
                    record = os.open(self._record_path, flags, 0o600)
                except OSError:
                    self._wanted = False  # no room for the record, so no spare
            try:
                pid = spare.start_cold(self.python, given, self._work, out, out, reports, record)
            finally:
                if record >= 0:
                    os.close(record)
        attempt.began(pid, warm=False)
        self._began(attempt)

    # ---- the spare

    def consider_spare(self, attempts: dict[str, Attempt], memory: machine.Memory) -> None:
        """Make a spare once the program has imported what it needs and shows progress, where memory allows."""
        if not self._wanted or self._spare is not None or self.python is None:
            return
        first = next((attempt for attempt in attempts.values() if attempt.pid), None)
        if first is None or not (first.step is not None or self._imports_done()):
            return
        need = machine.resident(first.pid) + MARGIN
        if memory.free() < need:
            self.no_spares(
                f"{self._options.host}: no spare is kept: {memory.free() >> 20} MiB free, {need >> 20} MiB needed"
            )
            return
        try:
            record = spare.modules_of(Path(self._record_path))
            if not record and self.python.hooked:
                self._wanted = False  # nothing to import ahead: a cold start is as fast
                return
            self._spare = spare.Spare.spawn(self.python, self._static, self._work, record, nice=SPARE_NICE)
        except (OSError, ValueError) as error:
            self.no_spares(f"{self._options.host}: no spare is kept: {error}")
            return
        self._loop.watch(self._spare, selectors.EVENT_READ, self._spare_speaks)

    def _imports_done(self) -> bool:
        try:
            written = os.stat(self._record_path).st_mtime_ns
        except OSError:
            return False
        if written != self._record_seen[0]:
            self._record_seen = written, self._loop.now()
        return self._loop.now() - self._record_seen[1] > SETTLED

    def _spare_speaks(self) -> None:
        if self._spare is None:
            return
        for message in self._spare.receive():
            if isinstance(message, spare.Ready):
                self._spare_ready = True
                self._tell({"type": "spare", "seconds": message.seconds})
            elif isinstance(message, spare.Unfit):
                self._spare_fails("it ended" if message.reason == spare.GONE else message.reason)
                return
            elif isinstance(message, spare.Started) and self._pending:
                attempt = self._pending.pop(0)
                self._pending_environments.pop(attempt.task.name, None)
                attempt.began(message.pid, warm=True)
                self._began(attempt)

    def _unanswered(self, attempt: Attempt) -> None:
        if attempt in self._pending and self._spare is not None:
            try:
                os.killpg(self._spare.pid, signal.SIGKILL)  # with what it has forked and that is no task yet
            except ProcessLookupError:
                pass
            self._spare_fails(f"it did not answer for {SPARE_ANSWERS:g} s")

    def asked_a_spare(self) -> bool:
        """Whether the pid of a task is still to be told."""
        return bool(self._pending)

    def child_ended(self, pid: int) -> bool:
        if self._spare is not None and pid == self._spare.pid:
            self._spare_fails("it ended")
            return True
        return False

    def _spare_fails(self, why: str) -> None:
        """It may be tried again, a few times; tasks that it was to become are started cold."""
        self._spare_deaths += 1
        self._drop_spare()
        if self._spare_deaths >= SPARE_DEATHS or why != "it ended":
            self.no_spares(f"{self._options.host}: no spare is kept: {why}")
        pending, self._pending = self._pending, []
        for attempt in pending:
            try:
                self._start_cold(attempt, self._pending_environments.pop(attempt.task.name))
            except OSError as error:
                self._failed(attempt, error)

    def _drop_spare(self) -> None:
        if self._spare is not None:
            self._loop.unwatch(self._spare)
            self._spare.kill()
        self._spare, self._spare_ready = None, False

    def no_spares(self, why: str) -> None:
        if self._wanted:
            self._wanted = False
            self._said(why)
        if not self._pending:
            self._drop_spare()

    def died_of_sigill(self) -> str:
        """Why a task may have."""
        return amx.likely_reason(self._static)

    def pids(self) -> set[int]:
        return {self._spare.pid} if self._spare is not None else set()

    def close(self) -> None:
        self._drop_spare()
        try:
            os.unlink(self._record_path)
        except OSError:
            pass
