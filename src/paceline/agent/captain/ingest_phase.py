"""The phase before the first generation: the job's data is built, or already exists. No I/O."""

from __future__ import annotations

from typing import Any, Callable

from paceline.agent.captain import events as ev
from paceline.agent.captain import instructions as ins
from paceline.agent.captain.ledger import Ledger
from paceline.agent.captain.restart_units import DONE, RUNNING, STOPPING, WAITING
from paceline.agent.captain.shutdown import Shutdown
from paceline.plan import INGEST, Plan


class IngestPhase:
    def __init__(
        self,
        plan: Plan,
        ledger: Ledger,
        shutdown: Shutdown,
        instruct: Callable[[ins.Instruction], None],
        emit: Callable[..., None],
    ) -> None:
        self._plan, self._ledger, self._shutdown = plan, ledger, shutdown
        self._instruct, self._emit = instruct, emit
        self.data = ""  # its location; empty: not ready yet
        self.ready_since = 0.0
        self._deadline: float | None = None
        self._build_started = 0.0  # when the attempt that builds the data started
        self._building_run = ""  # another run that builds the data

    def is_busy(self) -> bool:
        return self._ledger.ingest is not None and self._ledger.ingest.phase in (RUNNING, STOPPING)

    def advance(self, now: float, not_before: float) -> bool:
        """Whether training may start: the data is ready, or the job has no `ingest`."""
        unit = self._ledger.ingest
        if unit is None or unit.phase == DONE:
            return True
        if unit.live:
            return False
        if self.data:
            unit.enter(DONE)
            self.ready_since = now
            return True
        if unit.phase == RUNNING and INGEST in self._ledger.succeeded:
            unit.enter(WAITING, now)  # it succeeded, but did not report the location: another attempt will find it
        if unit.phase == WAITING and not unit.not_ready and now >= max(unit.not_before, not_before):
            self._start(now)
        return False

    def _start(self, now: float) -> None:
        unit, ingest = self._ledger.ingest, self._plan.ingest
        assert unit is not None and ingest is not None
        task = unit.tasks[0]
        unit.enter(RUNNING)
        hosts = {task.host: {task.name: self._ledger.begin_attempt(task)}}
        del self._ledger.addresses[task.name]  # no task connects to it
        self._deadline = now + ingest.limit if self._deadline is None else self._deadline
        self._instruct(ins.StartTasks(self._ledger.generation, 0, dict(self._ledger.addresses), None, hosts))

    def on_joined(self, event: ev.MemberJoined, now: float) -> None:
        """A captain without notes learns where the data is, or that it is being built."""
        unit = self._ledger.ingest
        if unit is None:
            return
        self.data = self.data or event.data
        attempt = event.running.get(INGEST)
        if attempt is not None and unit.phase == WAITING and not unit.live and unit.tasks[0].host == event.host:
            self._ledger.mark_live(INGEST, attempt)
            unit.enter(RUNNING)
            assert self._plan.ingest is not None
            self._deadline = now + self._plan.ingest.limit if self._deadline is None else self._deadline

    def on_progress(self, event: ev.IngestProgress, now: float) -> None:
        unit = self._ledger.ingest
        if unit is None or event.host != unit.tasks[0].host or self.data:
            return
        if event.stage == "waiting" and event.run != self._building_run:
            self._building_run = event.run
            self._emit("note", text=f"waiting for {event.run} to build the data")
        elif event.stage == "making":
            self._build_started, self._building_run = now, ""
            self._emit("ingest-started", host=event.host, data=event.data)
        elif event.stage == "there":
            self.data = event.data
            self._ledger.succeeded.add(INGEST)
            size = {"files": event.files, "bytes": event.size}
            if event.made:
                self._emit("ingest-done", data=event.data, **size, took_s=round(now - self._build_started, 3))
            else:
                self._emit("ingest-skipped", data=event.data, **size, run=event.run)

    def postpone(self, seconds: float) -> None:
        """The run was paused for so long."""
        self._deadline = None if self._deadline is None else self._deadline + seconds

    def check_limit(self, now: float) -> None:
        unit, ingest = self._ledger.ingest, self._plan.ingest
        if unit is None or ingest is None or unit.phase == DONE or self._deadline is None or now < self._deadline:
            return
        problem = f"{self._building_run} did not build the data" if self._building_run else "the data was not ready"
        reason = f"{problem} within {ingest.limit:g} s (ingest.limit)"
        self._shutdown.end("failed", reason, "ingest-limit", now, ins.TERMINATE)

    # ---- notes for the next captain

    def to_notes(self) -> dict[str, Any]:
        return {"data": self.data, "until": self._deadline, "begun": self._build_started}

    def load_notes(self, notes: dict[str, Any], clock_offset: float) -> None:
        self.data = notes["data"]
        if notes["until"] is not None:
            self._deadline = notes["until"] + clock_offset
        self._build_started = notes["begun"] + clock_offset
