"""The captain, which coordinates the run: a state machine without I/O that turns events into instructions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paceline.agent import generation_numbers, resource_usage
from paceline.agent.captain import events as ev
from paceline.agent.captain import instructions as ins
from paceline.agent.captain import start_times
from paceline.agent.captain.captain_return import CaptainReturn
from paceline.agent.captain.elastic_hosts import HostChoice, note_loss
from paceline.agent.captain.event_limiter import EventLimiter
from paceline.agent.captain.failures import Failures
from paceline.agent.captain.generations import Generations
from paceline.agent.captain.hangs import ProgressWatch
from paceline.agent.captain.ingest_phase import IngestPhase
from paceline.agent.captain.joining_hosts import JoiningHosts
from paceline.agent.captain.ledger import CLOSING, ENDING, LIVE, OVER, PAUSED, RETURNING, Ledger
from paceline.agent.captain.loss_spikes import Spikes
from paceline.agent.captain.not_finite import NotFinite
from paceline.agent.captain.pause import Pause
from paceline.agent.captain.restart_units import RUNNING, STOPPING, Unit
from paceline.agent.captain.scaling import Scaling
from paceline.agent.captain.shutdown import Shutdown
from paceline.agent.captain.snapshots.commits import Commits
from paceline.agent.captain.snapshots.evaluations import Evaluations
from paceline.agent.captain.snapshots.group_snapshot import GroupSnapshot
from paceline.agent.captain.snapshots.prefetches import Prefetches
from paceline.agent.captain.snapshots.restoring_tasks import restoring_hosts
from paceline.agent.exhaustive import assert_never
from paceline.agent.transfers import requests as req
from paceline.plan import ALONE, BEFORE, GROUP, Plan
from paceline.storage.snapshots.manifest import SnapshotId, pair

RESOURCES_EVERY = 5.0  # seconds, at least, between two reports of a host


class Captain:
    def __init__(
        self,
        plan: Plan,
        run: str,
        lease: float,
        now: float,
        wall: float,
        notes: dict[str, Any] | None = None,
        clock_offset: float = 0.0,
        name: str = "",
    ) -> None:
        """`wall`: the time of day, only for display: it may jump. `notes`: from the previous captain. `clock_offset`:
        how far `now` is ahead of the previous captain's clock. `name`: different for each captain of a run."""
        self.plan = plan
        self.run = run
        self.lease = lease
        self.ledger = Ledger(plan)
        self.members = self.ledger.members
        self.units = self.ledger.units
        self._unit_of = self.ledger.unit_of
        self._tasks = self.ledger.tasks
        self._wall_offset = wall - now
        self.watch = ProgressWatch(plan)
        self.commits = Commits(plan, run, name, self.members, self._instruct, self._emit)
        self._prefetches = Prefetches(self.commits, self._instruct, self._emit)
        self.commits.has_fetched = self._prefetches.has_fetched
        self._group_snapshot = GroupSnapshot(
            self.ledger, self.commits.contents, self.watch.rate, self._is_on_others, self._instruct, self._emit, name
        )
        self.evaluations = Evaluations(
            plan, self.ledger, self.commits, self.watch.add_metrics, self._instruct, self._emit
        )
        self.commits.contents.awaiting_evaluation = self.evaluations.needed_snapshots
        self._shutdown = Shutdown(plan, self.ledger, self.commits, self.evaluations, lease, self._instruct, self._emit)
        self.failures = Failures(
            plan,
            self.ledger,
            self.watch,
            self._shutdown,
            self.evaluations,
            lease,
            self._wall_offset,
            self._instruct,
            self._emit,
        )
        self._spikes = Spikes(plan.leading_task, self._emit)
        self._not_finite = NotFinite(plan, self.ledger, self.commits, self.failures, self._shutdown, self._emit)
        self._ingest = IngestPhase(plan, self.ledger, self._shutdown, self._instruct, self._emit)
        self.leaving: set[str] = set()  # hosts that are shutting down
        self._elastic_hosts = elastic_hosts = HostChoice(plan, self.ledger, self.leaving)
        self._generations = Generations(
            plan, self.ledger, self.commits, self._shutdown, self._ingest, elastic_hosts, self._start, self._restart,
            self._instruct, self._emit,
        )  # fmt: skip
        self._joining = JoiningHosts(
            plan, self.ledger, self.commits, elastic_hosts, self._group_snapshot, self.failures, self._instruct,
            self._emit,
        )  # fmt: skip
        self.scaling = Scaling(
            plan, self.ledger, self.commits, elastic_hosts, self._joining, self._group_snapshot, self.failures,
            self.leaving, self._instruct, self._emit,
        )  # fmt: skip
        self.pause = Pause(
            plan, self.ledger, self.commits, self.evaluations, self._group_snapshot, self.failures, self._generations,
            self._ingest, self.leaving, lambda: self.watch.steps, 0.0 if notes else now + lease, self._instruct,
            self._emit,
        )  # fmt: skip
        self._captain_return = CaptainReturn(
            plan, self.ledger, self.commits, self._generations, self.failures, self.watch, self._shutdown, lease,
            self._emit,
        )  # fmt: skip
        self.starts: start_times.Starts = {}  # of the newest generations
        self._started: dict[str, int] = {}  # task -> the newest attempt that has started
        self._runtime_until: float | None = None
        self._event_limiter = EventLimiter()
        self._instructions: ins.Instructions = []
        if notes:
            self.ledger.load_sizes(notes["books"])
            self.pause.load_notes(notes.get("pause", {}), clock_offset)
        if notes and (notes.get("generation") or notes["ingest"]["until"] is not None):
            self._load_notes(notes, clock_offset)
            self._captain_return.begin(now)

    @property
    def generation(self) -> int:
        return self.ledger.generation

    @property
    def phase(self) -> str:
        return self.ledger.phase

    @property
    def is_stopping(self) -> bool:
        """Whether tasks are being ended because others failed: the cause is emitted once all of them have ended."""
        return any(unit.phase == STOPPING for unit in self.units)

    # ---- events in, instructions out

    def handle(self, event: ev.Event, now: float) -> ins.Instructions:
        self._instructions = []
        if self.phase != OVER:
            self._handle(event, now)
            if self._instructions or not isinstance(event, ev.Heartbeat):
                self._advance(now)
        return self._instructions

    def _handle(self, event: ev.Event, now: float) -> None:
        if isinstance(event, ev.Heartbeat):  # the most frequent first
            self._heartbeat(event, now)
        elif isinstance(event, ev.Tick):
            self._tick(now)
        elif isinstance(event, ev.MemberJoined):
            self._joined(event, now)
        elif isinstance(event, ev.MemberDisconnected):
            self._disconnected(event)
        elif isinstance(event, ev.MemberLeft):
            self.members[event.host].has_left = True
            self.leaving.discard(event.host)
        elif isinstance(event, ev.HostLeaving):
            self._host_leaving(event)
        elif isinstance(event, ev.TaskStarted):
            self._task_started(event)
        elif isinstance(event, ev.StartMeasured):
            self._start_measured(event, now)
        elif isinstance(event, ev.MetricNotFinite):
            self._not_finite.on_reported(event, now)
        elif isinstance(event, ev.TaskExited):
            self.failures.on_exited(event.host, event.exit, now)
        elif isinstance(event, ev.TasksEnded):
            self.failures.on_ended(event, now)
            self.ledger.add_offers(self.members[event.host], event.offers)
        elif isinstance(event, ev.SpareReady):
            self.members[event.host].has_spare = True
            self._joining.on_spare_ready(event)
            if self._event_limiter.admits(f"spares of {event.host}", now):
                self._emit("spare-ready", host=event.host, took_s=round(event.seconds, 1))
        elif isinstance(event, ev.PartSaved):
            self._part_saved(event, now)
        elif isinstance(event, ev.PartStored):
            self.commits.on_stored(event, now)
        elif isinstance(event, ev.SnapshotPrefetched):
            self._prefetches.on_prefetched(event, now)
        elif isinstance(event, ev.HostPrepared):
            self._prefetches.on_prepared(event)
            if self._generations.starting is not None:
                self._generations.starting.on_prepared(event, now)
            else:
                self._generations.restarts.on_prepared(event, now)
                self._joining.on_prepared(event)
        elif isinstance(event, ev.StoreAnswered):
            self._store_answered(event, now)
        elif isinstance(event, ev.EvaluatorWaiting):
            self.evaluations.on_waiting(event)
        elif isinstance(event, ev.SnapshotEvaluated):
            self.evaluations.on_evaluated(event, now)
        elif isinstance(event, ev.SaveRequested):
            if self.phase == LIVE:
                self._group_snapshot.request()
        elif isinstance(event, ev.AgreementReply):
            self._group_snapshot.on_reply(event)
        elif isinstance(event, ev.IngestProgress):
            self._ingest.on_progress(event, now)
        elif isinstance(event, ev.Notice):
            self._notice(event, now)
        elif isinstance(event, ev.StopRequested):
            self._shutdown.stop(event.reason, now, ins.INTERRUPT if event.interrupt else ins.TERMINATE)
        elif isinstance(event, ev.ScaleRequested):
            self.scaling.on_requested(event)
        elif isinstance(event, ev.PauseRequested):
            self._postpone(self.pause.take_queued_s(now))
            self.pause.on_requested(event, now)
        elif isinstance(event, ev.ResumeRequested):
            self._postpone(self.pause.on_resume_requested(now))
        else:
            assert_never(event)

    def _instruct(self, instruction: ins.Instruction) -> None:
        self._instructions.append(instruction)

    def _emit(self, kind: str, **fields: Any) -> None:
        if kind in ("saved", "committed", "generation-formed") and self._counts_snapshots(fields):
            fields["counted"] = True
        self._instructions.append(ins.EmitEvent(kind, self.generation, fields))

    def _counts_snapshots(self, fields: dict[str, Any]) -> bool:
        """Whether the number of the snapshot in this event is a count and not a step: the program has its own
        checkpoints, and has not reported any step."""
        if not self.plan.snapshots.watch or "origin" in fields or fields.get("restore", "") is None:
            return False
        return not self.watch.has_stepped(task.name for task in self.plan.tasks if task.role != "evaluator")

    def _postpone(self, seconds: float) -> None:
        """The run was paused or queued for so long, which does not count towards its limits."""
        self._ingest.postpone(seconds)
        self.failures.postpone(seconds)
        self.evaluations.postpone(seconds)
        if self._runtime_until is not None:
            self._runtime_until = self.evaluations.run_deadline = self._runtime_until + seconds

    # ---- members

    def _joined(self, event: ev.MemberJoined, now: float) -> None:
        member = self.members.get(event.host)
        if member is None:
            return
        self._postpone(self.pause.take_queued_s(now))
        self._generations.on_joined(now)
        event = self._without_implausible_numbers(event, now)
        if self.generation == 0 and event.generation > 0 and self.phase == LIVE:
            self._captain_return.begin(now)  # a previous captain has led the run, and its notes are lost
        self.ledger.generation = max(self.generation, event.generation)
        running = self.ledger.running_on(event.host)
        if member.instance and event.instance != member.instance and running:
            note_loss(member, now)
            if event.replaces or (event.place and event.place == member.place):
                self.failures.on_vanished(running, f"{event.host} was lost and has been replaced", now)
            else:
                self.ledger.ghosts.append((member.lease_until, running))
                for name in running:
                    self.failures.on_host_lost(name, f"{event.host} was lost and has been replaced", now)
        elif running:  # after a captain restart: tasks that this captain has adopted
            self._compare(event, running, now)
        if self.phase == RETURNING:
            self._captain_return.on_joined(event, now)
        self._ingest.on_joined(event, now)
        for name, attempt in event.running.items():
            unit = self._unit_of.get(name)
            is_outdated = unit is None or self.ledger.live.get(name) != attempt or unit.phase == STOPPING
            if is_outdated:
                self._instruct(ins.EndTasks(event.host, {name: attempt}, ins.KILL))
            elif self.phase == ENDING:
                self._shutdown.end_task(event.host, name, attempt, now)
        self.ledger.withdraw_offers(member)
        member.connected, member.has_left = True, False
        if event.instance != member.instance:
            self.leaving.discard(event.host)
        member.has_spare = member.has_spare and (event.instance, event.agent) == (member.instance, member.agent)
        member.instance, member.place, member.serves = event.instance, event.place, event.serves
        member.agent, member.generation, member.joined_at, member.is_lost = event.agent, event.generation, now, False
        member.lease_until = now + self.lease
        self.ledger.add_offers(member, event.offers)
        self._emit("member-joined", host=event.host)
        for report in event.not_finite:
            self._not_finite.on_reported(report, now)
        self._add_saved_parts(event, now)
        self._prefetches.on_joined(event.host)
        self._shutdown.on_joined(event.host)
        self._group_snapshot.on_joined(event.host)
        self._joining.on_joined(event.host)
        self.scaling.on_joined(event.host)
        self.pause.on_joined(event.host)

    def _without_implausible_numbers(self, event: ev.MemberJoined, now: float) -> ev.MemberJoined:
        """The numbers come from files of the host, which a program may have changed."""
        known = self._newest_known_generation()
        records = tuple(each for each in event.records if generation_numbers.is_plausible(each.generation, known))
        held = tuple(each for each in event.held if generation_numbers.is_plausible(each.snapshot.generation, known))
        event = replace(event, records=records, held=held)
        if generation_numbers.is_plausible(event.generation, known):
            return event
        text = f"{event.host} reports generation {event.generation}, which cannot be true: the newest is {known}. The "
        text += "number is ignored; has a program changed hidden files in the folder logs of the run?"
        self._notice(ev.Notice(event.host, text, warning=True), now)
        return replace(event, generation=0)

    def _newest_known_generation(self) -> int:
        return max(self.generation, self._generations.recorded, self.commits.records.newest)

    def _add_saved_parts(self, event: ev.MemberJoined, now: float) -> None:
        """Record the snapshots on a host that has joined."""
        self.commits.learn_records(event.records, now)
        if self._generations.starting is None:
            self.commits.learn_generation(max(self.generation, self._generations.recorded))
        self.commits.on_joined(event.host, event.held)
        for saved in event.held:
            self._part_saved(saved, now, is_known=True)
        if self.plan.host(event.host).role == "evaluator":
            self.commits.contents.announce_to(event.host)
            self.evaluations.on_joined(event, now)
        if self._generations.starting is not None:
            self._generations.starting.on_joined(event.host)
        self._generations.restarts.on_joined(event.host)

    def _compare(self, event: ev.MemberJoined, expected: dict[str, int], now: float) -> None:
        """A member has reconnected: its tasks may have ended in the meantime."""
        exits = {exit.task: exit for exit in event.exits}
        for name, attempt in expected.items():
            if event.running.get(name) == attempt:
                continue
            exit = exits.get(name)
            if exit is not None and exit.attempt == attempt:
                self.failures.on_exited(event.host, exit, now)
            else:
                self.failures.on_vanished({name: attempt}, f"the agent of {event.host} died, and the task with it", now)

    def _disconnected(self, event: ev.MemberDisconnected) -> None:
        member = self.members[event.host]
        if member.connected:
            member.connected = False
            self.ledger.withdraw_offers(member)
            self._prefetches.on_disconnected(event.host)
            if not member.has_left and not self._shutdown.has_dismissed():
                self._emit("member-lost", host=event.host, reason="the connection was closed")

    def _host_leaving(self, event: ev.HostLeaving) -> None:
        member = self.members[event.host]
        is_new = event.host not in self.leaving and not member.has_left
        self.ledger.withdraw_offers(member)
        self.leaving.add(event.host)
        if is_new and self.ledger.pause != PAUSED:
            self._emit("note", text=f"{event.host} is shutting down: {event.reason}")
        if self.phase == LIVE:
            if self._joining.has_snapshot() or self._group_snapshot.is_polled:  # without one, no host can join later
                self._elastic_hosts.on_leaving(event.host)
            self._group_snapshot.on_leaving(event.host)

    def _notice(self, event: ev.Notice, now: float) -> None:
        notice = self._event_limiter.admit(event, now)
        if notice is not None:
            self._emit("warning" if notice.warning else "note", text=notice.text)

    def _tick(self, now: float) -> None:
        lost_hosts = self.failures.expire_leases(now)
        for host in lost_hosts if self.ledger.is_elastic and not self.plan.led_roles else ():
            self.commits.on_lost(host)  # the others may continue without what it has
        is_idle = self.ledger.pause == PAUSED or self._generations.is_queued
        counts_time = self.phase == LIVE and not is_idle
        if counts_time and self._runtime_until is not None and now >= self._runtime_until:
            reason = f"the run exceeded limits.runtime of {self.plan.limits.runtime:g} s"
            self._shutdown.end("failed", reason, "runtime-limit", now, ins.TERMINATE)
        if self.phase == LIVE and counts_time:
            self._ingest.check_limit(now)
        if self.phase == LIVE:
            self.failures.check_hangs(now)
        if self.phase == LIVE:
            self._generations.check_waiting(now)

    # ---- tasks

    def _task_started(self, event: ev.TaskStarted) -> None:
        is_running = self.ledger.running_on(event.host).get(event.task) == event.attempt
        if is_running and self._started.get(event.task) != event.attempt:
            self._started[event.task] = event.attempt
            start_times.record_started(self.starts, self.generation, event.task, event.warm)
            start_times.forget_old(self.starts)
            self._emit("task-started", task=event.task, pid=event.pid, warm=event.warm, host=event.host)

    def _start_measured(self, event: ev.StartMeasured, now: float) -> None:
        is_running = self.ledger.running_on(event.host).get(event.task) == event.attempt
        if is_running and self._event_limiter.admits(f"start of {event.task}", now):
            fields = start_times.fields_of(event.times)
            start_times.record_measured(self.starts, self.generation, event.task, fields)
            self._emit("start-times", task=event.task, **fields)

    def _heartbeat(self, event: ev.Heartbeat, now: float) -> None:
        member = self.members[event.host]
        member.lease_until = now + self.lease
        member.memory = event.memory
        self._group_snapshot.on_polling(name for name in event.asking if self.ledger.is_on(name, event.host))
        if event.resources is not None and now >= member.resources_due:
            member.resources_due = now + RESOURCES_EVERY
            fields = resource_usage.event_fields(event.resources, self.plan.host(event.host).tasks)
            self._emit("resources", host=event.host, **fields)
        running = self.ledger.running_on(event.host)
        for name, progress in event.tasks.items():
            if name not in running or self._unit_of[name].phase != RUNNING or self._unit_of[name].kind == BEFORE:
                continue
            has_stepped = self.watch.update(name, progress, now)
            if has_stepped and progress.step is not None:
                fields = {"task": name, "step": progress.step, "metrics": dict(progress.metrics)}
                self._emit("step", **fields, steps_per_s=self.watch.rate(name))
                if self._tasks[name].role == "evaluator":
                    self.evaluations.on_step(name)
                else:
                    self.failures.on_step(name, progress.step, now - progress.step_age, now)
                    self._spikes.on_step(name, progress.step, progress.metrics, now)

    # ---- snapshots

    def _part_saved(self, saved: ev.PartSaved, now: float, is_known: bool = False) -> None:
        is_plausible = generation_numbers.is_plausible(saved.snapshot.generation, self._newest_known_generation())
        if saved.task not in self.plan.host(saved.host).tasks or not is_plausible:
            return
        self._not_finite.on_saved(saved, now)
        draft = self.commits.on_saved(saved, now, is_known)
        if draft is not None:
            stall = {"stall_s": round(draft.stall, 3)} if draft.stall else {}
            self._emit("saved", step=saved.snapshot.step, snapshot=str(saved.snapshot), **stall)
            self._group_snapshot.on_saved(saved.snapshot)
            self._prefetches.on_saved(now)
            self.watch.on_snapshot(now)
            self.failures.on_progress(saved.task, saved.snapshot.step, now)

    def _store_answered(self, event: ev.StoreAnswered, now: float) -> None:
        request, answer = event.request, event.answer
        if isinstance(answer, req.Failure) and answer.kind == req.SUPERSEDED and not self._is_outdated(request):
            self.ledger.phase = OVER
            self._instruct(ins.StepDown(answer.text))
        elif isinstance(request, req.RecordEvaluation):
            self.evaluations.on_answered(request, answer, now)
        elif not event.ticket:
            before = self.commits.contents.newest_step()
            self.commits.on_answered(request, answer, now)
            if isinstance(request, req.CommitSnapshot) and self.commits.contents.newest_step() > before:
                # Even if an earlier generation had reached a later step, and its progress was lost.
                self.failures.reset_budgets(now)
        elif self.generation == 0 and isinstance(answer, req.SnapshotList) and answer.generation:
            # A previous captain has led the run, its notes are lost, and no member that joined knows of it.
            self.commits.update_contents(answer)
            self.ledger.generation, self._generations.starting = answer.generation, None
            self._captain_return.begin(now)
        elif self._generations.starting is not None:
            self._generations.starting.on_answered(event, now)
        else:
            self._generations.restarts.on_answered(event, now)

    def _is_outdated(self, request: req.Request) -> bool:
        """Whether this captain has started a later generation since it asked: that one is no reason to step down."""
        return isinstance(request, req.CommitSnapshot) and request.generation < self.commits.generation

    # ---- starting

    def _stop_generation(self, now: float) -> None:
        """Stop the current generation, so that a new one starts without its snapshots."""
        for unit in self.units:
            is_finished = unit.restarts_within_generation and unit.has_succeeded(self.ledger.succeeded)
            is_worker = unit in self.ledger.workers and not self.ledger.is_cluster_known
            trains = unit.kind not in (ALONE, BEFORE) or is_worker
            if trains and unit.phase == RUNNING and not is_finished:
                self.failures.stop_unit(unit, now)

    def _restart(self, units: list[Unit], restore: SnapshotId | None, now: float) -> None:
        """Start units from a snapshot while others continue, within the generation."""
        tasks = {task.name for unit in units for task in unit.tasks}
        self.commits.discard_incomplete(tasks)
        if self.plan.leading_task in tasks:
            self._spikes.on_group_started()
        self._start(units, restore, now, is_group=False)

    def _start(self, units: list[Unit], restore: SnapshotId | None, now: float, is_group: bool = True) -> None:
        """`is_group`: the tasks that train together start, as a generation, unless all units restart alone."""
        is_group = is_group and any(unit.kind != ALONE for unit in units)
        hosts: dict[str, dict[str, int]] = {}
        for unit in units:
            unit.enter(RUNNING)
            unit.is_resizing = False
            for task in unit.tasks:
                if task.name in self.ledger.succeeded and unit.kind == ALONE:
                    continue
                hosts.setdefault(task.host, {})[task.name] = self.ledger.begin_attempt(task)
                self.commits.incomplete.on_attempt_started(task.name)
                self._group_snapshot.on_attempt_started(task.name, not is_group or unit.kind == ALONE)
                self.evaluations.on_attempt_started(task.name)
                self.watch.begin(task.name, now)
        if self._runtime_until is None and self.plan.limits.runtime is not None:
            self._runtime_until = now + self.plan.limits.runtime
        self.evaluations.run_deadline = self._runtime_until
        restarts, roster = len(self.failures.restarts), self.ledger.roster()
        records = self.commits.records.for_members() if any(unit.kind != ALONE for unit in units) else ()
        start = ins.StartTasks(self.generation, restarts, roster, restore, hosts, self._ingest.data, records)
        self._instruct(start)
        tasks = [name for names in hosts.values() for name in names]
        if is_group:
            self._not_finite.on_group_started(restore is not None)
            self._spikes.on_group_started()
            self._elastic_hosts.on_started()
            self._joining.on_started(now)
        names = set(tasks)
        absent = [task.name for unit in units if not unit.is_whole for task in unit.all_tasks if task.name not in names]
        absent += [task.name for unit in self.ledger.workers if unit.is_absent and is_group for task in unit.tasks]
        missing = {"absent": absent} if absent else {}
        scratch = {"from_scratch": True} if restore is None and is_group and self.generation > 1 else {}
        restored = None if restore is None else str(restore)
        self._emit("generation-formed", tasks=tasks, restore=restored, **scratch, **missing)

    # ---- after every event

    def _advance(self, now: float) -> None:
        if self.phase == RETURNING:
            self._captain_return.settle(now)
        is_useless = self.commits.is_stuck() or self._generations.must_begin_anew()
        if self.phase == LIVE and self._generations.starting is None and self.generation and is_useless:
            self._stop_generation(now)
        if self.phase == LIVE:
            self._not_finite.advance(now)
        if self.phase == LIVE:
            self.failures.advance(now)
        self.pause.advance(now)
        if self.phase == LIVE:
            self._generations.advance(now)
        elif self.phase == CLOSING and self.evaluations.needs_evaluators(now):
            self.failures.advance(now)
            self._generations.restart_evaluators(now)
        if not self.ledger.is_pause_wanted:
            self._joining.advance(now)
            self.scaling.advance(now)
        self._group_snapshot.advance(now)
        if self.commits.has_surplus and self._have_all_joined():
            self.commits.limit_incomplete(self.ledger.live, self._group_snapshot.awaited_step)
        if self.phase != OVER:
            self.commits.advance(now, self.phase != RETURNING, self._needs_commit())
            self.evaluations.advance(now)
        is_needed = self.ledger.is_elastic and any(self.members[host].connected for host in self.leaving)
        if (self._prefetches.is_due or is_needed) and self.phase == LIVE and self._group_trains():
            group = self._group()
            self._prefetches.advance(
                lambda: restoring_hosts(self.plan, (task for unit in group for task in unit.tasks)) - self.leaving,
                is_needed, now,
            )  # fmt: skip
        self._shutdown.advance(now)

    def _have_all_joined(self) -> bool:
        """Whether each host that takes part has joined this captain, even if it is not connected now. Before that, it
        may have parts of snapshots that seem incomplete."""
        return all(self.members[host].instance for host in self.ledger.hosts_taking_part())

    def _needs_commit(self) -> bool:
        """Whether the newest snapshot is needed in the store now: a host shuts down or is no longer wanted, a task has
        failed, or the run is about to end."""
        if self.phase == RETURNING:
            return False
        is_leaving = any(self.members[host].connected for host in self.leaving) and not self._group_snapshot.is_pending
        is_urgent = self.scaling.needs_commit or self.pause.needs_commit
        return is_leaving or is_urgent or self.phase != LIVE or not self._does_any_train()

    def _is_on_others(self, snapshot: SnapshotId) -> bool:
        """Whether an elastic job could continue from the snapshot without the hosts that shut down, even if these never
        commit it."""
        unit = next((unit for unit in self.units if unit.kind == GROUP), None)
        if not self.ledger.is_elastic or unit is None or not self._elastic_hosts.can_continue(unit):
            return False
        others = restoring_hosts(self.plan, unit.tasks) - self.leaving
        can_get_it = all(self.members[host].connected for host in others) and snapshot in self.commits.restorable(
            others
        )
        return can_get_it and self._prefetches.have(snapshot, others)

    def _group(self) -> list[Unit]:
        return [unit for unit in self.units if unit.kind not in (ALONE, BEFORE)]

    def _group_trains(self) -> bool:
        return all(unit.phase == RUNNING for unit in self._group())

    def _does_any_train(self) -> bool:
        return any(unit.phase == RUNNING for unit in self._group())

    # ---- notes for the next captain

    def milestone(self) -> tuple[object, ...]:
        """A value that changes when something happens that the next captain must know and cannot learn from members."""
        newest = self.failures.restarts[-1].failed_at if self.failures.restarts else None
        restarts = newest, len(self.failures.recovering)
        owes_records, ingest = bool(self.commits.records), self._ingest.to_notes()
        own = self.generation, self._shutdown.outcome, self.phase, *self.ledger.sizes.values()
        return *own, *self.pause.milestone(), *restarts, owes_records, *ingest.values(), *self._not_finite.milestone()

    def to_notes(self) -> dict[str, Any]:
        return {
            "generation": self.generation,
            **self.failures.to_notes(),
            "recorded": self._generations.recorded,
            "owed": self.commits.records.to_notes(),
            "parent": None if self.commits.parent is None else pair(self.commits.parent),
            "skipped": self.commits.skipped,
            "runtime_until": self._runtime_until,
            "outcome": list(self._shutdown.outcome),
            "ingest": self._ingest.to_notes(),
            "books": self.ledger.to_notes(),
            "watch": self.watch.to_notes(),
            "follows": sorted(self.evaluations.follows),
            "not_finite": self._not_finite.to_notes(),
            **({"pause": self.pause.to_notes()} if self.pause.was_requested else {}),
            **({"growth": self._joining.to_notes()} if self.ledger.is_elastic else {}),
        }

    def _load_notes(self, notes: dict[str, Any], clock_offset: float) -> None:
        self.ledger.generation = notes["generation"]
        self.failures.load_notes(notes, clock_offset)
        self._generations.recorded = notes["recorded"]
        self.commits.records.load_notes(notes["owed"])
        parent = notes.get("parent")  # not in the notes of earlier versions
        self.commits.parent = None if parent is None else SnapshotId(*parent)
        self.commits.skipped = notes["skipped"]
        status, reason, cause = notes["outcome"]
        self._shutdown.outcome = (status, reason, cause)
        self._ingest.load_notes(notes["ingest"], clock_offset)
        self.ledger.load_notes(notes["books"], clock_offset)
        self.commits.world_sizes[self.generation] = len(self.ledger.group)
        self._joining.load_notes(notes.get("growth", {}), clock_offset)
        self.pause.adopt()
        self.watch.load_notes(notes["watch"])
        self.evaluations.follows = set(notes["follows"])
        self._not_finite.load_notes(notes.get("not_finite", {}), clock_offset)
        if notes["runtime_until"] is not None:
            self._runtime_until = self.evaluations.run_deadline = notes["runtime_until"] + clock_offset
