"""Processes that a task leaves behind: the agent of its host adopts and kills them.

A task may leave thousands. Looking at each takes a fraction of a millisecond, so the agent does it in slices, between
which it sends heartbeats.
"""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from typing import Callable

from paceline.agent import os_processes
from paceline.agent.net.loop import SLICE, Callback, Loop

LONGEST_COMMAND = 200  # characters that are shown
HELPERS = "multiprocessing."  # in the commands of Python's own helpers, which end with the process that they help


class Orphans:
    def __init__(
        self,
        loop: Loop,
        own_pids: Callable[[], set[int]],
        is_idle: Callable[[], bool],
        notify: Callable[[str], None],
    ) -> None:
        """`own_pids`: of tasks and of the agent's own processes. `is_idle`: no task runs or is about to."""
        self._loop, self._own_pids, self._is_idle, self._notify = loop, own_pids, is_idle, notify
        self._jobs: deque[Iterator[None]] = deque()
        self._killed: set[int] = set()  # children that were killed, and have not been waited for
        self._reaped: set[int] = set()  # while there are jobs: these pids may belong to other processes now
        self._adopted_from: set[str] = set()  # ended tasks whose processes may have left children

    def end(self, task: str, kill_group: Callback, is_noted: bool, then: Callback) -> None:
        """Kills what the task has left, with its process group, and calls `then`: at once, unless there is much.
        `is_noted`: shows the user what it is."""
        self._add(self._end(task, kill_group, is_noted, then))

    def kill_adopted(self, tasks: Iterable[str]) -> None:
        """Kills what the children of these tasks, which have ended, have left."""
        is_waiting = bool(self._adopted_from)
        self._adopted_from.update(tasks)
        if self._adopted_from and not is_waiting:
            self._add(self._kill_adopted())

    def on_reaped(self, pid: int) -> None:
        self._killed.discard(pid)
        if self._jobs:
            self._reaped.add(pid)

    # ---- jobs

    def _end(self, task: str, kill_group: Callback, is_noted: bool, then: Callback) -> Iterator[None]:
        if is_noted:
            commands = []
            for pid in self._find([task]):
                if pid:
                    commands.append(os_processes.command_of(pid))
                yield
            if text := note(task, commands):
                self._notify(text)
        kill_group()
        yield from self._kill([task])
        then()

    def _kill_adopted(self) -> Iterator[None]:
        tasks, self._adopted_from = self._adopted_from, set()
        yield from self._kill(tasks)

    def _kill(self, tasks: Collection[str]) -> Iterator[None]:
        for pid in self._find(tasks):
            if pid:
                self._killed.add(pid)
                yield from self._kill_tree(pid)
            yield

    def _kill_tree(self, pid: int) -> Iterator[None]:
        """The children of a process are looked for just before it is killed: this agent adopts those that are missed.
        One that was reaped in the meantime is left out: another process may have its number."""
        pids = [pid]
        for each in pids:  # the list grows while it is read
            if each not in self._reaped:
                pids += os_processes.children(each)
                os_processes.send_signal(each, signal.SIGKILL)
            yield

    def _find(self, tasks: Collection[str]) -> Iterator[int]:
        """Children of this process that the tasks have started; 0 for others.

        Programs can overwrite their environment, and that of a process which was forked by a task from a spare is the
        spare's: such processes could be of any task, and are included if no task runs.
        """
        children, own_pids, is_idle = os_processes.children(os.getpid()), self._own_pids(), self._is_idle()
        self._reaped.clear()
        for pid in children:
            if pid in own_pids or pid in self._killed or pid in self._reaped:
                continue
            owner = os_processes.environment_of(pid, "PACELINE_TASK")
            yield pid if owner in tasks or (not owner and is_idle) else 0

    def _add(self, job: Iterator[None]) -> None:
        self._jobs.append(job)
        if len(self._jobs) == 1:
            self._run()

    def _run(self) -> None:
        """Until all jobs are done, or SLICE has passed. A job may add another one."""
        until = self._loop.now() + SLICE
        while self._jobs:
            for _ in self._jobs[0]:
                if self._loop.now() >= until:
                    self._loop.after(0.0, self._run)
                    return
            self._jobs.popleft()
        self._reaped.clear()


def note(task: str, commands: Iterable[str]) -> str:
    """A text about what a task that has succeeded left running, which might be what should have trained; empty: it left
    nothing that matters."""
    commands = [command for command in commands if command and HELPERS not in command]
    if not commands:
        return ""
    number = len(commands)
    left = "1 process running, which was" if number == 1 else f"{number} processes running, which were"
    text = f"{task} succeeded and left {left} killed: {commands[0][:LONGEST_COMMAND]}"
    return f"{text}. If this was the training, the task's command must wait for it"
