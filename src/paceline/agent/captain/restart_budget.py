"""How often tasks may restart, counted for each cause, and the delay before a restart."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from paceline.agent.captain.root_cause import Failure

LONGEST_DELAY = 60.0
PLAIN_EXIT = "exit code"  # the location of an error without a traceback begins with it
LONG_RUN = 60.0  # seconds after which a program that reports nothing has probably done some of its work,
STARTS = 10  # if that is also this many times as long as it took to its first output


@dataclass(frozen=True)
class Verdict:
    give_up: bool
    reason: str
    delay: float
    count: int
    signs_of_work: str = ""  # why the same error may be tried again


@dataclass
class Budget:
    """Restarts since the last new step or snapshot, counted per cause."""

    counts: dict[str, int] = field(default_factory=dict)
    last_error: str = ""
    highest_step: int = -1  # of a unit that restarts while others continue: its own

    def record(self, failure: Failure, limit: int, reports_steps: bool = True) -> Verdict:
        """`reports_steps`: the program has reported a step, in any generation. If it has not, it may have made progress
        that is not known here: signs of it allow the same error again, but do not reset any count."""
        count = self.counts[failure.cause] = self.counts.get(failure.cause, 0) + 1
        # An error that looks like a lost peer may be temporary, even if no peer was lost.
        is_own_error = failure.cause == "program-error" and not failure.survivor
        error = f"{failure.cause} {failure.location}" if is_own_error else ""
        is_repeated = bool(error) and error == self.last_error
        self.last_error = error or self.last_error
        signs_of_work = failure.signs_of_work if is_repeated and not reports_steps else ""
        summary = f"{failure.task}: {failure.detail}"
        if is_repeated and limit > 0 and not signs_of_work:
            return Verdict(True, f"{summary} ({_repetition(failure, reports_steps)})", 0.0, count)
        if count > limit:
            repeated = f"the cause {failure.cause} occurred {count} times without a new step or snapshot"
            exceeded = f" ({repeated}; restart.limit is {limit})"
            return Verdict(True, summary + (exceeded if limit else " (restart.limit is 0)"), 0.0, count)
        total = sum(self.counts.values())
        delay = 0.0 if total < 2 else min(LONGEST_DELAY, 2.0 ** (total - 2))
        return Verdict(False, summary, delay, count, signs_of_work)

    def reset(self) -> None:
        self.counts.clear()
        self.last_error = ""

    def on_step(self, step: int) -> None:
        if step > self.highest_step:
            self.highest_step = step
            self.reset()

    def to_notes(self) -> dict[str, Any]:
        own = {} if self.highest_step < 0 else {"highest_step": self.highest_step}
        return {"counts": dict(self.counts), "last_error": self.last_error, **own}

    def load_notes(self, notes: dict[str, Any]) -> None:
        self.counts = dict(notes.get("counts", {}))
        self.last_error = notes.get("last_error", "")
        self.highest_step = notes.get("highest_step", -1)


def _repetition(failure: Failure, reports_steps: bool) -> str:
    is_plain = failure.location.startswith(PLAIN_EXIT)
    error = "the same exit code and last line of output" if is_plain else "the same error at the same line"
    counted = "step or snapshot" if reports_steps else "step, snapshot or checkpoint file, and it ran only briefly"
    return f"{error} twice, with no progress in between: no new {counted}"


def signs_of_work(checkpoint: str, ran: float, to_first_output: float) -> str:
    """What shows that a program which reports no steps has done some of its work, for a message; empty: nothing.

    `checkpoint`: a file of its own that it changed. `ran`, `to_first_output`: seconds since its start.
    """
    if checkpoint:
        return f"{checkpoint} had changed"
    if ran >= max(LONG_RUN, STARTS * to_first_output):
        return f"the program had run for {ran:.0f} s"
    return ""
