"""Agreement of the tasks of a group on a step at which all take a snapshot, while they train. No I/O.

The other side of the protocol is paceline.runtime.group_save.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Callable

from paceline.agent.captain import instructions as ins

ROUND_S = 0.5  # initial estimate of the round-trip time of a message to all tasks
MARGIN = 2  # steps
TRIES = 12
MOST_APART = 10_000_000  # calls by which tasks differ when they reply; even of an empty loop, these take many seconds
LIMIT_S = 60.0  # for tasks to agree, and then for all of them to save, unless steps are slow; longer than they wait
LIMIT_FACTOR = 3  # at least this many times the time in which tasks should reach the proposed step


class StepAgreement:
    def __init__(
        self,
        proposal: int,
        tasks: Iterable[str],
        host_of: Callable[[str], str],
        rate: float | None,
        is_stopping: Callable[[], bool],
        instruct: Callable[[ins.Instruction], None],
    ) -> None:
        """`proposal`: the number of the first proposal. `rate`: steps per second. `is_stopping`: whether a host waits
        for the snapshot before it shuts down."""
        self._proposal = proposal
        self.tasks = set(tasks)
        self._host_of, self._is_stopping, self._instruct = host_of, is_stopping, instruct
        self._rate = rate or 1.0
        self._margin = MARGIN + math.ceil(self._rate * ROUND_S)
        self._counts: dict[str, int] = {}
        self._accepted: set[str] = set()
        self._tries = 0
        self._words: dict[str, Any] = {}  # what all tasks must know now
        self.agreed: bool | None = None
        self.problem = ""  # why tasks cannot agree, if a user can change it
        self._broadcast("where")

    @property
    def proposal(self) -> int:
        """The number of the current proposal."""
        return self._proposal

    @property
    def limit_s(self) -> float:
        """Seconds after which it has failed if tasks have not agreed, or have agreed and not saved."""
        return max(LIMIT_S, LIMIT_FACTOR * self._margin / self._rate)

    def on_joined(self, host: str) -> None:
        """Messages to and from this host may have been lost: repeat the last one, to get the replies again."""
        tasks = {task for task in self.tasks if self._host_of(task) == host}
        if self.agreed is None:
            self._accepted -= tasks  # they may have stopped waiting since
        self._send(tasks, self._words)

    def withdraw(self) -> None:
        """Not after "go": a task that has received it may have saved, so all others should."""
        if self.agreed is None:
            self._send(self.tasks, {"say": "no", "which": self._proposal})

    def on_reply(self, task: str, say: str, proposal: int, count: int) -> None:
        if proposal != self._proposal or task not in self.tasks:
            return
        if self.agreed is not None:
            if self.agreed and say == "late":  # it still waits for "go", which was lost or is on its way
                self._send({task}, self._words)
            return
        self._counts[task] = count
        if say == "here" and self._counts.keys() == self.tasks and not self._tries:
            self._propose()
        elif say == "late":
            self.withdraw()
            self._proposal += 1
            self._margin *= 2
            self._propose()
        elif say == "yes":
            self._accepted.add(task)
            if self._accepted == self.tasks:
                self.agreed = True
                self._broadcast("go", stop=self._is_stopping())

    def _propose(self) -> None:
        self._tries += 1
        self._accepted = set()
        least, most = (choose(self._counts, key=self._counts.__getitem__) for choose in (min, max))
        if self._counts[most] - self._counts[least] > MOST_APART:
            counts = f"{self._counts[most]} times, {least} {self._counts[least]} times"
            self.problem = f"{most} has called should_save {counts}"
        if self.problem or self._tries > TRIES:
            self.agreed = False
            return
        self._broadcast("at", count=self._counts[most] + self._margin)

    def _broadcast(self, say: str, **fields: Any) -> None:
        self._words = {"say": say, "which": self._proposal, **fields}
        self._send(self.tasks, self._words)

    def _send(self, tasks: set[str], words: dict[str, Any]) -> None:
        hosts: dict[str, list[str]] = {}
        for task in sorted(tasks):
            hosts.setdefault(self._host_of(task), []).append(task)
        for host, names in hosts.items():
            self._instruct(ins.AgreeOnStep(host, tuple(names), words))
