"""Which tasks resume from a snapshot. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from paceline.agent.captain.ledger import Unit
from paceline.plan import Plan, Task


def restoring_hosts(plan: Plan, units: Iterable[Unit]) -> set[str]:
    """The hosts whose tasks resume from a snapshot: all hosts of a group, or the chief's of a parameter-server job."""
    return {task.host for unit in units for task in unit.tasks if restores(plan, task)}


def restores(plan: Plan, task: Task) -> bool:
    return task.role == "chief" if plan.strategy == "parameter-server" else task.rank >= 0
