"""The failures of one restart, and which of them caused the others: the task to name."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Failure:
    cause: str
    task: str
    detail: str
    location: str
    survivor: bool
    at: float
    was_ending: bool = False  # the captain was ending it, but its log shows that it had failed before
    states: tuple[tuple[str, str], ...] = ()
    signs_of_work: str = ""  # what shows that a program did some of its work, if it reports no steps

    def with_state(self, task: str, state: str) -> Failure:
        """Add what a task was doing when it was ended together with the others."""
        return replace(self, states=(*self.states, (task, state)))


def root_cause(failures: list[Failure]) -> Failure:
    """The earliest failure that is not the consequence of another failure."""

    def rank(failure: Failure) -> tuple[int, float]:
        order = 3 if failure.survivor else 2 if failure.cause == "hang" else 1 if failure.was_ending else 0
        return order, failure.at

    first = min(failures, key=rank)
    if first.cause != "hang" and not first.survivor:
        return first
    stopped = [task for task, state in first.states if state == "stopped"]
    if stopped:
        detail = f"the process of {stopped[0]} was suspended; {first.detail}"
        return replace(first, cause="hang", task=stopped[0], detail=detail, location="", survivor=False)
    busy = [(state, task) for task, state in first.states if state.startswith("busy")]
    if busy and first.cause == "hang":
        task = max(busy)[1]
        return replace(first, task=task, detail=f"{first.detail}; {task} was busy but reported no step")
    return first
