"""The captain's books: how far the run is, which hosts are there, which attempts may be running, and what each unit
still lacks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.agent import events as ev
from paceline.agent.budget import Budget, Failure
from paceline.plan import ALONE, BEFORE, Plan, Task

RETURNING, LIVE, CLOSING, ENDING, OVER = "returning", "live", "closing", "ending", "over"  # the run
WAITING, RUNNING, STOPPING, DONE = "waiting", "running", "stopping", "done"  # a unit of it


@dataclass
class Member:
    host: str
    connected: bool = False
    instance: str = ""
    place: str = ""
    lease_until: float = 0.0
    offers: dict[str, str] = field(default_factory=dict)
    memory: float = 0.0
    left: bool = False


@dataclass
class Unit:
    """Tasks that restart together."""

    name: str
    kind: str
    tasks: tuple[Task, ...]
    phase: str = WAITING
    since: float | None = None  # when it began to wait, or to stop
    not_before: float = 0.0
    failures: list[Failure] = field(default_factory=list)
    budget: Budget = field(default_factory=Budget)
    lacking: set[str] = field(default_factory=set)  # tasks whose host is away or has not offered an address
    live: set[str] = field(default_factory=set)  # tasks that may be running

    def turn(self, phase: str, now: float | None = None) -> None:
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
        self.task = {task.name: task for unit in self.units for task in unit.tasks}
        self._on_host = {host.name: host.tasks for host in plan.hosts}
        for task in () if self.ingest is None else self.ingest.tasks:
            self._on_host[task.host] = (*self._on_host[task.host], task.name)
        self.live: dict[str, int] = {}  # task -> attempt that may be running
        self.ghosts: list[tuple[float, dict[str, int]]] = []  # attempts on replaced hosts, until their lease ends
        self.succeeded: set[str] = set()
        self.waited: set[str] = set()  # units whose failure the captain before this one had counted already
        self.attempts: dict[str, int] = {}
        self.addresses: dict[str, str] = {}

    def held(self, host: str) -> dict[str, int]:
        """What runs on the host as it is now; attempts on an earlier instance of it are ghosts."""
        ghosts = self.ghostly()
        return {name: self.live[name] for name in self._on_host[host] if name in self.live and name not in ghosts}

    def ghostly(self) -> set[str]:
        return {name for _, held in self.ghosts for name in held}

    def anything_live(self) -> bool:
        return bool(self.live) or bool(self.ghosts)

    def lives(self, task: str, attempt: int) -> None:
        self.attempts[task] = attempt
        self.live[task] = attempt
        self.unit_of[task].live.add(task)

    def dies(self, task: str) -> None:
        del self.live[task]
        self.unit_of[task].live.discard(task)

    def offer(self, member: Member, offers: Mapping[str, str]) -> None:
        for name, address in offers.items():
            if name in self._on_host[member.host]:
                member.offers[name] = address
                self.unit_of[name].lacking.discard(name)

    def withdraw(self, member: Member) -> None:
        member.offers = {}
        for name in self._on_host[member.host]:
            self.unit_of[name].lacking.add(name)

    def begin(self, task: Task) -> int:
        """The next attempt of a task, at the address its host has offered."""
        self.succeeded.discard(task.name)
        self.lives(task.name, self.attempts.get(task.name, 0) + 1)
        offer = self.members[task.host].offers.pop(task.name)
        self.unit_of[task.name].lacking.add(task.name)
        if self._plan.strategy != "parameter-server" or task.name not in self.addresses:
            self.addresses[task.name] = offer  # a chief holds on to the addresses of its servers
        return self.attempts[task.name]

    def ends(self, names: Iterable[str], how: str, grace: float = 0.0) -> list[ev.End]:
        """To those of these tasks that can be asked to end: what runs on a connected host."""
        wanted: dict[str, dict[str, int]] = {}
        ghosts = self.ghostly()
        for name in names:
            if name in self.live and name not in ghosts and self.members[self.task[name].host].connected:
                wanted.setdefault(self.task[name].host, {})[name] = self.live[name]
        return [ev.End(host, tasks, how, grace) for host, tasks in wanted.items()]

    def missing(self) -> list[str]:
        """Hosts that some unit waits for."""
        wanted = {task.host for unit in self.units if unit.phase == WAITING for task in unit.tasks}
        return [host for host in self.members if host in wanted and not self.members[host].connected]

    def saved(self) -> dict[str, Any]:
        return {
            "attempts": self.attempts,
            "succeeded": sorted(self.succeeded),
            "addresses": self.addresses,
            "budgets": {unit.name: unit.budget.saved() for unit in self.units},
            "given_up": [unit.name for unit in self.units if unit.phase == DONE],
            "waiting": [unit.name for unit in self.units if unit.phase == WAITING],
        }

    def load(self, saved: dict[str, Any]) -> None:
        self.attempts = dict(saved["attempts"])
        self.succeeded = set(saved["succeeded"])
        self.addresses = dict(saved["addresses"])
        self.waited = set(saved["waiting"])
        for unit in self.units:
            unit.budget.load(saved["budgets"].get(unit.name, {}))
            if unit.name in saved["given_up"]:
                unit.phase = DONE


def _units(plan: Plan) -> list[Unit]:
    together: dict[str, list[Task]] = {}
    alone: list[Unit] = []
    kinds = {role.name: role.restarts for role in plan.roles}
    for task in plan.tasks:
        if kinds[task.role] == ALONE:
            alone.append(Unit(task.name, ALONE, (task,), lacking={task.name}))
        else:
            together.setdefault(kinds[task.role], []).append(task)
    if plan.ingest_task is not None:
        task = plan.ingest_task
        alone.append(Unit(task.name, BEFORE, (task,), lacking={task.name}))
    units = [Unit(kind, kind, tuple(tasks), lacking={t.name for t in tasks}) for kind, tasks in together.items()]
    return units + alone
