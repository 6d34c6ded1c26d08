"""A captain that returns: it adopts the tasks that its predecessor started, as their members join. No I/O."""

from __future__ import annotations

from typing import Callable

from paceline.agent.captain import events as ev
from paceline.agent.captain import instructions as ins
from paceline.agent.captain.failures import Failures, failure_of
from paceline.agent.captain.generations import Generations
from paceline.agent.captain.hangs import ProgressWatch
from paceline.agent.captain.ledger import DONE, LIVE, RETURNING, RUNNING, WAITING, Ledger
from paceline.agent.captain.shutdown import Shutdown
from paceline.agent.captain.snapshots.commits import Commits
from paceline.plan import BEFORE


class CaptainReturn:
    def __init__(
        self,
        ledger: Ledger,
        commits: Commits,
        generations: Generations,
        failures: Failures,
        watch: ProgressWatch,
        shutdown: Shutdown,
        lease: float,
        emit: Callable[..., None],
    ) -> None:
        self._ledger, self._commits, self._generations, self._failures = ledger, commits, generations, failures
        self._watch, self._shutdown, self._lease, self._emit = watch, shutdown, lease, emit

    def begin(self, now: float) -> None:
        self._ledger.phase = RETURNING
        self._commits.has_returned = True
        self._commits.pace.resume(now)
        self._generations.hold_until = now + self._lease

    def on_joined(self, event: ev.MemberJoined, now: float) -> None:
        """A member reports which tasks it runs, and how others have ended."""
        ledger = self._ledger
        for name, attempt in event.running.items():
            task = ledger.tasks.get(name)
            if task is not None and task.host == event.host and attempt >= ledger.attempts.get(name, 0):
                ledger.mark_live(name, attempt)
        for exit in event.exits:
            if exit.task in ledger.tasks and exit.attempt >= ledger.attempts.get(exit.task, 0):
                ledger.attempts[exit.task] = exit.attempt
                unit = ledger.unit_of[exit.task]
                if not exit.cause and not exit.expected:
                    ledger.mark_succeeded(exit)
                elif exit.cause and unit.name not in ledger.waiting_before:
                    unit.failures.append(failure_of(exit, now))

    def settle(self, now: float) -> None:
        """Once all members have joined, or the lease of the others has expired: what has not been adopted is lost."""
        ledger = self._ledger
        if now < self._generations.hold_until and not all(member.connected for member in ledger.members.values()):
            return
        ledger.phase = LIVE
        if self._shutdown.outcome[0]:  # the previous captain has decided how the run ends
            self._emit("captain-returned", adopted=True)
            if self._shutdown.outcome[0] == "succeeded":
                self._close_again(now)
            else:
                self._shutdown.end(*self._shutdown.outcome, now, ins.TERMINATE)
            return
        is_complete = True
        for unit in ledger.units:
            if unit.phase == DONE:
                continue
            if unit.name in ledger.waiting_before and not unit.live:
                unit.enter(WAITING, now)
                is_complete = False
                continue
            missing = [
                task for task in unit.tasks if task.name not in ledger.live and task.name not in ledger.succeeded
            ]
            unit.enter(RUNNING)
            for task in unit.tasks if unit.kind != BEFORE else ():
                self._watch.begin(task.name, now)
            if missing:
                is_complete = False
                if unit.failures:
                    self._failures.stop_unit(unit, now)
                else:
                    name = missing[0].name
                    self._failures.on_host_lost(name, "was not running when the captain restarted", now)
        if is_complete:
            self._generations.hold_until = 0.0
        self._emit("captain-returned", adopted=is_complete)

    def _close_again(self, now: float) -> None:
        """Training had succeeded; an evaluator may not have evaluated every snapshot."""
        for unit in self._ledger.units:
            task = unit.tasks[0]
            if unit.phase != DONE:
                must_restart = task.role == "evaluator" and not unit.live and task.name not in self._ledger.succeeded
                unit.enter(WAITING if must_restart else RUNNING, now)
        self._generations.hold_until = 0.0
        self._shutdown.close(now)
