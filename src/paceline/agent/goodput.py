"""The time of a run by kind, derived from its events one by one: how much of it was training that counts. Pure.

The kinds, which docs/resources.md explains, add up to the time between the first and the last event, in milliseconds.
Time becomes `lost` when a generation starts from a snapshot: what was trained after that snapshot is moved from
`training`. What this needs is small, and is part of the event that begins a new events.jsonl (see event_file.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from datetime import datetime, timedelta
from typing import Any

from paceline.agent.run_files import stamp

KINDS = (
    "queued", "waiting", "starting", "training", "stalled", "lost", "restarting", "paused", "evaluating", "ending",
)  # fmt: skip
MOST_POINTS = 128  # of the curve that says how long it took to train up to a step
EXACT_POINTS = 64  # the newest of them are not thinned out

# Phases
FORMING = "forming"  # no task trains: hosts are missing, or the next generation is being prepared
STARTING = "starting"  # tasks were started, and have not reported a step
TRAINING = "training"
FINISHED = "finished"  # training has succeeded
PAUSED = "paused"
ENDING = "ending"
OVER = "over"
_PHASES = (FORMING, STARTING, TRAINING, FINISHED, PAUSED, ENDING, OVER)

_EPOCH = datetime(1970, 1, 1)
_MILLISECOND = timedelta(milliseconds=1)
_SNAPSHOT = re.compile(r"step-([0-9]{1,16})(?:-g([0-9]{1,8}))?$")
_LARGEST = 2**53

Event = Mapping[str, Any]


class Goodput:
    # These follow from other attributes, and are not part of `vars`, so that they are not saved. Without them, whole
    # sets would be compared for each event, which takes long if there are thousands of hosts.
    __slots__ = ("__dict__", "_missing_hosts", "_missing_needed", "_undecided")

    def __init__(self) -> None:
        self._times = dict.fromkeys(KINDS, 0)  # milliseconds
        self._first: int | None = None  # when the run began, in milliseconds since 1970
        self._now = 0
        self._is_complete = False  # the first event was the first one of the run
        self._is_partial = False  # the first event was that of a captain that has replaced another one
        self._phase = FORMING
        self._has_formed = False  # a generation has started
        self._is_restart = False  # the current generation is not the first one
        self._has_steps = False  # a task that trains has reported a step, in any generation
        self._before_steps = 0  # `training` of this generation, while no task has ever reported a step
        self._curve: list[list[int]] = []  # a step, and `training` when it was done; both increase
        self._stalled = [0, -1]  # the newest snapshot whose stall was added: its generation and step
        self._strategy = ""
        self._continues = False  # `restart.scope` is set: training continues when a task fails
        self._running: set[str] = set()  # tasks that train, if so
        self._hosts: set[str] = set()
        self._joined: set[str] = set()
        self._has_joined = False  # a host has joined
        self._needed: set[str] = set()  # hosts of tasks that train together
        self._deciding: set[str] = set()  # tasks whose success ends training
        self._succeeded: set[str] = set()
        self._evaluators: set[str] = set()  # those that run
        self._compare_sets()

    def _compare_sets(self) -> None:
        self._missing_hosts = self._hosts - self._joined
        self._missing_needed = self._needed - self._joined
        self._undecided = self._deciding - self._succeeded

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Goodput) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    # ---- what was found

    @property
    def has_begun(self) -> bool:
        return self._first is not None

    @property
    def began(self) -> float | None:
        """When the run began, in seconds since 1970; None: the events do not begin with its first one."""
        is_known = self._is_complete and not self._is_partial
        return self._first / 1000 if self._first is not None and is_known else None

    @property
    def has_steps(self) -> bool:
        return self._has_steps

    def milliseconds(self, until: float | None = None) -> dict[str, int]:
        """By kind. `until`: of a run that continues, the time now, in seconds since 1970."""
        times = dict(self._times)
        if until is not None and self.has_begun and self._phase != OVER:
            times[self._kind()] += max(0, int(until * 1000) - self._now)
        return times

    def seconds(self, until: float | None = None) -> dict[str, float]:
        """By kind, in the order of KINDS."""
        return {kind: ms / 1000 for kind, ms in self.milliseconds(until).items()}

    def to_report(self, until: float | None = None) -> dict[str, Any] | None:
        """For report.json; None: nothing has happened yet."""
        if not self.has_begun:
            return None
        since = stamp(self._first / 1000) if self._is_partial and self._first is not None else None
        return report_of(self.milliseconds(until), self._has_steps, since)

    # ---- events

    def add(self, event: Event) -> None:
        """Events of any kind, in order."""
        if event.get("by") or self._phase == OVER:
            return  # `by`: written on another machine, whose clock may differ
        kind = event.get("event")
        if kind == "rotated":  # its time is that of the machine that has this copy of the events
            self._load(event.get("goodput"))
            return
        if kind == "clock-changed":
            self._shift_clock(event.get("shift_s"))
        self._is_complete = self._is_complete or (kind == "run-started" and not self.has_begun)
        self._advance(_milliseconds(event.get("at")))
        handle = _HANDLERS.get(kind) if isinstance(kind, str) else None
        if handle is not None:
            handle(self, event)

    def add_all(self, events: Iterable[Event]) -> Goodput:
        for event in events:
            self.add(event)
        return self

    def _shift_clock(self, shift: Any) -> None:
        """The clock was set: no time has passed. Afterwards, `at` is of the new clock."""
        if isinstance(shift, (int, float)) and abs(shift) < _LARGEST / 1000 and self.has_begun:
            self._now = max(0, self._now + round(shift * 1000))

    def _advance(self, at: int | None) -> None:
        if at is None:
            return
        if self._first is None:
            self._first = self._now = at
        passed = at - self._now
        if passed <= 0:
            return  # the clock of another captain, or one that was set back while there was none
        self._now = at
        self._times[self._kind()] += passed
        if self._phase == TRAINING and not self._has_steps:
            self._before_steps += passed

    def _kind(self) -> str:
        """Of the time that passes now."""
        if self._phase == TRAINING:
            return "training"
        if self._phase == STARTING:
            return "restarting" if self._is_restart else "starting"
        if self._phase == FINISHED and self._evaluators:
            return "evaluating"
        if self._phase == PAUSED:
            return "paused"
        if self._phase != FORMING:
            return "ending"
        if self._has_formed:
            return "waiting" if self._missing_needed else "restarting"
        if not self._has_joined:
            return "queued"
        return "waiting" if self._missing_hosts else "starting"

    def _run_started(self, event: Event) -> None:
        tasks, hosts = _names(event.get("tasks")), _names(event.get("hosts"))
        self._strategy, self._hosts = str(event.get("strategy")), set(hosts)
        chiefs = {name for name in tasks if name.startswith("chief-")}
        self._continues = event.get("restart_scope") is not None
        self._deciding = chiefs or {name for name in tasks if name.startswith("worker-")}
        self._missing_hosts, self._undecided = self._hosts - self._joined, self._deciding - self._succeeded

    def _scaled(self, event: Event) -> None:
        role, tasks = f"{event.get('role')}-", set(_names(event.get("tasks")))
        if next(iter(self._deciding), "").startswith(role):  # all have one role
            self._deciding, self._undecided = tasks, tasks - self._succeeded

    def _paused(self, event: Event) -> None:
        """Hosts are released: once the run is resumed, it waits for them."""
        self._phase, self._joined = PAUSED, set()
        self._missing_hosts, self._missing_needed = set(self._hosts), set(self._needed)

    def _resumed(self, event: Event) -> None:
        self._phase = FORMING if self._phase == PAUSED else self._phase

    def _member_joined(self, event: Event) -> None:
        host = str(event.get("host"))
        self._has_joined = True
        self._joined.add(host)
        self._missing_hosts.discard(host)
        self._missing_needed.discard(host)

    def _member_lost(self, event: Event) -> None:
        host = str(event.get("host"))
        self._joined.discard(host)
        self._missing_hosts.update({host} & self._hosts)
        self._missing_needed.update({host} & self._needed)

    def _generation_formed(self, event: Event) -> None:
        tasks = _names(event.get("tasks"))
        self._evaluators.update(filter(_is_evaluator, tasks))
        if not any(map(self._is_in_group, tasks)):
            return
        self._succeeded.difference_update(tasks)
        self._undecided.update(task for task in tasks if task in self._deciding)
        if self._does_any_train():
            return
        self._go_back(max(0, _snapshot_of(event.get("restore"))[1]))
        if absent := _names(event.get("absent")):  # an elastic job does not need them to succeed, or to be there
            self._succeeded.update(absent)
            self._undecided.difference_update(absent)
            self._needed, self._missing_needed = set(), set()
        self._phase, self._is_restart, self._has_formed = STARTING, self._has_formed, True

    def _task_started(self, event: Event) -> None:
        task = str(event.get("task"))
        if _is_evaluator(task):
            self._evaluators.add(task)
        elif self._is_in_group(task):
            self._running.update({task} if self._continues else ())
            host = str(event.get("host"))
            self._needed.add(host)
            self._missing_needed.update({host} - self._joined)
            if self._phase == STARTING and not self._has_steps:
                self._phase = TRAINING  # the program may never report a step

    def _step(self, event: Event) -> None:
        step = event.get("step")
        if _is_evaluator(str(event.get("task"))) or self._phase not in (FORMING, STARTING, TRAINING):
            return
        if not self._has_steps:
            self._move(self._before_steps, "training", "restarting" if self._is_restart else "starting")
            self._has_steps, self._before_steps = True, 0
        self._phase = TRAINING
        self._add_point(step)

    def _saved(self, event: Event) -> None:
        stall, snapshot = event.get("stall_s"), _snapshot_of(event.get("snapshot"))
        is_new = snapshot > self._stalled  # after a restart of the captain, hosts report again what they hold
        if isinstance(stall, (int, float)) and 0 < stall < _LARGEST and is_new:
            self._stalled = snapshot
            moved = self._move(int(stall * 1000), "training", "stalled")
            self._before_steps = max(0, self._before_steps - moved)
        self._add_point(event.get("step"))

    def _task_exited(self, event: Event) -> None:
        task = str(event.get("task"))
        self._evaluators.discard(task)
        self._running.discard(task)
        if self._phase not in (STARTING, TRAINING) or _is_evaluator(task):
            return
        if event.get("code") == 0 and not event.get("expected"):
            self._succeeded.add(task)
            self._undecided.discard(task)
            self._phase = self._phase if self._undecided else FINISHED
        elif self._is_in_group(task) and not self._does_any_train():
            self._phase = FORMING

    def _does_any_train(self) -> bool:
        """Whether tasks continue although others have failed or start again."""
        return self._continues and self._phase in (STARTING, TRAINING) and bool(self._running)

    def _stopped(self, event: Event) -> None:
        """Tasks hang, or are restarted for another reason."""
        tasks = _names(event.get("tasks")) + _names(event.get("scope"))
        if any(map(self._is_in_group, tasks)) and self._phase != ENDING and not self._does_any_train():
            self._phase = FORMING

    def _captain_returned(self, event: Event) -> None:
        """If it knows of no generation, the events of an earlier captain are lost, for example with its node."""
        if self._has_formed or not _is_count(event.get("generation")) or not event["generation"]:
            return
        self._is_partial = self._has_formed = True
        if event.get("adopted") and self._phase == FORMING:
            self._phase = TRAINING
            for kind in ("queued", "waiting", "starting"):  # its tasks ran while it started
                self._move(self._times[kind], kind, "training")

    def _ending(self, event: Event) -> None:
        self._phase = FINISHED if self._phase == FINISHED else ENDING

    def _run_ended(self, event: Event) -> None:
        self._phase = OVER

    def _is_in_group(self, task: str) -> bool:
        """Whether training stops when it fails."""
        return not _is_evaluator(task) and not (self._strategy == "parameter-server" and task.startswith("worker-"))

    # ---- what is lost

    def _move(self, ms: int, origin: str, target: str) -> int:
        ms = min(ms, self._times[origin])
        self._times[origin] -= ms
        self._times[target] += ms
        for point in reversed(self._curve):
            if point[1] <= self._times["training"]:
                break
            point[1] = self._times["training"]
        return ms

    def _add_point(self, step: Any) -> None:
        if type(step) is not int or not 0 <= step < _LARGEST or (self._curve and step <= self._curve[-1][0]):
            return
        self._curve.append([step, self._times["training"]])
        if len(self._curve) > MOST_POINTS:
            old, new = self._curve[:-EXACT_POINTS], self._curve[-EXACT_POINTS:]
            self._curve = old[::2] + new

    def _go_back(self, step: int) -> None:
        """The next generation starts from the snapshot of this step."""
        kept = self._trained_up_to(step)
        self._move(self._times["training"] - kept, "training", "lost")
        self._curve = [point for point in self._curve if point[0] < step] + [[step, kept]]
        self._before_steps = 0

    def _trained_up_to(self, step: int) -> int:
        """How long it took to train up to this step, in milliseconds."""
        before: list[int] | None = None
        for point in self._curve:
            if point[0] > step:
                if before is None:
                    return 0
                return before[1] + (point[1] - before[1]) * (step - before[0]) // (point[0] - before[0])
            before = point
        return 0 if before is None else before[1]

    # ---- for the next reader

    def to_json(self) -> dict[str, Any]:
        return {name[1:]: _plain(value) for name, value in vars(self).items()}

    def _load(self, data: Any) -> None:
        """Continues from what `to_json` returned. What is damaged is ignored."""
        if not isinstance(data, dict):
            return
        data = {"is_partial": False, "continues": False, "running": [], **data}  # earlier versions did not write them
        if isinstance(data.get("times"), dict):
            data["times"] = {"paused": 0, **data["times"]}
        if not _is_valid(data):
            return
        for name, value in vars(self).items():
            loaded = data[name[1:]]
            setattr(self, name, set(loaded) if isinstance(value, set) else deepcopy(loaded))
        self._compare_sets()


_HANDLERS = {
    "run-started": Goodput._run_started,
    "scaled": Goodput._scaled,
    "paused": Goodput._paused,
    "resumed": Goodput._resumed,
    "member-joined": Goodput._member_joined,
    "member-lost": Goodput._member_lost,
    "generation-formed": Goodput._generation_formed,
    "task-started": Goodput._task_started,
    "step": Goodput._step,
    "saved": Goodput._saved,
    "task-exited": Goodput._task_exited,
    "hang": Goodput._stopped,
    "restart": Goodput._stopped,
    "captain-returned": Goodput._captain_returned,
    "ending": Goodput._ending,
    "run-ended": Goodput._run_ended,
}


def report_of(times: Mapping[str, int], reports_steps: bool, since: str | None = None) -> dict[str, Any]:
    """`times`: milliseconds by kind. `share`: of the time in which the run trained, and what counts of it. `since`: the
    time before is unknown."""
    wall = sum(times.values())
    return {
        "share": round(times.get("training", 0) / wall, 4) if wall else 0.0,
        "wall_s": wall / 1000,
        "seconds": {kind: ms / 1000 for kind, ms in times.items()},
        "reports_steps": reports_steps,
        **({} if since is None else {"since": since}),
    }


def with_queue(report: Mapping[str, Any], queued: float) -> dict[str, Any]:
    """What `report_of` returned, for a run that was queued for so many seconds before it had a captain."""
    times = {kind: round(seconds * 1000) for kind, seconds in report["seconds"].items()}
    times["queued"] = times.get("queued", 0) + max(0, round(queued * 1000))
    return report_of(times, report.get("reports_steps", True), report.get("since"))


def _milliseconds(at: Any) -> int | None:
    """Of a time in an event, such as 2026-11-15T04:30:11.123Z, since 1970.

    >>> _milliseconds("1970-01-01T00:01:00.500Z")
    60500
    """
    try:
        return (datetime.fromisoformat(at[:23]) - _EPOCH) // _MILLISECOND if isinstance(at, str) else None
    except (TypeError, ValueError):
        return None  # TypeError: it has a time zone


def _snapshot_of(name: Any) -> list[int]:
    """The generation and the step of a snapshot.

    >>> _snapshot_of("step-300-g2"), _snapshot_of(None)
    ([2, 300], [0, -1])
    """
    match = _SNAPSHOT.match(name) if isinstance(name, str) else None
    return [int(match[2] or 0), int(match[1])] if match else [0, -1]


def _is_evaluator(task: str) -> bool:
    return task.startswith("evaluator-")


def _names(value: Any) -> list[str]:
    return [str(name) for name in value] if isinstance(value, list) else []


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set) else value


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _LARGEST


def _is_valid(data: dict[str, Any]) -> bool:
    for name, value in vars(Goodput()).items():
        loaded = data.get(name[1:])
        if isinstance(value, set):
            is_valid = isinstance(loaded, list) and all(isinstance(each, str) for each in loaded)
        elif isinstance(value, (bool, str)):
            is_valid = type(loaded) is type(value)
        else:
            is_valid = name in ("_times", "_curve", "_stalled") or _is_count(loaded)
        if not is_valid:
            return False
    times, curve, stalled = data["times"], data["curve"], data["stalled"]
    pairs = [*curve, stalled] if isinstance(curve, list) and len(curve) <= MOST_POINTS else [None]
    return (
        data["phase"] in _PHASES
        and isinstance(times, dict)
        and set(times) == set(KINDS)
        and all(map(_is_count, times.values()))
        and sum(times.values()) == data["now"] - data["first"]
        and all(isinstance(pair, list) and len(pair) == 2 and all(type(n) is int for n in pair) for pair in pairs)
    )
