"""Pauses a run on request: the group takes a snapshot, tasks end, and hosts are released until a user resumes the run.
No I/O.

The captain stays. None of this counts as a failure, and time limits do not run while the run is paused. The run
continues from the newest committed snapshot, in a new generation.
"""

from __future__ import annotations

from typing import Any, Callable

from paceline.agent.captain import events as ev
from paceline.agent.captain import instructions as ins
from paceline.agent.captain.failures import Failures
from paceline.agent.captain.generations import Generations
from paceline.agent.captain.ingest_phase import IngestPhase
from paceline.agent.captain.joining_hosts import ASK_AGAIN
from paceline.agent.captain.ledger import HALTING, LIVE, NOT_PAUSED, PAUSED, RESUMING, RETURNING, SAVING, STAGES, Ledger
from paceline.agent.captain.restart_units import RUNNING, STOPPING, Unit
from paceline.agent.captain.snapshots.commits import Commits
from paceline.agent.captain.snapshots.evaluations import Evaluations
from paceline.agent.captain.snapshots.group_snapshot import GroupSnapshot
from paceline.plan import ALONE, BEFORE, Plan
from paceline.storage.snapshots.manifest import SnapshotId


class Pause:
    def __init__(
        self,
        plan: Plan,
        ledger: Ledger,
        commits: Commits,
        evaluations: Evaluations,
        group_snapshot: GroupSnapshot,
        failures: Failures,
        generations: Generations,
        ingest: IngestPhase,
        leaving: set[str],
        steps: Callable[[], int],
        known_from: float,
        instruct: Callable[[ins.Instruction], None],
        emit: Callable[..., None],
    ) -> None:
        """`leaving`: hosts that are shutting down. `steps`: the highest step that was reported. `known_from`: until
        then, tasks of which this captain does not know may run, as the notes of the previous one may be lost."""
        self._plan, self._ledger, self._commits, self._evaluations = plan, ledger, commits, evaluations
        self._group_snapshot, self._failures, self._generations = group_snapshot, failures, generations
        self._ingest, self._leaving, self._steps, self._known_from = ingest, leaving, steps, known_from
        self._instruct, self._emit = instruct, emit
        self.was_requested = False
        self.problem = ""  # why the last request was not carried out
        self.is_late = False  # because no snapshot was committed in time
        self._releases = False  # members are told to exit
        self._within = 0.0
        self._until = 0.0  # when the current stage ends in any case
        self._since = 0.0  # when the run was paused or, once resumed, since when it is queued
        self._resumed_after = 0  # the generation before
        self._asked_at: float | None = None  # when the group was asked for a snapshot
        self._saved_before: SnapshotId | None = None  # the newest snapshot at that time
        self._dismissed: dict[str, float] = {}  # host -> when the member that was dismissed had joined

    # ---- requests

    def problem_with_pause(self, now: bool = False) -> str:
        """Why the run cannot be paused; empty: it can. `now`: without a snapshot."""
        if self._ledger.phase not in (LIVE, RETURNING):
            return "the run is ending"
        if self._ingest.is_busy():
            return "its data is being built: pause it once that is done"
        if self._is_finishing() and self._ledger.pause == NOT_PAUSED and not now:
            return "training is about to end: some of its tasks have succeeded"
        return ""

    def problem_with_resume(self) -> str:
        if self._ledger.phase not in (LIVE, RETURNING):
            return "the run is ending"
        return "" if self._ledger.is_pause_wanted else "the run is not paused"

    def on_requested(self, event: ev.PauseRequested, now: float) -> None:
        if self.problem_with_pause(event.now):
            return
        self._releases = self._releases or event.releases
        if self._ledger.pause in (NOT_PAUSED, RESUMING):
            self.was_requested, self._asked_at = True, None
            self.problem, self.is_late = "", False
            self._within, self._until = event.within, now + event.within
            self._ledger.pause = SAVING
            self._emit("pausing", limit_s=event.within, now=event.now)
        if self._ledger.pause == SAVING and event.now:
            self._begin_halt(now)

    def on_resume_requested(self, now: float) -> float:
        """Returns for how many seconds the run was paused."""
        if self.problem_with_resume():
            return 0.0
        if self._ledger.pause == SAVING:
            self._cancel("a user has resumed the run", now)
            return 0.0
        paused_s = max(0.0, now - self._since) if self._ledger.pause == PAUSED else 0.0
        self._ledger.pause, self._ledger.is_resuming = RESUMING, True
        self._since, self._resumed_after = now, self._ledger.generation
        self._emit("resumed", paused_s=round(paused_s, 3))
        self._restart(now)
        return paused_s

    def take_queued_s(self, now: float) -> float:
        """For how many seconds a resumed run has been queued since this was asked last."""
        if not self._generations.is_queued:
            return 0.0
        queued_s, self._since = max(0.0, now - self._since), now
        return queued_s

    @property
    def needs_commit(self) -> bool:
        """Whether the run waits for the commit of a snapshot before tasks end."""
        return self._ledger.pause == SAVING and not self._group_snapshot.is_pending

    def leaving_hosts(self) -> list[str]:
        """Hosts that are being released: their agents have not left yet."""
        if self._ledger.pause not in (HALTING, PAUSED):
            return []
        return [host for host, member in self._ledger.members.items() if member.connected and not member.has_left]

    def newest_snapshot(self) -> SnapshotId | None:
        """The snapshot that the run would resume from."""
        return next(iter(self._commits.contents.chain), None)

    def on_joined(self, host: str) -> None:
        if self._dismissed.pop(host, None) is not None:
            self._leaving.discard(host)  # the message that dismissed it was lost, or this is another instance

    # ---- progress

    def advance(self, now: float) -> None:
        if self._ledger.phase not in (LIVE, RETURNING):
            if self._ledger.is_pause_wanted:
                self.problem = "the run is ending"
            self._ledger.pause = NOT_PAUSED
        if self._ledger.phase != LIVE:
            return
        if self._ledger.pause == PAUSED and self._ledger.is_anything_live():
            # The notes of this captain were old: tasks have been started since the run was paused.
            self._ledger.pause, self._until = SAVING, now + self._within
            self._emit("pausing", limit_s=self._within, now=False)
        if self._ledger.pause == SAVING:
            self._await_snapshot(now)
        if self._ledger.pause == HALTING:
            self._halt(now)
        if self._ledger.pause == PAUSED:
            self._dismiss_members()
        if self._ledger.is_resuming and self._has_resumed():
            self._ledger.is_resuming = False
            self._ledger.pause = NOT_PAUSED if self._ledger.pause == RESUMING else self._ledger.pause

    def _group(self) -> list[Unit]:
        return [unit for unit in self._ledger.units if unit.kind not in (ALONE, BEFORE)]

    def _has_resumed(self) -> bool:
        """Whether the next generation has started, or the tasks of the previous one had not been ended."""
        is_running = self._ledger.generation > 0 and all(unit.phase == RUNNING for unit in self._group())
        return is_running or self._ledger.generation > self._resumed_after

    def _trains(self) -> bool:
        """Whether the group may take a snapshot. Units that restart alone continue without the others."""
        group = self._group()
        if any(unit.restarts_within_generation for unit in group):
            return any(unit.phase == RUNNING and unit.live for unit in group)
        return all(unit.phase == RUNNING for unit in group)

    def _is_finishing(self) -> bool:
        return any(task.name in self._ledger.succeeded for unit in self._group() for task in unit.tasks)

    def _await_snapshot(self, now: float) -> None:
        if self._trains():
            if not self._is_finishing() and self._is_saved(now):
                self._begin_halt(now)
        elif self._may_any_run_unseen(now):
            return
        elif not any(unit.phase == RUNNING or unit.live for unit in self._group()) and not self._commits.is_busy():
            self._begin_halt(now)  # the group waits for hosts, or has failed: nothing newer will be saved
        if self._ledger.pause == SAVING and now >= self._until:
            self._cancel(f"no new snapshot was committed within {self._within:g} s", now)
            self.is_late = True

    def _is_saved(self, now: float) -> bool:
        """Whether a snapshot that the group has taken since the request is committed. Asks for one."""
        if self._asked_at is None:
            hosts = {task.host for unit in self._group() for task in unit.tasks}
            self._saved_before = next(iter(self._commits.restorable(hosts)), None)
        if self._asked_at is None or now - self._asked_at >= ASK_AGAIN:
            self._asked_at = now
            self._group_snapshot.request()
        newest, before = self.newest_snapshot(), self._saved_before
        if newest is None or newest.generation != self._ledger.generation:
            return False
        return before is None or newest.generation != before.generation or newest.step > before.step

    def _cancel(self, reason: str, now: float) -> None:
        self._ledger.pause = RESUMING if self._ledger.is_resuming else NOT_PAUSED
        self.problem = reason
        self._emit("pause-canceled", reason=reason)
        self._restart(now)

    def _restart(self, now: float) -> None:
        """Tasks may start again. Hosts that have been told to leave will join again."""
        staying = (host for host, member in self._ledger.members.items() if member.connected and not member.has_left)
        self._generations.on_pause_ended(not self._leaving.issuperset(staying), now)

    def _begin_halt(self, now: float) -> None:
        self._ledger.pause, self._asked_at = HALTING, None
        self._until = now + self._plan.limits.commit

    def _halt(self, now: float) -> None:
        """End all tasks, and commit what they save until then."""
        running = [unit for unit in self._ledger.units if unit.phase == RUNNING and unit.live]
        for unit in running:
            unit.is_resizing = True
        for unit in running:
            if unit.phase == RUNNING:  # not stopped with another one
                self._failures.stop_unit(unit, now)
        if (
            self._may_any_run_unseen(now)
            or self._ledger.is_anything_live()
            or any(unit.phase == STOPPING for unit in self._ledger.units)
        ):
            return
        if now < self._until and (self._commits.is_busy() or self._evaluations.has_unrecorded()):
            return
        self._ledger.pause, self._since = PAUSED, now
        self._ledger.addresses.clear()  # other tasks, perhaps on other hosts, will offer theirs
        if (draft := self._commits.newest_uncommitted()) is not None:
            failure = f": {draft.failure}" if draft.failure else ""
            self._emit("warning", text=f"the snapshot of step {draft.snapshot.step} is not committed{failure}")
        snapshot = self.newest_snapshot()
        # The last steps before a task was killed may not have been reported, but saved.
        step = max(self._steps(), 0 if snapshot is None else snapshot.step)
        self._emit("paused", step=step, snapshot=None if snapshot is None else str(snapshot))

    def _dismiss_members(self) -> None:
        for host, member in self._ledger.members.items() if self._releases else ():
            if member.connected and self._dismissed.get(host) != member.joined_at:
                self._dismissed[host] = member.joined_at
                self._leaving.add(host)
                self._ledger.withdraw_offers(member)
                self._commits.drop_copies_on(host)
                self._instruct(ins.DismissMember(host, ins.RELEASED, "the run is paused"))

    def _may_any_run_unseen(self, now: float) -> bool:
        """Whether tasks may run that this captain has not adopted, and may still do so."""
        return now < self._generations.hold_until or (self._ledger.generation == 0 and now < self._known_from)

    # ---- notes for the next captain

    def milestone(self) -> tuple[object, ...]:
        return self._ledger.pause, self._releases

    def to_notes(self) -> dict[str, Any]:
        return {
            "stage": self._ledger.pause, "releases": self._releases, "within": self._within, "until": self._until,
            "since": self._since, "resumed_after": self._resumed_after, "resuming": self._ledger.is_resuming,
        }  # fmt: skip

    def load_notes(self, notes: dict[str, Any], clock_offset: float) -> None:
        """Also before the first generation, when nothing else of the notes is needed."""
        if not notes:
            return
        if notes["stage"] not in STAGES:
            raise ValueError("not a stage of a pause")
        self.was_requested, self._ledger.pause = True, notes["stage"]
        self._releases, self._within = bool(notes["releases"]), float(notes["within"])
        self._until, self._since = notes["until"] + clock_offset, notes["since"] + clock_offset
        self._resumed_after = int(notes.get("resumed_after", 0))
        self._ledger.is_resuming = bool(notes.get("resuming", self._ledger.pause == RESUMING))

    def adopt(self) -> None:
        """The previous captain was ending all tasks, or had: it is no failure if they do not run."""
        if self._ledger.pause in (HALTING, PAUSED):
            for unit in self._ledger.units:
                unit.is_resizing = True
                self._ledger.waiting_before.add(unit.name)
