"""Before the first generation: the data that the job makes is made, or found. Decides, does nothing itself."""

from __future__ import annotations

from typing import Any, Callable

from paceline.agent import events as ev
from paceline.agent.ending import Ending
from paceline.agent.ledger import DONE, RUNNING, STOPPING, WAITING, Ledger
from paceline.plan import INGEST, Plan


class Ingesting:
    def __init__(
        self,
        plan: Plan,
        books: Ledger,
        ending: Ending,
        put: Callable[[ev.Instruction], None],
        emit: Callable[..., None],
    ) -> None:
        self._plan, self._books, self._ending = plan, books, ending
        self._put, self._emit = put, emit
        self.data = ""  # where it is
        self.there_since = 0.0
        self._until: float | None = None
        self._begun = 0.0  # the attempt that makes it
        self._waits_for = ""  # the run that makes it

    def busy(self) -> bool:
        return self._books.ingest is not None and self._books.ingest.phase in (RUNNING, STOPPING)

    def advance(self, now: float, not_before: float) -> bool:
        """Whether the data is there, or none is asked for."""
        unit = self._books.ingest
        if unit is None or unit.phase == DONE:
            return True
        if unit.live:
            return False
        if self.data:
            unit.turn(DONE)
            self.there_since = now
            return True
        if unit.phase == RUNNING and INGEST in self._books.succeeded:
            unit.turn(WAITING, now)  # it has ended well, and where the data is was not heard: it is found there
        if unit.phase == WAITING and not unit.lacking and now >= max(unit.not_before, not_before):
            self._start(now)
        return False

    def _start(self, now: float) -> None:
        unit, ingest = self._books.ingest, self._plan.ingest
        assert unit is not None and ingest is not None
        task = unit.tasks[0]
        unit.turn(RUNNING)
        hosts = {task.host: {task.name: self._books.begin(task)}}
        del self._books.addresses[task.name]  # nobody speaks to it
        self._until = now + ingest.limit if self._until is None else self._until
        self._put(ev.Start(self._books.generation, 0, dict(self._books.addresses), None, hosts))

    def joined(self, told: ev.Joined, now: float) -> None:
        """A captain whose notes are lost learns where the data is, or that it is being made."""
        unit = self._books.ingest
        if unit is None:
            return
        self.data = self.data or told.data
        attempt = told.running.get(INGEST)
        if attempt is not None and unit.phase == WAITING and not unit.live and unit.tasks[0].host == told.host:
            self._books.lives(INGEST, attempt)
            unit.turn(RUNNING)
            assert self._plan.ingest is not None
            self._until = now + self._plan.ingest.limit if self._until is None else self._until

    def told(self, told: ev.Ingested, now: float) -> None:
        unit = self._books.ingest
        if unit is None or told.host != unit.tasks[0].host or self.data:
            return
        if told.stage == "waiting" and told.run != self._waits_for:
            self._waits_for = told.run
            self._emit("note", text=f"{told.run} makes the data: waiting for it")
        elif told.stage == "making":
            self._begun, self._waits_for = now, ""
            self._emit("ingest-started", host=told.host, data=told.data)
        elif told.stage == "there":
            self.data = told.data
            self._books.succeeded.add(INGEST)
            size = {"files": told.files, "bytes": told.size}
            if told.made:
                self._emit("ingest-done", data=told.data, **size, took_s=round(now - self._begun, 3))
            else:
                self._emit("ingest-skipped", data=told.data, **size, run=told.run)

    def check(self, now: float) -> None:
        unit, ingest = self._books.ingest, self._plan.ingest
        if unit is None or ingest is None or unit.phase == DONE or self._until is None or now < self._until:
            return
        what = f"{self._waits_for} has not made the data" if self._waits_for else "the data was not there"
        reason = f"{what} within {ingest.limit:g} s, which is ingest.limit"
        self._ending.end("failed", reason, "ingest-limit", now, "term")

    # ---- notes for the next captain

    def saved(self) -> dict[str, Any]:
        return {"data": self.data, "until": self._until, "begun": self._begun}

    def load(self, saved: dict[str, Any], ahead: float) -> None:
        self.data = saved["data"]
        if saved["until"] is not None:
            self._until = saved["until"] + ahead
        self._begun = saved["begun"] + ahead
