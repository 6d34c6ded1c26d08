"""Processes that a task leaves behind: the agent of its host adopts and kills them."""

from __future__ import annotations

import os
import signal

from paceline.agent import machine

LONGEST_COMMAND = 200  # characters that are shown
HELPERS = "multiprocessing."  # in the commands of Python's own helpers, which end with the process that they help


def orphans(task: str, own_pids: set[int], is_idle: bool) -> list[int]:
    """Children of this process that the task has started.

    Programs can overwrite their environment, and that of a process which was forked by a task from a spare is the
    spare's: such processes could be of any task, and are included if no task runs. `own_pids`: of tasks and of the
    agent's own processes. `is_idle`: no task runs or is about to.
    """
    pids = []
    for pid in machine.children(os.getpid()):
        if pid not in own_pids:
            owner = machine.environment_of(pid, "PACELINE_TASK")
            if owner == task or (not owner and is_idle):
                pids.append(pid)
    return pids


def kill(pids: list[int]) -> None:
    for pid in pids:
        for each in (pid, *machine.descendants(pid)):
            try:
                os.kill(each, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass


def note(task: str, pids: list[int]) -> str:
    """A text about what a task that has succeeded left running, which might be what should have trained; empty: it left
    nothing that matters."""
    commands = [command for command in map(machine.command_of, pids) if command and HELPERS not in command]
    if not commands:
        return ""
    left = "1 process running, which was killed" if len(commands) == 1 else f"{len(commands)} processes running, killed"
    text = f"{task} succeeded and left {left}: {commands[0][:LONGEST_COMMAND]}"
    return f"{text}. If this was training, the command of the task must wait for it"
