"""A snapshot of the whole group, because a host must shut down or a task requests one. No I/O."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any, Callable

from paceline.agent.captain import events as ev
from paceline.agent.captain import instructions as ins
from paceline.agent.captain.ledger import Ledger
from paceline.agent.captain.restart_units import RUNNING
from paceline.agent.captain.snapshots.step_agreement import StepAgreement
from paceline.agent.captain.snapshots.store_contents import StoreContents
from paceline.plan import ALONE
from paceline.storage.snapshots.manifest import SnapshotId


class GroupSnapshot:
    def __init__(
        self,
        ledger: Ledger,
        contents: StoreContents,
        rate: Callable[[str], float | None],
        is_on_others: Callable[[SnapshotId], bool],
        instruct: Callable[[ins.Instruction], None],
        emit: Callable[..., Any],
        captain: str,
    ) -> None:
        """`rate`: steps per second of a task. `is_on_others`: whether the others can continue from the snapshot without
        the hosts that shut down. `captain`: its name, different for each captain of a run."""
        self._ledger, self._contents = ledger, contents
        self._rate, self._is_on_others, self._instruct, self._emit = rate, is_on_others, instruct, emit
        self._agreement: StepAgreement | None = None
        self._since: tuple[bool | None, float] | None = None  # whether tasks have agreed, and since when
        self._served: set[str] = set()  # hosts that were leaving when it began
        self._proposals = _first_proposal(captain)
        self._polling: set[str] = set()  # tasks that check at each step whether to save
        self._is_requested = False  # a task requested a snapshot, and it has not begun
        self._leaving: set[str] = set()  # hosts that wait for the snapshot before they shut down
        self._saving_steps: dict[str, int] = {}  # tasks that have reached the agreed step, and that step
        self._snapshot: SnapshotId | None = None  # the snapshot of the agreed step
        self._has_warned = False  # that tasks cannot agree

    # ---- events

    def on_attempt_started(self, task: str, alone: bool) -> None:
        self._polling.discard(task)
        self._is_requested = self._is_requested and alone

    def on_polling(self, tasks: Iterable[str]) -> None:
        added = set(tasks) - self._polling
        self._polling |= added
        if added and self._is_requested:
            self._agree()

    def request(self) -> None:
        self._is_requested = self._agreement is None or self._agreement.agreed is not None
        self._agree()

    def on_leaving(self, host: str) -> None:
        self._leaving.add(host)
        self._agree()

    def on_joined(self, host: str) -> None:
        if self._agreement is not None:
            self._agreement.on_joined(host)

    def on_reply(self, event: ev.AgreementReply) -> None:
        if self._ledger.running_on(event.host).get(event.task) is None:
            return
        if self._agreement is None:
            if event.say == "late":  # it waits at a step that a previous captain proposed, or that was withdrawn
                self._instruct(ins.AgreeOnStep(event.host, (event.task,), {"say": "no", "which": event.which}))
        elif event.say == "saves":
            is_current = event.which == self._agreement.proposal and self._agreement.agreed
            if is_current and event.task in self._agreement.tasks:
                self._saving_steps[event.task] = event.step
                if self._is_requested and not self._leaving:  # a leaving host waits for this snapshot, not for another
                    self._agree()
        else:
            self._agreement.on_reply(event.task, event.say, event.which, event.count)

    def on_saved(self, snapshot: SnapshotId) -> None:
        """Ignores a snapshot of an earlier step, which may have been in progress when all tasks agreed."""
        if self._snapshot is None and self._saving_steps and snapshot.step >= max(self._saving_steps.values()):
            self._snapshot = snapshot

    @property
    def is_polled(self) -> bool:
        """Whether tasks check at each step whether to save."""
        return bool(self._polling)

    @property
    def is_pending(self) -> bool:
        """Whether tasks are about to save: sending an older snapshot now would delay that one."""
        return self._agreement is not None and self._agreement.agreed is not False and self._snapshot is None

    @property
    def awaited_step(self) -> int | None:
        """The step that all tasks save, while not all of them have."""
        return max(self._saving_steps.values(), default=None) if self._snapshot is None else None

    # ---- agreement

    def _agree(self) -> None:
        """Have all tasks that train together (in a parameter-server job: the chief; with `restart.scope`: those of the
        first unit that can) save at the same step. If they are about to, wait until each of them has."""
        if self._agreement is not None and not self._have_all_saved(self._agreement):
            return
        for unit in self._ledger.units:
            tasks = [task.name for task in unit.tasks if task.rank >= 0 or task.role == "chief"]
            are_polling = bool(tasks) and unit.live.issuperset(tasks) and self._polling.issuperset(tasks)
            if unit.kind != ALONE and unit.phase == RUNNING and are_polling:
                host_of = {task.name: task.host for task in unit.tasks}
                self._is_requested, self._saving_steps, self._snapshot = False, {}, None
                self._since, self._served = None, set(self._leaving)
                self._agreement = StepAgreement(
                    self._proposals, tasks, host_of.__getitem__, self._rate(tasks[0]), lambda: bool(self._leaving),
                    self._instruct,
                )  # fmt: skip
                return
        self._release_hosts()

    def _have_all_saved(self, agreement: StepAgreement) -> bool:
        return self._saving_steps.keys() >= agreement.tasks

    def advance(self, now: float) -> None:
        """Once the snapshot of the group is committed, or the others have it, let the hosts that wait for it shut down.
        If tasks do not agree, or do not save in time, try again for hosts that have begun to shut down since."""
        agreement = self._agreement
        if agreement is None:
            return
        self._proposals = agreement.proposal + 1
        if self._since is None or self._since[0] is not agreement.agreed:
            self._since = agreement.agreed, now
        is_live = all(name in self._ledger.live for name in agreement.tasks)
        is_safe = self._snapshot is not None and (
            self._contents.chain[:1] >= [self._snapshot] or (bool(self._leaving) and self._is_on_others(self._snapshot))
        )
        is_overdue = now - self._since[1] > agreement.limit_s and not self._have_all_saved(agreement)
        if agreement.agreed is False or not is_live or is_safe or is_overdue:
            agreement.withdraw()
            self._warn(agreement.problem)
            self._agreement, self._saving_steps, self._snapshot = None, {}, None
            must_try_again = not is_safe and not self._leaving <= self._served
            if not must_try_again:
                self._release_hosts()
            if must_try_again or self._is_requested:
                self._agree()

    def _warn(self, problem: str) -> None:
        if problem and not self._has_warned:
            self._has_warned = True
            text = f"tasks cannot agree on a step at which all save, so no snapshot of the group was taken: {problem}. "
            self._emit("warning", text=text + "Each task must call it once per step")

    def _release_hosts(self) -> None:
        for host in sorted(self._leaving):
            self._instruct(ins.ReleaseHost(host))
        self._leaving = set()


def _first_proposal(captain: str) -> int:
    """Different for each captain: a late reply to a proposal of the previous captain must not be taken for a reply to
    one of this captain. The numbers stay below 2**53."""
    return (zlib.crc32(captain.encode()) << 20) + 1
