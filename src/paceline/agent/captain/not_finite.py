"""Metrics that are NaN or infinite: reported once. Depending on `restart.on_nan`, they also end the run, or the group
goes back to the snapshot before. No I/O.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Callable

from paceline.agent.captain import events as ev
from paceline.agent.captain import instructions as ins
from paceline.agent.captain.failures import NOT_A_NUMBER, Failures
from paceline.agent.captain.ledger import Ledger
from paceline.agent.captain.restart_units import RUNNING
from paceline.agent.captain.root_cause import Failure
from paceline.agent.captain.shutdown import Shutdown
from paceline.agent.captain.snapshots.commits import Commits
from paceline.plan import ALONE, GROUP, LEAD, OWN, ROLLBACK, STOP, WARN, Plan

MOST = 1000  # metrics that are reported, because members choose their names
REMEDY = "lower the learning rate, or skip the data that leads to it"


@dataclass(frozen=True)
class Report:
    """The first metric of a generation that was not finite."""

    generation: int
    task: str
    metric: str
    value: str
    step: int | None  # None: the task has reported no step
    at: float
    first_abandoned: int | None  # snapshots of this step and later ones are not used; None: not decided yet

    def __str__(self) -> str:
        return f"{self.metric} is {self.value}" + ("" if self.step is None else f" at step {self.step}")


class NotFinite:
    def __init__(
        self,
        plan: Plan,
        ledger: Ledger,
        commits: Commits,
        failures: Failures,
        shutdown: Shutdown,
        emit: Callable[..., None],
    ) -> None:
        self._ledger, self._commits, self._failures, self._shutdown, self._emit = (
            ledger, commits, failures, shutdown, emit
        )  # fmt: skip
        self._choice = plan.restart.on_nan
        # Reported: the generation and the metric, or, of a task that restarts while others continue, such as an
        # evaluator, its name, attempt and metric.
        self._emitted: set[tuple[str, int, str]] = set()
        self._due: Report | None = None  # what ends this generation
        self._last: Report | None = None  # what has ended a generation

    # ---- events

    def on_reported(self, event: ev.MetricNotFinite, now: float) -> None:
        """Also of attempts that have ended: their snapshots may still be restored."""
        task, attempt = self._ledger.tasks.get(event.task), self._ledger.attempts.get(event.task)
        if task is None or task.host != event.host or attempt != event.attempt:
            return
        unit = self._ledger.unit_of[task.name]
        is_live = unit.kind == ALONE and unit.phase == RUNNING and task.name in unit.live
        if task.role == "evaluator":
            self._emit_once((task.name, event.attempt, event.metric), event)
        elif is_live or unit.kind in (GROUP, LEAD, *OWN):
            self._handle(event, now)

    def on_saved(self, saved: ev.PartSaved, now: float) -> None:
        """A snapshot has the metrics of its step; on a GPU, they may not have been read before."""
        snapshot, is_evaluator = saved.snapshot, self._ledger.tasks[saved.task].role == "evaluator"
        if snapshot.generation == self._ledger.generation and not is_evaluator:
            attempt = self._ledger.attempts.get(saved.task, 0)
            for metric, value in saved.not_finite.items():
                self._handle(ev.MetricNotFinite(saved.host, saved.task, attempt, metric, value, snapshot.step), now)

    def _handle(self, event: ev.MetricNotFinite, now: float) -> None:
        generation = self._ledger.generation
        is_own = self._ledger.unit_of[event.task].restarts_within_generation
        self._emit_once((event.task, event.attempt, event.metric) if is_own else ("", generation, event.metric), event)
        if self._choice == WARN:
            return
        step = event.step if event.step is not None and event.step >= 0 else None  # no task has trained a negative step
        if self._choice == ROLLBACK and step is not None:
            self._commits.abandon(generation, step, now)
        if self._due is None or self._due.generation < generation:
            self._due = Report(generation, event.task, event.metric, event.value, step, now, step)

    def _emit_once(self, key: tuple[str, int, str], event: ev.MetricNotFinite) -> None:
        if key in self._emitted:
            return
        task, attempt, _ = key
        self._emitted -= {each for each in self._emitted if task and each[0] == task and each[1] < attempt}
        if len(self._emitted) < MOST:
            self._emitted.add(key)
            self._emit("not-finite", task=event.task, metric=event.metric, value=event.value, step=event.step)

    def on_group_started(self, has_snapshot: bool) -> None:
        """A new generation has started."""
        self._emitted = {
            (task, number, metric)
            for task, number, metric in self._emitted
            if number >= (self._ledger.attempts.get(task, 0) if task else self._ledger.generation)
        }
        due, self._due = self._due, None
        if due is not None and self._choice == ROLLBACK and not has_snapshot:
            step = "" if due.step is None else f" step {due.step}"
            self._emit("note", text=f"there is no snapshot from before{step}: training starts from the beginning")

    # ---- after every event

    def advance(self, now: float) -> None:
        """Ends the generation, or the run."""
        due = self._due
        if due is None or due.generation != self._ledger.generation:
            return
        if self._choice == STOP:
            reason = f"{due.task}: {due} (restart.on_nan is stop)"
            self._shutdown.end("failed", reason, NOT_A_NUMBER, now, ins.TERMINATE)
            return
        if due.first_abandoned is None:
            if not self._commits.contents.is_known:
                return
            first_abandoned = self._newest_saved_step() + 1
            due = self._due = replace(due, first_abandoned=first_abandoned)
            self._commits.abandon(due.generation, first_abandoned, now)
        last = self._last
        if last is not None and last.generation < due.generation and _is_repeated(last, due):
            before = "" if last.step is None else f" (the last time, it happened at step {last.step})"
            reason = f"{due.task}: {due} again: rolling back to a snapshot did not help{before}; {REMEDY}"
            self._shutdown.end("failed", reason, NOT_A_NUMBER, now, ins.KILL)
            return
        self._last = due
        self._failures.roll_back(Failure(NOT_A_NUMBER, due.task, str(due), "", False, due.at), now)

    def _newest_saved_step(self) -> int:
        """Of the snapshots that exist, committed or not; -1: none."""
        newest = self._commits.newest_uncommitted()
        return max(self._commits.contents.newest_step(), -1 if newest is None else newest.snapshot.step)

    # ---- notes for the next captain

    def milestone(self) -> tuple[object, ...]:
        abandoned = self._commits.contents.abandoned
        return len(self._emitted), self._due, self._last, abandoned.to_notes(), abandoned.generation_steps_to_notes()

    def to_notes(self) -> dict[str, Any]:
        return {
            "emitted": sorted(self._emitted),
            "due": None if self._due is None else asdict(self._due),
            "last": None if self._last is None else asdict(self._last),
            "abandoned": self._commits.contents.abandoned.to_notes(),
            "abandoned_own": self._commits.contents.abandoned.generation_steps_to_notes(),
        }

    def load_notes(self, notes: dict[str, Any], clock_offset: float) -> None:
        """Earlier versions have no such notes."""
        self._emitted = {(task, number, metric) for task, number, metric in notes.get("emitted", ())}
        reports = [notes.get(name) for name in ("due", "last")]
        self._due, self._last = (
            None if each is None else Report(**{**each, "at": each["at"] + clock_offset}) for each in reports
        )
        self._commits.contents.abandoned.load_notes(notes.get("abandoned", ()), notes.get("abandoned_own", ()))


def _is_repeated(last: Report, due: Report) -> bool:
    """Whether training has not come further than the last time."""
    return due.first_abandoned is not None and due.first_abandoned <= (last.first_abandoned or 0)
