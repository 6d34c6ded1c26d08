"""Starts tasks with their environment: from a spare if one is ready, else in a new interpreter."""

from __future__ import annotations

import os
import selectors
import signal
import sys
import time
from pathlib import Path
from typing import Callable

from paceline.agent import memory_limits, os_processes
from paceline.agent.captain import events as ev
from paceline.agent.net.loop import Loop
from paceline.agent.options import Options
from paceline.agent.spares import spare
from paceline.agent.tasks import compiled_folder, variable_references
from paceline.agent.tasks.attempt import Attempt
from paceline.agent.tasks.gpu_standbys import GpuStandbys
from paceline.agent.tasks.python_command import Python, parse_command, with_program_found
from paceline.agent.transfers.porter_client import process
from paceline.frameworks import amx_probe, environment, tensorflow_server
from paceline.frameworks.tracking import tracking_variables
from paceline.plan import Plan, launcher_of
from paceline.storage.regular_files import append_to_regular, open_regular

SETTLED = 3.0  # seconds without an import, after which a program has imported what it needs
SPARE_DEATHS = 3  # spares that may end before no more are started, unless one has started a task in between
SPARE_ANSWERS = 10.0  # seconds that a spare may take to fork
SPARE_RENEWALS = 3  # spares that are replaced because the program has imported more since
SPARE_LEFT_OUT = 5  # modules that spares may leave to the program, because forks cannot share what they open
SPARE_NICE = 5  # training has priority, but the spare must become ready eventually
MARGIN = 256 * 1024 * 1024  # bytes of memory to leave free
RECORD_SENDERS = 16  # hosts of a role that send it: the first ones
RECORD_SENT = 60 * 1024  # bytes of a record of imports, at most, that other hosts get: it is one text of a message


