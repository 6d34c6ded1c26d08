"""The state of a run, derived from its events: a pure fold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.agent.captain import start_times
from paceline.agent.goodput import Goodput
from paceline.agent.resource_usage import Resources
from paceline.view.files.run_files import is_measurement
from paceline.view.state.event_limits import MOST_ROLES
from paceline.view.state.events import Event, number, seconds, started_tasks

ENDED = ("succeeded", "failed", "stopped")
LIVE = ("starting", "running", "paused")
# Far more than a run has in practice, but the events of another user's run may be forged.
MOST_RESTARTS = 2_000
MOST_AWAITED = 20  # restarts whose tasks have not started again
MOST_WARNINGS = 1_000
MOST_STARTS = 50_000  # of tasks, in all generations
_SLACK = 1.2  # a list may exceed its limit by this factor, so that it is cut rarely


@dataclass(slots=True)
class Task:
    name: str
    state: str = "waiting"  # waiting, starting, running, succeeded, failed, ended; absent: not in this generation
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
    scaled: dict[str, dict[str, None]] = field(default_factory=dict)  # by role: its tasks, if a user has changed them
    restarts: list[dict[str, Any]] = field(default_factory=list)  # the newest
    last_restarts: dict[str, dict[str, Any]] = field(default_factory=dict)  # of each task that has caused any
    # Restarts whose tasks have not started again yet, with these tasks: the newest.
    awaited: list[tuple[frozenset[str], dict[str, Any]]] = field(default_factory=list)
    stacks: dict[str, str] = field(default_factory=dict)
    starts: start_times.Starts = field(default_factory=dict)  # of the newest generations
    start_count: int = 0  # at least as many as there are in `starts`
    saved: Mark | None = None  # the newest snapshot that is complete on its hosts
    committed: Mark | None = None  # the newest snapshot in its store
    best: dict[str, Any] | None = None  # snapshot, metric and value
    waiting: Event | None = None
    pause_event: Event | None = None  # the newest: a pause is requested, or complete; None: the run is not paused
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

    @property
    def followed_restarts(self) -> list[dict[str, Any]]:
        """Those after which tasks have started again. When a run is killed, its captain may outlive other hosts, and
        announce a restart that never takes place."""
        return [restart for restart in self.restarts if not any(restart is each for _, each in self.awaited)]

    def is_wanted(self, task: str) -> bool:
        """Whether it is to run: the plan has more tasks than that if the run can be scaled."""
        return task in self.scaled.get(task.rpartition("-")[0], self.tasks)

    def task(self, name: str) -> Task:
        task = self.tasks.get(name)
        if task is None:
            task = self.tasks[name] = Task(name)
        return task


TOTAL_STEPS = "total_steps"  # a metric that programs may report: the number of steps of the whole training


def total_steps(metrics: Mapping[str, Any]) -> int | None:
    total = number(metrics.get(TOTAL_STEPS))
    return int(total) if total is not None and total >= 1 else None


def fold(new_events: Iterable[Event], state: State | None = None) -> State:
    """The state after these events. `state`: the state before them, which is updated."""
    state = state if state is not None else State()
    for event in new_events:
        state.generation = max(state.generation, event.generation)
        state.goodput.add(event.data)
        state.resources.add(event.data)
        if state.awaited and (started := started_tasks(event)):
            state.awaited = [each for each in state.awaited if each[0].isdisjoint(started)]
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
    if state.status in ("starting", "paused"):
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
    for name in event.names("absent"):
        task = state.task(name)
        task.state, task.exit = "absent", ""


def _scaled(state: State, event: Event) -> None:
    role, tasks = event.text("role"), dict.fromkeys(event.names("tasks"))
    before = state.scaled.get(role)
    if before is None:
        if len(state.scaled) >= MOST_ROLES:
            return
        before = dict.fromkeys(name for name in state.tasks if name.rpartition("-")[0] == role)
    state.scaled[role] = tasks
    for name in tasks:
        if name not in state.tasks or state.tasks[name].state == "ended":
            state.task(name).state = "absent" if state.generation else "waiting"
    # Not all tasks: there may be thousands, and as many events of another user's run.
    for task in [state.tasks[name] for name in before if name in state.tasks and name not in tasks]:
        if not task.generation:
            del state.tasks[task.name]
        elif task.state in ("absent", "waiting"):
            task.state = "ended"


def _pausing(state: State, event: Event) -> None:
    state.pause_event = event


def _pause_canceled(state: State, event: Event) -> None:
    state.pause_event = None


def _paused(state: State, event: Event) -> None:
    state.status, state.pause_event, state.waiting = "paused", event, None
    for task in state.tasks.values():
        if task.state in ("starting", "running", "ended", "failed"):
            task.state, task.pid, task.memory = "waiting", None, None


def _resumed(state: State, event: Event) -> None:
    state.status, state.pause_event = "running" if state.generation else "starting", None


def _task_started(state: State, event: Event) -> None:
    task = state.task(event.text("task"))
    task.state, task.exit = "running", ""
    task.host, task.generation = event.text("host") or task.host, event.generation
    pid = event.get("pid")
    task.pid = pid if isinstance(pid, int) else None
    start_times.record_started(state.starts, event.generation, task.name, event.get("warm") is True)
    _limit_starts(state)


def _start_times(state: State, event: Event) -> None:
    start_times.record_measured(state.starts, event.generation, event.text("task"), event.data)
    _limit_starts(state)


def _limit_starts(state: State) -> None:
    state.start_count += 1
    if state.start_count <= _SLACK * MOST_STARTS:
        return
    state.start_count = 0
    for generation in sorted(state.starts, reverse=True):
        if state.start_count >= MOST_STARTS:
            del state.starts[generation]
        else:
            state.start_count += len(state.starts[generation])


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
    task.metrics.update(values)  # a copy for each event would take long if there are thousands
    state.last_metrics.update(values)


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
    restart = {
        "cause": event.text("cause"), "task": event.text("task"), "at": event.at,
        "detail": event.text("detail"), "first_step_after_s": None,
    }  # fmt: skip
    state.restarts.append(restart)
    state.last_restarts[event.text("task")] = restart
    _keep_newest(state.restarts, MOST_RESTARTS)
    if scope := event.names("scope"):
        state.awaited = [*state.awaited, (frozenset(scope), restart)][-MOST_AWAITED:]
    for name in scope:
        task = state.task(name)
        if task.state == "running":
            task.state = "waiting"


def _recovered(state: State, event: Event) -> None:
    restart = state.last_restarts.get(event.text("task"))
    if restart is not None:
        restart["first_step_after_s"] = number(event.get("first_step_after_s"))


def _warning(state: State, event: Event) -> None:
    state.warnings.append(event.text("text"))
    _keep_newest(state.warnings, MOST_WARNINGS)


def _keep_newest(items: list[Any], most: int) -> None:
    if len(items) > _SLACK * most:
        del items[:-most]


def _ending(state: State, event: Event) -> None:
    state.ending, state.waiting, state.pause_event = event.text("reason") or "ending", None, None


def _run_ended(state: State, event: Event) -> None:
    status = event.text("status")
    state.status = status if status in ENDED else "failed"
    state.reason, state.cause = event.text("reason"), event.text("cause") or None
    state.ended, state.waiting, state.pause_event = event.at, None, None


_CHANGES = {
    "run-started": _run_started,
    "waiting": _waiting,
    "ingest-started": _ingesting,
    "ingest-done": _ingested,
    "ingest-skipped": _ingested,
    "ingest-failed": _ingested,
    "scaled": _scaled,
    "pausing": _pausing,
    "pause-canceled": _pause_canceled,
    "paused": _paused,
    "resumed": _resumed,
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
