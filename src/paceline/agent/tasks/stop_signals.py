"""Ends a task on request: which signals its processes get, and when."""

from __future__ import annotations

import signal

from paceline.agent import os_processes
from paceline.agent.captain import instructions as ins
from paceline.agent.net.loop import Loop
from paceline.agent.tasks.attempt import Attempt
from paceline.agent.tasks.launcher import TaskLauncher
from paceline.plan import INGEST, Plan, Task

STACKS_WITHIN = 3.0  # seconds a task has to write its stacks
GRACEFUL = (ins.TERMINATE, ins.INTERRUPT)  # ways to end after which the task may exit on its own
TERMINATE_AFTER = 0.5  # share of the grace period between SIGINT and SIGTERM


class StopSignals:
    def __init__(self, plan: Plan, loop: Loop, launcher: TaskLauncher) -> None:
        self._plan, self._loop, self._launcher = plan, loop, launcher

    def end(self, attempt: Attempt, how: str, grace: float) -> None:
        """`how`: KILL, ABORT, INTERRUPT or TERMINATE of the captain's instructions."""
        is_repeated = attempt.requested_end in GRACEFUL  # by a captain to which this host has reconnected
        if not attempt.has_ended():  # if it has ended by itself, how it ended may be the cause of this request
            attempt.requested_end = how
        if how == ins.KILL:
            attempt.state = "stopped" if attempt.is_stopped() else ""
            attempt.kill()
        elif how == ins.ABORT and not attempt.pid:
            attempt.kill()  # there is no process that could write its stacks
        elif how == ins.ABORT:
            attempt.state = attempt.doing()
            attempt.read_output()
            attempt.log.clear_tail()
            descendants = os_processes.descendants(attempt.pid) if self._launcher.starts_the_program_below else []
            for pid in descendants or [attempt.pid]:  # the stacks of a shell or of torchrun are not useful
                os_processes.send_signal(pid, signal.SIGABRT)
                os_processes.send_signal(pid, signal.SIGCONT)
            attempt.kill_within(STACKS_WITHIN)
        elif how == ins.INTERRUPT and not self._only_serves(attempt.task):
            if not is_repeated:  # a second SIGINT would interrupt the program's clean-up
                self._interrupt(attempt, grace)
            attempt.kill_within(grace)
        else:
            self.terminate(attempt)
            attempt.signal(signal.SIGCONT, whole_group=True)
            attempt.kill_within(grace)

    def _only_serves(self, task: Task) -> bool:
        """Whether a task runs none of the user's training: servers wait in C++ code, in which Python handles no
        SIGINT."""
        has_chief = any(role.name == "chief" for role in self._plan.roles)
        servers = ("ps", "worker") if has_chief else ("ps",)
        return task.name == INGEST or (self._plan.strategy == "parameter-server" and task.role in servers)

    def _interrupt(self, attempt: Attempt, grace: float) -> None:
        """As Ctrl-C in a terminal: SIGINT for all processes of the task. Half of the grace period later: SIGTERM."""
        attempt.signal(signal.SIGINT, whole_group=True)
        attempt.signal(signal.SIGCONT, whole_group=True)
        self._loop.after(TERMINATE_AFTER * grace, lambda: None if attempt.exited else self.terminate(attempt))

    def terminate(self, attempt: Attempt) -> None:
        whole_group = self._launcher.python is None or attempt.task.name == INGEST
        attempt.signal(signal.SIGTERM, whole_group=whole_group)