class TaskLauncher:
    def __init__(
        self,
        plan: Plan,
        options: Options,
        loop: Loop,
        send: Callable[[ev.MemberEvent], None],
        notify: Callable[..., None],
        on_started: Callable[[Attempt], None],
        on_failed: Callable[[Attempt, OSError], None],
    ) -> None:
        self._plan = plan
        self._options = options
        self._loop = loop
        self._send = send
        self._notify = notify
        self._on_started = on_started
        self._on_failed = on_failed
        host = plan.host(options.host)
        self._role = plan.role(host.role)
        self._command = list(self._role.command or tensorflow_server.COMMAND)
        self._refers = any(variable_references.is_changed(word) for word in self._command)
        self._work = options.work or plan.code
        self._interpreter = options.interpreter or sys.executable
        self.python = parse_command(self._command, self._interpreter)
        # A shell or a launcher such as torchrun: the program runs in processes below that of the task.
        self.starts_the_program_below = self.python is None or launcher_of(self._command) is not None
        # Their values are not the same for all tasks.
        self._env_with_references = {
            name: value for name, value in self._role.env.items() if variable_references.is_changed(value)
        }
        self._static = self._static_environment(len(host.tasks))
        self._record_path = f"{options.folder}/logs/.{options.host}.imports"
        self._record_mtime = 0, 0.0  # modification time of the record, in ns, and when it was first observed
        self._spare: spare.Spare | None = None
        self._spare_ready = False
        self._spare_deaths = 0
        self._spare_renewals = 0
        self._left_out: set[str] = set()  # modules that spares do not import
        self._spare_record_size = 0  # bytes of the record that the spare was started with
        self.standbys = GpuStandbys()
        self._spares_enabled = plan.restart.warm and self.python is not None and not self._is_program_varying()
        self._pending: list[Attempt] = []
        self._pending_environments: dict[str, dict[str, str]] = {}

    def _is_program_varying(self) -> bool:
        """Whether tasks run different programs or start Python with different options, not only other arguments."""
        own = () if self.python is None else self.python.argv[: len(self.python.argv) - len(self.python.args)]
        return any(variable_references.is_changed(word) for word in own)

    def _static_environment(self, tasks: int) -> dict[str, str]:
        """The variables that are the same for all tasks of this host in all generations."""
        threads = environment.threads(self._options.cores, tasks)
        environ = {**os.environ, **self._role.env}
        for name in self._env_with_references:
            del environ[name]
        for name in environment.SHARE_VARIABLES:  # of a task that has started this run
            environ.pop(name, None)
        site = (
            str(spare.site_folder()) if self.starts_the_program_below else ""
        )  # Python below a shell shows its stacks
        paths = [*filter(None, [site, environ.get("PYTHONPATH"), self._options.library])]
        compiled = compiled_folder.variables(self._plan, self._options, {**os.environ, **self._role.env}, self._notify)
        limits = amx_probe.environment(environ)
        if limits:
            self._notify(f"{amx_probe.FINDING}; tasks run with {amx_probe.VARIABLE}={amx_probe.LIMIT}")
        return {
            "PYTHONUNBUFFERED": "1",
            **{name: value for name, value in threads.items() if name not in os.environ},
            **environ,
            **limits,
            **compiled,
            **({"PYTHONPATH": os.pathsep.join(paths)} if self._options.library or site else {}),
            "PYTHONFAULTHANDLER": "1",
            "PACELINE_TENSORBOARD_DIR": f"{self._options.folder}/tensorboard",
        }

    def start(
        self,
        attempt: Attempt,
        plan: Plan,
        roster: dict[str, str],
        restarts: int,
        variables: dict[str, str],
        mlflow_run: str = "",
    ) -> None:
        """Starts the attempt; `on_started` is called once it has a process. OSError: the command cannot be started.
        `plan`: that of the generation."""
        task = attempt.task
        own_variables = {**self._static, **self._env_with_references}
        environ = {
            **self._static,
            **tracking_variables(plan, task, self._options.run, mlflow_run, own_variables),
            **environment.task_variables(
                plan, task, roster, self._options.run, attempt.generation, restarts, self._options.machine
            ),
            **environment.gpus(plan, task, self._options.devices, self._options.machine),
            **attempt.environment(),
            **variables,
        }
        environ.update(variable_references.expand_env(self._env_with_references, environ))
        standby = self.standbys.take(task.name, environ)
        if self._spare is not None and self._spare_ready:
            out, reports = attempt.output_end, attempt.report_end.fileno()
            python = self._python_for(environ)
            try:
                self._spare.start(environ, out, out, reports, None if python is None else python.argv, standby)
            except (OSError, ValueError) as error:
                self.disable_spares(f"{self._options.host} does not use spares: {error}")
            else:
                self._pending.append(attempt)
                self._pending_environments[task.name] = environ
                self._loop.after(SPARE_ANSWERS, lambda: self._check_answered(attempt))
                return
        self._start_cold(attempt, environ)

    def start_ingest(self, attempt: Attempt, variables: dict[str, str]) -> None:
        """Starts the agent's own process that runs the ingest command."""
        environ = {
            **self._static,
            "PACELINE_RUN": self._options.run,
            "PACELINE_TASK": attempt.task.name,
            "PACELINE_ROLE": attempt.task.role,
            "PACELINE_INDEX": str(attempt.task.index),
            "CUDA_VISIBLE_DEVICES": ",".join(self._options.devices),
            **attempt.environment(),
            **variables,
        }
        environ.update(variable_references.expand_env(self._env_with_references, environ))
        command = process("paceline.agent.ingest_process", self._options.to_json())
        out, reports = attempt.output_end, attempt.report_end.fileno()
        attempt.began(spare.start_plain(command, environ, self._work, out, out, reports), warm=False)
        self._on_started(attempt)

    def _expanded(self, environ: dict[str, str]) -> tuple[str, ...]:
        return variable_references.expand_command(self._command, environ) if self._refers else tuple(self._command)

    def _python_for(self, environ: dict[str, str]) -> Python | None:
        """The Python program of a task with this environment."""
        return parse_command(self._expanded(environ), self._interpreter) if self._refers else self.python

    def _start_cold(self, attempt: Attempt, environ: dict[str, str]) -> None:
        out, reports = attempt.output_end, attempt.report_end.fileno()
        python = self._python_for(environ)
        if python is None:
            command = with_program_found(self._expanded(environ), self._interpreter, environ.get("PATH"))
            pid = spare.start_plain(command, environ, self._work, out, out, reports)
        else:
            record_fd = -1
            if self._spares_enabled and self._spare is None and attempt.task.local_index == 0:
                try:
                    record_fd = self._new_record()
                except OSError:
                    self._spares_enabled = False  # a spare needs the record
            try:
                pid = spare.start_cold(python, environ, self._work, out, out, reports, record_fd)
            finally:
                if record_fd >= 0:
                    os.close(record_fd)
        attempt.began(pid, warm=False)
        self._on_started(attempt)

    def _new_record(self) -> int:
        """The file in which a task records what it imports. Tasks can write to its folder."""
        fd = append_to_regular(self._record_path)
        os.ftruncate(fd, 0)
        return fd

    # ---- the spare

    def consider_spare(self, attempts: dict[str, Attempt], memory: memory_limits.Memory) -> None:
        """Starts a spare once the program has imported what it needs or reports steps, if there is enough memory."""
        first = next((attempt for attempt in attempts.values() if attempt.pid), None)
        if self._spare is not None and self._spare_ready and first is not None and first.step is not None:
            if self._has_imported_more():
                self._spare_renewals += 1
                self._drop_spare()
            else:
                self.standbys.prepare(self._spare, attempts.values(), memory)
        if not self._spares_enabled or self._spare is not None or self.python is None:
            return
        record_path = self._record_path
        if first is None:
            record_path = self._record_for_newcomer()
            if not record_path:
                return
        elif not (first.step is not None or self._has_finished_imports()):
            return
        need = (MARGIN if first is None else os_processes.resident(first.pid)) + MARGIN
        if memory.free() < need:
            shortage = f"{need >> 20} MiB of memory needed, {memory.free() >> 20} MiB free"
            self.disable_spares(f"{self._options.host} does not use spares: {shortage}")
            return
        try:
            self._spare_record_size = self._record_size()
            record = spare.without(spare.read_record(Path(record_path)), self._left_out)
            if not record and self.python.hooked:
                self._spares_enabled = False  # there is nothing to preload: a cold start is as fast
                return
            devices = self._options.devices
            self._spare = spare.Spare.spawn(self.python, self._static, self._work, record, SPARE_NICE, devices)
        except (OSError, ValueError) as error:
            self.disable_spares(f"{self._options.host} does not use spares: {error}")
            return
        self._loop.watch(self._spare, selectors.EVENT_READ, self._read_spare)

    def _record_for_others(self) -> str:
        """What the program has imported here, for hosts of an elastic job that join later."""
        if self._plan.elastic is None or self._plan.host(self._options.host).index >= RECORD_SENDERS:
            return ""
        try:
            with open(open_regular(self._record_path), "rb") as file:
                record = file.read(RECORD_SENT + 1)
        except OSError:
            return ""
        return record.decode(errors="replace") if len(record) <= RECORD_SENT else ""

    def learn_imports(self, record: str) -> None:
        """Another host has recorded what the program imports; ignored if it has run here."""
        data = record.encode(errors="replace")  # JSON can contain what UTF-8 cannot
        try:
            with open(self._record_path, "xb", opener=_open_private) as file:
                file.write(data)
        except OSError:
            pass

    def _record_for_newcomer(self) -> str:
        """The record of what the program imports, for a host of an elastic job on which no task runs: its own, or that
        of another host on this machine. Empty: there is none, or the program still imports."""
        if self._plan.elastic is None:
            return ""
        folder = os.path.dirname(self._record_path)
        hosts = [host.name for host in self._plan.hosts if host.role == self._role.name]
        paths = [self._record_path, *(f"{folder}/.{host}.imports" for host in hosts)]
        now = time.time()
        for path in paths:
            try:
                about = os.stat(path)
            except OSError:
                continue
            if about.st_size and now - about.st_mtime > SETTLED:
                return path
        return ""

    def _has_finished_imports(self) -> bool:
        try:
            mtime = os.stat(self._record_path).st_mtime_ns
        except OSError:
            return False
        if mtime != self._record_mtime[0]:
            self._record_mtime = mtime, self._loop.now()
        return self._loop.now() - self._record_mtime[1] > SETTLED

    def _has_imported_more(self) -> bool:
        """Whether the program has imported modules that the spare lacks: on a slow disk, one import can take so long
        that the spare was started in between. They are not missed while a task waits to be forked."""
        if self._pending or self._spare_renewals >= SPARE_RENEWALS or not self._has_finished_imports():
            return False
        return self._record_size() > self._spare_record_size

    def _record_size(self) -> int:
        try:
            return os.stat(self._record_path).st_size
        except OSError:
            return 0

    def _read_spare(self) -> None:
        if self._spare is None:
            return
        for message in self._spare.receive():
            if isinstance(message, spare.Ready):
                if not self._spare_ready:
                    self._send(ev.SpareReady(self._options.host, message.seconds, self._record_for_others()))
                self._spare_ready = True
            elif isinstance(message, spare.Ended):
                self._on_spare_ended()
                return
            elif isinstance(message, spare.Unfit):
                if message.module not in {"", *self._left_out} and len(self._left_out) < SPARE_LEFT_OUT:
                    self._left_out.add(message.module)
                    self._drop_spare()
                    self._start_pending_cold()
                else:
                    self._on_spare_failed(message.reason)
                return
            elif isinstance(message, spare.Started) and self._pending:
                attempt = self._pending.pop(0)
                self._pending_environments.pop(attempt.task.name, None)
                self._spare_deaths = 0
                attempt.began(message.pid, warm=True)
                self._on_started(attempt)

    def _check_answered(self, attempt: Attempt) -> None:
        """A spare that does not answer is killed. It is replaced: the machine may only have been busy."""
        if attempt in self._pending and self._spare is not None:
            try:
                os.killpg(self._spare.pid, signal.SIGKILL)  # including forks that are not tasks yet
            except ProcessLookupError:
                pass
            host = self._options.host
            self._notify(f"{host} does not use this spare: it did not respond for {SPARE_ANSWERS:g} s")
            self._on_spare_ended()

    def awaits_spare(self) -> bool:
        """Whether a spare is forking a task whose pid is not known yet."""
        return bool(self._pending)

    def child_ended(self, pid: int) -> bool:
        if self._spare is not None and pid == self._spare.pid:
            self._on_spare_ended()
            return True
        return False

    def _on_spare_ended(self) -> None:
        """The spare is replaced, until SPARE_DEATHS spares have ended."""
        self._spare_deaths += 1
        self._drop_spare()
        if self._spare_deaths >= SPARE_DEATHS:
            self.disable_spares(f"{self._options.host} does not use spares: they ended {self._spare_deaths} times")
        self._start_pending_cold()

    def _on_spare_failed(self, reason: str) -> None:
        self._drop_spare()
        self.disable_spares(f"{self._options.host} does not use spares: {reason}")
        self._start_pending_cold()

    def _start_pending_cold(self) -> None:
        pending, self._pending = self._pending, []
        for attempt in pending:
            try:
                self._start_cold(attempt, self._pending_environments.pop(attempt.task.name))
            except OSError as error:
                self._on_failed(attempt, error)

    def _drop_spare(self) -> None:
        if self._spare is not None:
            self._loop.unwatch(self._spare)
            self._spare.kill()
        self._spare, self._spare_ready = None, False
        self.standbys.clear()

    def disable_spares(self, reason: str) -> None:
        if self._spares_enabled:
            self._spares_enabled = False
            self._notify(reason)
        if not self._pending:
            self._drop_spare()

    def sigill_hint(self) -> str:
        """The likely reason if a task was killed by SIGILL."""
        return amx_probe.likely_reason(self._static)

    def program_processes(self, pid: int) -> list[int]:
        """The processes of a task, whose own is `pid`, that may run the program."""
        if not self.starts_the_program_below:
            return [pid]
        below = os_processes.descendants(pid)
        return [pid, *below] if self.python is None else below or [pid]

    def uses_keras_3(self) -> bool:
        """Whether `tf.keras` is Keras 3 in these tasks, as far as their environment decides it."""
        is_legacy = self._static.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true")
        return self._plan.framework == "tensorflow" and not is_legacy

    def pids(self) -> set[int]:
        return {self._spare.pid} if self._spare is not None else set()

    def close(self) -> None:
        self._drop_spare()
        try:
            os.unlink(self._record_path)
        except OSError:
            pass


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
