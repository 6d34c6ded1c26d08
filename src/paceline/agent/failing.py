"""What follows when tasks end, or hang: which others end with them, who is to blame, and whether they start again.
Decides, does nothing itself.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Callable

from paceline.agent import events as ev
from paceline.agent.budget import Failure, blame
from paceline.agent.ending import Ending
from paceline.agent.evaluating import Evaluating
from paceline.agent.ledger import CLOSING, DONE, ENDING, LIVE, RETURNING, RUNNING, STOPPING, WAITING, Ledger, Unit
from paceline.agent.progress import Watch
from paceline.plan import ALONE, BEFORE, LEAD, Plan

UNKILLABLE = 120.0  # seconds after which a task that was killed and is still there ends the run
NEARLY_FULL = 0.95  # share of memory
FOR_GOOD = ("program-error", "store")  # of ingest: it would fail again, after hours perhaps


class Failing:
    def __init__(
        self,
        plan: Plan,
        books: Ledger,
        watch: Watch,
        ending: Ending,
        evaluating: Evaluating,
        lease: float,
        wall_offset: float,
        put: Callable[[ev.Instruction], None],
        emit: Callable[..., None],
    ) -> None:
        self._plan, self._books, self._watch, self._ending = plan, books, watch, ending
        self._evaluating = evaluating
        self._lease, self._wall_offset = lease, wall_offset
        self._put, self._emit = put, emit
        self.restarts: list[dict[str, Any]] = []
        self.recovering: list[dict[str, Any]] = []  # those of them without a step since
        self.stacks: dict[str, str] = {}
        self._best = -1  # the highest step

    # ---- how attempts end

    def exited(self, host: str, exit: ev.Exit, now: float) -> None:
        if self._books.held(host).get(exit.task) != exit.attempt:
            return
        unit = self._books.unit_of[exit.task]
        self._books.dies(exit.task)
        self._emit("task-exited", task=exit.task, code=exit.code, signal=exit.signal, expected=exit.expected)
        if self._books.phase == ENDING:
            return
        if exit.expected:
            if exit.cause:
                unit.failures.append(failure_of(exit, now))
            return
        if not exit.cause:
            self._books.succeeded.add(exit.task)
        elif self._books.phase == CLOSING and not self._needed(unit, now):
            self._emit("note", text=f"{exit.task} failed after training had succeeded: {exit.detail}")
        else:
            failure = failure_of(exit, now)
            if failure.cause == "signal" and exit.signal == "SIGKILL":
                failure = self._perhaps_memory(failure, host)
            self._fail(unit, failure, now)

    def ended(self, told: ev.Ended, now: float) -> None:
        for name, attempt in told.tasks.items():
            if self._books.held(told.host).get(name) != attempt:
                continue
            self._books.dies(name)
            self._emit("task-exited", task=name, code=None, signal=None, expected=True)
            unit = self._books.unit_of[name]
            if (self._books.phase == LIVE or self._needed(unit, now)) and unit.phase == RUNNING:
                self.lost(name, f"{told.host} ended it: it had heard nothing from the captain for a lease", now)
        for name, text in told.stacks.items():
            self.stacks[name] = text
            self._emit("stacks", task=name, text=text)
        for name, state in told.states.items():
            if name in self._books.unit_of:
                of = self._books.unit_of[name]
                of.failures = [failure.seen(name, state) for failure in of.failures]

    def gone(self, held: dict[str, int], detail: str, now: float, host: str = "") -> None:
        """These attempts are not running any more, and nobody has said how they ended. `host`: where they may have
        been killed for want of memory."""
        for name, attempt in held.items():
            if self._books.live.get(name) != attempt:
                continue
            self._books.dies(name)
            self._emit("task-exited", task=name, code=None, signal=None, expected=self._books.phase == ENDING)
            unit = self._books.unit_of[name]
            if self._books.phase in (LIVE, RETURNING) or self._needed(unit, now):
                failure = _lost(name, detail, now)
                self._fail(unit, self._perhaps_memory(failure, host) if host else failure, now)

    def _needed(self, unit: Unit, now: float) -> bool:
        """Whether it has to start again though training is over: an evaluator that has not seen all of it."""
        return self._books.phase == CLOSING and unit.tasks[0].role == "evaluator" and self._evaluating.left(now)

    def lost(self, task: str, detail: str, now: float) -> None:
        self._fail(self._books.unit_of[task], _lost(task, detail, now), now)

    def _perhaps_memory(self, failure: Failure, host: str) -> Failure:
        """What vanished while memory was almost used up was probably killed for that."""
        memory = self._books.members[host].memory
        if memory <= NEARLY_FULL:
            return failure
        detail = f"{failure.detail}; probably out of memory ({memory:.0%} was in use)"
        return replace(failure, cause="out-of-memory", detail=detail)

    # ---- without a word

    def silence(self, now: float) -> None:
        """What ran on hosts whose lease has run out is gone."""
        for member in self._books.members.values():
            if not member.connected and member.instance and now >= member.lease_until:
                detail = f"{member.host}: no word for {self._lease:g} s"
                self.gone(self._books.held(member.host), detail, now, member.host)
        for until, held in list(self._books.ghosts):
            if now >= until:
                self._books.ghosts.remove((until, held))
                self.gone(held, "a host was replaced and its last lease has run out", now)

    def judge(self, now: float) -> None:
        """What hangs, or does not go."""
        for unit in self._books.units:
            if unit.phase == STOPPING and unit.since is not None and now - unit.since > UNKILLABLE:
                stuck = ", ".join(sorted(unit.live))
                reason = f"{stuck}: not gone {UNKILLABLE:g} s after it was ended; something in the kernel holds it"
                self._ending.end("failed", reason, "hang", now, "kill")
                return
            if unit.phase != RUNNING or unit.kind == BEFORE:
                continue
            hang = self._watch.hung(unit.kind, [task for task in unit.tasks if task.name in unit.live], now)
            if hang is None:
                continue
            silent, limit = round(hang.silent, 1), round(hang.limit, 1)
            self._emit("hang", tasks=hang.tasks, silent_s=silent, limit_s=limit, progress=hang.progress)
            detail = f"no {hang.progress} for {hang.silent:.1f} s (limit {hang.limit:g} s)"
            self._fail(unit, Failure("hang", hang.tasks[0], detail, "", False, now), now, "abort")

    # ---- what follows

    def _fail(self, unit: Unit, failure: Failure, now: float, how: str = "kill") -> None:
        unit.failures.append(failure)
        if unit.phase != STOPPING:
            self.stop(unit, now, how)

    def stop(self, unit: Unit, now: float, how: str = "kill") -> None:
        for each in [unit, *self._led(unit)]:
            if each is unit or each.phase == RUNNING:
                each.turn(STOPPING, now)
                for end in self._books.ends([task.name for task in each.tasks], how):
                    self._put(end)

    def _led(self, unit: Unit) -> list[Unit]:
        """The workers of a chief: they start again with it. One that hangs may wait for any of them; and those that
        stayed would need a second to find a ps that was started again, in which the new chief gives up."""
        chief = unit.kind == LEAD and any(task.role == "chief" for task in unit.tasks)
        return [each for each in self._books.units if chief and each.tasks[0].role == "worker"]

    def advance(self, now: float) -> None:
        for unit in self._books.units:
            may = self._books.phase == LIVE or self._needed(unit, now)
            if may and unit.phase == STOPPING and not unit.live:
                self._settle(unit, now)

    def _settle(self, unit: Unit, now: float) -> None:
        """All tasks of a failed unit are gone: say why, and start again or give up."""
        failures, unit.failures = unit.failures, []
        unit.turn(WAITING, now)
        if not failures:
            return  # ended with others, through no fault of its own
        failure = blame(failures)
        if unit.kind == BEFORE and unit.name in self._books.succeeded:
            return  # what was lost had done its work
        if unit.kind == BEFORE:
            self._emit("ingest-failed", cause=failure.cause, detail=failure.detail)
            if failure.cause in FOR_GOOD:
                self._ending.end("failed", f"ingest failed: {failure.detail}", failure.cause, now, "kill")
                return
        verdict = unit.budget.count(failure, self._plan.restart.limit)
        if verdict.give_up:
            if unit.kind == ALONE and unit.tasks[0].role == "evaluator":
                unit.phase = DONE
                self._emit("warning", text=f"{unit.name} is given up and training goes on without it: {verdict.reason}")
                return
            self._ending.end("failed", verdict.reason, failure.cause, now, "kill")
            return
        unit.not_before = now + verdict.delay
        what = {"cause": failure.cause, "task": failure.task, "detail": failure.detail}
        at = failure.at + self._wall_offset
        record = {**what, "at": at, "first_step_after_s": None, "_at": failure.at}
        self.restarts.append(record)
        if unit.kind != BEFORE and (unit.kind != ALONE or self._plan.strategy == "parameter-server"):
            self.recovering.append(record)
        count = {"count": verdict.count, "limit": self._plan.restart.limit}
        scope = [task.name for each in [unit, *self._led(unit)] for task in each.tasks]
        self._emit("restart", **what, **count, scope=scope, delay_s=verdict.delay)

    # ---- progress

    def stepped(self, step: int, at: float) -> None:
        for record in list(self.recovering):
            if at >= record["_at"]:
                self.recovering.remove(record)
                record["first_step_after_s"] = round(at - record.pop("_at"), 3)
                self._emit("recovered", task=record["task"], first_step_after_s=record["first_step_after_s"])
        self.reached(step)

    def reached(self, step: int) -> None:
        if step > self._best:
            self._best = step
            self.forgive()

    def forgive(self) -> None:
        for unit in self._books.units:
            unit.budget.reset()

    # ---- notes for the next captain

    def saved(self) -> dict[str, Any]:
        return {
            "restarts": self.restarts,
            "recovering": [number for number, record in enumerate(self.restarts) if record in self.recovering],
            "best": self._best,
            "stacks": self.stacks,
        }

    def load(self, saved: dict[str, Any], ahead: float) -> None:
        self.restarts = [dict(record) for record in saved["restarts"]]
        self.recovering = [self.restarts[number] for number in saved["recovering"]]
        for record in self.recovering:
            record["_at"] += ahead
        self._best = saved["best"]
        self.stacks = dict(saved["stacks"])


def failure_of(exit: ev.Exit, now: float) -> Failure:
    return Failure(exit.cause, exit.task, exit.detail, exit.place, exit.survivor, now - exit.age, asked=exit.expected)


def _lost(task: str, detail: str, now: float) -> Failure:
    return Failure("host-lost", task, detail, "", False, now)
