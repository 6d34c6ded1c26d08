"""Evaluation of committed snapshots: which are not evaluated yet, which evaluator has which, and the results. No I/O.

Evaluators request snapshots; each snapshot is assigned to one of them, the oldest first, and again if that one dies
without a result. A result is final once it is in the store, beside the snapshot: a new captain finds it there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Callable

from paceline.agent.captain import events as ev
from paceline.agent.captain import instructions as ins
from paceline.agent.captain.ledger import ENDING, OVER, RETURNING, Ledger
from paceline.agent.captain.restart_units import DONE
from paceline.agent.captain.snapshots.commits import Commits
from paceline.agent.captain.snapshots.drafts import first_entries
from paceline.agent.captain.snapshots.pending_records import PAUSE
from paceline.agent.run_files import stamp
from paceline.agent.transfers.requests import DAMAGED, Answer, EvaluationRecorded, Failure, Metrics, RecordEvaluation
from paceline.plan import Plan
from paceline.storage.snapshots.manifest import SnapshotId

LEAST = 600.0  # seconds for each evaluation after training, if limits.evaluation is omitted;
TIMES = 5  # or this many times the longest evaluation so far
MOST_UNRECORDED = 100  # results of a host that are not in the store; an evaluator has one at a time
MANY = 10  # warn if this many snapshots are waiting: each of them is kept


class Evaluations:
    def __init__(
        self,
        plan: Plan,
        ledger: Ledger,
        commits: Commits,
        add_metrics: Callable[[str, Metrics], None],
        instruct: Callable[[ins.Instruction], None],
        emit: Callable[..., None],
    ) -> None:
        """`add_metrics`: receives the metrics that a task reported."""
        self._plan, self._ledger, self._commits = plan, ledger, commits
        self._contents = commits.contents
        self._add_metrics, self._instruct, self._emit = add_metrics, instruct, emit
        self._host_of = {task.name: task.host for task in plan.tasks if task.role == "evaluator"}
        self.follows: set[str] = set()  # evaluators that have ever requested a snapshot
        self._first_started: dict[str, float] = {}  # evaluator -> when this captain first started it
        self._independent: set[str] = set()  # report steps but send no requests: they poll for snapshots
        self._idle: set[str] = set()  # evaluators that wait for a snapshot
        self._assigned: dict[str, tuple[SnapshotId, float]] = {}  # evaluator -> its snapshot, and when it was assigned
        self._longest = 0.0
        self._reported: set[SnapshotId] = set()  # this captain has emitted their evaluation
        self._skipped: set[SnapshotId] = set()  # cannot be evaluated
        self._unrecorded: dict[SnapshotId, ev.SnapshotEvaluated] = {}
        self._record_at: dict[SnapshotId, float | None] = {}  # when to record the result; None: being recorded
        self._warned: set[Any] = set()
        self._needed: set[SnapshotId] = set()  # result of needed_snapshots() in the last advance()
        self._training_is_over = False  # training has ended, and its last snapshot is committed
        self._result_deadline: float | None = None  # when the next result is due, after training
        self.run_deadline: float | None = None  # limits.runtime

    # ---- events

    def on_attempt_started(self, task: str) -> None:
        self._idle.discard(task)
        self._assigned.pop(task, None)

    def postpone(self, seconds: float) -> None:
        """The run was paused for so long, in which no evaluator could request a snapshot."""
        self._first_started = {task: at + seconds for task, at in self._first_started.items()}

    def on_step(self, task: str) -> None:
        self._independent.add(task)

    def on_joined(self, event: ev.MemberJoined, now: float) -> None:
        """Learn what the host's evaluators did while no captain was connected."""
        for task, snapshot in event.follows.items():
            if self._host_of.get(task) != event.host or task not in self._ledger.live:
                continue
            self.follows.add(task)
            self._idle.discard(task)
            if snapshot is None:
                self._assigned.pop(task, None)
                self._idle.add(task)
            else:
                self._assigned[task] = snapshot, now
        for result in event.evaluated:
            self.on_evaluated(result, now)

    def on_waiting(self, event: ev.EvaluatorWaiting) -> None:
        if self._host_of.get(event.task) == event.host and event.task in self._ledger.live:
            self.follows.add(event.task)
            self._assigned.pop(event.task, None)
            self._idle.add(event.task)

    def on_evaluated(self, event: ev.SnapshotEvaluated, now: float) -> None:
        if self._host_of.get(event.task) != event.host:
            return
        assigned, since = self._assigned.get(event.task, (None, now))
        if assigned == event.snapshot:
            self._longest = max(self._longest, now - since)
        if event.error:
            self._skip(event, event.error, now)
        elif event.snapshot in self._reported:
            self._acknowledge(event)
        elif event.snapshot not in self._unrecorded:
            self._add_unrecorded(event, now)

    def _add_unrecorded(self, event: ev.SnapshotEvaluated, now: float) -> None:
        if sum(each.host == event.host for each in self._unrecorded.values()) >= MOST_UNRECORDED:
            text = f"more than {MOST_UNRECORDED} results of evaluators on {event.host} are not stored yet"
            self._warn(("unrecorded", event.host), f"{text}: others are ignored until the host joins again")
            return
        self._unrecorded[event.snapshot] = replace(event, metrics=first_entries(event.metrics))
        self._record_at[event.snapshot] = now

    def on_answered(self, request: RecordEvaluation, answer: Answer, now: float) -> None:
        snapshot = request.snapshot
        event = self._unrecorded.get(snapshot)
        if event is None:
            return
        if isinstance(answer, EvaluationRecorded):
            self._finish_recorded(event, answer.metrics, now)
        elif isinstance(answer, Failure) and answer.kind == DAMAGED:
            self._skip(event, answer.text, now)
        elif isinstance(answer, Failure):
            self._record_at[snapshot] = now + PAUSE
            text = f"the evaluation of step {snapshot.step} by {event.task} is not stored yet: {answer.text}"
            self._warn(snapshot, text)

    def _finish_recorded(self, event: ev.SnapshotEvaluated, metrics: Metrics, now: float) -> None:
        snapshot = event.snapshot
        self._reported.add(snapshot)
        self._add_metrics(event.task, metrics)
        self._contents.add_evaluation(snapshot, metrics)
        best = self._contents.best(self.needed_snapshots(now) - {snapshot})
        fields = {"task": event.task, "step": snapshot.step, "snapshot": str(snapshot), "metrics": dict(metrics)}
        self._emit("evaluated", **fields, **({} if best is None else {"best": best.to_json()}))
        self._finish(event, now)

    def _skip(self, event: ev.SnapshotEvaluated, reason: str, now: float) -> None:
        self._skipped.add(event.snapshot)
        if event.snapshot in self._contents.chain:
            self._emit("warning", text=f"the snapshot of step {event.snapshot.step} cannot be evaluated: {reason}")
        self._finish(event, now)

    def _finish(self, event: ev.SnapshotEvaluated, now: float) -> None:
        self._unrecorded.pop(event.snapshot, None)
        self._record_at.pop(event.snapshot, None)
        self._result_deadline = None  # restarts with the next evaluation
        self._acknowledge(event)
        self._forget_deleted()

    def _acknowledge(self, event: ev.SnapshotEvaluated) -> None:
        if self._assigned.get(event.task, (None, 0.0))[0] == event.snapshot:
            del self._assigned[event.task]
        self._instruct(ins.AcknowledgeEvaluation(event.host, event.snapshot))

    def _forget_deleted(self) -> None:
        """If an evaluator reports a snapshot again that has been deleted, the store refuses the result."""
        for known in (self._reported, self._skipped, self._warned):
            known -= {each for each in known if isinstance(each, SnapshotId) and not self._contents.may_exist(each)}

    # ---- queries

    def unevaluated(self) -> list[SnapshotId]:
        """Snapshots without a result, oldest first, including those that are assigned."""
        finished = (self._contents.evaluations, self._skipped, self._unrecorded)
        chain = reversed(self._contents.chain)
        return [snapshot for snapshot in chain if not any(snapshot in group for group in finished)]

    def is_evaluator_expected(self, now: float) -> bool:
        """Whether an evaluator requests snapshots, or may still do so. One that sends no request within limits.start of
        its first start, or reports steps without any request, finds snapshots itself."""
        return any(self._may_follow(task, now) for task in self._host_of)

    def _may_follow(self, task: str, now: float) -> bool:
        if task in self._ledger.succeeded or self._ledger.unit_of[task].phase == DONE:
            return False
        is_late = now >= self._first_started.get(task, now) + self._plan.limits.start
        return task in self.follows or not (task in self._independent or is_late)

    def needed_snapshots(self, now: float) -> set[SnapshotId]:
        """Snapshots that may not be deleted yet."""
        if not self._host_of:
            return set()
        in_progress = {snapshot for snapshot, _ in self._assigned.values()} | set(self._unrecorded)
        if self._ledger.phase in (ENDING, OVER) or not self.is_evaluator_expected(now):
            return in_progress
        return in_progress.union(self.unevaluated())

    def is_unfinished(self, now: float) -> bool:
        """Whether evaluations remain, or may remain: a captain that has returned must list the store first."""
        may_remain = not self._contents.is_known or bool(self.unevaluated())
        return bool(self._unrecorded) or (self._has_follower(now) and may_remain)

    def needs_evaluators(self, now: float) -> bool:
        """Whether an evaluator that is lost after training must restart: also if a snapshot may be committed soon."""
        return self.is_unfinished(now) or (self._has_follower(now) and self._commits.is_busy())

    def _has_follower(self, now: float) -> bool:
        return any(task in self.follows and self._may_follow(task, now) for task in self._host_of)

    # ---- the end

    def limit(self) -> float:
        """Seconds for each evaluation that remains after training."""
        limit = self._plan.limits.evaluation
        return limit if limit is not None else max(LEAST, TIMES * self._longest)

    def end_training(self, now: float) -> None:
        """No more snapshots will be committed: evaluators learn this once every snapshot is evaluated."""
        if not self._training_is_over:
            self._training_is_over = True
            self.advance(now)

    def has_unrecorded(self) -> bool:
        return bool(self._unrecorded)

    def should_wait(self, now: float) -> bool:
        """Whether the run should wait for the remaining evaluations."""
        if not self.is_unfinished(now):
            return False
        if self._result_deadline is None:
            self._result_deadline = now + self.limit()
        if now < self._result_deadline and (self.run_deadline is None or now < self.run_deadline):
            return True
        limit = f"limits.evaluation of {self.limit():g} s" if now >= self._result_deadline else "limits.runtime"
        steps = ", ".join(str(snapshot.step) for snapshot in (*self._unrecorded, *self.unevaluated()))
        self._warn("end", f"the run ends before step {steps} was evaluated: {limit} was exceeded")
        return False

    # ---- progress

    def advance(self, now: float) -> None:
        if not self._host_of:
            return
        for task in self._ledger.live.keys() & self._host_of.keys():
            self._first_started.setdefault(task, now)
        for snapshot, at in list(self._record_at.items()):
            if at is not None and now >= at:
                self._record_at[snapshot] = None
                result = self._unrecorded[snapshot]
                self._instruct(ins.AskStore(RecordEvaluation(snapshot, result.task, result.metrics, stamp())))
        for task in [task for task in self._assigned if task not in self._ledger.live]:
            del self._assigned[task]
        self._idle &= self._ledger.live.keys()
        if self._contents.is_known and self._idle and self._ledger.phase != RETURNING:
            self._assign(now)  # not right after a captain restart: a host that has not joined yet may have a result
        needed = self.needed_snapshots(now)
        if self._needed - needed:
            self._commits.delete_surplus(now)
        self._needed = needed

    def _assign(self, now: float) -> None:
        assigned = {snapshot for snapshot, _ in self._assigned.values()}
        unassigned = [snapshot for snapshot in self.unevaluated() if snapshot not in assigned]
        if len(unassigned) > MANY and not self._training_is_over:
            self._warn("many", f"{len(unassigned)} snapshots are waiting for evaluation, and are kept until then")
        for task in [task for task in self._host_of if task in self._idle]:
            if unassigned:
                self._assigned[task] = unassigned.pop(0), now
            elif not self._training_is_over:
                return
            snapshot = self._assigned[task][0] if task in self._assigned else None
            self._idle.discard(task)
            self._instruct(ins.EvaluateSnapshot(self._host_of[task], task, snapshot))

    def _warn(self, key: Any, text: str) -> None:
        """Once per key."""
        if key not in self._warned:
            self._warned.add(key)
            self._emit("warning", text=text)
