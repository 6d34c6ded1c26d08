"""Which hosts take part in the next generation of an elastic job. No I/O.

The first generation starts with all hosts of the plan or, once `elastic.wait` has passed, with at least as many as the
job needs. Later ones do not wait for a host that is lost, only for those that are about to be ready.
"""

from __future__ import annotations

from collections.abc import Collection

from paceline.agent.captain.ledger import RESUMING, Ledger, Member
from paceline.agent.captain.restart_units import Unit
from paceline.plan import GROUP, Plan, Task

REMEMBERED = 30.0  # times `elastic.every`: how long the loss of a host counts, and the longest time it has to stay
MOST_LOSSES = 10  # whose times are kept for each host


class HostChoice:
    def __init__(self, plan: Plan, ledger: Ledger, leaving: Collection[str]) -> None:
        """`leaving`: hosts that are shutting down."""
        self._elastic, self._ledger, self._leaving = plan.elastic, ledger, leaving
        self.stuck: set[str] = set()  # hosts that did not get a snapshot for long; they take part only if needed
        self._left: set[str] = set()  # hosts of the group that have shut down, or are about to
        groups = {(each.role, each.group): each.min for each in plan.elastic.hosts} if plan.elastic else {}
        in_group: dict[tuple[str, int], list[str]] = {}
        for host in plan.hosts:
            in_group.setdefault((host.role, host.group), []).append(host.name)
        # Hosts that can replace each other, and how many of them a generation needs.
        self._groups = [(hosts, groups.get(key, len(hosts))) for key, hosts in in_group.items()]

    def on_leaving(self, host: str) -> None:
        """The next generation does not wait until the replacement of this host has what its tasks need: it joins later,
        without delaying the others."""
        if any(task.host == host for unit in self._ledger.units if unit.kind == GROUP for task in unit.tasks):
            self._left.add(host)

    def on_started(self) -> None:
        """A generation of the group has started."""
        self._left.clear()

    def choose(self, unit: Unit, since: float | None, now: float) -> tuple[Task, ...] | None:
        """The tasks of the unit that can start now; None: it waits for more. `since`: when it began to wait."""
        if self._elastic is None or unit.kind != GROUP:
            return None if unit.not_ready else unit.all_tasks
        chosen = self._choose_hosts({task.host for task in unit.all_tasks}, self.ready_hosts(unit), since, now)
        return None if chosen is None else tuple(task for task in unit.all_tasks if task.host in chosen)

    def choose_workers(self, startable: Collection[Unit], since: float | None, now: float) -> list[Unit] | None:
        """The workers of a parameter-server job that take part from now on; None: it waits for more. `startable`: those
        that do not run. `since`: when the chief began to wait."""
        workers = self._ledger.workers
        unready = self._unready_hosts(workers) | {unit.tasks[0].host for unit in workers if unit not in startable}
        hosts = {unit.tasks[0].host for unit in workers}
        chosen = self._choose_hosts(hosts, hosts - unready - set(self._leaving), since, now)
        return None if chosen is None else [unit for unit in workers if unit.tasks[0].host in chosen]

    def _choose_hosts(self, hosts: set[str], ready: set[str], since: float | None, now: float) -> set[str] | None:
        """Of these hosts, those that take part; None: the job waits for more."""
        # No host is lost at the start of a run, or when it is resumed: all may still join.
        is_first = self._ledger.generation == 0 or self._ledger.pause == RESUMING
        staying = ready if is_first else ready - self._left
        stable = {host for host in staying if not self.is_unstable(host, now)}
        chosen = stable if self._suffice(hosts, stable) else ready
        if not self._suffice(hosts, chosen):
            return None
        has_waited = self._elastic is not None and since is not None and now - since >= self._elastic.wait
        if has_waited or chosen == hosts:
            return chosen
        return None if is_first or self._expected_hosts(hosts - ready) else chosen

    def newcomers(self, unit: Unit, now: float) -> set[str]:
        """Hosts that do not take part in the running generation, and could take part in the next one."""
        if self._elastic is None:
            return set()
        taking_part = {task.host for task in unit.tasks}
        candidates = self.ready_hosts(unit) - taking_part
        absent = [worker for worker in self._ledger.workers if worker.is_absent]
        candidates |= {worker.tasks[0].host for worker in absent} - self._unready_hosts(absent) - set(self._leaving)
        return {host for host in candidates if self._is_warm(host, now) and not self.is_unstable(host, now)}

    def ready_hosts(self, unit: Unit) -> set[str]:
        hosts = {task.host for task in unit.all_tasks}
        return hosts - {self._ledger.tasks[name].host for name in unit.not_ready} - set(self._leaving)

    def is_unstable(self, host: str, now: float) -> bool:
        """Whether the host is stuck, or has been lost again and again: each time, it has to stay for twice as long."""
        if self._elastic is None:
            return False
        if host in self.stuck:
            return True
        member = self._ledger.members[host]
        losses = [at for at in member.losses if now - at < REMEMBERED * self._elastic.every]
        if len(losses) < 2:
            return False
        return now - member.joined_at < self._elastic.every * min(REMEMBERED, 2.0 ** (len(losses) - 2))

    def _is_warm(self, host: str, now: float) -> bool:
        """Whether its tasks would start in an interpreter that has imported what they need. Not every program can have
        one, so this is not awaited for long."""
        assert self._elastic is not None
        member = self._ledger.members[host]
        return member.has_spare or now - member.joined_at >= self._elastic.wait

    def can_continue(self, unit: Unit) -> bool:
        """Whether the group could restart now without waiting for more hosts, and without those that are not wanted."""
        wanted = {task.host for task in unit.all_tasks} - set(self._leaving)
        return self.are_enough(unit, self.ready_hosts(unit) | (wanted & {task.host for task in unit.tasks}))

    def are_enough(self, unit: Unit, hosts: Collection[str]) -> bool:
        return self._suffice({task.host for task in unit.all_tasks}, hosts)

    def dispensable_hosts(self) -> set[str]:
        """Workers' hosts of a parameter-server job that a chief need not wait for, since enough others are there."""
        hosts = {unit.tasks[0].host for unit in self._ledger.workers}
        connected = {host for host in hosts if self._ledger.members[host].connected}
        return hosts if self._elastic is not None and self._suffice(hosts, connected) else set()

    def _suffice(self, hosts: set[str], some: Collection[str]) -> bool:
        """Whether some of these hosts are as many of each kind as a generation needs."""
        groups = [(group, least) for group, least in self._groups if not hosts.isdisjoint(group)]
        return all(sum(host in some for host in group) >= least for group, least in groups)

    def _unready_hosts(self, workers: Collection[Unit]) -> set[str]:
        return {unit.tasks[0].host for unit in workers if unit.not_ready}

    def _expected_hosts(self, hosts: Collection[str]) -> set[str]:
        """Hosts that are connected and about to be ready: they end their tasks."""
        return {host for host in hosts if self._ledger.members[host].connected and host not in self._leaving}


def note_loss(member: Member, now: float) -> None:
    member.losses = [*member.losses, now][-MOST_LOSSES:]
