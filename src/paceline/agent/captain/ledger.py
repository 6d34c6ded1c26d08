"""The captain's ledger: the phase of the run, its members, its units, and the attempts that may be running."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.agent.captain import events as ev
from paceline.agent.captain import instructions as ins
from paceline.agent.captain.restart_units import DONE, WAITING, restart_units
from paceline.plan import ALONE, BEFORE, GROUP, LEAD, OWN, Plan, Task

RETURNING, LIVE, CLOSING, ENDING, OVER = "returning", "live", "closing", "ending", "over"  # phases of the run
# Stages of a pause: the group takes a snapshot, tasks end, hosts are released; once resumed, until the group trains.
NOT_PAUSED, SAVING, HALTING, PAUSED, RESUMING = "", "saving", "halting", "paused", "resuming"
STAGES = (NOT_PAUSED, SAVING, HALTING, PAUSED, RESUMING)

NO_ADDRESS = "0.0.0.0:0"


@dataclass
class Member:
    host: str
    connected: bool = False
    instance: str = ""
    agent: int = 0  # counts the agents of this instance
    place: str = ""
    lease_until: float = 0.0
    offers: dict[str, str] = field(default_factory=dict)
    memory: float = 0.0
    resources_due: float = 0.0  # when its resources may be reported again
    has_left: bool = False
    serves: str = ""  # how other hosts get its snapshots
    generation: int = 0  # the highest that it had seen when it joined
    joined_at: float = 0.0
    is_lost: bool = False  # its lease has expired
    has_spare: bool = False  # its agent has had an interpreter that has imported what tasks need
    losses: list[float] = field(default_factory=list)  # when it was lost, or replaced, while its tasks ran


class Ledger:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.phase = LIVE
        self.generation = 0
        self.pause = NOT_PAUSED  # its stage: see `pause`
        self.is_resuming = False  # the run was resumed, and no generation has started since; it may be paused again
        self.members = {host.name: Member(host.name) for host in plan.hosts}
        self.units = restart_units(plan)
        self.ingest = next((unit for unit in self.units if unit.kind == BEFORE), None)
        self.unit_of = {task.name: unit for unit in self.units for task in unit.all_tasks}
        self.tasks = {task.name: task for unit in self.units for task in unit.all_tasks}
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
        self.sizes: dict[str, int] = {}  # by scalable role: the number of hosts that are wanted
        self.unwanted_hosts: list[str] = []  # hosts of the plan that are not to take part
        # Workers of a parameter-server job, which restart on their own; with a chief, it decides what they do.
        servers = plan.strategy == "parameter-server"
        self.workers = [unit for unit in self.units if servers and unit.tasks[0].role == "worker"]
        self.lead = next((unit for unit in self.units if unit.kind == LEAD), None)
        names = {task.name for unit in self.workers for task in unit.tasks}
        names.update(name for name, unit in self.unit_of.items() if unit.kind not in (ALONE, BEFORE))
        self._training = frozenset(names)  # all tasks but evaluators and the ingest
        self._all_in_group = self.group
        self.resize(plan.sizes)

    def resize(self, sizes: Mapping[str, int]) -> None:
        """Scalable roles are to have this many hosts. Hosts that are no longer wanted may take part until the next
        generation starts."""
        self.sizes = {**self.sizes, **sizes}
        wanted = {host.name for host in self._plan.hosts_of_size(self.sizes)} if self.sizes else set(self.members)
        self.unwanted_hosts = [host for host in self.members if host not in wanted]
        for unit in self.units if self.sizes else ():
            if unit.kind == GROUP:
                unit.all_tasks = tuple(task for task in self._all_in_group if task.host in wanted)
                unit.tasks = unit.tasks if self.generation else unit.all_tasks

    @property
    def is_pause_wanted(self) -> bool:
        """Whether a user has paused the run, or it is being paused."""
        return self.pause in (SAVING, HALTING, PAUSED)

    @property
    def is_held(self) -> bool:
        """Whether no task may start. While a pause waits for a snapshot, tasks that restart alone may."""
        return self.pause in (HALTING, PAUSED)

    def running_on(self, host: str) -> dict[str, int]:
        """Task -> attempt on the current instance of the host; attempts on earlier instances are ghosts."""
        ghosts = self.ghost_tasks()
        return {name: self.live[name] for name in self._on_host[host] if name in self.live and name not in ghosts}

    def is_on(self, name: str, host: str) -> bool:
        """Whether it is the name of a task of this host: a member can send any names."""
        task = self.tasks.get(name)
        return task is not None and task.host == host

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
        if not self._plan.keeps_addresses or task.name not in self.addresses:
            self.addresses[task.name] = offer  # tasks that continue, such as a chief, never update those of others
        return self.attempts[task.name]

    def end_instructions(self, names: Iterable[str], how: str, grace: float = 0.0) -> list[ins.EndTasks]:
        """Instructions that end those of these tasks that run on connected hosts."""
        attempts: dict[str, dict[str, int]] = {}
        ghosts = self.ghost_tasks()
        for name in names:
            if name in self.live and name not in ghosts and self.members[self.tasks[name].host].connected:
                attempts.setdefault(self.tasks[name].host, {})[name] = self.live[name]
        return [ins.EndTasks(host, tasks, how, grace) for host, tasks in attempts.items()]

    @property
    def is_elastic(self) -> bool:
        return self._plan.elastic is not None

    @property
    def group(self) -> tuple[Task, ...]:
        """The tasks that train together in the current generation, in the order of their ranks."""
        return tuple(task for unit in self.units if unit.kind in (GROUP, *OWN) for task in unit.tasks)

    def roster(self) -> dict[str, str]:
        """The addresses of tasks. Of those that train, only tasks of the current generation have one; a captain whose
        predecessor's notes are lost does not know them all."""
        units = [unit for unit in self.units if not unit.is_absent]
        taking_part = [task.name for unit in units for task in unit.tasks if task.name in self._training]
        absent = self._training.difference(taking_part)
        known = {name: address for name, address in self.addresses.items() if name not in absent}
        return {**dict.fromkeys(taking_part, NO_ADDRESS), **known}

    @property
    def is_cluster_known(self) -> bool:
        """Whether the addresses of all tasks of a parameter-server job are known. If not, no task can start on its own:
        the notes of the previous captain are lost."""
        units = [unit for unit in (self.lead, *self.workers) if unit is not None and not unit.is_absent]
        names = {task.name for unit in units for task in unit.tasks}
        return self.addresses.keys() >= names - self.succeeded

    def hosts_taking_part(self) -> set[str]:
        return {task.host for unit in self.units if not unit.is_absent for task in unit.tasks}

    def missing_hosts(self) -> list[str]:
        """Hosts that are not connected although a unit waits for them."""
        needed = {task.host for unit in self.units if unit.phase == WAITING for task in unit.all_tasks}
        return [host for host in self.members if host in needed and not self.members[host].connected]

    def to_notes(self) -> dict[str, Any]:
        elastic = self._elastic_notes() if self.is_elastic else {}
        return {
            **elastic,
            "attempts": self.attempts,
            "succeeded": sorted(self.succeeded),
            "unmet": sorted(self.unmet),
            "addresses": self.addresses,
            "budgets": {unit.name: unit.budget.to_notes() for unit in self.units},
            "given_up": [unit.name for unit in self.units if unit.phase == DONE],
            "waiting": [unit.name for unit in self.units if unit.phase == WAITING],
        }

    def _elastic_notes(self) -> dict[str, Any]:
        losses = {host: member.losses for host, member in self.members.items() if member.losses}
        sizes = {"sizes": self.sizes} if self.sizes else {}
        absent = {"absent": [unit.name for unit in self.workers if unit.is_absent]} if self.workers else {}
        return {"group": [task.name for task in self.group], "losses": losses, **sizes, **absent}

    def load_sizes(self, notes: dict[str, Any]) -> None:
        """Also before the first generation, when nothing else of the notes is needed."""
        saved = notes.get("sizes", {})
        self.resize({role: max(1, int(saved.get(role, size))) for role, size in self.sizes.items()})

    def load_notes(self, notes: dict[str, Any], clock_offset: float) -> None:
        if self.is_elastic:
            for unit in self.units:
                if unit.kind == GROUP:
                    unit.tasks = tuple(task for task in self._all_in_group if task.name in set(notes["group"]))
            for unit in self.workers:
                unit.is_absent = unit.name in notes.get("absent", ())
            for host, losses in notes["losses"].items():
                self.members[host].losses = [at + clock_offset for at in losses]
        self.attempts = dict(notes["attempts"])
        self.succeeded = set(notes["succeeded"])
        self.unmet = set(notes.get("unmet", ()))
        self.addresses = dict(notes["addresses"])
        self.waiting_before = set(notes["waiting"])
        for unit in self.units:
            unit.budget.load_notes(notes["budgets"].get(unit.name, {}))
            if unit.name in notes["given_up"]:
                unit.phase = DONE
