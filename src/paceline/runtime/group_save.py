"""Whether the group should take a snapshot now: the same answer in all its tasks, at the same step.

All tasks of a group call `should_save` once per step. When a snapshot is requested, the captain collects the number of
calls of each task and proposes a number that none has reached yet. A task that reaches it waits until the captain
confirms that all tasks agree ("go"), or withdraws the proposal ("no").

A task that has waited for AGREE_S says that it is late, and the captain decides: it withdraws the proposal, or repeats
"go" if it has said so to others. Either way, all tasks do the same. A task stops waiting without an answer only after
another ANSWER_S, which is longer than the lease of its host: if its agent cannot reach the captain, it has ended the
task by then. So one task saves and another does not only if a message between an agent and its own task is lost, or if
a captain dies after its "go" has reached some of the tasks. If they then wait for each other, the group is restarted as
after any other hang.

Messages may arrive twice: after a connection was lost, the captain repeats the last one.

The counts of tasks that train together differ by a few calls. If one of them counts differently, the captain may
confirm a call that is far away. A later proposal replaces it: no task can have saved there.
"""

from __future__ import annotations

import json
import os
import select
import time
from typing import Any

from paceline.runtime import report

AGREE_S = 10.0  # how long a task waits at the proposed call for the others to agree
ANSWER_S = 40.0  # how long it then waits for the captain's decision; longer than any lease
REPEAT_S = 1.0  # between its messages while it waits: its agent drops them while it is not connected
MOST_AHEAD = 100_000_000  # calls; nothing reaches that in the time in which others wait, however fast its loop is
REACH_S = 30.0  # a confirmed call may be replaced after this time; shorter than the captain waits for tasks to save
FAR_S = 600.0  # if the task, as fast as it has been since, would take this time to reach it,
FAR_CALLS = 100  # and more calls than tasks that train together can be apart


class _Agreement:
    def __init__(self) -> None:
        self.count = 0  # calls of should_save
        self.save_at: int | None = None  # the call that returns True, if all tasks agree
        self.proposal = 0  # number of the captain's proposal
        self.is_agreed = False  # whether the captain has confirmed the proposal
        self.agreed_at = (0.0, 0)  # when it has, and the count at that time
        self.saved: tuple[int, int | None] | None = None  # the proposal at which this task has saved last, and its step
        self.is_stopping = False  # why the last snapshot was requested: a task is about to be stopped

    def should_save(self, step: int | None) -> bool:
        descriptor = report.descriptor()
        if descriptor < 0:
            return False
        if self.count == 0:
            report.polls = False
            report.send_to_agent({"_": "asks"})
        self.count += 1
        self._receive(descriptor, 0.0)
        if self.save_at is None or self.count < self.save_at:
            return False
        self._wait(descriptor)
        if self.save_at is None or self.count < self.save_at:
            return False  # withdrawn; the captain may have proposed another call
        is_agreed, self.save_at, self.is_agreed = self.is_agreed, None, False
        if is_agreed:
            self.saved = self.proposal, step
            self._reply("saves", self.proposal, step=step)
        return is_agreed

    def _wait(self, descriptor: int) -> None:
        """Waits at the proposed call until the captain has confirmed or withdrawn the proposal."""
        now = time.monotonic()
        late_at, deadline = now + AGREE_S, now + AGREE_S + ANSWER_S
        while self.save_at == self.count and not self.is_agreed and now < deadline:
            if now >= late_at:
                self._reply("late", self.proposal)
                late_at = now + REPEAT_S
            self._receive(descriptor, late_at - now)
            now = time.monotonic()

    def _receive(self, descriptor: int, wait: float) -> None:
        if wait:
            select.select([descriptor], [], [], wait)
        while True:
            try:
                message = json.loads(os.read(descriptor, 4096) or b"null")
            except (OSError, ValueError):
                return  # no more messages, or the agent has ended
            if not isinstance(message, dict):
                return
            if message.get("say") == "profile":
                report.handle_request(message)
            else:
                self._handle(message)

    def _handle(self, message: dict[str, Any]) -> None:
        kind, proposal = message["say"], int(message["which"])
        if kind == "where":
            self._reply("here", proposal)
        elif kind == "at":
            self._consider(proposal, int(message["count"]))
        elif kind == "go" and self.saved is not None and proposal == self.saved[0]:
            self._reply("saves", proposal, step=self.saved[1])
        elif kind == "go" and proposal == self.proposal and self.save_at is not None:
            if not self.is_agreed:
                self.agreed_at = time.monotonic(), self.count
            self.is_agreed, self.is_stopping = True, bool(message.get("stop", True))
        elif kind == "no" and proposal == self.proposal and not self.is_agreed:
            self.save_at = None

    def _consider(self, proposal: int, count: int) -> None:
        is_known = (proposal, count) == (self.proposal, self.save_at)  # this task may be waiting at that call
        if not is_known and self.is_agreed:
            if not self._is_out_of_reach():
                self._reply("late", proposal)  # others may have saved at the call that was confirmed
                return
            self.is_agreed = False
        if is_known or self.count < count <= self.count + MOST_AHEAD:
            self.proposal, self.save_at, self.saved = proposal, count, None
            self._reply("yes", proposal)
        else:
            self.proposal, self.save_at = proposal, None
            self._reply("late", proposal)

    def _is_out_of_reach(self) -> bool:
        """Whether the confirmed call is so far away that no task of the group can have saved there."""
        since, count = self.agreed_at
        elapsed, remaining = time.monotonic() - since, (self.save_at or 0) - self.count
        is_slow = remaining * elapsed > FAR_S * (self.count - count)
        return elapsed > REACH_S and remaining > FAR_CALLS and is_slow

    def _reply(self, kind: str, proposal: int, **fields: Any) -> None:
        report.send_to_agent({"_": "agree", "say": kind, "which": proposal, "count": self.count, **fields})


_agreement = _Agreement()


def should_save(step: int | None = None) -> bool:
    """Call this once per step, in every task. True in all tasks at the same step: take a snapshot now, because a task
    is about to be stopped or `save_now` was called. Then continue training: Paceline stops the task once the snapshot
    is committed. Takes microseconds, and is always False outside a run.

    `step`: the completed step; default: the last one reported. With it, Paceline can tell this snapshot from an earlier
    one that is still being written.

    >>> should_save()
    False
    """
    return _agreement.should_save(step)


def is_stopping() -> bool:
    """After `should_save` has returned True: whether a task of the group is about to be stopped."""
    return _agreement.is_stopping


def save_now() -> None:
    """Request a snapshot from all tasks of the group: `should_save` returns True in each of them a few steps later."""
    report.send_to_agent({"_": "save"})
