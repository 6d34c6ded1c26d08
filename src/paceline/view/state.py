"""The state of a run, as its events tell it: a pure fold, and the same for a folder on disk."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.view import events, runs
from paceline.view.events import Event, number, seconds

GONE = "the supervisor is gone without a word: it was killed, or this machine went down"
NEVER = "it was never started: the folder holds no events"
ABANDONED = "its submission was cut short, so that it never starts; `paceline delete {}` removes what is left"
ENDED = ("succeeded", "failed", "stopped")
_STARTING_S = 15.0


@dataclass
class Task:
    name: str
    state: str = "waiting"  # waiting, starting, running, succeeded, failed, ended
    host: str = ""
    pid: int | None = None
    generation: int = 0
    step: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    memory: int | None = None
    exit: str = ""  # how it ended: "exit 1", "SIGKILL"


@dataclass(frozen=True)
class Mark:
    """A snapshot that an event has told of."""

    step: int
    snapshot: str
    at: str
    generation: int


@dataclass
class Pace:
    """Steps over time, counted within generations only: what lies between them is not stepping."""

    generation: int = -1
    first: tuple[float, int] = (0.0, 0)
    last: tuple[float, int] = (0.0, 0)
    seconds: float = 0.0
    steps: int = 0

    def add(self, generation: int, at: float, step: int) -> None:
        if generation != self.generation:
            self.seconds, self.steps = self._total()
            self.generation, self.first, self.last = generation, (at, step), (at, step)
        else:
            self.last = (max(at, self.last[0]), max(step, self.last[1]))

    def _total(self) -> tuple[float, int]:
        return self.seconds + self.last[0] - self.first[0], self.steps + self.last[1] - self.first[1]

    @property
    def steps_per_s(self) -> float | None:
        time_s, steps = self._total()
        return round(steps / time_s, 3) if time_s > 0 and steps > 0 else None


@dataclass
class State:
    run: str = ""
    job: str = ""
    framework: str = ""
    strategy: str = ""
    status: str = "starting"
    reason: str = ""
    cause: str | None = None
    generation: int = 0
    steps: int = 0
    last_metrics: dict[str, float] = field(default_factory=dict)  # of the newest report that had any
    speed: float | None = None  # steps a second, as the leading task last reported them
    pace: Pace = field(default_factory=Pace)
    tasks: dict[str, Task] = field(default_factory=dict)
    restarts: list[dict[str, Any]] = field(default_factory=list)
    stacks: dict[str, str] = field(default_factory=dict)
    saved: Mark | None = None  # the newest snapshot that is complete on its hosts
    committed: Mark | None = None  # and the newest that is at its place
    best: dict[str, Any] | None = None  # snapshot, metric and value
    waiting: Event | None = None
    data: str = ""  # where the data is that the job makes
    ending: str = ""
    warnings: list[str] = field(default_factory=list)
    started: str = ""
    ended: str | None = None

    @property
    def steps_per_s(self) -> float | None:
        return self.pace.steps_per_s or self.speed

    @property
    def metrics(self) -> dict[str, dict[str, float]]:
        return {task.name: task.metrics for task in self.tasks.values() if task.metrics}

    def task(self, name: str) -> Task:
        return self.tasks.setdefault(name, Task(name))


def fold(seen: Iterable[Event], state: State | None = None) -> State:
    """The state after these events. Given the state before them, that one is carried on."""
    state = state if state is not None else State()
    for event in seen:
        state.generation = max(state.generation, event.generation)
        change = _CHANGES.get(event.kind)
        if change is not None:
            change(state, event)
    return state


def _run_started(state: State, event: Event) -> None:
    state.run, state.job = event.text("run"), event.text("job")
    state.framework, state.strategy = event.text("framework"), event.text("strategy")
    state.started = state.started or event.at
    for name in event.names("tasks"):
        state.task(name)


def _waiting(state: State, event: Event) -> None:
    state.waiting = event


def _ingesting(state: State, event: Event) -> None:
    state.waiting = event


def _ingested(state: State, event: Event) -> None:
    state.waiting, state.data = None, event.text("data") or state.data


def _formed(state: State, event: Event) -> None:
    state.waiting = None
    if state.status == "starting":
        state.status = "running"
    if state.saved is not None and state.saved.generation < event.generation:
        state.saved = state.committed  # what a generation has saved and not committed ends with it
    for name in event.names("tasks"):
        task = state.task(name)
        # A worker of a parameter-server job stays alive when ps and chief begin a generation.
        if task.state != "running" or task.exit:
            task.state, task.exit = "starting", ""
        task.generation = event.generation


def _task_started(state: State, event: Event) -> None:
    task = state.task(event.text("task"))
    task.state, task.exit = "running", ""
    task.host, task.generation = event.text("host") or task.host, event.generation
    pid = event.get("pid")
    task.pid = pid if isinstance(pid, int) else None


def _step(state: State, event: Event) -> None:
    task = state.task(event.text("task"))
    step = int(event.number("step"))
    task.step = step
    _measured(state, task, event)
    memory = number(event.get("memory"))
    task.memory = int(memory) if memory is not None else task.memory
    if step >= state.steps:
        state.steps = step
        state.speed = number(event.get("steps_per_s")) or state.speed
    at = seconds(event.at)
    if at is not None:
        state.pace.add(event.generation, at, step)


def _measured(state: State, task: Task, event: Event) -> None:
    reported = event.get("metrics")
    values = {k: v for k, v in reported.items() if number(v) is not None} if isinstance(reported, dict) else {}
    task.metrics = {**task.metrics, **values}
    state.last_metrics = {**state.last_metrics, **values} if values else state.last_metrics


def _evaluated(state: State, event: Event) -> None:
    task = state.task(event.text("task"))
    task.step = int(event.number("step"))
    _measured(state, task, event)
    _best(state, event)


def _best(state: State, event: Event) -> None:
    found = event.get("best")
    if isinstance(found, dict) and number(found.get("value")) is not None:
        state.best = found


def _saved(state: State, event: Event) -> None:
    state.saved = _mark(event)


def _committed(state: State, event: Event) -> None:
    state.committed = _mark(event)
    _best(state, event)


def _mark(event: Event) -> Mark:
    return Mark(int(event.number("step")), event.text("snapshot"), event.at, event.generation)


def _task_exited(state: State, event: Event) -> None:
    task = state.task(event.text("task"))
    code, signal = event.get("code"), event.text("signal")
    task.exit = signal or (f"exit {code}" if code is not None else "lost" if not event.get("expected") else "ended")
    task.state = "succeeded" if code == 0 else "ended" if event.get("expected") else "failed"
    task.pid = None


def _stacks(state: State, event: Event) -> None:
    state.stacks[event.text("task")] = event.text("text")


def _restart(state: State, event: Event) -> None:
    state.restarts.append(
        {
            "cause": event.text("cause"), "task": event.text("task"), "at": event.at,
            "detail": event.text("detail"), "first_step_after_s": None,
        }
    )  # fmt: skip
    for name in event.names("scope"):
        task = state.task(name)
        if task.state == "running":
            task.state = "waiting"


def _recovered(state: State, event: Event) -> None:
    for restart in reversed(state.restarts):
        if restart["task"] == event.text("task"):
            restart["first_step_after_s"] = number(event.get("first_step_after_s"))
            return


def _warning(state: State, event: Event) -> None:
    state.warnings.append(event.text("text"))


def _ending(state: State, event: Event) -> None:
    state.ending, state.waiting = event.text("reason") or "ending", None


def _run_ended(state: State, event: Event) -> None:
    status = event.text("status")
    state.status = status if status in ENDED else "failed"
    state.reason, state.cause = event.text("reason"), event.text("cause") or None
    state.ended, state.waiting = event.at, None


_CHANGES = {
    "run-started": _run_started,
    "waiting": _waiting,
    "ingest-started": _ingesting,
    "ingest-done": _ingested,
    "ingest-skipped": _ingested,
    "ingest-failed": _ingested,
    "generation-formed": _formed,
    "task-started": _task_started,
    "step": _step,
    "saved": _saved,
    "committed": _committed,
    "evaluated": _evaluated,
    "task-exited": _task_exited,
    "stacks": _stacks,
    "restart": _restart,
    "recovered": _recovered,
    "warning": _warning,
    "ending": _ending,
    "run-ended": _run_ended,
}


@dataclass(frozen=True)
class Standing:
    """Where a run stands: what its folder says, with the lock as the judge of whether it is over."""

    run: str
    folder: Path
    alive: bool
    info: dict[str, Any]
    state: State
    report: dict[str, Any]  # the fields of report.json, also while it runs


def read(run: runs.Run, over: bool = False) -> Standing:
    """Everything the folder says. `over`: the caller knows that nothing runs there (any more)."""
    # The lock first: a supervisor that has let go of it has written its report before.
    alive = not over and runs.alive(run.folder)
    info = runs.info(run.folder)
    state = fold(events.read(run.folder))
    written = runs.read_object(run.folder / "report.json")
    if written is None and runs.abandoned(run.folder):
        state.status, state.reason = "abandoned", ABANDONED.format(run.name)
    elif written is None and not alive and state.status not in ENDED and (over or not _just_made(run.folder, state)):
        state.status, state.reason = "failed", GONE if state.started or info else NEVER
    return Standing(run.name, run.folder, alive, info, state, {**derive(run, state), **(written or {})})


def summary(run: runs.Run) -> dict[str, Any]:
    """The fields of report.json alone: for a run that has ended, without reading its events."""
    if not runs.alive(run.folder):
        written = runs.read_object(run.folder / "report.json")
        if written is not None:
            return {**derive(run, State()), **written}
    return read(run).report


def derive(run: runs.Run, state: State) -> dict[str, Any]:
    """The fields of report.json, as far as the events tell them."""
    return {
        "run": run.name,
        "status": state.status,
        "reason": state.reason or state.ending or _why_waiting(state),
        "cause": state.cause,
        "generations": state.generation,
        "restarts": state.restarts,
        "steps": state.steps,
        "steps_per_s": state.steps_per_s,
        "metrics": state.metrics,
        "best": state.best,
        "started": state.started or runs.started(run.folder),
        "ended": state.ended,
        "folder": str(run.folder),
        "stacks": state.stacks,
    }


def _why_waiting(state: State) -> str:
    if state.waiting is None:
        return ""
    from paceline.view.words import say

    return say(state.waiting)


def _just_made(folder: Path, state: State) -> bool:
    """Between the making of the folder and the supervisor's lock there is a moment in which neither says anything."""
    if state.started:
        return False
    try:
        return time.time() - folder.stat().st_mtime < _STARTING_S
    except OSError:
        return False
