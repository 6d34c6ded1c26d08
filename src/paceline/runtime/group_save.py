"""Whether the group should take a snapshot now: the same answer in all its tasks, at the same step.

All tasks of a group call `should_save` once per step. When a snapshot is requested, the captain collects the number of
calls of each task and proposes a number that none has reached yet. A task that reaches it waits until the captain
confirms that all tasks agree.
"""

from __future__ import annotations

import json
import os
import select
import time
from typing import Any

from paceline.runtime import report

AGREE_S = 10.0  # how long a task waits at the proposed call for the others to agree


class _Agreement:
    def __init__(self) -> None:
        self.count = 0  # calls of should_save
        self.save_at: int | None = None  # the call that returns True, if all tasks agree
        self.proposal = 0  # number of the captain's proposal
        self.is_agreed: bool | None = None  # None: not decided yet
        self.is_stopping = False  # why the last snapshot was requested: a task is about to be stopped

    def should_save(self, step: int | None) -> bool:
        descriptor = report.descriptor()
        if descriptor < 0:
            return False
        if self.count == 0:
            report.send_to_agent({"_": "asks"})
        self.count += 1
        self._receive(descriptor, 0.0)
        if self.save_at is None or self.count < self.save_at:
            return False
        deadline = time.monotonic() + AGREE_S
        while self.is_agreed is None and self.save_at is not None and (wait := deadline - time.monotonic()) > 0:
            self._receive(descriptor, wait)
        is_agreed, self.save_at, self.is_agreed = bool(self.is_agreed), None, None
        if is_agreed:
            self._reply("saves", self.proposal, step=step)
        return is_agreed

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
            self._handle(message)

    def _handle(self, message: dict[str, Any]) -> None:
        kind, proposal = message["say"], int(message["which"])
        if kind == "where":
            self._reply("here", proposal)
        elif kind == "at":
            is_ahead = int(message["count"]) > self.count
            self.proposal, self.save_at, self.is_agreed = proposal, int(message["count"]) if is_ahead else None, None
            self._reply("yes" if is_ahead else "late", proposal)
        elif proposal == self.proposal and kind == "go":
            self.is_agreed, self.is_stopping = True, bool(message.get("stop", True))
        elif proposal == self.proposal and kind == "no":
            self.save_at = self.is_agreed = None

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
