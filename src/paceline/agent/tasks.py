"""The tasks of a host: each attempt is started, tended and ended, and what is left of it is swept away."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from typing import Any, Callable

from paceline.agent import causes, machine
from paceline.agent import events as ev
from paceline.agent.attempt import Attempt
from paceline.agent.following import Following
from paceline.agent.journal import Echo, replace_text
from paceline.agent.line import Line
from paceline.agent.logs import TaskLog
from paceline.agent.loop import Loop
from paceline.agent.options import Options
from paceline.agent.shelf import restores
from paceline.agent.staging import Staging
from paceline.agent.starting import Starting
from paceline.agent.wire import Message
from paceline.plan import INGEST, Plan

STACKS_WITHIN = 3.0  # seconds a task has to write its stacks
STACKS_LIMIT = 16 * 1024
_INGESTED: dict[str, Any] = {"stage": "", "data": "", "run": "", "made": False, "files": 0, "size": 0}


class Tasks:
    def __init__(
        self,
        plan: Plan,
        options: Options,
        loop: Loop,
        line: Line,
        staging: Staging,
        following: Following,
        echo: Echo | None,
        none_left: Callable[[], None],
    ) -> None:
        """`none_left`: the last one is gone, and the host has to go, too."""
        self._plan, self._options, self._loop = plan, options, loop
        self._line, self._staging, self._following, self._echo = line, staging, following, echo
        self._none_left = none_left
        every = [*plan.tasks, *([] if plan.ingest_task is None else [plan.ingest_task])]
        self._tasks = {task.name: task for task in every if task.host == options.host}
        self._starting = Starting(plan, options, loop, line.send, line.said, self._began, self._cannot_start)
        self._memory = machine.Memory()
        self._kills_before = self._memory.kills()
        self._logs: dict[str, TaskLog] = {}
        self.attempts: dict[str, Attempt] = {}
        self._exits: dict[str, ev.Exit] = {}
        self._exit_at: dict[str, float] = {}
        self._ending: dict[str, int] = {}  # asked to end and not yet told of
        self._states: dict[str, str] = {}
        self._stacks: dict[str, str] = {}
        self._early: dict[int, int] = {}  # pid -> status of children that ended before their pid was known
        self._generation_file = f"{options.folder}/logs/.{options.host}.generation"
        self.generation = self._last_generation()
        self._data_file = f"{options.folder}/logs/.{options.host}.data"
        self.data = self._last_data()
        self.roster: dict[str, str] = {}
        self.reached = 0  # the furthest step of those that have ended
        self._leaving = False

    # ---- what the captain is told

    def exits(self) -> tuple[ev.Exit, ...]:
        """The last attempts of those that do not run."""
        now = self._loop.now()
        return tuple(
            ev.Exit(**{**exit.__dict__, "age": max(0.0, now - self._exit_at[name])})
            for name, exit in self._exits.items()
            if name not in self.attempts
        )

    def offers(self) -> dict[str, str]:
        """Addresses for the next start."""
        if self._leaving:
            return {}
        taken: set[str] = set()
        offers = {}
        for name in self._tasks:
            if name not in self.attempts:
                address = f"{self._options.address}:{machine.free_port()}"
                while address in taken:
                    address = f"{self._options.address}:{machine.free_port()}"
                taken.add(address)
                offers[name] = address
        return offers

    def beat(self) -> Message:
        now = self._loop.now()
        tasks = {name: attempt.progress(now) for name, attempt in self.attempts.items() if name != INGEST}
        asking = [name for name, attempt in self.attempts.items() if attempt.asks]
        more = {"asking": asking} if asking else {}
        return {"tasks": tasks, "memory": self._memory.share(), **more}

    # ---- starting

    def start(self, message: Message) -> None:
        if self._leaving or int(message["generation"]) < self.generation:
            return
        self._remember(int(message["generation"]))
        self._remember_data(str(message["data"]))
        for name, number in message["tasks"].items():
            if name not in self._tasks or name in self.attempts:
                continue
            log = self._logs.get(name)
            if log is None:
                log = self._logs[name] = TaskLog(
                    f"{self._options.folder}/logs/{name}.log", lambda text: self._line.said(text, True), name,
                    self._echo,
                )  # fmt: skip
            self._kills_before = self._memory.kills()
            attempt = Attempt(
                self._tasks[name], int(number), self.generation, log, self._loop, self._line.beat, self._told_by
            )
            self.attempts[name] = attempt
            try:
                if name == INGEST:
                    self._starting.start_ingest(attempt, self._staging.shared())
                    continue
                restore = message["restore"] if restores(self._plan, self._tasks[name]) else None
                given = {**self._staging.environment(name, self.generation, restore), **self._staging.shared()}
                given.update({"PACELINE_DATA": self.data} if self.data else {})
                self._starting.start(attempt, self.roster, int(message["restarts"]), given)
            except OSError as error:
                self._cannot_start(attempt, error)

    def _last_generation(self) -> int:
        """The highest this host has seen, also by an agent before this one: numbers only grow."""
        try:
            with open(self._generation_file) as file:
                return int(file.read())
        except (OSError, ValueError):
            return 0

    def _remember(self, generation: int) -> None:
        if generation <= self.generation:
            return
        self.generation = generation
        try:
            replace_text(self._generation_file, str(generation))
        except OSError:
            pass  # a full disk: this agent still knows

    def _last_data(self) -> str:
        try:
            with open(self._data_file) as file:
                return file.read().rstrip("\n")
        except (OSError, ValueError):
            return ""

    def _remember_data(self, data: str) -> None:
        """A captain whose notes are lost asks for it."""
        if not data or data == self.data:
            return
        self.data = data
        try:
            replace_text(self._data_file, data)
        except OSError:
            pass  # a full disk: this agent still knows

    def _began(self, attempt: Attempt) -> None:
        words = {"pid": attempt.pid, "warm": attempt.warm}
        self._line.send({"type": "started", "task": attempt.task.name, "attempt": attempt.number, **words})
        self._staging.watching.began(attempt)
        early = self._early.pop(attempt.pid, None)
        if not self._starting.asked_a_spare():
            self._early.clear()  # pids are used again
        if early is not None:
            self._ended(attempt, early)
        elif attempt.asked or self._leaving:
            attempt.kill()  # there was nobody to signal until now

    def _cannot_start(self, attempt: Attempt, error: OSError) -> None:
        where = f": {error.filename}" if error.filename else ""
        attempt.log.feed(f"{error.strerror or error}{where}\n".encode())
        self._ended(attempt, 127 << 8)

    # ---- while they run

    def look(self) -> None:
        """Once a second."""
        for attempt in self.attempts.values():
            attempt.sample()
        trains = {name: attempt for name, attempt in self.attempts.items() if name != INGEST}
        self._starting.consider_spare(trains, self._memory)

    def _told_by(self, attempt: Attempt, message: dict[str, Any]) -> None:
        """What the runtime in a task has to say."""
        kind, task = message["_"], attempt.task.name
        if kind == "saved":
            self._staging.look()
        elif kind == "warning":
            self._line.said(f"{task}: {str(message.get('text'))[:2000]}", True)
        elif kind == "asks":
            attempt.asks = True
            self._line.beat()
        elif kind == "follow":
            self._following.told(task, message)
        elif kind == "ingest":
            self._ingest_says(attempt, message)
        elif kind == "save":
            self._line.send({"type": "save", "task": task})
        elif kind == "agree":
            step = attempt.step if message.get("step") is None else message["step"]
            words = {name: message.get(name) for name in ("say", "which", "count")}
            self._line.send({"type": "agree", "task": task, **words, "step": step or 0})

    def _ingest_says(self, attempt: Attempt, message: dict[str, Any]) -> None:
        if message.get("stage") == "failed":
            attempt.failed = str(message.get("cause")), str(message.get("detail"))[:2000]
            return
        words = {name: message.get(name, default) for name, default in _INGESTED.items()}
        if words["stage"] == "there":
            self._remember_data(str(words["data"]))
        self._line.send({"type": "ingest", **words})

    def tell(self, message: Message) -> None:
        for name in message["tasks"]:
            if name in self.attempts:
                self.attempts[name].tell(message["words"])

    # ---- how they end

    def child_ended(self, pid: int, status: int) -> None:
        if self._starting.child_ended(pid) or self._staging.porting.child_ended(pid):
            return
        for attempt in list(self.attempts.values()):
            if attempt.pid == pid:
                self._ended(attempt, status)
                return
        if self._starting.asked_a_spare():
            self._early[pid] = status
        for name in self._tasks:
            if name not in self.attempts:
                self._sweep(name)  # what an orphan left behind has come here too

    def _ended(self, attempt: Attempt, status: int) -> None:
        name = attempt.task.name
        attempt.exited = True
        attempt.kill()  # what it started and left in its process group
        self._sweep(name)
        attempt.finish()
        well = status == 0 and attempt.asked in ("", "term")
        self._staging.watching.ended(attempt, well, lambda: self._gone(attempt, status))

    def _sweep(self, task: str) -> None:
        """What a task started and that left its process group: orphans are adopted by this agent."""
        known = {attempt.pid for attempt in self.attempts.values()} | self._starting.pids()
        known |= self._staging.porting.pids()
        for pid in machine.children(os.getpid()):
            if pid not in known and machine.environment_of(pid, "PACELINE_TASK") == task:
                _signal(pid, signal.SIGKILL)

    def _gone(self, attempt: Attempt, status: int) -> None:
        name = attempt.task.name
        self._staging.look()  # its last snapshot, and its last step, before the word that it is gone
        self._line.beat()
        del self.attempts[name]
        self._following.gone(name)
        self.reached = max(self.reached, attempt.step or 0)
        if attempt.cold_because:
            self._starting.no_spares(f"{name} starts cold from now on: {attempt.cold_because}")
        if attempt.state:
            self._states[name] = attempt.state
        if attempt.asked == "abort":
            self._stacks[name] = causes.stacks(attempt.log.tail)[-STACKS_LIMIT:]
        exit = self._exit_of(attempt, status)
        self._exits[name], self._exit_at[name] = exit, self._failed_at(attempt)
        if exit.cause or not exit.expected:
            self._line.send({"type": "exited", "exit": exit.__dict__})
        if exit.expected and self._ending:
            self._tell_ended()
        elif not self._leaving:
            self._offer()
        if self._leaving and not self.attempts:
            self._none_left()

    def _exit_of(self, attempt: Attempt, status: int) -> ev.Exit:
        code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
        expected = bool(attempt.asked)
        if expected:
            shown = attempt.log.tail if attempt.asked == "kill" else ()
            cause = causes.own_error(shown, attempt.raised) if attempt.asked != "term" else None
            cause = cause or causes.Cause("")
        elif attempt.failed is not None and status != 0:
            cause = causes.Cause(*attempt.failed)
        else:
            memory = self._out_of_memory(attempt, causes.signal_of(status))
            cause = causes.classify(status, attempt.log.tail, self._leaving, memory, attempt.raised)
            if cause.kind == "signal" and cause.place == "SIGILL":
                cause = replace(cause, detail=f"{cause.detail}: {self._starting.died_of_sigill()}")
        survivor = cause.survivor and len(self._plan.tasks) > 1
        return ev.Exit(
            attempt.task.name, attempt.number, code, None if number is None else causes.signal_name(number), expected,
            cause.kind, cause.detail, cause.place, survivor, max(0.0, self._loop.now() - self._failed_at(attempt)),
        )  # fmt: skip

    def _failed_at(self, attempt: Attempt) -> float:
        """When it failed: an exception comes before the exit, and who was first is told by that."""
        return attempt.raised_at if attempt.raised is not None else self._loop.now()

    def _out_of_memory(self, attempt: Attempt, number: int) -> str | None:
        if number != signal.SIGKILL:
            return None
        kills = self._memory.kills()
        counted, self._kills_before = kills > self._kills_before, kills
        if counted or machine.kernel_killed(attempt.pid):
            _used, limit = self._memory.used_and_limit()
            return f"killed by the kernel for want of memory ({limit >> 20} MiB is the limit)"
        return None

    def _tell_ended(self) -> None:
        """Once all that was asked to end is gone, say so, with addresses for the next start."""
        for name, number in self._ending.items():
            attempt = self.attempts.get(name)
            if attempt is not None and attempt.number == number:
                return
        ending, self._ending = self._ending, {}
        self._offer(ending)

    def _offer(self, ended: dict[str, int] | None = None) -> None:
        states, self._states = self._states, {}
        stacks, self._stacks = self._stacks, {}
        words = {"tasks": ended or {}, "offers": self.offers(), "states": states, "stacks": stacks}
        self._line.send({"type": "ended", **words})

    # ---- being ended

    def end(self, message: Message) -> None:
        """As the captain says."""
        how, grace = message["how"], float(message["grace"])
        tasks = {name: int(number) for name, number in message["tasks"].items()}
        for name, number in tasks.items():
            attempt = self.attempts.get(name)
            self._ending[name] = number
            if attempt is not None and attempt.number == number:
                self._ask(attempt, how, grace)
        self._tell_ended()

    def _ask(self, attempt: Attempt, how: str, grace: float) -> None:
        attempt.asked = how
        if how == "kill":
            attempt.state = "stopped" if attempt.is_stopped() else ""
            attempt.kill()
        elif how == "abort" and not attempt.pid:
            attempt.kill()  # there is no process, or not yet, that could show its stacks
        elif how == "abort":
            attempt.state = attempt.doing()
            attempt.log.tail.clear()
            below = [] if self._starting.python is not None else machine.descendants(attempt.pid)
            for pid in below or [attempt.pid]:  # a shell has no stacks to show: what it runs has
                _signal(pid, signal.SIGABRT)
                _signal(pid, signal.SIGCONT)
            attempt.kill_within(STACKS_WITHIN)
        else:
            self._terminate(attempt)
            attempt.signal(signal.SIGCONT, whole_group=True)
            attempt.kill_within(grace)

    def _terminate(self, attempt: Attempt) -> None:
        whole = self._starting.python is None or attempt.task.name == INGEST
        attempt.signal(signal.SIGTERM, whole_group=whole)

    def terminate(self) -> None:
        for attempt in self.attempts.values():
            self._terminate(attempt)

    def kill(self) -> None:
        for attempt in self.attempts.values():
            attempt.asked = attempt.asked or "kill"
            attempt.kill()

    def kill_unasked(self) -> None:
        """The captain hears of it when it is there again."""
        self.kill()
        for name, attempt in self.attempts.items():
            self._ending.setdefault(name, attempt.number)

    def leave(self, grace: float) -> None:
        """No others start, and these have that long."""
        self._leaving = True
        for attempt in self.attempts.values():
            attempt.kill_within(grace)

    def close(self) -> None:
        self._starting.close()


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass
