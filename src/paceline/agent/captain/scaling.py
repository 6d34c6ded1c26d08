"""Changes the number of hosts of an elastic job on request: hosts that are no longer wanted leave after the group has
taken a snapshot. No I/O.

The wanted hosts are those with the lowest indexes. New ones take part as any host that joins does: see `joining_hosts`.
"""

from __future__ import annotations

from typing import Callable

from paceline.agent.captain import events as ev
from paceline.agent.captain import instructions as ins
from paceline.agent.captain.elastic_hosts import HostChoice
from paceline.agent.captain.failures import Failures
from paceline.agent.captain.joining_hosts import ASK_AGAIN, JoiningHosts
from paceline.agent.captain.ledger import LIVE, PAUSED, RETURNING, Ledger
from paceline.agent.captain.restart_units import RUNNING, Unit
from paceline.agent.captain.snapshots.commits import Commits
from paceline.agent.captain.snapshots.group_snapshot import GroupSnapshot
from paceline.plan import GROUP, Plan
from paceline.storage.snapshots.manifest import SnapshotId


class Scaling:
    def __init__(
        self,
        plan: Plan,
        ledger: Ledger,
        commits: Commits,
        elastic_hosts: HostChoice,
        joining: JoiningHosts,
        group_snapshot: GroupSnapshot,
        failures: Failures,
        leaving: set[str],
        instruct: Callable[[ins.Instruction], None],
        emit: Callable[..., None],
    ) -> None:
        """`leaving`: hosts that are shutting down."""
        self._plan, self._ledger, self._commits, self._elastic_hosts = plan, ledger, commits, elastic_hosts
        self._joining, self._group_snapshot, self._failures, self._leaving = joining, group_snapshot, failures, leaving
        self._instruct, self._emit = instruct, emit
        self._asked_at: float | None = None  # when the group was asked for a snapshot; None: it need not take one
        self._saved_before: SnapshotId | None = None  # the newest snapshot at that time
        self._dismissed: dict[str, float] = {}  # host -> when the member that was dismissed had joined

    # ---- requests

    def problem_with(self, role: str, hosts: int) -> str:
        """Why a role cannot have this many hosts; empty: it can."""
        if self._ledger.phase not in (LIVE, RETURNING):
            return "the run is ending"
        elastic = self._plan.scalable.get(role)
        if elastic is None:
            return f"the number of hosts of {role} cannot change"
        if self._ledger.is_pause_wanted and hosts != self._ledger.sizes[role]:
            return "the run is paused: resume it first" if self._ledger.pause == PAUSED else "the run is being paused"
        most = sum(host.role == role for host in self._plan.hosts)
        return "" if elastic.min <= hosts <= most else f"{role} can have {elastic.min} to {most} hosts"

    def on_requested(self, event: ev.ScaleRequested) -> None:
        if self.problem_with(event.role, event.hosts) or event.hosts == self._ledger.sizes[event.role]:
            return
        before = self._ledger.sizes[event.role]
        self._ledger.resize({event.role: event.hosts})
        self._asked_at = None
        self._joining.on_scaled()
        hosts = self._plan.hosts_of_size(self._ledger.sizes)
        tasks = [name for host in hosts if host.role == event.role for name in host.tasks]
        self._emit("scaled", role=event.role, count=event.hosts, was=before, tasks=tasks)

    def joining_hosts(self) -> list[str]:
        """Hosts that are wanted, but do not take part in the current generation."""
        taking_part = {task.host for task in self._ledger.group} if self._ledger.generation else set()
        return sorted({task.host for unit in self._group() for task in unit.all_tasks} - taking_part)

    def leaving_hosts(self) -> list[str]:
        """Hosts that are not wanted, but still take part or have not left yet."""
        taking_part = {task.host for task in self._ledger.group} if self._ledger.generation else set()
        members = self._ledger.members
        present = {host for host, member in members.items() if member.connected and not member.has_left}
        return [host for host in self._ledger.unwanted_hosts if host in taking_part or host in present]

    # ---- progress

    @property
    def needs_commit(self) -> bool:
        """Whether hosts wait for the commit of a snapshot before they leave."""
        return self._asked_at is not None and not self._group_snapshot.is_pending

    def on_joined(self, host: str) -> None:
        if self._dismissed.pop(host, None) is not None:
            self._leaving.discard(host)  # the message that dismissed it was lost, or this is another instance

    def advance(self, now: float) -> None:
        if not self._ledger.unwanted_hosts:
            self._asked_at = None
            return
        unit = self._group()[0]
        surplus = {task.host for task in unit.tasks}.intersection(self._ledger.unwanted_hosts)
        is_finishing = any(task.name in self._ledger.succeeded for task in unit.tasks)
        if self._ledger.phase != LIVE or unit.phase != RUNNING or not surplus or is_finishing:
            self._asked_at = None
        elif self._elastic_hosts.can_continue(unit):
            self._shrink(unit, surplus, now)
        if self._ledger.phase == LIVE and (unit.phase == RUNNING or not self._ledger.generation):
            self._dismiss_unwanted(unit)

    def _group(self) -> list[Unit]:
        return [unit for unit in self._ledger.units if unit.kind == GROUP]

    def _shrink(self, unit: Unit, surplus: set[str], now: float) -> None:
        """Have the group take a snapshot, and interrupt it once that is committed: nothing is lost with the hosts."""
        hosts = {task.host for task in unit.tasks}
        if self._asked_at is None:
            self._saved_before = next(iter(self._commits.restorable(hosts)), None)
        if self._asked_at is None or now - self._asked_at >= ASK_AGAIN:
            self._asked_at = now
            self._group_snapshot.request()
        newest = next(iter(self._commits.contents.chain), None)
        if newest is None or newest.generation != self._ledger.generation:
            return
        before = self._saved_before
        if before is not None and newest.generation == before.generation and newest.step <= before.step:
            return
        verb, size = "leaves" if len(surplus) == 1 else "leave", len(hosts - surplus)
        self._emit("note", text=f"{', '.join(sorted(surplus))} {verb}: the group continues with {size} hosts")
        unit.is_resizing = True
        self._failures.stop_unit(unit, now)
        self._asked_at = None

    def _dismiss_unwanted(self, unit: Unit) -> None:
        """Let hosts exit that take no part any more, and have nothing that is needed."""
        taking_part = {task.host for task in unit.tasks} if self._ledger.generation else set()
        for host in self._ledger.unwanted_hosts:
            member = self._ledger.members[host]
            if not member.connected or host in taking_part or self._dismissed.get(host) == member.joined_at:
                continue
            if self._ledger.running_on(host) or self._commits.needs(host):
                continue
            self._dismissed[host] = member.joined_at
            self._leaving.add(host)
            self._ledger.withdraw_offers(member)
            self._commits.drop_copies_on(host)
            self._instruct(ins.DismissMember(host, ins.RELEASED, "the run continues with fewer hosts"))
