"""Forms generations: of which units, and when all is there that they wait for. Decides, does nothing itself."""

from __future__ import annotations

from typing import Callable

from paceline.agent import events as ev
from paceline.agent.beginning import READY, RECORDING, Beginning
from paceline.agent.ending import Ending
from paceline.agent.ingesting import Ingesting
from paceline.agent.ledger import WAITING, Ledger, Unit
from paceline.agent.shelf import Shelf, restoring
from paceline.plan import ALONE, BEFORE, Plan
from paceline.storage.manifest import Id

WAIT_WORDS_EVERY = 10.0


class Forming:
    def __init__(
        self,
        plan: Plan,
        books: Ledger,
        shelf: Shelf,
        ending: Ending,
        ingesting: Ingesting,
        start: Callable[[list[Unit], Id | None, float], None],
        put: Callable[[ev.Instruction], None],
        emit: Callable[..., None],
    ) -> None:
        """`start`: these units, from that snapshot."""
        self._plan, self._books, self._shelf, self._ending = plan, books, shelf, ending
        self._ingesting = ingesting
        self._start, self._put, self._emit = start, put, emit
        self.beginning: Beginning | None = None
        self.recorded = 0  # the highest generation that may have a record
        self.hold_until = 0.0  # nothing starts before
        self._first_joined: float | None = None
        self._said_waiting = 0.0

    def joined(self, now: float) -> None:
        if self._first_joined is None:
            self._first_joined = now

    def advance(self, now: float) -> None:
        if not self._ingesting.advance(now, self.hold_until):
            return
        training = [unit for unit in self._books.units if unit.kind != BEFORE]
        waiting = [unit for unit in training if unit.phase == WAITING]
        free = [unit for unit in waiting if not unit.lacking and not unit.live]
        ready = [unit for unit in free if now >= max(unit.not_before, self.hold_until)]
        if self._books.generation == 0:
            self._begin(ready if len(ready) == len(training) else [], now)
            return
        if alone := [unit for unit in ready if unit.kind == ALONE]:
            self._start(alone, None, now)
        self._begin([unit for unit in ready if unit.kind != ALONE], now)

    def again(self, now: float) -> None:
        """Training is over: evaluators alone, which have not seen all of it."""
        for unit in self._books.units:
            free = unit.phase == WAITING and not unit.lacking and not unit.live
            if free and unit.tasks[0].role == "evaluator" and now >= max(unit.not_before, self.hold_until):
                self._start([unit], None, now)

    def _begin(self, units: list[Unit], now: float) -> None:
        """A generation of these, once everything is there; from the start again where they have changed meanwhile."""
        hosts = restoring(self._plan, units)
        if self.beginning is not None and (not units or hosts != self.beginning.hosts):
            self.beginning = None
        if not units:
            return
        books, limits = self._books, self._plan.limits
        if self.beginning is None:
            number = max(books.generation, self.recorded, self._shelf.recorded) + 1
            self.beginning = Beginning(self._shelf, number, hosts, self._put, self._emit, now, limits.grace)
        begun = self.beginning
        begun.advance(now)
        if begun.stage in (RECORDING, READY):
            self.recorded = max(self.recorded, begun.number)
        if begun.trouble is not None:
            text, passing = begun.trouble
            if books.generation == 0 or not passing or now - begun.since >= limits.start:
                self._ending.end("failed", text, "store", now, "kill")
        elif begun.stage == READY:
            self.beginning = None
            books.generation = begun.number
            self._shelf.descend(begun.choice)
            if begun.owed is not None:
                self._shelf.owe(*begun.owed, now)
            elif books.generation > 1:
                self._put(ev.Ask({"do": "sweep", "generation": books.generation}))
            self._start(units, begun.choice, now)

    def check(self, now: float) -> None:
        """Says what is waited for; not for longer than limits.start."""
        if self._ingesting.busy():
            return  # hosts may come meanwhile; ingest.limit bounds it
        missing = self._books.missing()
        since: float | None
        if self.beginning is not None and not missing:
            if self.beginning.trouble is not None:
                return  # the place is missing, no host
            missing, since = self.beginning.missing(), self.beginning.since
        elif self._books.generation == 0:
            since = None if self._first_joined is None else max(self._first_joined, self._ingesting.there_since)
        else:
            units = self._books.units
            since = min((u.since for u in units if u.phase == WAITING and u.since is not None), default=None)
        if not missing or since is None:
            return
        limit = self._plan.limits.start
        if now - since >= limit:
            tasks = [task for host in missing for task in self._plan.host(host).tasks]
            reason = f"missing {', '.join(tasks)} after {limit:g} s (limits.start)"
            self._ending.end("failed", reason, "start-timeout", now, "kill")
        elif now - max(self._said_waiting, since) >= WAIT_WORDS_EVERY:
            self._said_waiting = now
            self._emit("waiting", missing=missing, since_s=round(now - since, 1), limit_s=limit)
