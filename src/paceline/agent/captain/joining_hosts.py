"""Lets hosts that join, or return, take part in an elastic job: the group is interrupted once they are ready. No I/O.

A host that is to join has a spare interpreter, if it can have one. The group then takes a snapshot: all tasks at the
same step if they poll for that, otherwise whenever the program saves. The host gets that snapshot while the others
continue to train. Only then is the group stopped, and a larger generation starts from it. In a parameter-server job,
workers hold no state: only the chief needs the snapshot.
"""

from __future__ import annotations

from typing import Any, Callable

from paceline.agent.captain import events as ev
from paceline.agent.captain import instructions as ins
from paceline.agent.captain.elastic_hosts import HostChoice
from paceline.agent.captain.failures import Failures
from paceline.agent.captain.ledger import LIVE, Ledger
from paceline.agent.captain.restart_units import RUNNING, Unit
from paceline.agent.captain.snapshots.commits import Commits
from paceline.agent.captain.snapshots.group_snapshot import GroupSnapshot
from paceline.agent.captain.snapshots.restoring_tasks import restoring_hosts
from paceline.agent.transfers.requests import DAMAGED
from paceline.plan import GROUP, LEAD, Elastic, Plan
from paceline.storage.snapshots.manifest import SnapshotId

TRAINING = ("chief", "worker")  # roles
ASK_AGAIN = 90.0  # seconds after which the group is asked for a snapshot again
FETCH_LIMIT = 1800.0  # seconds for newcomers to get the snapshot; the others do not wait for longer
MOST_GONE = 2  # snapshots that were replaced by newer ones before a newcomer had them


