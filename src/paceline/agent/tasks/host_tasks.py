"""The tasks of a host: starts, monitors and ends each attempt, and kills the processes that it leaves behind."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Callable

from paceline.agent import memory_limits
from paceline.agent.captain import events as ev
from paceline.agent.captain import instructions as ins
from paceline.agent.captain.snapshots.restoring_tasks import restores
from paceline.agent.free_ports import PortReservations
from paceline.agent.net.captain_connection import CaptainConnection
from paceline.agent.net.codec import data_location
from paceline.agent.net.loop import Loop
from paceline.agent.net.messages import StartOnHost
from paceline.agent.options import Options, endpoint
from paceline.agent.redaction import Redactor
from paceline.agent.run_files import Echo
from paceline.agent.tasks import compiled_folder, exit_causes, keras_hint
from paceline.agent.tasks.attempt import Attempt, is_small_integer, text_of
from paceline.agent.tasks.host_notes import HostNotes
from paceline.agent.tasks.launcher import TaskLauncher
from paceline.agent.tasks.not_finite_reports import NotFiniteReports
from paceline.agent.tasks.orphans import Orphans
from paceline.agent.tasks.port_watch import PortWatch
from paceline.agent.tasks.signs_of_work import changed_checkpoint
from paceline.agent.tasks.stop_signals import GRACEFUL, StopSignals
from paceline.agent.tasks.task_log import TaskLog
from paceline.agent.transfers.evaluator_copies import EvaluatorCopies
from paceline.agent.transfers.host_snapshots import HostSnapshots
from paceline.frameworks import compile_cache, environment
from paceline.plan import GROUP, INGEST, Plan

EXHAUSTED = (  # of the machine, or of a limit: the next attempt may succeed
    errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT,
)  # fmt: skip
STACKS_LIMIT = 16 * 1024


class HostTasks:
    def __init__(
        self,
        plan: Plan,
        options: Options,
        loop: Loop,
        connection: CaptainConnection,
        snapshots: HostSnapshots,
        evaluators: EvaluatorCopies,
        echo: Echo | None,
        on_all_ended: Callable[[], None],
    ) -> None:
        """`on_all_ended`: called when the host is shutting down and its last task has ended."""
        self._plan, self._options, self._loop = plan, options, loop
        self._connection, self._snapshots, self._evaluators, self._echo = connection, snapshots, evaluators, echo
        self._on_all_ended = on_all_ended
        # Texts of tasks are redacted here, where they become events; their logs stay as they wrote them.
        self._redact = Redactor(os.environ, plan.role(plan.host(options.host).role).env)
        all_tasks = [*plan.tasks, *([] if plan.ingest_task is None else [plan.ingest_task])]
        self._tasks = {task.name: task for task in all_tasks if task.host == options.host}
        self._launcher = TaskLauncher(
            plan, options, loop, connection.send, connection.notify, self._on_started, self._on_start_failed
        )
        self._stop_signals = StopSignals(plan, loop, self._launcher)
        self.program_processes = self._launcher.program_processes
        self.learn_imports = self._launcher.learn_imports
        self._memory = memory_limits.Memory(options.memory)
        self._kills_before = self._memory.oom_kills()
        self._logs: dict[str, TaskLog] = {}
        self.attempts: dict[str, Attempt] = {}
        self.not_finite = NotFiniteReports(connection.send)
        self._exits: dict[str, ev.TaskExit] = {}
        self._exit_at: dict[str, float] = {}
        self._ending: dict[str, int] = {}  # task -> attempt that the captain has asked to end
        self._states: dict[str, str] = {}
        self._stacks: dict[str, str] = {}
        self._port_watch: PortWatch | None = None  # of the running attempt of rank 0, if the group has more tasks
        self._listened: bool | None = None  # of the last attempt of rank 0
        self._early_exits: dict[int, int] = {}  # pid -> status of children that ended before their pid was known
        self._orphans = Orphans(
            loop, self._own_pids, self._is_idle, lambda text: connection.notify(self._redact(text))
        )  # fmt: skip
        self._has_adopted = False  # a process has ended that is no task: its children may be this agent's now
        self.notes = HostNotes(options.folder, options.host)
        self.roster: dict[str, str] = {}
        self.reached = 0  # the highest step of attempts that have ended
        self._ports = PortReservations()
        self._leaving = False

    # ---- reports to the captain

    def exits(self) -> tuple[ev.TaskExit, ...]:
        """The last attempts of tasks that are not running."""
        now = self._loop.now()
        return tuple(
            replace(exit, age=max(0.0, now - self._exit_at[name]))
            for name, exit in self._exits.items()
            if name not in self.attempts
        )

    def offers(self) -> dict[str, str]:
        """Addresses for the next start of tasks that are not running."""
        if self._leaving:
            return {}
        # Parameter-server tasks keep their addresses.
        self._ports.release({int(self.roster[name].rpartition(":")[2]) for name in self._tasks if name in self.roster})
        idle = [name for name in self._tasks if name not in self.attempts]
        return {name: f"{self._options.address}:{self._ports.reserve()}" for name in idle}

    def heartbeat(self, number: int) -> ev.Heartbeat:
        now = self._loop.now()
        tasks = {name: attempt.progress(now) for name, attempt in self.attempts.items() if name != INGEST}
        asking = tuple(name for name, attempt in self.attempts.items() if attempt.polls_for_saves)
        return ev.Heartbeat(self._options.host, number, tasks, self._memory.share(), asking)

    # ---- starting

    def start(self, message: StartOnHost) -> None:
        if self._leaving or self.notes.is_outdated(message.generation):
            return
        self.notes.update(message.generation, message.data, message.records)
        plan = self._plan.of_generation(self.roster)
        for name, number in message.tasks.items():
            if name not in self._tasks or name in self.attempts:
                continue
            log = self._logs.get(name)
            if log is None:
                log = self._logs[name] = TaskLog(
                    f"{self._options.folder}/logs/{name}.log", lambda text: self._connection.notify(text, True), name,
                    self._echo, self._plan.limits.log,
                )  # fmt: skip
            self._kills_before = self._memory.oom_kills()
            task = self._tasks[name] if name == INGEST else plan.task(name)
            framework = "" if self._launcher.starts_the_program_below else plan.framework
            attempt = Attempt(
                task, number, self.notes.generation, log, self._loop, framework, self._on_first_step,
                self._on_task_message,
            )  # fmt: skip
            self.attempts[name] = attempt
            try:
                if name == INGEST:
                    self._launcher.start_ingest(attempt, self._snapshots.fetch_env())
                    continue
                restore = message.restore if restores(plan, task) else None
                variables = {
                    **self._snapshots.environment(name, self.notes.generation, restore),
                    **self._snapshots.fetch_env(),
                }
                variables.update({"PACELINE_DATA": self.notes.data} if self.notes.data else {})
                if task.rank == 0 and plan.restart_scope == GROUP and plan.framework != "none" and plan.world_size > 1:
                    self._port_watch = PortWatch(endpoint(environment.rendezvous(plan, self.roster))[1])
                self._launcher.start(attempt, plan, self.roster, message.restarts, variables, message.mlflow_run)
            except OSError as error:
                self._on_start_failed(attempt, error)
            except ValueError as error:  # a variable cannot contain it: a program may have changed files of this host
                self._on_start_failed(attempt, OSError(errno.EINVAL, f"invalid environment: {error}"))

    def _on_started(self, attempt: Attempt) -> None:
        started = ev.TaskStarted(self._options.host, attempt.task.name, attempt.number, attempt.pid, attempt.warm)
        self._connection.send(started)
        self._snapshots.watched.attempt_started(attempt)
        early_status = self._early_exits.pop(attempt.pid, None)
        if not self._launcher.awaits_spare():
            self._early_exits.clear()  # pids are reused
        if early_status is not None:
            self._on_exit(attempt, early_status)
        elif attempt.requested_end or self._leaving:
            attempt.kill()  # there was no process to signal until now

    def _on_first_step(self, attempt: Attempt) -> None:
        self._connection.beat()
        self._send_start_times(attempt, at_once=True)

    def _send_start_times(self, attempt: Attempt, at_once: bool = False) -> None:
        times = attempt.start_timer.unsent(self._loop.now(), at_once)
        if times is not None and attempt.task.name != INGEST:
            self._connection.send(ev.StartMeasured(self._options.host, attempt.task.name, attempt.number, times))

    def _on_start_failed(self, attempt: Attempt, error: OSError) -> None:
        path = f": {error.filename}" if error.filename else ""
        reason = f"{error.strerror or error}{path}"
        attempt.log.feed(f"{reason}\n".encode())
        attempt.start_failure = f"could not be started: {reason}" if error.errno in EXHAUSTED else ""
        self._on_exit(attempt, 127 << 8)

    # ---- while they run

    def look(self) -> None:
        """Called once a second."""
        for attempt in self.attempts.values():
            attempt.sample()
            self._send_start_times(attempt)
        if self._port_watch is not None:
            self._port_watch.look()
        training = {name: attempt for name, attempt in self.attempts.items() if name != INGEST}
        self._launcher.consider_spare(training, self._memory)

    def _on_task_message(self, attempt: Attempt, message: dict[str, Any]) -> None:
        """Handles a message from the runtime in a task."""
        kind, task = message["_"], attempt.task.name
        if kind == "saved":
            self._snapshots.collect()
        elif kind == "warning":
            self._connection.notify(f"{task}: {self._redact(text_of(message.get('text')))[:2000]}", True)
        elif kind == "asks":
            if not attempt.polls_for_saves:
                attempt.polls_for_saves = True
                self._connection.beat()
        elif kind == "follow":
            self._evaluators.handle_message(task, message)
        elif kind == "ingest" and task == INGEST:
            self._on_ingest_message(attempt, message)
        elif kind == "save":
            self._connection.send(ev.SaveRequested(self._options.host, task))
        elif kind == "not-finite":
            self.not_finite.add(attempt, message)
        elif kind == "agree":
            self._agreement_reply(attempt, message)

    def _agreement_reply(self, attempt: Attempt, message: dict[str, Any]) -> None:
        """Validates the reply of the program's process: the captain would disconnect this host if it were invalid."""
        step = attempt.step if message.get("step") is None else message["step"]
        say = message.get("say")
        numbers: list[Any] = [message.get("which"), message.get("count"), step or 0]
        if isinstance(say, str) and all(map(is_small_integer, numbers)):
            reply = ev.AgreementReply(self._options.host, attempt.task.name, say, *numbers)
            self._connection.send(reply)

    def _on_ingest_message(self, attempt: Attempt, message: dict[str, Any]) -> None:
        if message.get("stage") == "failed":
            detail = self._redact(text_of(message.get("detail")))[:2000]
            attempt.ingest_failure = text_of(message.get("cause")), detail
            return
        stage, location, run = (text_of(message.get(name)) for name in ("stage", "data", "run"))
        data = data_location(location)
        files, size = (message.get(name, 0) for name in ("files", "size"))
        if data != location or not is_small_integer(files) or not is_small_integer(size):
            return
        progress = ev.IngestProgress(
            self._options.host, stage, data, run, bool(message.get("made", False)), files, size
        )  # fmt: skip
        if progress.stage == "there":
            self.notes.update_data(progress.data)
        self._connection.send(progress)

    def tell(self, tasks: Iterable[str], message: Mapping[str, Any]) -> None:
        """Sends a message to the processes of these tasks."""
        for name in tasks:
            if name in self.attempts:
                self.attempts[name].tell(dict(message))

    # ---- exits

    def child_ended(self, pid: int, status: int) -> None:
        self._orphans.on_reaped(pid)
        if self._launcher.child_ended(pid) or self._snapshots.porter.child_ended(pid):
            return
        for attempt in list(self.attempts.values()):
            if attempt.pid == pid and not attempt.exited:  # its pid may be used again while its orphans are killed
                self._on_exit(attempt, status)
                return
        if self._launcher.awaits_spare():
            self._early_exits[pid] = status
        self._has_adopted = True

    def children_ended(self) -> None:
        """After all that ended at once, which may be thousands: kills their children, which this agent has adopted."""
        if self._has_adopted:
            self._orphans.kill_adopted(name for name in self._tasks if name not in self.attempts)
        self._has_adopted = False

    def _on_exit(self, attempt: Attempt, status: int) -> None:
        attempt.exited, attempt.exited_at = True, self._loop.now()
        if attempt.task.rank == 0:
            self._listened = None if self._port_watch is None else self._port_watch.finish()
            self._port_watch = None
        is_noted = status == 0 and not attempt.requested_end
        self._orphans.end(attempt.task.name, attempt.kill, is_noted, lambda: self._on_all_killed(attempt, status))

    def _on_all_killed(self, attempt: Attempt, status: int) -> None:
        attempt.finish()
        succeeded = status == 0 and attempt.requested_end in ("", *GRACEFUL)
        self._snapshots.watched.attempt_ended(attempt, succeeded, lambda: self._finish_attempt(attempt, status))

    def _own_pids(self) -> set[int]:
        pids = {attempt.pid for attempt in self.attempts.values()} | self._launcher.pids()
        return pids | self._snapshots.porter.pids()

    def _is_idle(self) -> bool:
        return all(attempt.exited for attempt in self.attempts.values()) and not self._launcher.awaits_spare()

    def _finish_attempt(self, attempt: Attempt, status: int) -> None:
        name = attempt.task.name
        self._snapshots.collect()  # report its last snapshot and its last step before its exit
        self._connection.beat()
        self._send_start_times(attempt, at_once=True)
        del self.attempts[name]
        self._evaluators.attempt_ended(name)
        self._snapshots.attempt_ended(name)
        self.reached = max(self.reached, attempt.step or 0)
        if attempt.cold_because:
            reason = self._redact(attempt.cold_because)
            self._launcher.disable_spares(f"{name} starts without a spare from now on: {reason}")
        if attempt.state:
            self._states[name] = attempt.state
        if attempt.requested_end == ins.ABORT:
            self._stacks[name] = self._redact(exit_causes.stacks(attempt.log.tail))[-STACKS_LIMIT:]
        exit = self._exit_of(attempt, status)
        self._discard_damaged(exit, attempt.step)
        self._exits[name], self._exit_at[name] = exit, self._failed_at(attempt)
        if exit.cause or not exit.expected:
            self._connection.send(ev.TaskExited(self._options.host, exit))
        if self._ending and (exit.expected or name in self._ending):
            self._report_ended()
        elif not self._leaving:
            self._send_offers()
        if self._leaving and not self.attempts:
            self._on_all_ended()

    def _discard_damaged(self, exit: ev.TaskExit, step: int | None) -> None:
        """The next generation must not fail because of what an earlier one has compiled."""
        folder = compiled_folder.compiled_folder(self._plan, self._options)
        present = [path for name in compile_cache.NAMES if os.path.isdir(path := f"{folder}/{name}")]
        if present and compiled_folder.is_suspect(folder, exit, step):
            self._snapshots.remove(present)
            reason = "the compiled code kept from earlier may be damaged and was deleted"
            self._connection.notify(f"{exit.task} failed before its first step: {reason}")

    def _exit_of(self, attempt: Attempt, status: int) -> ev.TaskExit:
        code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
        expected = bool(attempt.requested_end)
        output = [self._redact(line) for line in attempt.log.tail]
        raised = attempt.raised
        raised = None if raised is None else replace(raised, text=self._redact(raised.text))
        if raised is not None:
            self._launcher.standbys.on_error(raised)
        if expected:
            tail = output if attempt.requested_end == ins.KILL else ()
            cause = exit_causes.own_error(tail, raised) if attempt.requested_end not in GRACEFUL else None
            cause = cause or exit_causes.Cause("")
        elif attempt.start_failure:
            cause = exit_causes.Cause("start-failed", self._redact(attempt.start_failure))
        elif attempt.ingest_failure is not None and status != 0:
            cause = exit_causes.Cause(*attempt.ingest_failure)
        else:
            number_below = exit_causes.signal_of(status) or exit_causes.signal_below(output, raised)
            memory = self._out_of_memory(attempt, number_below)
            cause = exit_causes.classify(status, output, self._leaving, memory, raised)
            if cause.kind == "signal" and cause.place == "SIGILL":
                cause = replace(cause, detail=f"{cause.detail}: {self._launcher.sigill_hint()}")
        if cause.raised is not None and self._launcher.uses_keras_3() and keras_hint.is_for_keras_2(cause.raised):
            cause = replace(cause, detail=f"{cause.detail}; {keras_hint.HINT}")
        survivor = cause.survivor and len(self._plan.tasks) > 1
        failed_at = self._failed_at(attempt)
        return ev.TaskExit(
            attempt.task.name, attempt.number, code,
            None if number is None else exit_causes.signal_name(number), expected,
            cause.kind, cause.detail, cause.place, survivor, max(0.0, self._loop.now() - failed_at),
            max(0.0, failed_at - attempt.started), max(0.0, (attempt.first_output_at or failed_at) - attempt.started),
            self._changed_checkpoint(attempt) if cause.kind == "program-error" else "",
            self._listened if attempt.task.rank == 0 else None,
        )  # fmt: skip

    def _changed_checkpoint(self, attempt: Attempt) -> str:
        """For a program that reports nothing: a checkpoint of its own that it has changed. In a job with
        `snapshots.watch`, only snapshots count: other files of the watched folder are replaced at the restart."""
        if attempt.step is not None or attempt.task.name == INGEST or self._plan.snapshots.watch:
            return ""
        work, runs = self._options.work or self._plan.code, os.path.dirname(self._options.folder)
        return changed_checkpoint(work, attempt.started_wall, runs)

    def _failed_at(self, attempt: Attempt) -> float:
        """When the attempt failed: at its uncaught exception if there was one. It decides which task failed first."""
        return attempt.raised_at if attempt.raised is not None else attempt.exited_at

    def _out_of_memory(self, attempt: Attempt, number: int) -> str | None:
        if number != signal.SIGKILL:
            return None
        kills = self._memory.oom_kills()
        has_new_kill, self._kills_before = kills > self._kills_before, kills
        if has_new_kill or memory_limits.was_oom_killed(attempt.pid):
            _used, limit = self._memory.used_and_limit()
            return f"killed by the kernel: out of memory (the limit is {limit >> 20} MiB)"
        return None

    def _report_ended(self) -> None:
        """Once all attempts that the captain asked to end have ended, reports it, with addresses for the next start."""
        for name, number in self._ending.items():
            attempt = self.attempts.get(name)
            if attempt is not None and attempt.number == number:
                return
        ending, self._ending = self._ending, {}
        self._send_offers(ending)

    def _send_offers(self, ended: dict[str, int] | None = None) -> None:
        states, self._states = self._states, {}
        stacks, self._stacks = self._stacks, {}
        self._connection.send(ev.TasksEnded(self._options.host, ended or {}, self.offers(), states, stacks))

    # ---- ending

    def end(self, message: ins.EndTasks) -> None:
        """Ends attempts on the captain's request."""
        for name, number in message.tasks.items():
            attempt = self.attempts.get(name)
            self._ending[name] = number
            if attempt is not None and attempt.number == number:
                self._stop_signals.end(attempt, message.how, message.grace)
        self._report_ended()

    def terminate(self) -> None:
        for attempt in self.attempts.values():
            self._stop_signals.terminate(attempt)

    def kill(self) -> None:
        for attempt in self.attempts.values():
            attempt.requested_end = attempt.requested_end or ins.KILL
            attempt.kill()

    def kill_unasked(self) -> None:
        """Kills tasks without a request from the captain, which receives a report when it is back."""
        self.kill()
        for name, attempt in self.attempts.items():
            self._ending.setdefault(name, attempt.number)

    def leave(self, grace: float) -> None:
        """Starts no more attempts, and kills the running ones after `grace` seconds."""
        self._leaving = True
        for attempt in self.attempts.values():
            attempt.kill_within(grace)

    def close(self) -> None:
        self._launcher.close()
