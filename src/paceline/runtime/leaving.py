"""Whether the group is to take a snapshot now: the same answer in all its tasks, at the same step.

All tasks of a group ask once a step. When a snapshot is wanted, the captain hears how often each has asked, names a
number of questions that none has reached yet, and each task that gets there waits for the word that all agree.
"""

from __future__ import annotations

import json
import os
import select
import time
from typing import Any

from paceline.runtime import report

WORD_S = 10.0  # how long a task waits for the others to agree, once it is there


class _Asking:
    def __init__(self) -> None:
        self.count = 0
        self.at: int | None = None  # the question that is answered with yes, if all agree
        self.which = 0  # of the captain's proposals
        self.agreed: bool | None = None

    def question(self, step: int | None) -> bool:
        descriptor = report.descriptor()
        if descriptor < 0:
            return False
        if self.count == 0:
            report.tell({"_": "asks"})
        self.count += 1
        self._hear(descriptor, 0.0)
        if self.at is None or self.count < self.at:
            return False
        until = time.monotonic() + WORD_S
        while self.agreed is None and self.at is not None and (left := until - time.monotonic()) > 0:
            self._hear(descriptor, left)
        yes, self.at, self.agreed = bool(self.agreed), None, None
        if yes:
            report.tell({"_": "agree", "say": "saves", "which": self.which, "count": self.count, "step": step})
        return yes

    def _hear(self, descriptor: int, wait: float) -> None:
        if wait:
            select.select([descriptor], [], [], wait)
        while True:
            try:
                words = json.loads(os.read(descriptor, 4096) or b"null")
            except (OSError, ValueError):
                return  # nothing more, or the agent is gone
            if not isinstance(words, dict):
                return
            self._take(words)

    def _take(self, words: dict[str, Any]) -> None:
        which = int(words["which"])
        if words["say"] == "where":
            report.tell({"_": "agree", "say": "here", "which": which, "count": self.count})
        elif words["say"] == "at":
            can = int(words["count"]) > self.count
            self.which, self.at, self.agreed = which, int(words["count"]) if can else None, None
            report.tell({"_": "agree", "say": "yes" if can else "late", "which": which, "count": self.count})
        elif which == self.which and words["say"] == "go":
            self.agreed = True
        elif which == self.which and words["say"] == "no":
            self.at = self.agreed = None


_asking = _Asking()


def leaving(step: int | None = None) -> bool:
    """Ask once a step, in every task. True in all tasks at the same step: take a snapshot now, since one of them is
    about to go, or somebody has called `save_now`; then go on: Paceline ends the task that has to go, once the snapshot
    is committed. Takes microseconds, and is never true outside a run.

    `step`: the one that is done. Where it is not given, the last one that was reported counts, so that a snapshot which
    is still being written is not taken for the one that is asked for.

    >>> leaving()
    False
    """
    return _asking.question(step)


def save_now() -> None:
    """Ask all tasks of the group for a snapshot: `leaving` is true in each of them, a few steps from now."""
    report.tell({"_": "save"})
