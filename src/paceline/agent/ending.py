"""How a run ends: what is saved is committed, tasks have their grace, members leave, and then it is over. Decides, does
nothing itself.
"""

from __future__ import annotations

from typing import Callable

from paceline.agent import events as ev
from paceline.agent.evaluating import Evaluating
from paceline.agent.ledger import CLOSING, ENDING, LIVE, OVER, RETURNING, Ledger
from paceline.agent.shelf import Shelf
from paceline.plan import Plan

FAREWELL = 5.0  # how long members may take to say that they have left


class Ending:
    def __init__(
        self,
        plan: Plan,
        books: Ledger,
        shelf: Shelf,
        evaluating: Evaluating,
        lease: float,
        put: Callable[[ev.Instruction], None],
        emit: Callable[..., None],
    ) -> None:
        self._limits, self._books, self._shelf, self._lease = plan.limits, books, shelf, lease
        self._evaluating = evaluating
        self._put, self._emit = put, emit
        self._deciding = [task.name for task in plan.tasks if plan.role(task.role).decides]
        servers = plan.strategy == "parameter-server"
        self._servers = [task.name for task in plan.tasks if servers and task.role in ("ps", "worker")]
        self.outcome: tuple[str, str, str | None] = ("", "", None)
        self._closing_until = 0.0
        self._commit_until: float | None = None
        self._how, self._grace_until = "kill", 0.0
        self._farewell_until = 0.0
        self._finished_at: float | None = None

    # ---- what makes it end

    def stop(self, reason: str, now: float) -> None:
        if self._books.phase == RETURNING:  # once it is known what runs, that gets its grace
            self.outcome = self.outcome if self.outcome[0] else ("stopped", reason, None)
        elif self._books.phase in (LIVE, CLOSING):
            self.end("stopped", reason, None, now, "term")

    def end(self, status: str, reason: str, cause: str | None, now: float, how: str) -> None:
        self._books.phase = ENDING
        self.outcome = (status, reason, cause)
        grace = self._limits.grace if how == "term" else 0.0
        if self._books.anything_live():
            self._emit("ending", reason=reason, grace_s=grace)
        self._end_tasks(list(self._books.live), how, grace)
        self._how, self._grace_until = how, now + grace
        self._farewell_until = now + grace + self._lease + FAREWELL

    def close(self, now: float) -> None:
        """Training has succeeded: servers end at once, evaluator and peers may finish what they do."""
        self._books.phase = CLOSING
        self.outcome = ("succeeded", "training succeeded", None)
        self._end_tasks(self._servers, "term", self._limits.grace)
        self._commit_until = now + self._limits.commit
        self._closing_until = now + self._limits.grace
        beside = [name for name in self._books.live if self._books.task[name].role == "evaluator"]
        if beside:
            text = f"training has succeeded; {', '.join(beside)} may finish"
            limit = self._evaluating.limit() if self._evaluating.follows else self._limits.grace
            self._emit("ending", reason=text, grace_s=limit)

    def _end_tasks(self, names: list[str], how: str, grace: float) -> None:
        for end in self._books.ends(names, how, grace):
            self._put(end)

    # ---- a host that joins meanwhile

    def end_too(self, host: str, task: str, attempt: int, now: float) -> None:
        self._put(ev.End(host, {task: attempt}, self._how, max(0.0, self._grace_until - now)))

    def joined(self, host: str) -> None:
        if self._books.phase == ENDING and not self._books.anything_live():
            self._finish(host)

    def _finish(self, host: str) -> None:
        self._put(ev.Finish(host, self.outcome[0], self.outcome[1]))

    # ---- from one to the next

    def advance(self, now: float) -> None:
        if self._books.phase == LIVE and all(name in self._books.succeeded for name in self._deciding):
            self.close(now)
        if self._books.phase == CLOSING:
            self._closing(now)
        if self._books.phase == ENDING:
            self._ending(now)

    def _closing(self, now: float) -> None:
        if self._committing(now):
            self._closing_until = now + self._limits.grace  # what stands beside training gets the last snapshot too
            return
        self._evaluating.end(now)
        if self._evaluating.may_finish(now):
            self._closing_until = now + self._limits.grace
            return
        if not self._books.anything_live() or now >= self._closing_until:
            self.end(*self.outcome, now, "term")

    def _committing(self, now: float) -> bool:
        """Whether a snapshot that is saved should still be waited for."""
        if self._commit_until is None:
            self._commit_until = now + self._limits.commit
        return self._shelf.busy() and now < self._commit_until

    def _deleting(self, now: float) -> bool:
        """What is not to be kept is gone when the run is over, too, and what evaluators said is at its place."""
        until = max(self._commit_until or 0.0, self._farewell_until)
        return now < until and (bool(self._shelf.deleting) or self._evaluating.unrecorded())

    def _ending(self, now: float) -> None:
        members = self._books.members.values()
        gone = not self._books.anything_live() or now >= self._farewell_until
        if self._finished_at is None and gone and not self._committing(now) and not self._deleting(now):
            self._finished_at = now
            self._check_last_snapshot()
            self._shelf.close()
            for member in members:
                if member.connected:
                    self._finish(member.host)
        if self._finished_at is None:
            return
        staying = any(member.connected and not member.left for member in members)
        if not staying or now >= self._finished_at + FAREWELL:
            self._books.phase = OVER
            status, reason, cause = self.outcome
            self._emit("run-ended", status=status, reason=reason, cause=cause)
            self._put(ev.Over(status, reason, cause))

    def _check_last_snapshot(self) -> None:
        """Training that has succeeded and whose result is not where it should be has not succeeded."""
        draft, gone = self._shelf.unfinished(), self._shelf.gone
        if draft is not None:
            why = draft.failed or self._shelf.trouble or f"{self._limits.commit:g} s (limits.commit) were not enough"
            hosts = ", ".join(sorted({piece.host for piece in draft.pieces.values()}))
            text = f"the last snapshot (step {draft.id.step}) is not committed and is on {hosts} only: {why}"
        elif gone is not None and not self._shelf.past(gone[0]):
            text = f"the last snapshot (step {gone[0].step}) is not committed: it was lost with {gone[1]}"
        else:
            return
        if self.outcome[0] == "succeeded":
            self.outcome = ("failed", f"training succeeded, but {text}", "store")
        else:
            self._emit("warning", text=text)
