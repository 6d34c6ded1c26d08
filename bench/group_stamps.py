"""What a run whose group changes its size has done, from the stamps of its steps."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from measure import Stamp


@dataclass(frozen=True)
class Change:
    """Seconds that it took a group to continue with other hosts."""

    next_step: float  # from the event to the first step of the next group
    paused: float  # from the last step of one group to the first of the next
    without_new: float  # from a step to the next one that no group had done before, at the longest


def groups(stamps: Sequence[Stamp]) -> list[int]:
    """The groups that have done a step, oldest first: each is named by the time when it was formed."""
    return sorted({each.pid for each in stamps})


def size(stamps: Sequence[Stamp], group: int) -> int:
    return len({each.rank for each in stamps if each.pid == group})


def change(stamps: Sequence[Stamp], old: int, since: float) -> Change | None:
    """After an event at that time in the group `old`; None: the next group has done no step yet that is new."""
    later = [each for each in stamps if each.pid > old]
    before = [each for each in stamps if each.pid <= old]
    if not later or not before:
        return None
    last, first = max(each.at for each in before), min(each.at for each in later)
    new = new_steps(stamps)
    begins = max((at for at, _ in new if at <= since), default=since)
    times = [begins, *(at for at, _ in new if at > since)]
    if times[-1] < first:
        return None
    until = next(number for number, at in enumerate(times) if at >= first)
    without_new = max(after - each for each, after in itertools.pairwise(times[: until + 1]))
    return Change(first - since, first - last, without_new)


def new_steps(stamps: Sequence[Stamp]) -> list[tuple[float, int]]:
    """For each step: when it was done for the first time, and by how many tasks."""
    sizes = {group: size(stamps, group) for group in groups(stamps)}
    steps: list[tuple[float, int]] = []
    newest = 0
    for each in sorted(stamps, key=lambda each: each.at):
        if each.step > newest:
            newest = each.step
            steps.append((each.at, sizes[each.pid]))
    return steps


def work(stamps: Sequence[Stamp], since: float, until: float) -> int:
    """New steps of single tasks: twice as many tasks do twice as much in a step."""
    return sum(tasks for at, tasks in new_steps(stamps) if since <= at < until)
