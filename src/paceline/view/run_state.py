"""The state of a run, derived from its events: a pure fold, and a reader for a folder on disk."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.agent.captain import start_times
from paceline.agent.goodput import Goodput, with_queue
from paceline.agent.resources import Resources
from paceline.view import events, run_files, run_folders
from paceline.view.events import Event, number, seconds
from paceline.view.run_files import is_measurement

GONE = "the supervisor ended without a report: it was killed, or this machine went down"
NEVER = "it was never started: its folder contains no events"
ABANDONED = "its submission was interrupted, so it will never start; `paceline delete {}` removes it"
ENDED = ("succeeded", "failed", "stopped")
DAMAGED = "damaged"


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
    """A snapshot, as an event reports it."""

    step: int
    snapshot: str
    at: str
    generation: int
    counted: bool = False  # `step` is the number of the snapshot: the program reports no steps
    size: int | None = None  # bytes, once it is committed
    took_s: float | None = None  # until it was committed, once it was saved
    stall_s: float | None = None  # how long training waited for it

    def __str__(self) -> str:
        return f"{'snapshot' if self.counted else 'step'} {self.step}"

    def to_json(self) -> dict[str, Any]:
        return {"step": self.step, "snapshot": self.snapshot, "at": self.at}


@dataclass
class Pace:
    """Steps per time, measured within generations only: no steps are done between them."""

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
    last_metrics: dict[str, float] = field(default_factory=dict)  # metrics of the newest report that had any
    speed: float | None = None  # steps per second, as last reported by the leading task
    pace: Pace = field(default_factory=Pace)
    progress_at: str = ""  # when training last reached a new highest step, or saved a snapshot
    tasks: dict[str, Task] = field(default_factory=dict)
    restarts: list[dict[str, Any]] = field(default_factory=list)
    stacks: dict[str, str] = field(default_factory=dict)
    starts: start_times.Starts = field(default_factory=dict)
    saved: Mark | None = None  # the newest snapshot that is complete on its hosts
    committed: Mark | None = None  # the newest snapshot in its store
    best: dict[str, Any] | None = None  # snapshot, metric and value
    waiting: Event | None = None
    data: str = ""  # address of the data that the job builds
    ending: str = ""
    warnings: list[str] = field(default_factory=list)
    started: str = ""
    ended: str | None = None
    goodput: Goodput = field(default_factory=Goodput)  # its time by kind
    resources: Resources = field(default_factory=Resources)  # what its tasks and hosts have used

    @property
    def steps_per_s(self) -> float | None:
        return self.pace.steps_per_s or self.speed

    @property
    def metrics(self) -> dict[str, dict[str, float]]:
        return {task.name: task.metrics for task in self.tasks.values() if task.metrics}

    def task(self, name: str) -> Task:
        return self.tasks.setdefault(name, Task(name))


def fold(new_events: Iterable[Event], state: State | None = None) -> State:
    """The state after these events. `state`: the state before them, which is updated."""
    state = state if state is not None else State()
    for event in new_events:
        state.generation = max(state.generation, event.generation)
        state.goodput.add(event.data)
        state.resources.add(event.data)
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
    is_earlier = state.saved is not None and state.saved.generation < event.generation
    if is_earlier and state.saved is not None and state.saved.snapshot != event.text("restore"):
        state.saved = state.committed  # a generation commits only its own snapshots and the one it started from
    for name in event.names("tasks"):
        task = state.task(name)
        # A worker of a parameter-server job stays alive when ps and chief start a new generation.
        if task.state != "running" or task.exit:
            task.state, task.exit = "starting", ""
        task.generation = event.generation


def _task_started(state: State, event: Event) -> None:
    task = state.task(event.text("task"))
    task.state, task.exit = "running", ""
    task.host, task.generation = event.text("host") or task.host, event.generation
    pid = event.get("pid")
    task.pid = pid if isinstance(pid, int) else None
    start_times.record_started(state.starts, event.generation, task.name, event.get("warm") is True)


def _start_times(state: State, event: Event) -> None:
    start_times.record_measured(state.starts, event.generation, event.text("task"), event.data)


def _step(state: State, event: Event) -> None:
    task = state.task(event.text("task"))
    step = int(event.number("step"))
    task.step = step
    if task.state in ("waiting", "starting"):
        task.state = "running"  # the captain that was to report its start has died, or its output is lost
    if state.status == "starting":
        state.status = "running"
    _measured(state, task, event)
    memory = number(event.get("memory"))
    task.memory = int(memory) if memory is not None else task.memory
    if step > state.steps:
        state.progress_at = event.at
    if step >= state.steps:
        state.steps = step
        state.speed = number(event.get("steps_per_s")) or state.speed
    at = seconds(event.at)
    if at is not None:
        state.pace.add(event.generation, at, step)


def _resources(state: State, event: Event) -> None:
    measured = event.get("tasks")
    for name in measured if isinstance(measured, dict) else ():
        memory = state.resources.memory(name)
        if memory is not None:
            state.task(name).memory = int(memory)


def _measured(state: State, task: Task, event: Event) -> None:
    reported = event.get("metrics")
    values = {k: v for k, v in reported.items() if is_measurement(v)} if isinstance(reported, dict) else {}
    task.metrics = {**task.metrics, **values}
    state.last_metrics = {**state.last_metrics, **values} if values else state.last_metrics


def _evaluated(state: State, event: Event) -> None:
    task = state.task(event.text("task"))
    task.step = int(event.number("step"))
    _measured(state, task, event)
    _best(state, event)


def _best(state: State, event: Event) -> None:
    best = event.get("best")
    if isinstance(best, dict) and is_measurement(best.get("value")):
        state.best = best


def _saved(state: State, event: Event) -> None:
    state.saved, state.progress_at = _mark(event), event.at


def _committed(state: State, event: Event) -> None:
    state.committed = _mark(event)
    _best(state, event)


def _mark(event: Event) -> Mark:
    counted = event.get("counted") is True
    size = number(event.get("bytes"))
    return Mark(
        int(event.number("step")), event.text("snapshot"), event.at, event.generation, counted,
        None if size is None else int(size), number(event.get("took_s")), number(event.get("stall_s")),
    )  # fmt: skip


def _task_exited(state: State, event: Event) -> None:
    task = state.task(event.text("task"))
    code, signal = event.get("code"), event.text("signal")
    task.exit = signal or (f"exit {code}" if code is not None else "lost" if not event.get("expected") else "ended")
    task.state = "succeeded" if code == 0 else "ended" if event.get("expected") else "failed"
    task.pid = task.memory = None


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
    "start-times": _start_times,
    "step": _step,
    "resources": _resources,
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
    """The status of a run, read from its folder; the lock shows whether it is still running."""

    run: str
    folder: Path
    alive: bool
    info: dict[str, Any]
    state: State
    report: dict[str, Any]  # the fields of report.json, even while the run is alive
    problems: tuple[str, ...] = ()  # files that cannot be used, or only in part, and why


def read(run: run_folders.Run, over: bool = False) -> Standing:
    """Read everything in the folder. `over`: the caller knows that the run is not alive."""
    # The lock first: a supervisor writes its report before it releases the lock.
    alive = not over and run_folders.alive(run.folder)
    files = _Files(run.folder)
    event_problems: list[str] = []
    state = fold(events.read(run.folder, event_problems.append))
    info, report = files.info.fields or {}, files.report.fields
    problems = (*files.problems, *event_problems)
    is_open = report is None and not alive and state.status not in ENDED  # nothing says how it ended
    if is_open and (files.is_damaged or event_problems):
        state.status, state.reason = DAMAGED, "; ".join(problems)
    elif report is None and run_folders.abandoned(run.folder):
        state.status, state.reason = "abandoned", ABANDONED.format(run.name)
    elif is_open and (over or not _just_created(run.folder, state)):
        state.status, state.reason = "failed", GONE if state.started or info else NEVER
    derived = derive(run, state, time.time() if alive else None)
    fields = {**derived, **(report or {}), **({"problems": list(problems)} if problems else {})}
    fields["starts"] = derived["starts"] or fields["starts"]  # the report has only the newest generations
    fields["resources"] = derived["resources"] or fields["resources"]
    fields["goodput"] = _goodput(derived["goodput"], (report or {}).get("goodput"), state.goodput.began, info)
    return Standing(run.name, run.folder, alive, info, state, fields, problems)


def _goodput(
    derived: dict[str, Any] | None, reported: dict[str, Any] | None, began: float | None, info: dict[str, Any]
) -> dict[str, Any] | None:
    """`derived`: from the events that are here, of which some may be missing. `reported`: by the last captain of the
    run; if it replaced another one, it may know only of its own time."""
    is_whole = derived is None or (reported is not None and reported["wall_s"] > derived["wall_s"] - 1.0)
    goodput = reported if is_whole else derived
    submitted = seconds(info.get("started")) if info.get("on") == "kubernetes" else None
    if goodput is None or submitted is None or began is None:
        return goodput
    return with_queue(goodput, began - submitted)  # it may have waited in a queue before there was a captain


class _Files:
    """The small files of a run, and what is wrong with them."""

    def __init__(self, folder: Path) -> None:
        self.info, self.report = run_files.info(folder), run_files.report(folder)
        every = (self.info, run_files.plan(folder), self.report)
        self.problems = tuple(contents.problem for contents in every if contents.error is not None)
        # A file of a newer version is not damaged: what else is known of the run is shown.
        self.is_damaged = any(isinstance(contents.error, run_files.DamagedRun) for contents in every)


def summary(run: run_folders.Run) -> dict[str, Any]:
    """Only the fields of report.json; for a run that has ended, without reading its events."""
    if not run_folders.alive(run.folder):
        files = _Files(run.folder)
        if files.report.fields is not None and not files.problems:
            return {**derive(run, State()), **files.report.fields}
    return read(run).report


def derive(run: run_folders.Run, state: State, now: float | None = None) -> dict[str, Any]:
    """The fields of report.json that can be derived from events. `now`: the run is alive."""
    return {
        "run": run.name,
        "status": state.status,
        "reason": state.reason or state.ending or _waiting_reason(state),
        "cause": state.cause,
        "generations": state.generation,
        "restarts": state.restarts,
        "starts": start_times.to_report(state.starts),
        "steps": state.steps,
        "steps_per_s": state.steps_per_s,
        "metrics": state.metrics,
        "best": state.best,
        "started": state.started or run_folders.started(run.folder),
        "ended": state.ended,
        "folder": str(run.folder),
        "stacks": state.stacks,
        "goodput": state.goodput.to_report(now),
        "resources": state.resources.to_report(),
    }


def _waiting_reason(state: State) -> str:
    if state.waiting is None:
        return ""
    from paceline.view.wording import describe

    return describe(state.waiting)


def _just_created(folder: Path, state: State) -> bool:
    """A new folder has neither a lock nor events for a moment, until the supervisor has started."""
    if state.started:
        return False
    try:
        return time.time() - folder.stat().st_mtime < run_folders.STARTING_S
    except OSError:
        return False
