"""Which tasks resume from a snapshot. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.plan import Plan, Task


def restoring_hosts(plan: Plan, tasks: Iterable[Task]) -> set[str]:
    """The hosts whose tasks resume from a snapshot: all hosts of a group, or the chief's of a parameter-server job."""
    return {task.host for task in tasks if restores(plan, task)}


def restores(plan: Plan, task: Task) -> bool:
    return task.role == "chief" if plan.strategy == "parameter-server" else task.rank >= 0
