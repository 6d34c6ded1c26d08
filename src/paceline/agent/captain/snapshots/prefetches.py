"""Which hosts fetch the newest snapshot from others before a restart needs it, and when. No I/O.

If one task saves for all, as under data parallelism, the other hosts would fetch everything while a restart waits. One
host at a time does so in advance. A fetch is worth its cost only if the snapshot is still the newest for a while after
it: if all hosts together would need more than a share of the time between two snapshots, none of them fetches.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Callable

from paceline.agent.captain import events as ev
from paceline.agent.captain import instructions as ins
from paceline.agent.captain.snapshots.commits import Commits
from paceline.storage.snapshots.manifest import SnapshotId

SHARE = 0.25  # of the time between two snapshots, at most
AGAIN = 1.0  # seconds until a needed fetch that failed is repeated: hosts begin to serve when they save
REMEASURE = 10.0  # times as long as a fetch took, after which it is measured again: the network may be faster then


class Prefetches:
    def __init__(
        self, commits: Commits, instruct: Callable[[ins.Instruction], None], emit: Callable[..., None]
    ) -> None:
        self._commits, self._instruct, self._emit = commits, instruct, emit
        self._fetching: tuple[str, SnapshotId, float] | None = None  # host, snapshot, and since when
        self._newest: dict[str, SnapshotId] = {}  # host -> what it has fetched, or could not fetch
        self._failed: dict[str, float] = {}  # hosts that could not fetch it, and when they may be able to
        self._took: tuple[float, float] | None = None  # how long the last fetch took, and when it ended
        self._saved_at: float | None = None  # when the newest snapshot was complete
        self._interval: float | None = None  # between the newest two
        self.is_due = False  # something has changed since the last decision
        self._has_noted = False

    # ---- events

    def on_saved(self, now: float) -> None:
        """A snapshot is complete on its hosts."""
        if self._saved_at is not None:
            self._interval = now - self._saved_at
        self._saved_at, self.is_due = now, True

    def on_joined(self, host: str) -> None:
        """It may be another instance, or may not have received an instruction."""
        self._newest.pop(host, None)
        self._failed.pop(host, None)
        self._end(host)

    def on_disconnected(self, host: str) -> None:
        self._end(host)

    def on_prepared(self, event: ev.HostPrepared) -> None:
        """Hosts keep what they fetched for a restart, too."""
        if event.snapshot is None:
            return
        if not event.from_hosts:
            self._newest.pop(event.host, None)  # it has deleted what it had, to have room for what is in the store
        elif event.error is None:
            self._newest[event.host] = event.snapshot
            self._failed.pop(event.host, None)

    def on_prefetched(self, event: ev.SnapshotPrefetched, now: float) -> None:
        if self._fetching is None or self._fetching[:2] != (event.host, event.snapshot):
            return
        self._measure(now, is_complete=event.error is None)
        self._newest[event.host] = event.snapshot
        self._failed.pop(event.host, None)
        if event.error is not None:
            self._failed[event.host] = now + AGAIN if event.error.passing else math.inf
        self._end(event.host)

    def _measure(self, now: float, is_complete: bool) -> None:
        assert self._fetching is not None
        took = now - self._fetching[2]
        if is_complete or self._took is None or took > self._took[0]:  # it would have taken at least as long
            self._took = took, now

    def _end(self, host: str) -> None:
        self.is_due = True
        if self._fetching is not None and self._fetching[0] == host:
            self._fetching = None

    # ---- decisions

    def advance(self, hosts: Callable[[], Collection[str]], is_needed: bool, now: float) -> None:
        """The group trains. `hosts`: those whose tasks resume from a snapshot. `is_needed`: a restart is about to need
        it."""
        self.is_due = False
        snapshot = self._commits.newest_on_hosts()
        if snapshot is None or (self._fetching is not None and self._fetching[1] == snapshot):
            return
        if self._fetching is not None:  # a newer one has been saved
            self._measure(now, is_complete=False)
            self._instruct(ins.PrefetchSnapshot(self._fetching[0], snapshot, {}))
            self._fetching = None
        lacking = self._commits.lacking_hosts(snapshot, hosts())
        waiting = [host for host in lacking if self._newest.get(host) != snapshot]
        if is_needed and not waiting:
            waiting = [host for host in lacking if now >= self._failed.get(host, math.inf)]
        sources = self._commits.sources(snapshot, waiting[0]) if waiting else None
        if sources is None or not (is_needed or self._is_worth_it(len(lacking), now)):
            return
        remote = {task: address for task, address in sources.items() if address}
        self._fetching = waiting[0], snapshot, now
        self._newest.pop(waiting[0], None)  # it deletes what it has of another snapshot
        self._instruct(ins.PrefetchSnapshot(waiting[0], snapshot, remote))

    def have(self, snapshot: SnapshotId, hosts: Collection[str]) -> bool:
        """Whether each of these hosts has all parts of the snapshot."""
        lacking = self._commits.lacking_hosts(snapshot, hosts)
        return all(self.has_fetched(host, snapshot) for host in lacking)

    def has_fetched(self, host: str, snapshot: SnapshotId) -> bool:
        return self._newest.get(host) == snapshot and host not in self._failed

    def _is_worth_it(self, count: int, now: float) -> bool:
        """`count`: the number of hosts that have to fetch each snapshot."""
        if self._took is None or self._interval is None:
            return True
        took, measured_at = self._took
        total = took * count
        if now - measured_at > REMEASURE * took:
            return True
        if total <= SHARE * self._interval:
            return True
        if not self._has_noted:
            self._has_noted = True
            slow = f"fetching takes {total:.1f} s in total, and a snapshot is saved every {self._interval:.1f} s"
            self._emit("note", text=f"snapshots are fetched only when a restart needs them, not in advance: {slow}")
        return False
