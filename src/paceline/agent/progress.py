"""How far training is, and whether it still moves: steps once any are reported, until then output and snapshots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.agent.events import Progress
from paceline.plan import ALONE, Plan, Task

SHORTEST_LIMIT = 600.0  # of hang_after when the job does not say
GAPS = 5
STARTS = 2


@dataclass
class Pace:
    started: float
    step: int | None = None
    step_at: float = 0.0
    reported_at: float = 0.0
    output_at: float = 0.0
    rate: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Hang:
    tasks: list[str]
    silent: float
    limit: float
    progress: str


class Watch:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._watched = {role.name for role in plan.roles if role.watched}
        self._has_chief = any(role.name == "chief" for role in plan.roles)
        self._pace: dict[str, Pace] = {}
        self._stepping: set[str] = set()  # tasks that have reported a step, in any generation
        self._snapshot_at = 0.0
        self._longest = 0.0
        self._longest_start = 0.0  # from the start of a task to its first step
        self._totals: dict[str, list[float]] = {}  # task -> steps, seconds while stepping
        self.steps = 0
        self.metrics: dict[str, dict[str, float]] = {}

    def begin(self, task: str, now: float) -> None:
        self._pace[task] = Pace(now, reported_at=now)

    def update(self, task: str, progress: Progress, now: float) -> bool:
        """Take in what a beat says; true when a step was reported since the last one."""
        pace = self._pace.setdefault(task, Pace(now))
        output_at = max(pace.started, now - progress.output_age)
        if output_at > pace.output_at:
            if task not in self._stepping:
                self._gap(output_at - max(pace.started, pace.output_at))
            pace.output_at = output_at
        if progress.metrics:
            self.metrics.setdefault(task, {}).update(progress.metrics)
        if progress.step is None:
            return False
        at = now - progress.step_age
        reported = progress.step != pace.step or at > pace.reported_at + 1e-3
        if progress.step != pace.step:
            self._gap(at - (pace.step_at or pace.started))
            if pace.step is None:
                self._longest_start = max(self._longest_start, at - pace.started)
            if pace.step is not None and progress.step > pace.step and at > pace.step_at:
                totals = self._totals.setdefault(task, [0.0, 0.0])
                totals[0] += progress.step - pace.step
                totals[1] += at - pace.step_at
                pace.rate = (progress.step - pace.step) / (at - pace.step_at)
            pace.step, pace.step_at = progress.step, at
            self._stepping.add(task)
            if self._is_training(task):
                self.steps = max(self.steps, progress.step)
        pace.reported_at = max(at, pace.reported_at)
        return reported

    def measured(self, task: str, metrics: Mapping[str, float]) -> None:
        """What an evaluator said of a snapshot."""
        self.metrics.setdefault(task, {}).update(metrics)

    def snapshot(self, now: float) -> None:
        self._snapshot_at = now

    def rate(self, task: str) -> float | None:
        pace = self._pace.get(task)
        return None if pace is None or pace.rate is None else round(pace.rate, 3)

    def steps_per_second(self) -> float | None:
        """Over the whole run, without the time between a failure and the next step."""
        training = [totals for task, totals in self._totals.items() if self._is_training(task) and totals[1] > 0]
        if not training:
            return None
        steps, seconds = max(training)
        return round(steps / seconds, 3)

    def hung(self, kind: str, tasks: Sequence[Task], now: float) -> Hang | None:
        """Judge running tasks that train together (or, in a parameter-server job, one worker)."""
        judged = [task.name for task in tasks if task.role in self._watched]
        if kind == ALONE and self._has_chief:
            judged = [
                name for name in judged if name in self._stepping
            ]  # a worker that only serves the chief is silent
        if not judged:
            return None
        stepping = any(name in self._stepping for name in judged)
        last = max(self._last(self._pace[name], stepping) for name in judged)
        if not stepping:
            last = max(last, self._snapshot_at)
        limit = self.limit()
        if stepping and all(self._pace[name].step is None for name in judged):
            limit = max(limit, STARTS * self._longest_start)  # a cold start may be slower than any step
        if now - last < limit:
            return None
        return Hang(judged, now - last, limit, "step" if stepping else "output")

    def limit(self) -> float:
        asked = self._plan.restart.hang_after
        return asked if asked is not None else max(SHORTEST_LIMIT, GAPS * self._longest)

    def saved(self) -> dict[str, Any]:
        return {
            "stepping": sorted(self._stepping),
            "longest": self._longest,
            "longest_start": self._longest_start,
            "totals": self._totals,
            "steps": self.steps,
            "metrics": self.metrics,
        }

    def load(self, saved: dict[str, Any]) -> None:
        self._stepping = set(saved["stepping"])
        self._longest = saved["longest"]
        self._longest_start = saved["longest_start"]
        self._totals = {task: list(totals) for task, totals in saved["totals"].items()}
        self.steps = saved["steps"]
        self.metrics = {task: dict(metrics) for task, metrics in saved["metrics"].items()}

    def _last(self, pace: Pace, stepping: bool) -> float:
        return max(pace.started, pace.step_at, 0.0 if stepping else pace.output_at)

    def _gap(self, seconds: float) -> None:
        self._longest = max(self._longest, seconds)

    def _is_training(self, task: str) -> bool:
        return not task.startswith("evaluator-")
