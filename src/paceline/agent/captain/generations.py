"""Forms generations: which units start, and when everything they need is ready. No I/O."""

from __future__ import annotations

from typing import Callable

from paceline.agent.captain import instructions as ins
from paceline.agent.captain.generation_start import READY, RECORDING, GenerationStart
from paceline.agent.captain.ingest_phase import IngestPhase
from paceline.agent.captain.ledger import WAITING, Ledger, Unit
from paceline.agent.captain.shutdown import Shutdown
from paceline.agent.captain.snapshots.commits import Commits
from paceline.agent.captain.snapshots.restoring_tasks import restoring_hosts
from paceline.plan import ALONE, BEFORE, Plan
from paceline.storage.snapshots.manifest import SnapshotId

WAITING_EVENT_EVERY = 10.0


class Generations:
    def __init__(
        self,
        plan: Plan,
        ledger: Ledger,
        commits: Commits,
        shutdown: Shutdown,
        ingest: IngestPhase,
        start: Callable[[list[Unit], SnapshotId | None, float], None],
        instruct: Callable[[ins.Instruction], None],
        emit: Callable[..., None],
    ) -> None:
        """`start`: starts units from a snapshot."""
        self._plan, self._ledger, self._commits, self._shutdown = plan, ledger, commits, shutdown
        self._ingest = ingest
        self._start, self._instruct, self._emit = start, instruct, emit
        self.starting: GenerationStart | None = None
        self.recorded = 0  # the highest generation that may have a record
        self.hold_until = 0.0  # no task starts before this time
        self._first_joined: float | None = None
        self._waiting_reported_at = 0.0

    def on_joined(self, now: float) -> None:
        if self._first_joined is None:
            self._first_joined = now

    def advance(self, now: float) -> None:
        if not self._ingest.advance(now, self.hold_until):
            return
        training = [unit for unit in self._ledger.units if unit.kind != BEFORE]
        waiting = [unit for unit in training if unit.phase == WAITING]
        startable = [unit for unit in waiting if not unit.not_ready and not unit.live]
        ready = [unit for unit in startable if now >= max(unit.not_before, self.hold_until)]
        if self._ledger.generation == 0:
            self._begin(ready if len(ready) == len(training) else [], now)
            return
        if alone := [unit for unit in ready if unit.kind == ALONE]:
            self._start(alone, None, now)
        self._begin([unit for unit in ready if unit.kind != ALONE], now)

    def restart_evaluators(self, now: float) -> None:
        """After training: start only evaluators, which may not have evaluated every snapshot."""
        for unit in self._ledger.units:
            is_startable = unit.phase == WAITING and not unit.not_ready and not unit.live
            if is_startable and unit.tasks[0].role == "evaluator" and now >= max(unit.not_before, self.hold_until):
                self._start([unit], None, now)

    def _begin(self, units: list[Unit], now: float) -> None:
        """Start a generation of these units once everything is ready. If the units change meanwhile, or the snapshot is
        abandoned, start over."""
        hosts = restoring_hosts(self._plan, units)
        if self.starting is not None and (not units or hosts != self.starting.hosts or self._is_abandoned()):
            self.starting = None
        if not units:
            return
        ledger, limits = self._ledger, self._plan.limits
        if self.starting is None:
            number = max(ledger.generation, self.recorded, self._commits.records.newest) + 1
            self.starting = GenerationStart(
                self._commits, self._plan.snapshots, number, hosts, self._instruct, self._emit, now, limits.grace,
                is_first=ledger.generation == 0,
            )  # fmt: skip
        start = self.starting
        start.advance(now)
        if start.stage in (RECORDING, READY):
            self.recorded = max(self.recorded, start.number)
        if start.failure is not None:
            text, may_pass = start.failure
            if ledger.generation == 0 or not may_pass or now - start.since >= limits.start:
                self._shutdown.end("failed", text, "store", now, ins.KILL)
        elif start.stage == READY:
            self.starting = None
            ledger.generation = start.number
            self._commits.begin_generation(start.record, start.is_recorded, now)
            self._start(units, start.snapshot, now)

    def _is_abandoned(self) -> bool:
        """Whether the snapshot that was chosen has been abandoned since."""
        snapshot = None if self.starting is None else self.starting.snapshot
        return snapshot is not None and self._commits.contents.abandoned.cover(snapshot)

    def check_waiting(self, now: float) -> None:
        """Report the hosts that the run waits for; after limits.start, end the run."""
        if self._ingest.is_busy():
            return  # hosts may still join; ingest.limit applies
        missing = self._ledger.missing_hosts()
        since: float | None
        if self.starting is not None and not missing:
            if self.starting.failure is not None:
                return  # the store is failing, not a host
            missing, since = self.starting.unprepared_hosts(), self.starting.since
        elif self._ledger.generation == 0:
            since = None if self._first_joined is None else max(self._first_joined, self._ingest.ready_since)
        else:
            units = self._ledger.units
            since = min((u.since for u in units if u.phase == WAITING and u.since is not None), default=None)
        if not missing or since is None:
            return
        limit = self._plan.limits.start
        if now - since >= limit:
            tasks = [task for host in missing for task in self._plan.host(host).tasks]
            reason = f"{', '.join(tasks)} did not start within {limit:g} s (limits.start)"
            self._shutdown.end("failed", reason, "start-timeout", now, ins.KILL)
        elif now - max(self._waiting_reported_at, since) >= WAITING_EVENT_EVERY:
            self._waiting_reported_at = now
            self._emit("waiting", missing=missing, since_s=round(now - since, 1), limit_s=limit)
