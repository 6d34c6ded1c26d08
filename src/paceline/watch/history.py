"""What has happened in a run, from its events in any order: generations, snapshots, evaluations. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from paceline.view.files.run_files import is_measurement
from paceline.view.state.events import Event, number, seconds
from paceline.view.text.wording import step_of
from paceline.watch.tables import plain

# Events that are needed; others of an earlier events.jsonl need not be parsed.
KINDS = ("generation-formed", "restart", "committed", "evaluated", "scaled", "paused", "resumed", "run-ended")
MARKS = ("scaled", "paused", "resumed")  # what users do
MOST_GENERATIONS = 1000
MOST_MARKS = 1000
MOST_SNAPSHOTS = 200


@dataclass(frozen=True)
class Generation:
    number: int
    begin: float | None = None  # seconds since 1970; None: only its steps are known
    origin: str = ""  # what it started from
    first_step_at: float | None = None
    step: int | None = None  # the last one
    failed_at: float | None = None
    paused_at: float | None = None
    cause: str = ""
    task: str = ""  # whose failure ended it
    detail: str = ""


@dataclass(frozen=True)
class SnapshotRecord:
    name: str
    step: int
    committed: float | None = None  # seconds since 1970
    size: int | None = None
    took_s: float | None = None
    evaluation: tuple[tuple[str, float], ...] = ()  # metrics of an evaluator


class History:
    def __init__(self) -> None:
        self._generations: dict[int, Generation] = {}
        self._snapshots: dict[str, SnapshotRecord] = {}
        self._marks: set[tuple[float, str]] = set()  # when, and the kind of the event
        self.best = ""  # the name of a snapshot
        self._best_at = ""
        self.ended: float | None = None

    def add(self, event: Event) -> None:
        at = seconds(event.at)
        if at is None:
            return
        if event.kind == "step":
            self._step(event, at)
        elif event.kind == "generation-formed":
            self._formed(event, at)
        elif event.kind == "restart":
            self._failed(event, at)
        elif event.kind in ("committed", "evaluated"):
            self._snapshot(event, at)
        elif event.kind in MARKS:
            self._mark(event, at)
        elif event.kind == "run-ended":
            self.ended = at

    def generations(self) -> list[Generation]:
        """Oldest first."""
        return [self._generations[number] for number in sorted(self._generations)[-MOST_GENERATIONS:]]

    def snapshots(self) -> list[SnapshotRecord]:
        """Newest first."""
        known = sorted(self._snapshots.values(), key=lambda each: (each.committed or 0.0, each.step), reverse=True)
        return known[:MOST_SNAPSHOTS]

    def marks(self) -> list[tuple[float, str]]:
        """What users have done, oldest first: when, and the kind of the event."""
        return sorted(self._marks)[-MOST_MARKS:]

    def _generation(self, event: Event) -> Generation:
        if len(self._generations) > 2 * MOST_GENERATIONS:
            for old in sorted(self._generations)[:-MOST_GENERATIONS]:
                del self._generations[old]
        return self._generations.get(event.generation, Generation(event.generation))

    def _step(self, event: Event, at: float) -> None:
        generation = self._generation(event)
        first = generation.first_step_at
        self._generations[event.generation] = replace(
            generation,
            first_step_at=at if first is None else min(first, at),
            step=max(generation.step or 0, int(event.number("step"))),
        )

    def _formed(self, event: Event, at: float) -> None:
        generation = self._generation(event)
        if generation.begin is not None and generation.begin <= at:
            return
        step, restore = step_of(event.get("restore")), event.get("restore")
        if step is not None:
            origin = f"{'snapshot' if event.get('counted') else 'step'} {step}"
        else:
            origin = plain(str(restore)) if restore else "the start"
        self._generations[event.generation] = replace(generation, begin=at, origin=origin)

    def _failed(self, event: Event, at: float) -> None:
        generation = self._generation(event)
        if generation.failed_at is not None and generation.failed_at <= at:
            return
        cause, task, detail = (plain(event.text(name)) for name in ("cause", "task", "detail"))
        self._generations[event.generation] = replace(generation, failed_at=at, cause=cause, task=task, detail=detail)

    def _mark(self, event: Event, at: float) -> None:
        self._marks.add((at, event.kind))
        if len(self._marks) > 2 * MOST_MARKS:
            self._marks = set(self.marks())
        if event.kind == "paused" and event.generation:  # without one, the run has not started yet
            generation = self._generation(event)
            paused_at = at if generation.paused_at is None else min(at, generation.paused_at)
            self._generations[event.generation] = replace(generation, paused_at=paused_at)

    def _snapshot(self, event: Event, at: float) -> None:
        name = event.text("snapshot")
        if not name:
            return
        known = self._snapshots.get(name, SnapshotRecord(name, int(event.number("step"))))
        if event.kind == "committed":
            size, took = number(event.get("bytes")), number(event.get("took_s"))
            known = replace(known, committed=at, size=None if size is None else int(size), took_s=took)
        else:
            known = replace(known, evaluation=measurements(event.get("metrics")))
        self._snapshots[name] = known
        if len(self._snapshots) > 2 * MOST_SNAPSHOTS:
            kept = {each.name for each in self.snapshots()}
            self._snapshots = {each: record for each, record in self._snapshots.items() if each in kept}
        best = event.get("best")
        if isinstance(best, dict) and isinstance(best.get("snapshot"), str) and event.at >= self._best_at:
            self.best, self._best_at = best["snapshot"], event.at


def measurements(values: Any) -> tuple[tuple[str, float], ...]:
    """The numbers among reported metrics."""
    if not isinstance(values, dict):
        return ()
    return tuple((str(name), value) for name, value in values.items() if is_measurement(value))
