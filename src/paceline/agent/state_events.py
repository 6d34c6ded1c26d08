"""Which events of a run still determine its state: the others may be dropped from events.jsonl."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from paceline.storage.json_values import parse_json

STARTS_KEPT = 3  # generations whose start times are kept
PACES_KEPT = 100  # generations of which the first and the last step are kept: the average speed is measured within them
RESTARTS_KEPT = 500
WARNINGS_KEPT = 100
METRICS_KEPT = 1000  # names of a task whose last values are kept: a program may use other names for each step
_LAST = {  # the last event of each row is kept
    "waiting": "waiting",
    "ingest-started": "waiting",
    "ingest-done": "data",
    "ingest-skipped": "data",
    "ingest-failed": "ingest-failed",
    "run-started": "run-started",
    "scaled": "scaled",
    "pausing": "pausing",
    "pause-canceled": "pausing",
    "paused": "paused",
    "resumed": "resumed",
    "saved": "saved",
    "ending": "ending",
    "run-ended": "run-ended",
}
_LAST_OF_TASK = ("task-started", "task-exited", "stacks")
_LAST_FEW = {"restart": RESTARTS_KEPT, "recovered": RESTARTS_KEPT, "warning": WARNINGS_KEPT}

Event = dict[str, Any]


def needed(events: Sequence[Event]) -> list[Event]:
    """The events from which the same state follows, in the same order. The newest metrics of earlier events are added
    to the last event of a task."""
    collected = _Collected()
    for number, event in enumerate(events):
        collected.add(number, event)
    numbers = collected.numbers(max((_generation(event) for event in events), default=0))
    return [collected.with_metrics(number, events[number]) for number in numbers]


class _Collected:
    def __init__(self) -> None:
        self._last: dict[tuple[Any, ...], int] = {}  # what an event is needed for -> its number
        self._few: dict[str, list[int]] = {kind: [] for kind in _LAST_FEW}
        self._metrics: dict[tuple[str, str], dict[str, Any]] = {}  # by kind and task
        self._steps = -1.0

    def add(self, number: int, event: Event) -> None:
        kind, task = str(event.get("event")), str(event.get("task"))
        generation = _generation(event)
        if kind == "run-started":
            self._last.setdefault(("first run-started",), number)
        if kind in _LAST:
            self._last[_LAST[kind],] = number
        elif kind in _LAST_FEW:
            self._few[kind] = [*self._few[kind], number][-_LAST_FEW[kind] :]
        elif kind == "generation-formed":
            self._form(number, event)
        elif kind == "committed":
            self._last["committed",] = number
        elif kind in ("step", "evaluated"):
            self._add_measured(number, event, kind, task, generation)
        if kind == "resources":
            self._last[kind, str(event.get("host"))] = number
        if kind in _LAST_OF_TASK:
            self._last[kind, task] = number
        if kind in ("task-started", "start-times"):
            self._last["start", generation, kind, task] = number
        if isinstance(event.get("best"), dict):
            self._last["best",] = number

    def _form(self, number: int, event: Event) -> None:
        if ("committed",) in self._last:
            self._last["committed before",] = self._last["committed",]
        self._last["formed",] = number
        tasks = event.get("tasks")
        for name in tasks if isinstance(tasks, list) else ():
            self._last["formed", str(name)] = number

    def _add_measured(self, number: int, event: Event, kind: str, task: str, generation: int) -> None:
        self._last[kind, task] = number
        metrics = event.get("metrics")
        if isinstance(metrics, dict):
            _add_newest(self._metrics.setdefault((kind, task), {}), metrics)
        if kind == "step":
            step = event.get("step")
            if isinstance(step, (int, float)) and step >= self._steps:
                self._steps, self._last["most steps",] = step, number
            self._last.setdefault(("pace", generation, "first"), number)
            self._last["pace", generation, "last"] = number

    def numbers(self, newest: int) -> list[int]:
        """`newest`: the newest generation."""
        oldest = {"start": newest - STARTS_KEPT, "pace": newest - PACES_KEPT}
        kept = {
            number
            for purpose, number in self._last.items()
            if purpose[0] not in oldest or len(purpose) == 1 or purpose[1] > oldest[purpose[0]]
        }
        return sorted(kept.union(*self._few.values()))

    def with_metrics(self, number: int, event: Event) -> Event:
        kind, task = str(event.get("event")), str(event.get("task"))
        if self._last.get((kind, task)) == number and self._metrics.get((kind, task)):
            return {**event, "metrics": self._metrics[kind, task]}
        return event


def _add_newest(known: dict[str, Any], metrics: dict[str, Any]) -> None:
    """Adds a report. If there are too many names, those are dropped that were reported longest ago."""
    for name in metrics:
        known.pop(name, None)
    known.update(metrics)
    for name in list(known)[: max(0, len(known) - max(METRICS_KEPT, len(metrics)))]:
        del known[name]


def parse(lines: Iterable[bytes]) -> list[Event]:
    """The events in these lines; damaged lines are left out."""
    events = []
    for line in lines:
        try:
            event = parse_json(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            events.append(event)
    return events


def _generation(event: Event) -> int:
    generation = event.get("generation")
    return generation if isinstance(generation, int) else 0
