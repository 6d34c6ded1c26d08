"""A captain that returns: it adopts the tasks that its predecessor started, as their members join. No I/O."""

from __future__ import annotations

from typing import Callable

from paceline.agent.captain import events as ev
from paceline.agent.captain import instructions as ins
from paceline.agent.captain.failures import Failures, failure_of
from paceline.agent.captain.generations import Generations
from paceline.agent.captain.hangs import ProgressWatch
from paceline.agent.captain.ledger import LIVE, RETURNING, Ledger
from paceline.agent.captain.restart_units import DONE, RUNNING, WAITING, Unit
from paceline.agent.captain.shutdown import Shutdown
from paceline.agent.captain.snapshots.commits import Commits
from paceline.plan import BEFORE, GROUP, Plan, Task


class CaptainReturn:
    def __init__(
        self,
        plan: Plan,
        ledger: Ledger,
        commits: Commits,
        generations: Generations,
        failures: Failures,
        watch: ProgressWatch,
        shutdown: Shutdown,
        lease: float,
        emit: Callable[..., None],
    ) -> None:
        self._plan, self._ledger, self._commits = plan, ledger, commits
        self._generations, self._failures = generations, failures
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
            if ledger.is_on(name, event.host) and self._may_be_current(name, attempt):
                ledger.mark_live(name, attempt)
        for exit in event.exits:
            if ledger.is_on(exit.task, event.host) and self._may_be_current(exit.task, exit.attempt):
                ledger.attempts[exit.task] = exit.attempt
                unit = ledger.unit_of[exit.task]
                if not exit.cause and not exit.expected:
                    ledger.mark_succeeded(exit)
                elif exit.cause and unit.name not in ledger.waiting_before and not _has_failed(unit, exit.task):
                    unit.failures.append(failure_of(exit, now))

    def _may_be_current(self, task: str, attempt: int) -> bool:
        """Whether this attempt may be of the current generation. A host that does not take part in it may still run, or
        report, an attempt of an earlier one."""
        unit = self._ledger.unit_of[task]
        takes_part = not unit.is_absent and (not self._ledger.is_elastic or self._ledger.tasks[task] in unit.tasks)
        return takes_part and attempt >= self._ledger.attempts.get(task, 0)

    def settle(self, now: float) -> None:
        """Once all members have joined, or the lease of the others has expired: what has not been adopted is lost."""
        ledger = self._ledger
        if now < self._generations.hold_until and not self._are_all_connected():
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
            if unit.is_absent:
                unit.enter(WAITING, now)
            elif unit.name in ledger.waiting_before and not unit.live:
                unit.enter(WAITING, now)
                is_complete = False
            else:
                unit.enter(RUNNING)
                for task in unit.tasks if unit.kind != BEFORE else ():
                    self._watch.begin(task.name, now)
        # Not before: a unit that fails may stop others with it.
        for unit in [unit for unit in ledger.units if unit.phase == RUNNING]:
            missing = [task for task in unit.tasks if not self._is_adopted(unit, task)]
            if missing:
                is_complete = False
                if unit.failures or unit.is_resizing:
                    self._failures.stop_unit(unit, now)
                else:
                    name = missing[0].name
                    self._failures.on_host_lost(name, "was not running when the captain restarted", now)
        lead = ledger.lead
        if lead is not None and lead.phase == WAITING and self._plan.led_roles:
            self._stop_led_workers(now)
        if is_complete:
            self._generations.hold_until = 0.0
        self._emit("captain-returned", adopted=is_complete)

    def _stop_led_workers(self, now: float) -> None:
        """The previous captain was starting the chief again. The next one leads workers that start with it."""
        for unit in self._ledger.workers:
            if unit.phase == RUNNING:
                unit.is_resizing = True
                self._failures.stop_unit(unit, now)

    def _are_all_connected(self) -> bool:
        return all(self._ledger.members[host].connected for host in self._ledger.hosts_taking_part())

    def _is_adopted(self, unit: Unit, task: Task) -> bool:
        """Whether a task of the current generation runs, or has succeeded. If the notes are lost, it is not known which
        hosts take part: one that does not may run a task of an earlier generation."""
        ledger = self._ledger
        is_member_current = ledger.members[task.host].generation >= ledger.generation
        is_current = is_member_current or unit.kind != GROUP or not ledger.is_elastic
        return (is_current and task.name in ledger.live) or task.name in ledger.succeeded

    def _close_again(self, now: float) -> None:
        """Training had succeeded; an evaluator may not have evaluated every snapshot."""
        for unit in self._ledger.units:
            task = unit.tasks[0]
            if unit.phase != DONE:
                must_restart = task.role == "evaluator" and not unit.live and task.name not in self._ledger.succeeded
                unit.enter(WAITING if must_restart else RUNNING, now)
        self._generations.hold_until = 0.0
        self._shutdown.close(now)


def _has_failed(unit: Unit, task: str) -> bool:
    """Whether the failure is known: a member that joins again reports it again."""
    return any(failure.task == task for failure in unit.failures)
