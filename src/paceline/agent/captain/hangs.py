"""Progress and hangs of training: measured by steps once a task reports any, until then by output and snapshots."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.agent.captain.events import TaskProgress
from paceline.plan import ALONE, Plan, Task

SHORTEST_LIMIT = 600.0  # seconds, if restart.hang_after is omitted
GAPS = 5  # the limit is at least this many times the longest gap between steps
MOST_METRICS = 1000  # names per task whose last values are kept
STARTS = 2  # before the first step, the limit is at least this many times the longest start


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


class ProgressWatch:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._watched = {role.name for role in plan.roles if role.watched}
        self._has_chief = any(role.name == "chief" for role in plan.roles)
        self._pace: dict[str, Pace] = {}
        self._stepping: set[str] = set()  # tasks that have reported a step, in any generation
        self._snapshot_at = 0.0
        self._longest_gap = 0.0
        self._longest_start = 0.0  # from the start of a task to its first step
        self._totals: dict[str, list[float]] = {}  # task -> steps, seconds while stepping
        self.steps = 0
        self.metrics: dict[str, dict[str, float]] = {}

    def begin(self, task: str, now: float) -> None:
        self._pace[task] = Pace(now, reported_at=now)

    def update(self, task: str, progress: TaskProgress, now: float) -> bool:
        """Record the progress in a heartbeat. Returns whether a step was reported since the last one."""
        pace = self._pace.setdefault(task, Pace(now))
        output_at = max(pace.started, now - progress.output_age)
        if output_at > pace.output_at:
            if task not in self._stepping:
                self._record_gap(output_at - max(pace.started, pace.output_at))
            pace.output_at = output_at
        if progress.metrics:
            self.add_metrics(task, progress.metrics)
        if progress.step is None:
            return False
        at = now - progress.step_age
        is_new_report = progress.step != pace.step or at > pace.reported_at + 1e-3
        if progress.step != pace.step:
            self._record_gap(at - (pace.step_at or pace.started))
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
        return is_new_report

    def has_stepped(self, tasks: Iterable[str]) -> bool:
        """Whether one of these tasks has reported a step, in any generation."""
        return any(task in self._stepping for task in tasks)

    def shortest_run(self, tasks: Iterable[str], now: float) -> float:
        """For how long the current attempts of these tasks have run; of several, the shortest time."""
        return min((now - self._pace[task].started for task in tasks if task in self._pace), default=0.0)

    def add_metrics(self, task: str, metrics: Mapping[str, float]) -> None:
        """Add what a task reported, such as an evaluator for a snapshot. It may use other names each time."""
        known = self.metrics.setdefault(task, {})
        known.update(metrics)
        if len(known) > MOST_METRICS:
            for name in [name for name in known if name not in metrics][: len(known) - MOST_METRICS]:
                del known[name]

    def on_snapshot(self, now: float) -> None:
        self._snapshot_at = now

    def rate(self, task: str) -> float | None:
        pace = self._pace.get(task)
        return None if pace is None or pace.rate is None else round(pace.rate, 3)

    def step(self, task: str) -> int | None:
        """The last step that the current attempt of the task has reported."""
        pace = self._pace.get(task)
        return None if pace is None else pace.step

    def current_rate(self) -> float | None:
        """Steps per second of the task that is furthest ahead."""
        training = [pace for task, pace in self._pace.items() if self._is_training(task) and pace.rate is not None]
        furthest = max(training, key=lambda pace: pace.step or 0, default=None)
        return None if furthest is None or furthest.rate is None else round(furthest.rate, 3)

    def steps_per_second(self) -> float | None:
        """Over the whole run, excluding the time between a failure and the next step."""
        training = [totals for task, totals in self._totals.items() if self._is_training(task) and totals[1] > 0]
        if not training:
            return None
        steps, seconds = max(training)
        return round(steps / seconds, 3)

    def find_hang(self, kind: str, tasks: Sequence[Task], now: float) -> Hang | None:
        """Check running tasks that train together (or, in a parameter-server job, one worker)."""
        watched = [task.name for task in tasks if task.role in self._watched]
        if kind == ALONE and self._has_chief:
            # A worker that only serves the chief reports nothing.
            watched = [name for name in watched if name in self._stepping]
        if not watched:
            return None
        has_steps = any(name in self._stepping for name in watched)
        last = max(self._last_progress(self._pace[name], has_steps) for name in watched)
        if not has_steps:
            last = max(last, self._snapshot_at)
        limit = self.limit()
        if has_steps and all(self._pace[name].step is None for name in watched):
            limit = max(limit, STARTS * self._longest_start)  # a cold start may be slower than any step
        if now - last < limit:
            return None
        return Hang(watched, now - last, limit, "step" if has_steps else "output")

    def limit(self) -> float:
        hang_after = self._plan.restart.hang_after
        return hang_after if hang_after is not None else max(SHORTEST_LIMIT, GAPS * self._longest_gap)

    def to_notes(self) -> dict[str, Any]:
        return {
            "stepping": sorted(self._stepping),
            "longest": self._longest_gap,
            "longest_start": self._longest_start,
            "totals": self._totals,
            "steps": self.steps,
            "metrics": self.metrics,
        }

    def load_notes(self, notes: dict[str, Any]) -> None:
        self._stepping = set(notes["stepping"])
        self._longest_gap = notes["longest"]
        self._longest_start = notes["longest_start"]
        self._totals = {task: list(totals) for task, totals in notes["totals"].items()}
        self.steps = notes["steps"]
        self.metrics = {task: dict(metrics) for task, metrics in notes["metrics"].items()}

    def _last_progress(self, pace: Pace, has_steps: bool) -> float:
        return max(pace.started, pace.step_at, 0.0 if has_steps else pace.output_at)

    def _record_gap(self, seconds: float) -> None:
        self._longest_gap = max(self._longest_gap, seconds)

    def _is_training(self, task: str) -> bool:
        return not task.startswith("evaluator-")
