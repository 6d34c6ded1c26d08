"""The end of a run: saved snapshots are committed, tasks get their grace period, members leave. No I/O."""

from __future__ import annotations

from typing import Callable

from paceline.agent.captain import instructions as ins
from paceline.agent.captain.ledger import CLOSING, ENDING, LIVE, OVER, PAUSED, RETURNING, Ledger
from paceline.agent.captain.snapshots.commits import Commits
from paceline.agent.captain.snapshots.evaluations import Evaluations
from paceline.plan import Plan

LEAVE_TIMEOUT = 5.0  # seconds for members to report that they have left
# By framework: what names the address of rank 0, and what a program does to join the group.
MEETING_PLACES = {
    "torch": ("MASTER_ADDR and MASTER_PORT", "calls torch.distributed.init_process_group() without other addresses"),
    "tensorflow": ("TF_CONFIG", "creates a tf.distribute.MultiWorkerMirroredStrategy() and trains with it"),
    "jax": ("PACELINE_JAX_COORDINATOR", "calls jax.distributed.initialize() before anything else of JAX"),
}


class Shutdown:
    def __init__(
        self,
        plan: Plan,
        ledger: Ledger,
        commits: Commits,
        evaluations: Evaluations,
        lease: float,
        instruct: Callable[[ins.Instruction], None],
        emit: Callable[..., None],
    ) -> None:
        self._plan, self._limits, self._ledger, self._commits, self._lease = plan, plan.limits, ledger, commits, lease
        self._evaluations = evaluations
        self._instruct, self._emit = instruct, emit
        self._deciding = {role.name for role in plan.roles if role.decides}
        servers = plan.strategy == "parameter-server"
        self._servers = [task.name for task in plan.tasks if servers and task.role in ("ps", "worker")]
        self.outcome: tuple[str, str, str | None] = ("", "", None)
        self._closing_until = 0.0
        self._commit_until: float | None = None
        self._how, self._grace_until = ins.KILL, 0.0
        self._end_deadline = 0.0
        self._dismissed_at: float | None = None
        self._was_paused = False  # hosts that have left do not come back

    # ---- reasons to end

    def stop(self, reason: str, now: float, how: str = ins.TERMINATE) -> None:
        if self._ledger.phase == RETURNING:  # once it is known which tasks run, they get their grace period
            self.outcome = self.outcome if self.outcome[0] else ("stopped", reason, None)
        elif self._ledger.phase in (LIVE, CLOSING):
            self.end("stopped", reason, None, now, how)

    def end(self, status: str, reason: str, cause: str | None, now: float, how: str) -> None:
        self._was_paused = self._ledger.pause == PAUSED
        self._ledger.phase = ENDING
        self.outcome = (status, reason, cause)
        grace = self._limits.grace if how in (ins.TERMINATE, ins.INTERRUPT) else 0.0
        if self._ledger.is_anything_live():
            self._emit("ending", reason=reason, grace_s=grace)
        self._end_tasks(list(self._ledger.live), how, grace)
        self._how, self._grace_until = how, now + grace
        self._end_deadline = now + grace + self._lease + LEAVE_TIMEOUT

    def close(self, now: float) -> None:
        """Training has succeeded: end servers now, and let evaluators and other tasks finish."""
        self._ledger.phase = CLOSING
        self.outcome = ("succeeded", "training succeeded", None)
        self._end_tasks(self._servers, ins.TERMINATE, self._limits.grace)
        self._commit_until = now + self._limits.commit
        self._closing_until = now + self._limits.grace
        evaluators = [name for name in self._ledger.live if self._ledger.tasks[name].role == "evaluator"]
        if evaluators:
            text = f"training succeeded; waiting for {', '.join(evaluators)} to finish"
            limit = self._evaluations.limit() if self._evaluations.follows else self._limits.grace
            self._emit("ending", reason=text, grace_s=limit)

    def _end_tasks(self, names: list[str], how: str, grace: float) -> None:
        for end in self._ledger.end_instructions(names, how, grace):
            self._instruct(end)

    # ---- hosts that join while the run ends

    def end_task(self, host: str, task: str, attempt: int, now: float) -> None:
        self._instruct(ins.EndTasks(host, {task: attempt}, self._how, max(0.0, self._grace_until - now)))

    def on_joined(self, host: str) -> None:
        if self._ledger.phase == ENDING and not self._ledger.is_anything_live():
            self._dismiss(host)

    def _dismiss(self, host: str) -> None:
        self._instruct(ins.DismissMember(host, self.outcome[0], self.outcome[1]))

    def has_dismissed(self) -> bool:
        """Whether members have been told to leave: a connection that is closed now is one that has left."""
        return self._dismissed_at is not None

    # ---- progress

    def advance(self, now: float) -> None:
        if self._ledger.phase == LIVE and self._has_succeeded():
            self.close(now)
        if self._ledger.phase == CLOSING:
            self._closing(now)
        if self._ledger.phase == ENDING:
            self._ending(now)

    def _has_succeeded(self) -> bool:
        """Whether all tasks that decide, and take part in the current generation, have succeeded."""
        deciding = (task for unit in self._ledger.units for task in unit.tasks if task.role in self._deciding)
        return all(task.name in self._ledger.succeeded for task in deciding)

    def _closing(self, now: float) -> None:
        if self._awaits_commit(now):
            self._closing_until = now + self._limits.grace  # evaluators get the last snapshot, too
            return
        self._evaluations.end_training(now)
        if self._evaluations.should_wait(now):
            self._closing_until = now + self._limits.grace
            return
        if not self._ledger.is_anything_live() or now >= self._closing_until:
            self.end(*self.outcome, now, ins.TERMINATE)

    def _awaits_commit(self, now: float) -> bool:
        """Whether to wait for the commit of a saved snapshot."""
        if self._commit_until is None:
            self._commit_until = now + self._limits.commit
        is_hopeless = self._was_paused and self._commits.is_out_of_reach()
        return self._commits.is_busy() and not is_hopeless and now < self._commit_until

    def _awaits_store(self, now: float) -> bool:
        """Whether to wait until surplus snapshots are deleted and results of evaluators are recorded."""
        deadline = max(self._commit_until or 0.0, self._end_deadline)
        return now < deadline and (bool(self._commits.contents.deleting) or self._evaluations.has_unrecorded())

    def _ending(self, now: float) -> None:
        members = self._ledger.members.values()
        has_ended = not self._ledger.is_anything_live() or now >= self._end_deadline
        if self._dismissed_at is None and has_ended and not self._awaits_commit(now) and not self._awaits_store(now):
            self._dismissed_at = now
            self._check_last_snapshot()
            self._check_incomplete_snapshot()
            self._check_communication()
            self._commits.drop_all_copies()
            for member in members:
                if member.connected:
                    self._dismiss(member.host)
        if self._dismissed_at is None:
            return
        is_any_present = any(member.connected and not member.has_left for member in members)
        if not is_any_present or now >= self._dismissed_at + LEAVE_TIMEOUT:
            self._ledger.phase = OVER
            status, reason, cause = self.outcome
            self._emit("run-ended", status=status, reason=reason, cause=cause)
            self._instruct(ins.EndRun(status, reason, cause))

    def _check_last_snapshot(self) -> None:
        """A run whose last snapshot is not committed has failed, even if training succeeded."""
        draft, lost = self._commits.newest_uncommitted(), self._commits.lost_snapshot
        if draft is not None:
            timeout = f"it took longer than {self._limits.commit:g} s (limits.commit)"
            reason = draft.failure or self._commits.store_error or timeout
            hosts = ", ".join(sorted({part.host for part in draft.parts.values()}))
            step = draft.snapshot.step
            text = f"the last snapshot (step {step}) is not committed and exists only on {hosts}: {reason}"
        elif lost is not None and not self._commits.contents.is_past(lost[0]):
            text = f"the last snapshot (step {lost[0].step}) is not committed: it was lost with {lost[1]}"
        else:
            return
        if self.outcome[0] == "succeeded":
            self.outcome = ("failed", f"training succeeded, but {text}", "store")
        else:
            self._emit("warning", text=text)

    def _check_incomplete_snapshot(self) -> None:
        """A program that announces more parts than its tasks save never has a complete snapshot."""
        draft = self._commits.newest_incomplete()
        if self.outcome[0] != "succeeded" or draft is None:
            return
        text = f"the snapshot of step {draft.snapshot.step} is incomplete and cannot be used: {draft.shortage()}. "
        text += "Each task must save its part of a snapshot"
        self._emit("warning", text=text)

    def _check_communication(self) -> None:
        """If tasks that train together never connected to each other, each has trained a model of its own."""
        group = self._ledger.group
        first = group[0].name if group and not self._ledger.unit_of[group[0].name].restarts_within_generation else ""
        if self.outcome[0] != "succeeded" or first not in self._ledger.unmet:
            return
        kind = "workers" if all(task.role == "worker" for task in group) else "tasks"
        names, remedy = MEETING_PLACES[self._plan.framework]
        address = self._ledger.addresses.get(first, "the address of rank 0")
        text = f"{len(group)} {kind} succeeded and probably never communicated with each other: no process "
        text += f"used {address}, where {first} should listen ({names}). Unless the program uses another address, "
        text += f"each trained on its own. Check that the program {remedy}"
        self._emit("warning", text=text)
