"""Waits until a run has ended, has reached a step, or has committed a snapshot."""

from __future__ import annotations

import math
import re
import time
from contextlib import closing
from dataclasses import dataclass
from typing import assert_never

from paceline.client.reading.find_run import Notify, ignore
from paceline.client.reading.refreshed_folder import followed
from paceline.errors import Argument, Call, PacelineError, UsageError
from paceline.storage.snapshots.manifest import parse_id
from paceline.view.files import run_folders
from paceline.view.files.run_folders import Run
from paceline.view.state import run_state, status_reader
from paceline.view.state.event_limits import EventLimits
from paceline.view.state.events import EventFile
from paceline.view.state.run_state import Mark, State
from paceline.view.state.status_reader import Standing
from paceline.view.text.wording import outcome, span

CONDITIONS = "ended, step=N, snapshot or snapshot=STEP"
_POLL_S = 0.1
_QUIET_POLL_S = 0.5  # polling interval if nothing is new for a while: leave the cores to training


class EndedBefore(PacelineError):
    """The run ended, and will never reach the step or commit the snapshot."""

    exit_code = 3


class WaitTimeout(PacelineError, TimeoutError):
    """The time limit has passed. Only the waiting ends: the run, and a change that was requested, continue."""

    exit_code = 124  # as that of timeout(1)


class Deadline:
    """The time limit of a wait for a run."""

    def __init__(self, run: str, timeout: float | None = None) -> None:
        """`timeout`: seconds; None: no limit."""
        if timeout is not None and not timeout >= 0:
            raise UsageError("invalid value", where=Argument("timeout", timeout), remedy="use a number of seconds")
        self._run, self.limit = run, math.inf if timeout is None else timeout
        self.until = time.monotonic() + self.limit

    @property
    def remaining(self) -> float:
        return self.until - time.monotonic()

    def check(self, goal: str, progress: str = "") -> None:
        """Raises WaitTimeout once the limit has passed. `goal`: what the run has not done."""
        if self.remaining <= 0:
            raise self.error(goal, progress)

    def error(self, goal: str, progress: str = "") -> WaitTimeout:
        what = f"{self._run} has not {goal} within {span(self.limit)}"
        remedy = ("see: ", Call("status", self._run))
        return WaitTimeout(f"{what}: {progress}" if progress else what, remedy=remedy)


@dataclass(frozen=True)
class Ended:
    """The run has ended: it succeeded, failed or was stopped."""


@dataclass(frozen=True)
class StepReached:
    """A task has reported this step or a later one, in any generation."""

    step: int


@dataclass(frozen=True)
class SnapshotCommitted:
    """The run has committed a snapshot of this step or a later one. A copy of the snapshot that the run started from
    does not count."""

    step: int = 0


Condition = Ended | StepReached | SnapshotCommitted
ENDED = Ended()


def parse_condition(text: str) -> Condition:
    """
    >>> parse_condition("ended"), parse_condition("step=1000"), parse_condition("snapshot")
    (Ended(), StepReached(step=1000), SnapshotCommitted(step=0))
    """
    kind, _, number = text.partition("=")
    if text == "ended":
        return ENDED
    if text == "snapshot":
        return SnapshotCommitted()
    if kind in ("step", "snapshot") and re.fullmatch("[0-9]{1,18}", number):
        return StepReached(int(number)) if kind == "step" else SnapshotCommitted(int(number))
    raise UsageError("invalid condition", where=Argument("until", text), remedy=f"use {CONDITIONS}")


def wait(run: Run, condition: Condition, deadline: Deadline, notify: Notify = ignore) -> Standing:
    """Returns the state of the run once the condition is met, immediately if it is already met. A run on a cluster is
    followed in the meantime.

    WaitTimeout: the deadline has passed. EndedBefore: the run ended before it met the condition.
    """
    state = State()
    with (
        followed(run, follow=True, notify=notify, until=deadline.until) as has_ended,
        closing(EventFile(run.folder, admit=EventLimits().admit)) as events,
    ):
        pause = _POLL_S
        while True:
            is_over = has_ended()
            has_news = False
            while new := events.read():
                has_news = True
                for event, _ in new:
                    run_state.fold([event], state)
                    if _is_met(condition, state.steps, state.committed):
                        return status_reader.read(run)
            if is_over and (standing := _ended(run)) is not None:
                # The report of a run on a cluster may tell more than the events that could be read.
                if isinstance(condition, Ended) or _is_met(condition, _steps(standing), standing.state.committed):
                    return standing
                raise _ended_before(condition, standing)
            goal = "ended" if isinstance(condition, Ended) else _goal(condition)
            deadline.check(goal, _progress(condition, state.steps))
            pause = _POLL_S if has_news else min(_QUIET_POLL_S, 1.5 * pause)
            time.sleep(max(0.0, min(pause, deadline.remaining)))


def _ended(run: Run) -> Standing | None:
    """The final state; None: its supervisor has not started yet."""
    if not run.folder.is_dir() or run_folders.deleted(run.folder):
        raise PacelineError(f"{run.name} was deleted")
    standing = status_reader.read(run)
    return None if standing.report.get("status") in run_state.LIVE else standing


def _is_met(condition: Condition, steps: int, committed: Mark | None) -> bool:
    if isinstance(condition, Ended):
        return False  # events do not show whether the supervisor has exited
    if isinstance(condition, StepReached):
        return steps >= condition.step
    if isinstance(condition, SnapshotCommitted):
        return committed is not None and committed.step >= condition.step and not _is_copy(committed)
    assert_never(condition)


def _is_copy(mark: Mark) -> bool:
    """Whether this is the snapshot of another run that the run started from."""
    snapshot = parse_id(mark.snapshot)
    return snapshot is not None and snapshot.generation == 0


def _steps(standing: Standing) -> int:
    reported = standing.report.get("steps")
    return max(standing.state.steps, reported if isinstance(reported, int) else 0)


# ---- messages


def _goal(condition: StepReached | SnapshotCommitted) -> str:
    if isinstance(condition, StepReached):
        return f"reached step {condition.step}"
    return f"committed a snapshot of step {condition.step} or later" if condition.step else "committed a snapshot"


def _progress(condition: Condition, steps: int) -> str:
    if not isinstance(condition, StepReached):
        return ""
    return f"its last step is {steps}" if steps else "it has reported no steps"


def _ended_before(condition: StepReached | SnapshotCommitted, standing: Standing) -> EndedBefore:
    status, reason = str(standing.report.get("status")), str(standing.report.get("reason") or "")
    details = [_progress(condition, _steps(standing)), reason if status != "succeeded" else ""]
    text = "; ".join(filter(None, details))
    what = f"{standing.run} {outcome(status)}" + (f" before it {_goal(condition)}" if status in run_state.ENDED else "")
    return EndedBefore(f"{what}: {text}" if text else what)
