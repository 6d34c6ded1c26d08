"""The status of a run, read from its folder: what its events say, its report, and whether it is alive."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.agent.captain import start_times
from paceline.agent.goodput import with_queue
from paceline.view.files import run_files, run_folders
from paceline.view.state import events
from paceline.view.state.event_limits import EventLimits
from paceline.view.state.events import Event, seconds
from paceline.view.state.run_state import ENDED, State, fold

GONE = "the supervisor ended without a report: it was killed, or this machine went down"
NEVER = "it was never started: its folder contains no events"
ABANDONED = "its submission was interrupted, so it will never start; `paceline delete {}` removes it"
DAMAGED = "damaged"


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
    with closing(StatusReader(run)) as reader:
        return reader.read(over)


class StatusReader:
    """Reads the state of a run again and again: each event only once, even if events.jsonl is replaced."""

    def __init__(self, run: run_folders.Run, on_event: Callable[[Event], None] | None = None) -> None:
        """`on_event`: called for each event, after it has changed the state."""
        self._run, self._on_event = run, on_event
        self._limits = EventLimits()
        self._file = events.EventFile(run.folder, admit=self._limits.admit)
        self._state = State()

    def read(self, over: bool = False) -> Standing:
        """`over`: the caller knows that the run is not alive. The next call changes the objects in the state."""
        # The lock first: a supervisor writes its report before it releases the lock.
        alive = not over and run_folders.alive(self._run.folder)
        self._read_events()
        problems = [self._file.problem] if self._file.problem else []
        left_out = [*self._file.left_out, *self._limits.left_out]
        return assess(self._run, self._state, problems, alive, over, left_out)

    def _read_events(self) -> None:
        while batch := self._file.read():
            for event, _ in batch:
                fold((event,), self._state)
                if self._on_event is not None:
                    self._on_event(event)

    def close(self) -> None:
        self._file.close()


def assess(
    run: run_folders.Run, state: State, event_problems: Sequence[str], alive: bool, over: bool = False,
    left_out: Sequence[str] = (),
) -> Standing:  # fmt: skip
    """The status of a run whose events were folded into this state, which is not changed. `alive`: whether the run was
    alive before its events were read. `over`: the caller knows that the run is not alive. `left_out`: what exceeds the
    limits of readers, as text; it does not count as damage."""
    files, state = _Files(run.folder), replace(state)
    info, report = files.info.fields or {}, files.report.fields
    problems = (*files.problems, *event_problems, *left_out)
    is_open = report is None and not alive and state.status not in ENDED  # nothing says how it ended
    if is_open and (files.is_damaged or event_problems):
        state.status, state.reason = DAMAGED, "; ".join((*files.problems, *event_problems))
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
        "restarts": state.followed_restarts if state.status in ENDED else state.restarts,
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
    event = state.pause_event or state.waiting
    if event is None:
        return ""
    from paceline.view.text.wording import describe

    return describe(event)


def _just_created(folder: Path, state: State) -> bool:
    """A new folder has neither a lock nor events for a moment, until the supervisor has started."""
    if state.started:
        return False
    try:
        return time.time() - folder.stat().st_mtime < run_folders.STARTING_S
    except OSError:
        return False
