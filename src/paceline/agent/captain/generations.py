"""Forms generations: which units start, and when everything they need is ready. No I/O."""

from __future__ import annotations

from typing import Callable

from paceline.agent import generation_numbers
from paceline.agent.captain import instructions as ins
from paceline.agent.captain.elastic_hosts import HostChoice
from paceline.agent.captain.ingest_phase import IngestPhase
from paceline.agent.captain.ledger import RESUMING, SAVING, Ledger
from paceline.agent.captain.restart_units import RUNNING, WAITING, Unit
from paceline.agent.captain.scoped_restarts import ScopedRestarts
from paceline.agent.captain.shutdown import Shutdown
from paceline.agent.captain.snapshots.commits import Commits
from paceline.agent.captain.snapshots.restore_preparation import READY, RECORDING, RestorePreparation
from paceline.agent.captain.snapshots.restoring_tasks import restoring_hosts
from paceline.plan import ALONE, BEFORE, Plan, Task
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
        elastic_hosts: HostChoice,
        start: Callable[[list[Unit], SnapshotId | None, float], None],
        restart: Callable[[list[Unit], SnapshotId | None, float], None],
        instruct: Callable[[ins.Instruction], None],
        emit: Callable[..., None],
    ) -> None:
        """`start`: starts units from a snapshot. `restart`: the same, while others continue."""
        self._plan, self._ledger, self._commits, self._shutdown = plan, ledger, commits, shutdown
        self._ingest, self._elastic_hosts = ingest, elastic_hosts
        self._start, self._instruct, self._emit = start, instruct, emit
        self.restarts = ScopedRestarts(plan, ledger, commits, shutdown, restart, instruct, emit)
        commits.contents.being_fetched = self.restarts.fetched_snapshots
        self.starting: RestorePreparation | None = None
        self.recorded = 0  # the highest generation that may have a record
        self.hold_until = 0.0  # no task starts before this time
        self._first_joined: float | None = None
        self._waiting_reported_at = 0.0
        self._enough_at = 0.0  # when enough workers of an elastic parameter-server job were last connected

    @property
    def is_queued(self) -> bool:
        """Whether the run was resumed and no host has come yet: it may be queued for hours."""
        return self._ledger.pause == RESUMING and self._first_joined is None

    def on_joined(self, now: float) -> None:
        if self._first_joined is None:
            self._first_joined = now
            if self._ledger.pause == RESUMING:
                self._restart_waits(now)

    def on_pause_ended(self, is_any_present: bool, now: float) -> None:
        """Tasks may start again. `is_any_present`: a host is connected, so that `limits.start` counts from now on."""
        self._first_joined = now if is_any_present else None
        self._restart_waits(now)

    def _restart_waits(self, now: float) -> None:
        for unit in self._ledger.units:
            if unit.phase == WAITING:
                unit.since = now

    def advance(self, now: float) -> None:
        if self._ledger.is_held:
            self.starting = None
            self.restarts.cancel()
            return
        if not self._ingest.advance(now, self.hold_until):
            return
        training = [unit for unit in self._ledger.units if unit.kind != BEFORE]
        for unit in training:
            if unit.phase == WAITING and unit.restarts_within_generation and unit.has_succeeded(self._ledger.succeeded):
                unit.enter(RUNNING)  # it had finished before the others were restarted
        waiting = [unit for unit in training if unit.phase == WAITING]
        startable = [unit for unit in waiting if not unit.live and now >= max(unit.not_before, self.hold_until)]
        chosen = [(unit, self._elastic_hosts.choose(unit, self._waits_since(unit), now)) for unit in startable]
        ready = [(unit, tasks) for unit, tasks in chosen if tasks is not None]
        if self._ledger.generation == 0 and not self._plan.led_roles:
            self._begin(ready if len(ready) == len(training) else [], now)
            return
        if self._starts_as_one():
            self._advance_as_one(training, startable, now)
            return
        alone = [unit for unit, _ in ready if unit.kind == ALONE]
        if alone and not self._ledger.is_resuming:  # an evaluator is told which tasks train
            self._start(alone, None, now)
        group = [(unit, tasks) for unit, tasks in ready if unit.kind != ALONE]
        if not any(unit.restarts_within_generation for unit in training):
            self._begin(group, now)
        elif self.must_begin_anew():
            self.restarts.cancel()
            unfinished = [unit for unit in training if unit.kind != ALONE and self._is_unfinished(unit)]
            self._begin(group if len(group) == len(unfinished) else [], now)
        else:
            self.starting = None
            self.restarts.advance([unit for unit, _ in group], now)

    def _starts_as_one(self) -> bool:
        """Whether chief, ps and workers of a parameter-server job start together if the chief or a ps has to start:
        workers may be absent, or the addresses of those that run are unknown."""
        lead = self._ledger.lead
        return lead is not None and (bool(self._plan.led_roles) or not self._ledger.is_cluster_known)

    def _advance_as_one(self, training: list[Unit], startable: list[Unit], now: float) -> None:
        ledger, lead = self._ledger, self._ledger.lead
        assert lead is not None
        ready = [unit for unit in startable if not unit.not_ready]
        others = [unit for unit in training if unit is not lead and unit not in ledger.workers]  # evaluators
        led = [unit for unit in ledger.workers if not unit.is_absent and ledger.is_cluster_known]
        alone = [unit for unit in ready if unit in others or (lead.phase == RUNNING and unit in led)]
        if alone and ledger.generation and not ledger.is_resuming:
            self._start(alone, None, now)
        required = [lead] if ledger.generation else [lead, *others]
        workers = self._elastic_hosts.choose_workers(startable, self._waits_since(lead), now) or []
        units = [*required, *workers] if workers and all(unit in ready for unit in required) else []
        self._begin([(unit, unit.tasks) for unit in units], now)

    def must_begin_anew(self) -> bool:
        """Whether units that restart while others continue must start together, as the next generation: what they save
        in this one cannot be committed, this captain does not know which addresses the others have, or the run was
        paused."""
        if self._ledger.lead is not None:
            servers = [self._ledger.lead, *self._ledger.workers]
            return any(unit.phase == WAITING for unit in servers) and not self._ledger.is_cluster_known
        own = [unit for unit in self._ledger.units if unit.restarts_within_generation and self._is_unfinished(unit)]
        is_any_waiting = any(unit.phase == WAITING for unit in own)
        is_address_unknown = any(task.name not in self._ledger.addresses for unit in own for task in unit.tasks)
        is_resuming = is_any_waiting and self._ledger.pause == RESUMING
        return bool(own) and (self._commits.is_stuck() or is_resuming or (is_any_waiting and is_address_unknown))

    def _is_unfinished(self, unit: Unit) -> bool:
        return not unit.has_succeeded(self._ledger.succeeded)

    def _waits_since(self, unit: Unit) -> float | None:
        """Since when the unit waits for hosts."""
        if self._ledger.generation:
            return unit.since
        return None if self._first_joined is None else max(self._first_joined, self._ingest.ready_since)

    def restart_evaluators(self, now: float) -> None:
        """After training: start only evaluators, which may not have evaluated every snapshot."""
        for unit in self._ledger.units:
            is_startable = unit.phase == WAITING and not unit.not_ready and not unit.live
            if is_startable and unit.tasks[0].role == "evaluator" and now >= max(unit.not_before, self.hold_until):
                self._start([unit], None, now)

    def _begin(self, units: list[tuple[Unit, tuple[Task, ...]]], now: float) -> None:
        """Start a generation of these units, each with the tasks that take part, once everything is ready. If these
        change first, or the snapshot is abandoned, start over. None starts while the run is being paused."""
        if self._ledger.pause == SAVING:
            units = []
        hosts = restoring_hosts(self._plan, (task for _, tasks in units for task in tasks))
        if self.starting is not None and (not units or hosts != self.starting.hosts or self._is_abandoned()):
            self.starting = None
        if not units:
            return
        ledger, limits = self._ledger, self._plan.limits
        if self.starting is None:
            number = max(ledger.generation, self.recorded, self._commits.records.newest) + 1
            self.starting = RestorePreparation(
                self._commits, self._plan.snapshots, number, hosts, self._instruct, self._emit, now, limits.grace,
                is_first=ledger.generation == 0,
            )  # fmt: skip
        start = self.starting
        start.advance(now)
        if start.stage in (RECORDING, READY):
            self.recorded = max(self.recorded, start.number)
        if start.number > generation_numbers.MOST:  # members would reject it
            text = f"no generation can follow {start.number - 1}"
            self._shutdown.end("failed", text, "store", now, ins.KILL)
        elif start.failure is not None:
            text, may_pass = start.failure
            if ledger.generation == 0 or not may_pass or now - start.since >= limits.start:
                self._shutdown.end("failed", text, "store", now, ins.KILL)
        elif start.stage == READY:
            self.starting = None
            ledger.generation = start.number
            for unit, tasks in units:
                unit.tasks = tasks
            started = [unit for unit, _ in units]
            for unit in ledger.workers if self._plan.led_roles else ():
                unit.is_absent = unit not in started
            self._commits.begin_generation(start.record, len(ledger.group), start.is_recorded, now)
            self._start(started, start.snapshot, now)

    def _is_abandoned(self) -> bool:
        """Whether the snapshot that was chosen has been abandoned since."""
        snapshot = None if self.starting is None else self.starting.snapshot
        return snapshot is not None and self._commits.contents.abandoned.cover(snapshot)

    def check_waiting(self, now: float) -> None:
        """Report the hosts that the run waits for; after limits.start, end the run."""
        if self._ingest.is_busy():
            return  # hosts may still join; ingest.limit applies
        if self._ledger.is_pause_wanted or self.is_queued:
            return
        # An elastic group that is about to start no longer waits for the hosts that are missing.
        is_starting = self.starting is not None and self._ledger.is_elastic
        missing = [] if is_starting else self._ledger.missing_hosts()
        if self._ledger.generation:
            dispensable = self._elastic_hosts.dispensable_hosts()
            missing = [host for host in missing if host not in dispensable]
            self._enough_at = now if dispensable else self._enough_at
        since: float | None
        unprepared, unprepared_since = self.restarts.unprepared_hosts()
        if self.starting is not None and not missing:
            if self.starting.failure is not None:
                return  # the store is failing, not a host
            missing, since = self.starting.unprepared_hosts(), self.starting.since
        elif self._ledger.generation == 0:
            since = self._waits_since(self._ledger.units[0])
        elif unprepared and not missing:
            missing, since = unprepared, unprepared_since
        else:
            waiting = [unit for unit in self._ledger.units if unit.phase == WAITING]
            waiting = [unit for unit in waiting if any(task.host in missing for task in unit.all_tasks)]
            since = min((at for unit in waiting if (at := self._missed_since(unit)) is not None), default=None)
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

    def _missed_since(self, unit: Unit) -> float | None:
        """Since when the run has to wait for the unit: it could do without a worker while enough others were there."""
        return max(unit.since, self._enough_at) if unit.since and unit in self._ledger.workers else unit.since
