"""Why something failed, how often that may happen, and how long to wait before trying again."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

LONGEST_DELAY = 60.0


@dataclass(frozen=True)
class Failure:
    cause: str
    task: str
    detail: str
    place: str
    survivor: bool
    at: float
    asked: bool = False  # it was being ended anyway, but its log shows an error of its own
    states: tuple[tuple[str, str], ...] = ()

    def seen(self, task: str, state: str) -> Failure:
        """What a task was doing when it was ended with the others."""
        return replace(self, states=(*self.states, (task, state)))


def blame(failures: list[Failure]) -> Failure:
    """The first failure in time that is nobody else's consequence."""

    def rank(failure: Failure) -> tuple[int, float]:
        order = 3 if failure.survivor else 2 if failure.cause == "hang" else 1 if failure.asked else 0
        return order, failure.at

    first = min(failures, key=rank)
    if first.cause != "hang" and not first.survivor:
        return first
    stopped = [task for task, state in first.states if state == "stopped"]
    if stopped:
        detail = f"{stopped[0]} was stopped; {first.detail}"
        return replace(first, cause="hang", task=stopped[0], detail=detail, place="", survivor=False)
    busy = [(state, task) for task, state in first.states if state.startswith("busy")]
    if busy and first.cause == "hang":
        task = max(busy)[1]
        return replace(first, task=task, detail=f"{first.detail}; {task} was busy without a step")
    return first


@dataclass(frozen=True)
class Verdict:
    give_up: bool
    reason: str
    delay: float
    count: int


@dataclass
class Budget:
    """Restarts since the last new step or snapshot, counted for each cause."""

    counts: dict[str, int] = field(default_factory=dict)
    last_error: str = ""

    def count(self, failure: Failure, limit: int) -> Verdict:
        count = self.counts[failure.cause] = self.counts.get(failure.cause, 0) + 1
        # One that reads like the loss of a peer may have been bad luck, also where no peer was lost.
        own = failure.cause == "program-error" and not failure.survivor
        error = f"{failure.cause} {failure.place}" if own else ""
        repeated = bool(error) and error == self.last_error
        self.last_error = error or self.last_error
        told = f"{failure.task}: {failure.detail}"
        if repeated and limit > 0:
            return Verdict(
                True, f"{told} (the same error at the same place twice, with no progress in between)", 0.0, count
            )
        if count > limit:
            times = f" ({failure.cause} {count} times without a new step or snapshot; restart.limit is {limit})"
            return Verdict(True, told + (times if limit else " (restart.limit is 0)"), 0.0, count)
        total = sum(self.counts.values())
        delay = 0.0 if total < 2 else min(LONGEST_DELAY, 2.0 ** (total - 2))
        return Verdict(False, told, delay, count)

    def reset(self) -> None:
        self.counts.clear()
        self.last_error = ""

    def saved(self) -> dict[str, Any]:
        return {"counts": dict(self.counts), "last_error": self.last_error}

    def load(self, saved: dict[str, Any]) -> None:
        self.counts = dict(saved.get("counts", {}))
        self.last_error = saved.get("last_error", "")
