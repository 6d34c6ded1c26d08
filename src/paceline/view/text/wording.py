"""Events, times and numbers as readable text."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from paceline.agent.captain import start_times
from paceline.view.files.run_files import is_measurement
from paceline.view.state.events import Event, number, seconds
from paceline.view.text.terminal import visible

# Events that are shown to a user who follows a run; `paceline events` shows all.
IMPORTANT = frozenset(
    {
        "waiting", "ingest-started", "ingest-done", "ingest-skipped", "ingest-failed", "scaled", "pausing",
        "pause-canceled", "paused", "resumed", "generation-formed",
        "not-finite", "spike", "member-lost", "hang", "restart", "recovered", "captain-returned", "note", "warning",
        "ending", "run-ended",
    }
)  # fmt: skip


def important(event: Event) -> bool:
    if event.kind == "task-exited":
        return not event.get("expected") and event.get("code") != 0
    return event.kind in IMPORTANT


def describe(event: Event) -> str:
    """One event as a sentence without a full stop."""
    sentence = _SENTENCES.get(event.kind)
    if sentence is not None:
        return sentence(event)
    fields = {key: value for key, value in event.data.items() if key not in ("at", "event", "generation")}
    return " ".join([event.kind, *(f"{key}={value}" for key, value in fields.items())])


def _run_started(event: Event) -> str:
    kind = " ".join(word for word in (event.text("framework"), event.text("strategy")) if word not in ("", "none"))
    tasks, hosts = len(event.names("tasks")), len(event.names("hosts"))
    return (
        f"{event.text('run')} started: {count(tasks, 'task')} on {count(hosts, 'host')}{f' ({kind})' if kind else ''}"
    )


def _waiting(event: Event) -> str:
    missing = join(event.names("missing"))
    return f"waiting for {missing} ({span(event.number('since_s'))} so far, limit {span(event.number('limit_s'))})"


def _ingested(event: Event) -> str:
    return f"data built in {span(event.number('took_s'))}: {_amount(event)} at {event.text('data')}"


def _skipped(event: Event) -> str:
    return f"data already built by {event.text('run')}: {_amount(event)} at {event.text('data')}"


def _amount(event: Event) -> str:
    return f"{count(int(event.number('files')), 'file')}, {size(event.number('bytes'))}"


def _scaled(event: Event) -> str:
    hosts = count(int(event.number("count")), "host")
    return f"scaling {event.text('role')} from {event.get('was')} to {hosts}"


def _pausing(event: Event) -> str:
    if event.get("now") is True:
        return "the run is being paused without a new snapshot"
    return (
        f"the run is being paused: waiting for a new snapshot to be committed (limit {span(event.number('limit_s'))})"
    )


def _paused(event: Event) -> str:
    step = step_of(event.get("snapshot"))
    origin = "from the beginning, as it has no snapshot" if step is None else f"from step {step}"
    return f"the run is paused at step {int(event.number('step'))}; it will continue {origin}"


def _formed(event: Event) -> str:
    step = step_of(event.get("restore"))
    if step is not None:
        origin = f" from {'snapshot' if event.get('counted') else 'step'} {step}"
    elif event.get("restore"):
        origin = f" from {event.get('restore')}"
    else:
        origin = " from the beginning: no snapshot" if event.get("from_scratch") else ""
    absent = f", without {join(event.names('absent'))}" if event.names("absent") else ""
    return f"starting {join(event.names('tasks'))}{absent}{origin} (generation {event.generation})"


def _task_started(event: Event) -> str:
    warm = ", from a spare" if event.get("warm") else ""
    return f"{event.text('task')} started on {event.text('host')} (pid {event.get('pid')}{warm})"


def _start_times(event: Event) -> str:
    task, first_step = event.text("task"), number(event.get("first_step_s"))
    spent = start_times.phases({name: event.number(name) for name in start_times.FIELDS if name in event.data})
    reached = f"first step {span(first_step)} after its start" if first_step is not None else "no step reported"
    return f"{task}: {reached}" + (f" ({phases(spent)})" if len(spent) > 1 or first_step is None else "")


def _step(event: Event) -> str:
    speed = number(event.get("steps_per_s"))
    parts = [f"step {event.get('step')}", metrics(event.get("metrics"))]
    parts.append(f"{figure(speed)} steps/s" if speed is not None else "")
    return f"{event.text('task')}: {', '.join(filter(None, parts))}"


def _resources(event: Event) -> str:
    """worker-host-0: 3.1 GiB of 8.0 GiB in use; worker-0 uses 1.9 cores and 2.4 GiB."""
    machine, tasks = (event.get(name) if isinstance(event.get(name), dict) else {} for name in ("machine", "tasks"))
    memory, limit = (number(machine.get(name)) for name in ("memory", "memory_limit"))
    parts = [f"{size(memory)} of {size(limit)} in use"] if memory is not None and limit is not None else []
    for name, used in tasks.items():
        cores, memory = (number(used.get(key)) if isinstance(used, dict) else None for key in ("cpu", "memory"))
        if cores is not None and memory is not None:
            parts.append(f"{name} uses {figure(cores)} cores and {size(memory)}")
    return f"{event.text('host')}: {'; '.join(parts)}"


def _not_finite(event: Event) -> str:
    step = number(event.get("step"))
    at_step = "" if step is None else f" at step {event.get('step')}"
    return f"{event.text('task')}: {event.text('metric')} is {event.text('value')}{at_step}"


def _spike(event: Event) -> str:
    value, usual = figure(event.number("value")), figure(event.number("usual"))
    return f"{event.text('task')}: {event.text('metric')} is {value} at step {event.get('step')}; usually {usual}"


def _committed(event: Event) -> str:
    took = span(event.number("took_s"))
    if origin := event.get("origin"):
        return f"starts from step {event.get('step')} of {origin}: {size(event.number('bytes'))}, copied in {took}"
    return f"{_snapshot(event)} committed: {size(event.number('bytes'))}, {took} after it was saved"


def _snapshot(event: Event) -> str:
    return f"snapshot {'' if event.get('counted') else 'of step '}{event.get('step')}"


def _evaluated(event: Event) -> str:
    reported = metrics(event.get("metrics")) or "nothing reported"
    return f"{event.text('task')}: step {event.get('step')} evaluated: {reported}"


def _task_exited(event: Event) -> str:
    task = event.text("task")
    if event.get("code") == 0:
        return f"{task} finished"
    if event.get("expected"):
        return f"{task} was stopped"
    if event.text("signal"):
        return f"{task} was killed by {event.text('signal')}"
    if event.get("code") is None:
        return f"{task} was lost"
    return f"{task} failed with exit code {event.get('code')}"


def _clock_changed(event: Event) -> str:
    shift = event.number("shift_s")
    if shift < 0:
        return f"the clock of the captain's machine was set back by {span(-shift)}"
    return f"the clock of the captain's machine was set forward by {span(shift)}, or the machine was suspended"


def _hang(event: Event) -> str:
    progress = "no step" if event.text("progress") == "step" else "no output"
    tasks = event.names("tasks")
    verb = "hangs" if len(tasks) == 1 else "hang"
    return (
        f"{join(tasks)} {verb}: {progress} for {span(event.number('silent_s'))} (limit {span(event.number('limit_s'))})"
    )


def _stacks(event: Event) -> str:
    return f"the Python stacks of {event.text('task')} are in its log"


def _restart(event: Event) -> str:
    cause, detail = event.text("cause"), event.text("detail")
    source = f" of {event.text('task')}" if event.text("task") else ""
    signs = event.text("signs_of_work")
    budget = f"{event.get('count')} of {event.get('limit')} without {'a step or snapshot' if signs else 'progress'}"
    text = f"restarting after a failure{source} ({cause}, {budget})"
    text += f": {detail}" if detail else ""
    text += f"; the same error as before, but {signs}" if signs else ""
    delay = event.number("delay_s")
    return f"{text}; next attempt in {span(delay)}" if delay >= 1 else text


def _recovered(event: Event) -> str:
    return f"training resumed: first step {span(event.number('first_step_after_s'))} after {event.text('task')} failed"


def _ended(event: Event) -> str:
    return f"the run {outcome(event.text('status'))}" + (f": {event.text('reason')}" if event.text("reason") else "")


_SENTENCES: dict[str, Callable[[Event], str]] = {
    "run-started": _run_started,
    "member-joined": lambda event: f"{event.text('host')} joined",
    "member-lost": lambda event: f"{event.text('host')} was lost: {event.text('reason')}",
    "waiting": _waiting,
    "ingest-started": lambda event: f"building the data on {event.text('host')}: {event.text('data')}",
    "ingest-done": _ingested,
    "ingest-skipped": _skipped,
    "ingest-failed": lambda event: f"building the data failed ({event.text('cause')}): {event.text('detail')}",
    "scaled": _scaled,
    "pausing": _pausing,
    "pause-canceled": lambda event: f"the pause was canceled, and the run continues: {event.text('reason')}",
    "paused": _paused,
    "resumed": lambda event: f"the run is being resumed after a pause of {span(event.number('paused_s'))}",
    "generation-formed": _formed,
    "task-started": _task_started,
    "start-times": _start_times,
    "step": _step,
    "resources": _resources,
    "not-finite": _not_finite,
    "spike": _spike,
    "saved": lambda event: f"{_snapshot(event)} saved",
    "committed": _committed,
    "evaluated": _evaluated,
    "task-exited": _task_exited,
    "hang": _hang,
    "stacks": _stacks,
    "restart": _restart,
    "recovered": _recovered,
    "spare-ready": lambda event: f"{event.text('host')} has a spare ready ({span(event.number('took_s'))})",
    "captain-returned": lambda event: (
        "the captain has restarted" + ("; training was not interrupted" if event.get("adopted") else "")
    ),
    "clock-changed": _clock_changed,
    "note": lambda event: f"note: {event.text('text')}",
    "warning": lambda event: f"warning: {event.text('text')}",
    "ending": lambda event: f"ending: {event.text('reason')} (tasks have {span(event.number('grace_s'))} to exit)",
    "run-ended": _ended,
    "rotated": lambda event: (
        f"of events up to {clock(event.at)}, the store keeps only those that determine the state"
        if event.get("stored")
        else f"events before {clock(event.at)} are in events.old.jsonl, steps and resources in series/"
    ),
}


_OUTCOMES = {
    **{status: f"is {status}" for status in ("starting", "running", "paused", "damaged")},
    **{status: f"was {status}" for status in ("stopped", "abandoned")},
}


def outcome(status: str) -> str:
    """What comes after the name of a run: `was stopped`."""
    return _OUTCOMES.get(status, status)


def step_of(restore: Any) -> int | None:
    """The step in the name of a snapshot: step-<n>-g<generation>."""
    match = re.search(r"step-(\d+)(-g\d+)?/?$", restore) if isinstance(restore, str) else None
    return int(match.group(1)) if match else None


def count(amount: int, thing: str) -> str:
    return f"{amount} {thing}{'' if amount == 1 else 's'}"


def join(names: Sequence[str]) -> str:
    if len(names) > 6:
        names = [*names[:5], f"{len(names) - 5} more"]
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]])) or "nothing"


@lru_cache(8192)
def natural(name: str) -> tuple[str, int]:
    """Sort key: worker-2 before worker-10."""
    role, _, index = name.rpartition("-")
    return (role, int(index)) if index.isdecimal() and len(index) < 20 else (name, -1)


def span(duration: float) -> str:
    """A duration: 0.4 s, 12 s, 1 min 5 s, 30 min, 2 h 10 min, 3 d."""
    if duration < 0:
        return "0 s"
    if duration < 9.95:
        return f"{duration:.1f}".removesuffix(".0") + " s"
    remaining, parts = round(duration), []
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        amount, remaining = divmod(remaining, size)
        if amount:
            parts.append(f"{amount} {unit}")
        elif parts:
            break
        if len(parts) == 2:
            break
    return " ".join(parts)


def figure(value: float) -> str:
    return f"{value:d}" if isinstance(value, int) else f"{value:.4g}"


def metrics(values: Any, most: int = 6) -> str:
    """loss 0.312, accuracy 0.91; the loss comes first. Programs choose the names, which may contain line ends."""
    if not isinstance(values, dict):
        return ""
    ordered = sorted(values.items(), key=lambda item: (item[0] != "loss", "accuracy" not in item[0]))
    shown = [(visible(name, colors=False).replace("\n", "\\n"), value) for name, value in ordered[:most]]
    return ", ".join(f"{name} {figure(value)}" for name, value in shown if is_measurement(value))


def phases(spent: Mapping[str, float]) -> str:
    """Where the time of a start went: imports 3.4 s, before joining 0.2 s, joining 0.4 s, first step 1.5 s."""
    return ", ".join(f"{phase} {span(seconds)}" for phase, seconds in spent.items())


def size(amount: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}"
        amount /= 1024
    return f"{amount:.1f} GiB"


def clock(at: str) -> str:
    """Local time of day of an event."""
    moment = seconds(at)
    return datetime.fromtimestamp(moment).strftime("%H:%M:%S") if moment is not None else at


def since(at: str | None, until: float) -> float | None:
    start = seconds(at) if at else None
    return max(0.0, until - start) if start is not None else None
