"""What each task of a run did when, derived from its events one by one: a bar of segments for each task. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.view.state.event_limits import MOST_ROLES
from paceline.view.state.events import Event, number, seconds
from paceline.view.text.wording import describe, natural

KINDS = (
    "queued", "waiting", "starting", "training", "snapshot", "restarting", "hang", "evaluating", "succeeded", "failed",
    "ended", "mixed",
)  # fmt: skip
_RUNNING = ("starting", "restarting", "training", "evaluating", "hang")
_STARTS = ("starting", "restarting")
_OVER = ("succeeded", "failed", "ended")
_MOST_SEGMENTS = 400  # of a task; the older half is then merged
_MOST_IN_ALL = 300_000  # segments; the older halves of all tasks are then merged
_MOST_STALLS = 10_000  # at least; twice as many at most
_MOST_MARKS = 5_000
_MARKS = {
    "generation-formed": "generation", "restart": "restart", "hang": "hang", "committed": "snapshot",
    "evaluated": "evaluated", "warning": "warning", "spike": "spike", "not-finite": "not-finite", "run-ended": "end",
    "scaled": "scaled", "paused": "paused", "resumed": "resumed",
}  # fmt: skip
_STAGES = ("imports_s", "joining_s", "joined_s", "restoring_s", "restored_s")


@dataclass(slots=True)
class Segment:
    kind: str
    begin: float  # seconds since 1970
    end: float | None  # None: until now
    generation: int
    detail: str = ""


@dataclass(frozen=True)
class Mark:
    at: float
    kind: str
    text: str
    generation: int


class Timeline:
    def __init__(self, hosts: Mapping[str, str]) -> None:
        """`hosts`: the host of each task, as planned."""
        self._hosts = hosts
        self._queued: dict[str, dict[str, None]] = {}  # by host: tasks that may be queued
        self._scaled_tasks: dict[str, dict[str, None]] = {}  # by role, if a user has changed them
        self.tasks: dict[str, list[Segment]] = {}
        self._count = 0  # segments, at least as many as there are
        self.marks: deque[Mark] = deque(maxlen=_MOST_MARKS)
        self._stalls: list[tuple[float, float]] = []  # training waited for a snapshot; in order, without overlap
        self._started: dict[str, float] = {}  # when the current process of a task started
        self._restarting: set[str] = set()  # tasks that are ended because of a restart
        self.begin: float | None = None
        self.last = 0.0  # the time of the newest event
        self.end: float | None = None  # None: the run continues

    def names(self) -> list[str]:
        return sorted(self.tasks, key=natural)

    def phase(self, task: str) -> Segment | None:
        """What the task does now."""
        segments = self.tasks.get(task)
        return segments[-1] if segments else None

    # ---- events

    def add(self, event: Event) -> None:
        at = seconds(event.at)
        if at is None:
            return
        self.begin = at if self.begin is None else self.begin
        self.last = max(self.last, at)
        if event.kind in _MARKS:
            self.marks.append(Mark(at, _MARKS[event.kind], describe(event), event.generation))
        handle = _HANDLERS.get(event.kind)
        if handle is not None:
            handle(self, event, at)

    def _run_started(self, event: Event, at: float) -> None:
        for task in event.names("tasks"):
            if task not in self.tasks:
                self._set(task, "queued", at, event.generation)

    def _member_joined(self, event: Event, at: float) -> None:
        for task in self._queued.pop(event.text("host"), ()):
            phase = self.phase(task)
            if phase is not None and phase.kind == "queued":
                self._set(task, "waiting", at, event.generation)

    def _scaled(self, event: Event, at: float) -> None:
        role, tasks = event.text("role"), dict.fromkeys(event.names("tasks"))
        before = self._scaled_tasks.get(role)
        if before is None:
            if len(self._scaled_tasks) >= MOST_ROLES:
                return
            before = dict.fromkeys(task for task in self.tasks if task.rpartition("-")[0] == role)
        self._scaled_tasks[role] = tasks
        for task in tasks:
            phase = self.phase(task)
            if phase is None or phase.kind == "ended":
                self._set(task, "queued", at, event.generation)
        for task in before:
            phase = self.phase(task) if task not in tasks else None
            if phase is not None and phase.kind in ("queued", "waiting"):
                self._set(task, "ended", at, event.generation)

    def _paused(self, event: Event, at: float) -> None:
        for task, segments in self.tasks.items():
            if segments[-1].kind != "succeeded":
                self._restarting.discard(task)
                self._set(task, "waiting", at, event.generation, "the run is paused")

    def _generation_formed(self, event: Event, at: float) -> None:
        for task in event.names("tasks"):
            self._restarting.discard(task)
            phase = self.phase(task)
            # A worker of a parameter-server job continues when ps and chief start a new generation.
            if phase is None or phase.kind not in ("training", "evaluating"):
                self._set(task, self._start(task), at, event.generation)
        for task in event.names("absent"):
            self._restarting.discard(task)
            self._set(task, "waiting", at, event.generation, "its host is missing")

    def _task_started(self, event: Event, at: float) -> None:
        task = event.text("task")
        kind = self._start(task)
        self._started[task] = at
        self._restarting.discard(task)
        # An evaluator reports no steps: it evaluates, or waits for a snapshot.
        kind = "evaluating" if _work(task) == "evaluating" else kind
        self._set(task, kind, at, event.generation, "from a spare" if event.get("warm") is True else "")

    def _start(self, task: str) -> str:
        return "restarting" if task in self._started else "starting"

    def _step(self, event: Event, at: float) -> None:
        task = event.text("task")
        phase = self.phase(task)
        if phase is None or phase.kind not in ("training", "evaluating", "hang", *_OVER):
            self._set(task, _work(task), at, event.generation)

    def _start_times(self, event: Event, at: float) -> None:
        """Written after the first step, or when no step is expected any more."""
        task, phase = event.text("task"), self.phase(event.text("task"))
        started = self._started.get(task)
        if started is None or phase is None or phase.generation != event.generation:
            return
        first_step = number(event.get("first_step_s"))
        spent = first_step if first_step is not None else max((event.number(stage) for stage in _STAGES), default=0.0)
        if phase.kind in _STARTS:
            self._set(task, _work(task), min(at, started + spent), event.generation)
        elif phase.kind in ("training", "evaluating") and len(self.tasks[task]) > 1:
            before = self.tasks[task][-2]
            if before.kind in _STARTS:  # a step is known a second after it was done
                phase.begin = before.end = max(before.begin, min(phase.begin, started + spent))

    def _saved(self, event: Event, at: float) -> None:
        stall = number(event.get("stall_s"))
        begin = max(at - (stall or 0.0), self._stalls[-1][1] if self._stalls else 0.0)
        if begin < at:
            self._stalls.append((begin, at))
            if len(self._stalls) > 2 * _MOST_STALLS:
                del self._stalls[:_MOST_STALLS]

    def _task_exited(self, event: Event, at: float) -> None:
        task, code = event.text("task"), event.get("code")
        phase = self.phase(task)
        if phase is not None and phase.kind in _STARTS and code == 0:
            # A program that reports nothing.
            self._set(task, _work(task), self._started.get(task, phase.begin), event.generation)
        how = event.text("signal") or (f"exit {code}" if code is not None else "lost")
        if task in self._restarting:
            self._set(task, "restarting", at, event.generation, how)
        elif code == 0:
            self._set(task, "succeeded", at, event.generation)
        else:
            self._set(task, "ended" if event.get("expected") else "failed", at, event.generation, how)

    def _hang(self, event: Event, at: float) -> None:
        for task in event.names("tasks"):
            phase = self.phase(task)
            if phase is not None and phase.kind in _RUNNING:
                silent_since = max(phase.begin, at - event.number("silent_s"))
                self._set(task, "hang", silent_since, event.generation)

    def _restart(self, event: Event, at: float) -> None:
        cause = event.text("cause")
        for task in event.names("scope"):
            phase = self.phase(task)
            if phase is not None and phase.kind in ("failed", "ended"):
                phase.kind, phase.detail = "restarting", f"{cause}: {phase.detail}" if phase.detail else cause
            else:
                self._restarting.add(task)

    def _run_ended(self, event: Event, at: float) -> None:
        if self.end is None:  # a run ends once
            for task, segments in self.tasks.items():
                if segments[-1].kind not in _OVER:
                    self._set(task, "ended", at, event.generation)
        self.end = at

    def _set(self, task: str, kind: str, at: float, generation: int, detail: str = "") -> None:
        if not task:
            return
        segments = self.tasks.setdefault(task, [])
        if segments:
            last = segments[-1]
            at = max(at, last.begin)
            if last.kind == kind and last.generation == generation:
                last.detail = last.detail or detail
                return
            last.end = at
            if last.end <= last.begin:
                segments.pop()
        segments.append(Segment(kind, at, None, generation, detail))
        if kind == "queued" and task in self._hosts:
            self._queued.setdefault(self._hosts[task], {})[task] = None
        self._count += 1
        if len(segments) > _MOST_SEGMENTS:
            _merge_older_half(segments)
        if self._count > _MOST_IN_ALL:
            for each in self.tasks.values():
                _merge_older_half(each)
            self._count = sum(map(len, self.tasks.values()))

    # ---- windows

    def window(self, task: str, begin: float, end: float, resolution: float = 0.0) -> list[Segment]:
        """The segments between two times, in order and without overlap. Those shorter than `resolution` are merged."""
        segments: list[Segment] = []
        for each in self.tasks.get(task, ()):
            first, last = max(each.begin, begin), min(each.end if each.end is not None else end, end)
            if first < last:
                piece = Segment(each.kind, first, last, each.generation, each.detail)
                segments += self._with_stalls(piece, resolution) if each.kind == "training" else [piece]
        return _merged(segments, resolution)

    def _with_stalls(self, segment: Segment, resolution: float) -> Iterable[Segment]:
        assert segment.end is not None
        at, last = segment.begin, segment.end
        first = bisect_right(self._stalls, at, key=lambda stall: stall[1])  # there may be thousands before it
        for index in range(first, len(self._stalls)):
            begin, end = self._stalls[index]
            if begin >= last:
                break
            begin, end = max(begin, at), min(end, last)
            if end - begin > resolution:
                yield Segment("training", at, begin, segment.generation, segment.detail)
                yield Segment("snapshot", begin, end, segment.generation)
                at = end
        yield Segment("training", at, last, segment.generation, segment.detail)

    def to_json(
        self, now: float, begin: float | None = None, end: float | None = None, first: int = 0, most: int = 200,
        resolution: float = 0.0,
    ) -> dict[str, Any]:  # fmt: skip
        names, last = self.names(), self.end if self.end is not None else now
        since, until = (self.begin if begin is None else begin) or last, last if end is None else end
        return {
            "begin": self.begin, "end": last, "is_live": self.end is None, "total_tasks": len(names), "first": first,
            "tasks": [
                {"task": task, "segments": [_row(each) for each in self.window(task, since, until, resolution)]}
                for task in names[first : first + most]
            ],
            "marks": [vars(mark) for mark in self.marks if since <= mark.at <= until],
            "kinds": list(KINDS),
        }  # fmt: skip


def _merge_older_half(segments: list[Segment]) -> None:
    if len(segments) > 2:
        half = len(segments) // 2
        merged = Segment("mixed", segments[0].begin, segments[half - 1].end, segments[0].generation)
        segments[:half] = [merged]


def _row(segment: Segment) -> list[Any]:
    return [segment.kind, segment.begin, segment.end, segment.generation, segment.detail]


def _work(task: str) -> str:
    return "evaluating" if task.startswith("evaluator-") else "training"


def _merged(segments: Iterable[Segment], resolution: float) -> list[Segment]:
    merged: list[Segment] = []
    for each in segments:
        assert each.end is not None
        if each.end <= each.begin:
            continue
        last = merged[-1] if merged else None
        is_short = each.end - each.begin < resolution
        if last is not None and last.end is not None:
            continues = is_short and last.kind == "mixed" and each.end - last.begin < resolution * 2
            if continues or (last.kind == each.kind and last.generation == each.generation):
                last.end = each.end
                continue
        merged.append(Segment("mixed", each.begin, each.end, each.generation) if is_short else each)
    return merged


_HANDLERS = {
    "run-started": Timeline._run_started,
    "member-joined": Timeline._member_joined,
    "scaled": Timeline._scaled,
    "paused": Timeline._paused,
    "generation-formed": Timeline._generation_formed,
    "task-started": Timeline._task_started,
    "step": Timeline._step,
    "start-times": Timeline._start_times,
    "saved": Timeline._saved,
    "task-exited": Timeline._task_exited,
    "hang": Timeline._hang,
    "restart": Timeline._restart,
    "run-ended": Timeline._run_ended,
}
