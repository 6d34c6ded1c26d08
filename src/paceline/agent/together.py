"""A snapshot of the whole group, because somebody has to go, or a task asks for one. Decides, does nothing itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Callable

from paceline.agent import events as ev
from paceline.agent.agreement import Agreement
from paceline.agent.ledger import RUNNING, Ledger
from paceline.agent.shelf import Shelf
from paceline.plan import ALONE
from paceline.storage.manifest import Id


class Together:
    def __init__(
        self,
        books: Ledger,
        shelf: Shelf,
        rate: Callable[[str], float | None],
        put: Callable[[ev.Instruction], None],
    ) -> None:
        """`rate`: steps a second of a task."""
        self._books, self._shelf = books, shelf
        self._rate, self._put = rate, put
        self._agreement: Agreement | None = None
        self._proposals = 1
        self._asking: set[str] = set()  # tasks that ask once a step whether to save
        self._wished = False  # a task wants a snapshot, and others do not ask yet
        self._going: set[str] = set()  # hosts that wait for the last snapshot
        self._there: dict[str, int] = {}  # the tasks that take it, and at which step
        self._snapshot: Id | None = None  # the one that is agreed on

    # ---- what is told

    def begins(self, task: str, alone: bool) -> None:
        self._asking.discard(task)
        self._wished = self._wished and alone

    def asks(self, tasks: Iterable[str]) -> None:
        new = set(tasks) - self._asking
        self._asking |= new
        if new and self._wished:
            self._agree()

    def wish(self) -> None:
        self._wished = self._agreement is None or self._agreement.agreed is not None
        self._agree()

    def must_go(self, host: str) -> None:
        self._going.add(host)
        self._agree()

    def agrees(self, told: ev.Agrees) -> None:
        if self._agreement is None or self._books.held(told.host).get(told.task) is None:
            return
        if told.say == "saves" and told.which == self._agreement.which:
            self._there[told.task] = told.step
            if self._wished:
                self._agree()
        else:
            self._agreement.told(told.task, told.say, told.which, told.count)

    def saved(self, id: Id) -> None:
        """One of an earlier step may have been on its way when all agreed."""
        if self._snapshot is None and self._there and id.step >= max(self._there.values()):
            self._snapshot = id

    # ---- what follows

    def _agree(self) -> None:
        """Have all tasks that train together save at the same step; those of a parameter-server job: its chief. Where
        they are about to, not again before each of them has."""
        if self._agreement is not None and not self._there.keys() >= self._agreement.tasks:
            return
        for unit in self._books.units:
            tasks = [task.name for task in unit.tasks if task.rank >= 0 or task.role == "chief"]
            if unit.kind != ALONE and unit.phase == RUNNING and tasks and self._asking.issuperset(tasks):
                host_of = {task.name: task.host for task in unit.tasks}
                self._wished, self._there, self._snapshot = False, {}, None
                self._agreement = Agreement(
                    self._proposals, tasks, host_of.__getitem__, self._rate(tasks[0]), self._put
                )
                return
        self._farewell()

    def advance(self) -> None:
        """Once the group has saved, and that is committed, those that have to go may go."""
        if self._agreement is None:
            return
        self._proposals = self._agreement.which + 1
        live = all(name in self._books.live for name in self._agreement.tasks)
        committed = self._snapshot is not None and self._shelf.counted[:1] >= [self._snapshot]
        if self._agreement.agreed is False or not live or committed:
            self._agreement, self._there, self._snapshot = None, {}, None
            self._farewell()
            if self._wished:
                self._agree()

    def _farewell(self) -> None:
        for host in sorted(self._going):
            self._put(ev.Say(host, {"type": "farewell"}))
        self._going = set()