class JoiningHosts:
    def __init__(
        self,
        plan: Plan,
        ledger: Ledger,
        commits: Commits,
        elastic_hosts: HostChoice,
        group_snapshot: GroupSnapshot,
        failures: Failures,
        instruct: Callable[[ins.Instruction], None],
        emit: Callable[..., None],
    ) -> None:
        self._plan, self._ledger, self._commits, self._elastic_hosts = plan, ledger, commits, elastic_hosts
        self._group_snapshot, self._failures = group_snapshot, failures
        self._instruct, self._emit = instruct, emit
        self._changed_at: float | None = None  # when the hosts that take part changed last
        self._taking_part: set[str] = set()  # the hosts of the newest generation
        self._newcomers: set[str] = set()  # hosts that are to join; empty: none
        self._asked_at = 0.0  # when the group was asked for a snapshot for them
        self._saved_before: SnapshotId | None = None  # the newest snapshot at that time
        self._snapshot: SnapshotId | None = None  # the snapshot that newcomers get
        self._fetched_since = 0.0
        self._prepared: set[str] = set()
        self._is_scaled = False  # a user has requested more hosts: they need not wait for `elastic.every`
        self._some_ready_at: float | None = None  # since when some of these are ready
        self._gone = 0  # snapshots that newcomers could not get because they were replaced
        self._roles = {host.name: host.role for host in plan.hosts} if plan.elastic is not None else {}
        self._joining_roles = plan.led_roles or TRAINING
        self._imports: dict[str, str] = {}  # by role: the record of what its program imports

    def on_spare_ready(self, event: ev.SpareReady) -> None:
        if event.imports and event.host in self._roles:
            self._imports[self._roles[event.host]] = event.imports
            for host in self._absent_hosts():
                self._teach(host)

    def on_joined(self, host: str) -> None:
        self._elastic_hosts.stuck.discard(host)
        if self._imports and host in self._absent_hosts():
            self._teach(host)

    def _absent_hosts(self) -> list[str]:
        taking_part = self._hosts() | set(self._ledger.unwanted_hosts)
        return [host for host, role in self._roles.items() if role in self._joining_roles and host not in taking_part]

    def _teach(self, host: str) -> None:
        """A host on which the program has not run learns from others what to import."""
        member, imports = self._ledger.members[host], self._imports.get(self._roles[host])
        if imports and member.connected and not member.has_spare:
            self._instruct(ins.PrepareSpare(host, imports))

    def has_snapshot(self) -> bool:
        """Whether this generation has saved a snapshot, and so can be expected to save more."""
        return self._newest(set()) is not None

    def on_scaled(self) -> None:
        """A user has requested another number of hosts."""
        self._is_scaled, self._some_ready_at = True, None

    def on_started(self, now: float) -> None:
        """A generation of the group has started."""
        self._forget()
        self._some_ready_at = None
        if self._ledger.is_elastic and self._taking_part != self._hosts():
            self._taking_part, self._changed_at = self._hosts(), now

    def advance(self, now: float) -> None:
        elastic = self._plan.elastic
        if elastic is None:
            return
        unit = self._ledger.lead or next(unit for unit in self._ledger.units if unit.kind == GROUP)
        if unit.is_whole and not any(worker.is_absent for worker in self._ledger.workers):
            self._is_scaled = False
            return
        is_finishing = any(task.name in self._ledger.succeeded for task in unit.tasks)
        if self._ledger.phase != LIVE or unit.phase != RUNNING or is_finishing:
            self._forget()
            return
        if self._changed_at is not None and now - self._changed_at < elastic.every and not self._is_scaled:
            return
        newcomers = self._elastic_hosts.newcomers(unit, now)
        if not newcomers or not self._newcomers <= newcomers:
            self._forget()  # a host that was to join is gone
        if not newcomers or (not self._newcomers and self._awaits_more(unit, newcomers, elastic, now)):
            return
        if not self._newcomers:
            self._begin(newcomers, now)
        self._fetch(now)
        late = self._newcomers - self._prepared
        if late and self._snapshot is not None and now - self._fetched_since >= FETCH_LIMIT:
            self._leave_behind(late)
        if not self._newcomers:
            self._forget()
        elif self._snapshot is not None and self._prepared >= self._newcomers:
            self._interrupt(unit, now)
        elif now - self._asked_at >= ASK_AGAIN and self._snapshot is None:
            self._ask(now)

    def _awaits_more(self, unit: Unit, newcomers: set[str], elastic: Elastic, now: float) -> bool:
        """Whether more of the hosts that a user has requested may be ready soon: then the group is interrupted once for
        all of them."""
        wanted = {task.host for task in unit.all_tasks}
        if not self._is_scaled or newcomers >= wanted - self._hosts():
            return False
        self._some_ready_at = now if self._some_ready_at is None else self._some_ready_at
        return now - self._some_ready_at < elastic.wait

    def _begin(self, newcomers: set[str], now: float) -> None:
        self._newcomers, self._gone = newcomers, 0
        self._saved_before = self._newest(set())
        self._ask(now)

    def _ask(self, now: float) -> None:
        self._asked_at = now
        self._group_snapshot.request()

    def _hosts(self) -> set[str]:
        """Those that take part, of the kind that may be missing."""
        workers = {unit.tasks[0].host for unit in self._ledger.workers if not unit.is_absent}
        return workers if self._plan.led_roles else {task.host for task in self._ledger.group}

    def _newest(self, newcomers: set[str]) -> SnapshotId | None:
        """The newest snapshot of this generation that its hosts and the newcomers can restore."""
        units = [unit for unit in self._ledger.units if unit.kind in (GROUP, LEAD)]
        hosts = restoring_hosts(self._plan, (task for unit in units for task in unit.tasks)) | self._fetching(newcomers)
        return next((id for id in self._commits.restorable(hosts) if id.generation == self._ledger.generation), None)

    def _fetching(self, newcomers: set[str]) -> set[str]:
        """Those that need the snapshot."""
        return set() if self._plan.led_roles else newcomers

    def _fetch(self, now: float) -> None:
        """Once there is a new snapshot, have the newcomers get it."""
        if self._snapshot is not None:
            return
        newest = self._newest(self._newcomers)
        is_new = newest is not None and (self._saved_before is None or newest.step > self._saved_before.step)
        if newest is None or not is_new:
            return
        self._snapshot, self._fetched_since = newest, now
        self._prepared = self._newcomers - self._fetching(self._newcomers)
        for host in sorted(self._fetching(self._newcomers)):
            sources = self._commits.sources(newest, host)
            self._instruct(ins.PrepareHost(host, newest, self._ledger.generation + 1, sources or {}))

    def on_prepared(self, event: ev.HostPrepared) -> None:
        if event.snapshot != self._snapshot or self._snapshot is None or event.host not in self._newcomers:
            return
        if event.error is None:
            self._prepared.add(event.host)
            return
        # A newer snapshot may have replaced this one in the meantime: the next one is tried. If that happens again and
        # again, the host gets its snapshot after the group has stopped, when no newer one is saved.
        self._gone += event.error.kind == DAMAGED
        if self._gone > MOST_GONE:
            self._prepared.add(event.host)
            return
        self._emit("note", text=f"{event.host} cannot join yet: {event.error.text}")
        self._saved_before, self._snapshot, self._prepared = self._snapshot, None, set()

    def _leave_behind(self, hosts: set[str]) -> None:
        text = f"{', '.join(sorted(hosts))} did not get the snapshot within {FETCH_LIMIT:g} s; other hosts do not wait"
        self._emit("note", text=text)
        self._elastic_hosts.stuck |= hosts
        self._newcomers -= hosts

    def _interrupt(self, unit: Unit, now: float) -> None:
        hosts = sorted(self._newcomers)
        size = len((self._hosts() | self._newcomers) - set(self._ledger.unwanted_hosts))
        verb = "joins" if len(hosts) == 1 else "join"
        self._emit("note", text=f"{', '.join(hosts)} {verb}: the group continues with {size} hosts")
        self._is_scaled = False
        for each in (unit, *(worker for worker in self._ledger.workers if worker.phase == RUNNING)):
            each.is_resizing = True
        self._failures.stop_unit(unit, now)
        self._forget()

    def _forget(self) -> None:
        self._newcomers, self._snapshot, self._prepared = set(), None, set()

    # ---- notes for the next captain

    def to_notes(self) -> dict[str, Any]:
        return {"changed_at": self._changed_at, "hosts": sorted(self._taking_part)}

    def load_notes(self, notes: dict[str, Any], clock_offset: float) -> None:
        changed_at = notes.get("changed_at")
        self._changed_at = None if changed_at is None else changed_at + clock_offset
        self._taking_part = set(notes.get("hosts", ()))
