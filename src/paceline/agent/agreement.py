"""How tasks of a group come to take a snapshot at the same step, while they go on: see paceline.runtime.leaving.

Decides, does nothing itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Callable

from paceline.agent import events as ev

ROUND_S = 0.5  # that a word takes to all tasks and back, as a first guess
MARGIN = 2  # steps
TRIES = 12


class Agreement:
    def __init__(
        self,
        which: int,
        tasks: Iterable[str],
        host_of: Callable[[str], str],
        rate: float | None,
        put: Callable[[ev.Instruction], None],
    ) -> None:
        """`rate`: steps a second."""
        self._which = which
        self.tasks = set(tasks)
        self._host_of, self._put = host_of, put
        self._margin = MARGIN + math.ceil((rate or 1.0) * ROUND_S)
        self._counts: dict[str, int] = {}
        self._yes: set[str] = set()
        self._tries = 0
        self.agreed: bool | None = None
        self._say("where")

    @property
    def which(self) -> int:
        """The proposal that is made now."""
        return self._which

    def told(self, task: str, say: str, which: int, count: int) -> None:
        if which != self._which or task not in self.tasks or self.agreed is not None:
            return
        self._counts[task] = count
        if say == "here" and self._counts.keys() == self.tasks and not self._tries:
            self._propose()
        elif say == "late":
            self._say("no")
            self._which += 1
            self._margin *= 2
            self._propose()
        elif say == "yes":
            self._yes.add(task)
            if self._yes == self.tasks:
                self.agreed = True
                self._say("go")

    def _propose(self) -> None:
        self._tries += 1
        self._yes = set()
        if self._tries > TRIES:
            self.agreed = False
            return
        self._say("at", count=max(self._counts.values()) + self._margin)

    def _say(self, say: str, **more: Any) -> None:
        hosts: dict[str, list[str]] = {}
        for task in sorted(self.tasks):
            hosts.setdefault(self._host_of(task), []).append(task)
        for host, tasks in hosts.items():
            words = {"say": say, "which": self._which, **more}
            self._put(ev.Say(host, {"type": "agree", "tasks": tasks, "words": words}))
