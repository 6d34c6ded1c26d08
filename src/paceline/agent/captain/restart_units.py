"""Units: which tasks restart together when one of them dies, by their role and `restart.scope`. No I/O."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from paceline.agent.captain.restart_budget import Budget
from paceline.agent.captain.root_cause import Failure
from paceline.plan import ALONE, BEFORE, HOST, OWN, TASK, Plan, Task

WAITING, RUNNING, STOPPING, DONE = "waiting", "running", "stopping", "done"  # phases


@dataclass
class Unit:
    """Tasks that are restarted together."""

    name: str
    kind: str
    all_tasks: tuple[Task, ...]  # of the plan, without hosts that are not wanted: see `Ledger.resize`
    tasks: tuple[Task, ...]  # those that take part in the current generation: in an elastic job, not always the same
    phase: str = WAITING
    since: float | None = None  # when it entered WAITING or STOPPING
    not_before: float = 0.0
    failures: list[Failure] = field(default_factory=list)
    budget: Budget = field(default_factory=Budget)
    not_ready: set[str] = field(default_factory=set)  # tasks whose host is not connected or has not offered an address
    live: set[str] = field(default_factory=set)  # tasks that may be running
    is_resizing: bool = False  # it is being stopped only to continue with other hosts
    is_absent: bool = False  # a worker that the chief of the current generation does not know

    @property
    def restarts_within_generation(self) -> bool:
        """Whether it trains, and restarts while others continue: `restart.scope`."""
        return self.kind in OWN

    def has_succeeded(self, succeeded: Collection[str]) -> bool:
        return all(task.name in succeeded for task in self.all_tasks)

    @property
    def is_whole(self) -> bool:
        return self.tasks == self.all_tasks

    def enter(self, phase: str, now: float | None = None) -> None:
        self.phase, self.since = phase, now


def restart_units(plan: Plan) -> list[Unit]:
    together: dict[tuple[str, str], list[Task]] = {}
    alone: list[Unit] = []
    kinds = {role.name: role.restarts for role in plan.roles}
    for task in plan.tasks:
        kind = kinds[task.role]
        if kind == ALONE:
            alone.append(_unit(task.name, ALONE, [task]))
        else:
            name = {TASK: task.name, HOST: task.host}.get(kind, kind)
            together.setdefault((name, kind), []).append(task)
    if plan.ingest_task is not None:
        alone.append(_unit(plan.ingest_task.name, BEFORE, [plan.ingest_task]))
    return [_unit(name, kind, tasks) for (name, kind), tasks in together.items()] + alone


def _unit(name: str, kind: str, tasks: list[Task]) -> Unit:
    all_tasks = tuple(tasks)
    return Unit(name, kind, all_tasks, all_tasks, not_ready={task.name for task in tasks})
