"""The captain's ledger: the phase of the run, its members, its units, and the attempts that may be running."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.agent.captain import events as ev
from paceline.agent.captain import instructions as ins
from paceline.agent.captain.budget import Budget, Failure
from paceline.plan import ALONE, BEFORE, Plan, Task

RETURNING, LIVE, CLOSING, ENDING, OVER = "returning", "live", "closing", "ending", "over"  # phases of the run
WAITING, RUNNING, STOPPING, DONE = "waiting", "running", "stopping", "done"  # phases of a unit


@dataclass
class Member:
    host: str
    connected: bool = False
    instance: str = ""
    place: str = ""
    lease_until: float = 0.0
    offers: dict[str, str] = field(default_factory=dict)
    memory: float = 0.0
    resources_due: float = 0.0  # when its resources may be reported again
    has_left: bool = False
    serves: str = ""  # how other hosts get its snapshots


@dataclass
class Unit:
    """Tasks that are restarted together."""

    name: str
    kind: str
    tasks: tuple[Task, ...]
    phase: str = WAITING
    since: float | None = None  # when it entered WAITING or STOPPING
    not_before: float = 0.0
    failures: list[Failure] = field(default_factory=list)
    budget: Budget = field(default_factory=Budget)
    not_ready: set[str] = field(default_factory=set)  # tasks whose host is not connected or has not offered an address
    live: set[str] = field(default_factory=set)  # tasks that may be running

    def enter(self, phase: str, now: float | None = None) -> None:
        self.phase, self.since = phase, now


class Ledger:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.phase = LIVE
        self.generation = 0
        self.members = {host.name: Member(host.name) for host in plan.hosts}
        self.units = _units(plan)
        self.ingest = next((unit for unit in self.units if unit.kind == BEFORE), None)
        self.unit_of = {task.name: unit for unit in self.units for task in unit.tasks}
        self.tasks = {task.name: task for unit in self.units for task in unit.tasks}
        self._on_host = {host.name: host.tasks for host in plan.hosts}
        for task in () if self.ingest is None else self.ingest.tasks:
            self._on_host[task.host] = (*self._on_host[task.host], task.name)
        self.live: dict[str, int] = {}  # task -> the attempt that may be running
        self.ghosts: list[tuple[float, dict[str, int]]] = []  # attempts on replaced hosts, until their lease expires
        self.succeeded: set[str] = set()
        self.unmet: set[str] = set()  # of these, rank 0 if it ended without any task having used its address
        self.waiting_before: set[str] = set()  # units whose failure the previous captain has already counted
        self.attempts: dict[str, int] = {}
        self.addresses: dict[str, str] = {}

    def running_on(self, host: str) -> dict[str, int]:
        """Task -> attempt on the current instance of the host; attempts on earlier instances are ghosts."""
        ghosts = self.ghost_tasks()
        return {name: self.live[name] for name in self._on_host[host] if name in self.live and name not in ghosts}

    def ghost_tasks(self) -> set[str]:
        return {name for _, attempts in self.ghosts for name in attempts}

    def is_anything_live(self) -> bool:
        return bool(self.live) or bool(self.ghosts)

    def mark_live(self, task: str, attempt: int) -> None:
        self.attempts[task] = attempt
        self.live[task] = attempt
        self.unit_of[task].live.add(task)

    def mark_ended(self, task: str) -> None:
        del self.live[task]
        self.unit_of[task].live.discard(task)

    def mark_succeeded(self, exit: ev.TaskExit) -> None:
        self.succeeded.add(exit.task)
        (self.unmet.add if exit.listened is False else self.unmet.discard)(exit.task)

    def add_offers(self, member: Member, offers: Mapping[str, str]) -> None:
        for name, address in offers.items():
            if name in self._on_host[member.host]:
                member.offers[name] = address
                self.unit_of[name].not_ready.discard(name)

    def withdraw_offers(self, member: Member) -> None:
        member.offers = {}
        for name in self._on_host[member.host]:
            self.unit_of[name].not_ready.add(name)

    def begin_attempt(self, task: Task) -> int:
        """Begin the next attempt of a task, at the address that its host offered. Returns its number."""
        self.succeeded.discard(task.name)
        self.unmet.discard(task.name)
        self.mark_live(task.name, self.attempts.get(task.name, 0) + 1)
        offer = self.members[task.host].offers.pop(task.name)
        self.unit_of[task.name].not_ready.add(task.name)
        if self._plan.strategy != "parameter-server" or task.name not in self.addresses:
            self.addresses[task.name] = offer  # a chief never updates the addresses of its servers
        return self.attempts[task.name]

    def end_instructions(self, names: Iterable[str], how: str, grace: float = 0.0) -> list[ins.EndTasks]:
        """Instructions that end those of these tasks that run on connected hosts."""
        attempts: dict[str, dict[str, int]] = {}
        ghosts = self.ghost_tasks()
        for name in names:
            if name in self.live and name not in ghosts and self.members[self.tasks[name].host].connected:
                attempts.setdefault(self.tasks[name].host, {})[name] = self.live[name]
        return [ins.EndTasks(host, tasks, how, grace) for host, tasks in attempts.items()]

    def missing_hosts(self) -> list[str]:
        """Hosts that are not connected although a unit waits for them."""
        needed = {task.host for unit in self.units if unit.phase == WAITING for task in unit.tasks}
        return [host for host in self.members if host in needed and not self.members[host].connected]

    def to_notes(self) -> dict[str, Any]:
        return {
            "attempts": self.attempts,
            "succeeded": sorted(self.succeeded),
            "unmet": sorted(self.unmet),
            "addresses": self.addresses,
            "budgets": {unit.name: unit.budget.to_notes() for unit in self.units},
            "given_up": [unit.name for unit in self.units if unit.phase == DONE],
            "waiting": [unit.name for unit in self.units if unit.phase == WAITING],
        }

    def load_notes(self, notes: dict[str, Any]) -> None:
        self.attempts = dict(notes["attempts"])
        self.succeeded = set(notes["succeeded"])
        self.unmet = set(notes.get("unmet", ()))
        self.addresses = dict(notes["addresses"])
        self.waiting_before = set(notes["waiting"])
        for unit in self.units:
            unit.budget.load_notes(notes["budgets"].get(unit.name, {}))
            if unit.name in notes["given_up"]:
                unit.phase = DONE


def _units(plan: Plan) -> list[Unit]:
    together: dict[str, list[Task]] = {}
    alone: list[Unit] = []
    kinds = {role.name: role.restarts for role in plan.roles}
    for task in plan.tasks:
        if kinds[task.role] == ALONE:
            alone.append(Unit(task.name, ALONE, (task,), not_ready={task.name}))
        else:
            together.setdefault(kinds[task.role], []).append(task)
    if plan.ingest_task is not None:
        task = plan.ingest_task
        alone.append(Unit(task.name, BEFORE, (task,), not_ready={task.name}))
    units = [Unit(kind, kind, tuple(tasks), not_ready={t.name for t in tasks}) for kind, tasks in together.items()]
    return units + alone
