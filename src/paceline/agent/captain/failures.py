"""Failures and hangs of tasks, and lost hosts: which other tasks end with them, the root cause, and whether they
restart. No I/O."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Callable

from paceline.agent.captain import events as ev
from paceline.agent.captain import instructions as ins
from paceline.agent.captain.elastic_hosts import note_loss
from paceline.agent.captain.hangs import ProgressWatch
from paceline.agent.captain.ledger import CLOSING, ENDING, LIVE, RETURNING, Ledger
from paceline.agent.captain.restart_budget import LONG_RUN, signs_of_work
from paceline.agent.captain.restart_units import DONE, RUNNING, STOPPING, WAITING, Unit
from paceline.agent.captain.root_cause import Failure, root_cause
from paceline.agent.captain.shutdown import Shutdown
from paceline.agent.captain.snapshots.evaluations import Evaluations
from paceline.agent.state_events import RESTARTS_KEPT
from paceline.plan import ALONE, BEFORE, LEAD, Plan

UNKILLABLE = 120.0  # seconds after which a task that survives SIGKILL ends the run
NEARLY_FULL = 0.95  # fraction of memory in use
NOT_A_NUMBER = "nan"  # a cause: a metric was NaN or infinite
NOT_RETRIED = ("program-error", "store")  # causes of ingest failures: a retry would fail too, perhaps after hours


@dataclass
class Restart:
    """One restart, for the report."""

    cause: str
    task: str
    detail: str
    failed_at: float  # by the captain's clock
    failed_at_wall: float  # seconds since the epoch
    first_step_after_s: float | None = None

    def to_json(self) -> dict[str, Any]:
        recovering = {"_at": self.failed_at} if self.first_step_after_s is None else {}
        return {
            "cause": self.cause, "task": self.task, "detail": self.detail, "at": self.failed_at_wall,
            "first_step_after_s": self.first_step_after_s, **recovering,
        }  # fmt: skip


def _read_restart(data: dict[str, Any], clock_offset: float) -> Restart:
    failed_at = data.get("_at", 0.0) + clock_offset
    return Restart(data["cause"], data["task"], data["detail"], failed_at, data["at"], data["first_step_after_s"])


class Failures:
    def __init__(
        self,
        plan: Plan,
        ledger: Ledger,
        watch: ProgressWatch,
        shutdown: Shutdown,
        evaluations: Evaluations,
        lease: float,
        wall_offset: float,
        instruct: Callable[[ins.Instruction], None],
        emit: Callable[..., None],
    ) -> None:
        self._plan, self._ledger, self._watch, self._shutdown = plan, ledger, watch, shutdown
        self._evaluations = evaluations
        self._lease, self._wall_offset = lease, wall_offset
        self._instruct, self._emit = instruct, emit
        self.restarts: list[Restart] = []  # the newest
        self.recovering: list[Restart] = []  # the newest after which no step was reported yet
        self._awaited: dict[str, Restart] = {}  # unit -> the restart for which it waits, or has waited
        self.stacks: dict[str, str] = {}
        self._highest_step = -1

    # ---- ends of attempts

    def on_exited(self, host: str, exit: ev.TaskExit, now: float) -> None:
        if self._ledger.running_on(host).get(exit.task) != exit.attempt:
            return
        unit = self._ledger.unit_of[exit.task]
        self._ledger.mark_ended(exit.task)
        self._emit("task-exited", task=exit.task, code=exit.code, signal=exit.signal, expected=exit.expected)
        if self._ledger.phase == ENDING:
            return
        if exit.expected:
            if exit.cause:
                unit.failures.append(failure_of(exit, now))
            return
        if not exit.cause:
            if not _is_rolled_back(unit):
                self._ledger.mark_succeeded(exit)
        elif self._ledger.phase == CLOSING and not self._must_restart(unit, now):
            self._emit("note", text=f"{exit.task} failed after training had succeeded: {exit.detail}")
        else:
            failure = failure_of(exit, now)
            if failure.cause == "signal" and exit.signal == "SIGKILL":
                failure = self._check_memory(failure, host)
            self._fail(unit, failure, now)

    def on_ended(self, event: ev.TasksEnded, now: float) -> None:
        for name, attempt in event.tasks.items():
            if self._ledger.running_on(event.host).get(name) != attempt:
                continue
            self._ledger.mark_ended(name)
            self._emit("task-exited", task=name, code=None, signal=None, expected=True)
            unit = self._ledger.unit_of[name]
            if (self._ledger.phase == LIVE or self._must_restart(unit, now)) and unit.phase == RUNNING:
                detail = f"the agent of {event.host} killed the task: no message from the captain for {self._lease:g} s"
                self.on_host_lost(name, detail, now)
        for name, text in event.stacks.items():
            if self._ledger.is_on(name, event.host):
                self.stacks[name] = text
                self._emit("stacks", task=name, text=text)
        for name, state in event.states.items():
            if self._ledger.is_on(name, event.host):
                unit = self._ledger.unit_of[name]
                unit.failures = [failure.with_state(name, state) for failure in unit.failures]

    def on_vanished(self, attempts: dict[str, int], detail: str, now: float, host: str = "") -> None:
        """These attempts no longer run, and how they ended is unknown. `host`: check whether it ran out of memory."""
        for name, attempt in attempts.items():
            if self._ledger.live.get(name) != attempt:
                continue
            self._ledger.mark_ended(name)
            self._emit("task-exited", task=name, code=None, signal=None, expected=self._ledger.phase == ENDING)
            unit = self._ledger.unit_of[name]
            if self._ledger.phase in (LIVE, RETURNING) or self._must_restart(unit, now):
                failure = _host_lost(name, detail, now)
                self._fail(unit, self._check_memory(failure, host) if host else failure, now)

    def _must_restart(self, unit: Unit, now: float) -> bool:
        """Whether a unit must restart after training: an evaluator that has not evaluated every snapshot."""
        return (
            self._ledger.phase == CLOSING
            and unit.tasks[0].role == "evaluator"
            and self._evaluations.needs_evaluators(now)
        )

    def on_host_lost(self, task: str, detail: str, now: float) -> None:
        self._fail(self._ledger.unit_of[task], _host_lost(task, detail, now), now)

    def _check_memory(self, failure: Failure, host: str) -> Failure:
        """A task that vanished while memory was nearly full was probably killed for that reason."""
        memory = self._ledger.members[host].memory
        if memory <= NEARLY_FULL:
            return failure
        detail = f"{failure.detail}; probably out of memory ({memory:.0%} in use)"
        return replace(failure, cause="out-of-memory", detail=detail)

    # ---- lost and hung tasks

    def expire_leases(self, now: float) -> list[str]:
        """Tasks on hosts whose lease has expired no longer run. Returns the hosts whose lease has expired now."""
        lost = []
        for member in self._ledger.members.values():
            if not member.connected and member.instance and now >= member.lease_until:
                detail = f"{member.host}: no heartbeat for {self._lease:g} s"
                running = self._ledger.running_on(member.host)
                if running:
                    note_loss(member, now)
                if not member.is_lost:
                    member.is_lost = True
                    lost.append(member.host)
                self.on_vanished(running, detail, now, member.host)
        for until, attempts in list(self._ledger.ghosts):
            if now >= until:
                self._ledger.ghosts.remove((until, attempts))
                self.on_vanished(attempts, "its host was replaced, and the lease of the old one expired", now)
        return lost

    def check_hangs(self, now: float) -> None:
        """Stop units that hang; end the run if a killed task does not exit."""
        for unit in self._ledger.units:
            if unit.phase == STOPPING and unit.since is not None and now - unit.since > UNKILLABLE:
                stuck = ", ".join(sorted(unit.live))
                reason = f"{stuck}: still running {UNKILLABLE:g} s after SIGKILL; probably blocked in the kernel"
                self._shutdown.end("failed", reason, "hang", now, ins.KILL)
                return
            if unit.phase != RUNNING or unit.kind == BEFORE:
                continue
            hang = self._watch.find_hang(unit.kind, [task for task in unit.tasks if task.name in unit.live], now)
            if hang is None:
                continue
            silent, limit = round(hang.silent, 1), round(hang.limit, 1)
            self._emit("hang", tasks=hang.tasks, silent_s=silent, limit_s=limit, progress=hang.progress)
            detail = f"no {hang.progress} for {hang.silent:.1f} s (limit {hang.limit:g} s)"
            self._fail(unit, Failure("hang", hang.tasks[0], detail, "", False, now), now, ins.ABORT)

    # ---- restarts

    def roll_back(self, failure: Failure, now: float) -> None:
        """Restart the tasks that train, without what they have done since a snapshot: even those that have succeeded.
        May be called again until they have ended."""
        unit = next(unit for unit in self._ledger.units if unit.kind not in (ALONE, BEFORE))
        if unit.phase in (RUNNING, STOPPING) and not _is_rolled_back(unit):
            self._ledger.succeeded.difference_update(task.name for task in unit.tasks)
            self._fail(unit, failure, now)

    def _fail(self, unit: Unit, failure: Failure, now: float, how: str = ins.KILL) -> None:
        unit.failures.append(failure)
        if unit.phase != STOPPING:
            self.stop_unit(unit, now, how)

    def stop_unit(self, unit: Unit, now: float, how: str = ins.KILL) -> None:
        for each in [unit, *self._workers_of(unit)]:
            if each is unit or each.phase == RUNNING:
                each.enter(STOPPING, now)
                for end in self._ledger.end_instructions([task.name for task in each.tasks], how):
                    self._instruct(end)

    def _workers_of(self, unit: Unit) -> list[Unit]:
        """The workers of a chief, which restart with it. A chief that hangs may be waiting for any of them; and workers
        that kept running would take a second to find a restarted ps, too long for the new chief."""
        has_chief = unit.kind == LEAD and any(task.role == "chief" for task in unit.tasks)
        return [each for each in self._ledger.workers if has_chief and not each.is_absent]

    def advance(self, now: float) -> None:
        for unit in self._ledger.units:
            may_restart = self._ledger.phase == LIVE or self._must_restart(unit, now)
            if may_restart and unit.phase == STOPPING and not unit.live:
                self._settle(unit, now)

    def _settle(self, unit: Unit, now: float) -> None:
        """All tasks of a failed unit have ended: report why, and restart or give up."""
        failures, unit.failures = unit.failures, []
        unit.enter(WAITING, now)
        self._awaited.pop(unit.name, None)
        if unit.is_resizing:
            # Its tasks do not end at the same time: some notice that others are gone.
            failures = [each for each in failures if not each.was_ending and not each.survivor]
            unit.is_resizing = False
        if not failures:
            return  # it was ended because of another unit, or to continue with other hosts
        failure = root_cause(failures)
        if unit.kind == BEFORE and unit.name in self._ledger.succeeded:
            return  # the lost task had finished its work
        if unit.kind == BEFORE:
            self._emit("ingest-failed", cause=failure.cause, detail=failure.detail)
            if failure.cause in NOT_RETRIED:
                self._shutdown.end("failed", f"ingest failed: {failure.detail}", failure.cause, now, ins.KILL)
                return
        reports_steps = self._watch.has_stepped(task.name for task in unit.tasks)
        verdict = unit.budget.record(failure, self._plan.restart.limit, reports_steps)
        if verdict.give_up:
            if unit.kind == ALONE and unit.tasks[0].role == "evaluator":
                unit.phase = DONE
                self._emit("warning", text=f"gave up on {unit.name}; training continues without it: {verdict.reason}")
                return
            self._shutdown.end("failed", verdict.reason, failure.cause, now, ins.KILL)
            return
        unit.not_before = now + verdict.delay
        wall = failure.at + self._wall_offset
        restart = Restart(failure.cause, failure.task, failure.detail, failure.at, wall)
        self.restarts = [*self.restarts, restart][-RESTARTS_KEPT:]
        self._awaited[unit.name] = restart
        if unit.kind != BEFORE and (unit.kind != ALONE or self._plan.strategy == "parameter-server"):
            self.recovering = [*self.recovering, restart][-RESTARTS_KEPT:]
        scope = [task.name for each in [unit, *self._workers_of(unit)] for task in each.tasks]
        again = {"signs_of_work": verdict.signs_of_work} if verdict.signs_of_work else {}
        self._emit(
            "restart", cause=failure.cause, task=failure.task, detail=failure.detail, count=verdict.count,
            limit=self._plan.restart.limit, scope=scope, delay_s=verdict.delay, **again,
        )  # fmt: skip

    def followed_restarts(self) -> list[Restart]:
        """Those after which tasks have started again: if a run ends before that, its last failure is not one."""
        return [restart for restart in self.restarts if not self._is_awaited(restart)]

    def _is_awaited(self, restart: Restart) -> bool:
        waiting = [self._awaited.get(unit.name) for unit in self._ledger.units if unit.phase == WAITING]
        return any(restart is each for each in waiting)

    # ---- progress

    def on_step(self, task: str, step: int, at: float, now: float) -> None:
        for restart in list(self.recovering):
            if at >= restart.failed_at and self._is_affected(task, restart):
                self.recovering.remove(restart)
                restart.first_step_after_s = round(at - restart.failed_at, 3)
                self._emit("recovered", task=restart.task, first_step_after_s=restart.first_step_after_s)
        self.on_progress(task, step, now)

    def _is_affected(self, task: str, restart: Restart) -> bool:
        """Whether a step of this task shows that training has recovered: not if it has never stopped."""
        unit = self._ledger.unit_of[restart.task]
        return not unit.restarts_within_generation or self._ledger.unit_of[task] is unit

    def postpone(self, seconds: float) -> None:
        """The run was paused for so long, which is no part of a recovery."""
        for restart in self.recovering:
            restart.failed_at += seconds

    def on_progress(self, task: str, step: int, now: float) -> None:
        unit = self._ledger.unit_of[task]
        if unit.restarts_within_generation:
            unit.budget.on_step(step)
        if step > self._highest_step:
            self._highest_step = step
            self.reset_budgets(now)

    def reset_budgets(self, now: float) -> None:
        """The run has made progress. That of others says little about a unit that restarts while they continue: its own
        steps count or, if it reports none, that it has run for a while."""
        for unit in self._ledger.units:
            names = [task.name for task in unit.tasks]
            is_alive = unit.phase == RUNNING and self._watch.shortest_run(unit.live, now) >= LONG_RUN
            if not unit.restarts_within_generation or (is_alive and not self._watch.has_stepped(names)):
                unit.budget.reset()

    # ---- notes for the next captain

    def to_notes(self) -> dict[str, Any]:
        recovering = set(map(id, self.recovering))
        return {
            "restarts": [restart.to_json() for restart in self.restarts],
            "recovering": [number for number, restart in enumerate(self.restarts) if id(restart) in recovering],
            "awaited": [number for number, restart in enumerate(self.restarts) if self._is_awaited(restart)],
            "best": self._highest_step,
            "stacks": self.stacks,
        }

    def load_notes(self, notes: dict[str, Any], clock_offset: float) -> None:
        self.restarts = [_read_restart(restart, clock_offset) for restart in notes["restarts"]]
        self.recovering = [self.restarts[number] for number in notes["recovering"]]
        awaited = [self.restarts[number] for number in notes.get("awaited", ())]  # earlier versions did not write it
        self._awaited = {self._ledger.unit_of[restart.task].name: restart for restart in awaited}
        self._highest_step = notes["best"]
        self.stacks = dict(notes["stacks"])


def _is_rolled_back(unit: Unit) -> bool:
    return any(failure.cause == NOT_A_NUMBER for failure in unit.failures)


def failure_of(exit: ev.TaskExit, now: float) -> Failure:
    return Failure(
        exit.cause, exit.task, exit.detail, exit.place, exit.survivor, now - exit.age, was_ending=exit.expected,
        signs_of_work=signs_of_work(exit.checkpoint, exit.ran, exit.to_first_output),
    )  # fmt: skip


def _host_lost(task: str, detail: str, now: float) -> Failure:
    return Failure("host-lost", task, detail, "", False, now)
