"""Restarts of units while other units continue, as `restart.scope` allows: within the generation, each from the newest
snapshot that its host can get. No I/O."""

from __future__ import annotations

from typing import Callable

from paceline.agent.captain import events as ev
from paceline.agent.captain import instructions as ins
from paceline.agent.captain.ledger import LIVE, Ledger
from paceline.agent.captain.restart_units import Unit
from paceline.agent.captain.shutdown import Shutdown
from paceline.agent.captain.snapshots.commits import Commits
from paceline.agent.captain.snapshots.restore_preparation import READY, RestorePreparation
from paceline.plan import Plan
from paceline.storage.snapshots.manifest import SnapshotId


class ScopedRestarts:
    def __init__(
        self,
        plan: Plan,
        ledger: Ledger,
        commits: Commits,
        shutdown: Shutdown,
        start: Callable[[list[Unit], SnapshotId | None, float], None],
        instruct: Callable[[ins.Instruction], None],
        emit: Callable[..., None],
    ) -> None:
        """`start`: starts units from a snapshot, within the generation."""
        self._plan, self._ledger, self._commits, self._shutdown = plan, ledger, commits, shutdown
        self._start, self._instruct, self._emit = start, instruct, emit
        self._preparing: dict[str, RestorePreparation] = {}  # by host: each unit is on one

    def advance(self, units: list[Unit], now: float) -> None:
        """`units`: all that could start now. Those of one host start together."""
        by_host: dict[str, list[Unit]] = {}
        for unit in units:
            by_host.setdefault(unit.tasks[0].host, []).append(unit)
        self._preparing = {host: each for host, each in self._preparing.items() if host in by_host}
        for host, waiting in by_host.items():
            preparation = self._preparing.get(host)
            if preparation is None:
                # It does not wait for the commit of a snapshot that its host cannot get otherwise: the others continue,
                # and would have committed the next one by then.
                preparation = self._preparing[host] = RestorePreparation(
                    self._commits, self._plan.snapshots, self._ledger.generation, [host], self._instruct, self._emit,
                    now, settle=0.0, is_first=False,
                )  # fmt: skip
            preparation.advance(now)
            if preparation.failure is not None:
                text, may_pass = preparation.failure
                if not may_pass or now - preparation.since >= self._plan.limits.start:
                    self._shutdown.end("failed", text, "store", now, ins.KILL)
                    return
            elif preparation.stage == READY:
                del self._preparing[host]
                self._start(waiting, preparation.snapshot, now)
                self._commits.on_fetched(now)

    def fetched_snapshots(self) -> set[SnapshotId]:
        """Those that hosts are getting while others train: they must not be replaced by newer ones until then."""
        is_live = self._ledger.phase == LIVE
        each = (preparation.snapshot for preparation in self._preparing.values() if is_live)
        return {snapshot for snapshot in each if snapshot is not None}

    def cancel(self) -> None:
        self._preparing = {}

    def unprepared_hosts(self) -> tuple[list[str], float | None]:
        """The hosts that do not have their snapshot yet, and since when the first of them has been waiting. Not those
        that wait for a store that fails: another limit applies to them."""
        late = {host: each.since for host, each in self._preparing.items() if each.unprepared_hosts()}
        late = {host: since for host, since in late.items() if self._preparing[host].failure is None}
        return sorted(late), min(late.values(), default=None)

    # ---- events

    def on_joined(self, host: str) -> None:
        if host in self._preparing:
            self._preparing[host].on_joined(host)

    def on_prepared(self, event: ev.HostPrepared, now: float) -> None:
        if event.host in self._preparing:
            self._preparing[event.host].on_prepared(event, now)

    def on_answered(self, event: ev.StoreAnswered, now: float) -> None:
        for preparation in self._preparing.values():
            preparation.on_answered(event, now)
