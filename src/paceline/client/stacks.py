"""What the tasks of a run are doing: their Python stacks, once or as samples over some seconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from paceline.agent.net import messages
from paceline.agent.net.frames import Message, WireError
from paceline.agent.stacks import ANSWER_WITHIN, MOST_SECONDS, StacksTaken
from paceline.client.find import Notify, ignore
from paceline.client.task_requests import ask, select
from paceline.errors import PacelineError, UsageError
from paceline.view import run_folders
from paceline.view.run_folders import Run
from paceline.view.stacks import ProcessStacks, read
from paceline.view.wording import natural

MOST_PROCESSES = 256  # of a task; members send fewer


def take(run: Run, tasks: Sequence[str] = (), seconds: float = 0.0, notify: Notify = ignore) -> list[ProcessStacks]:
    """The processes of these tasks, in the order of the tasks; without tasks: of all.

    `tasks`: names of tasks or roles. `seconds`: take samples for that time; 0: one.
    """
    if not 0 <= seconds <= MOST_SECONDS:
        raise UsageError("invalid value", where=f"--seconds {seconds:g}", remedy=f"use 1 to {MOST_SECONDS:g}")
    all_names = sorted((task["name"] for task in run_folders.plan(run.folder).get("tasks", ())), key=natural)
    names = select(tasks, all_names, run.name)
    if seconds:
        notify(f"taking samples for {seconds:g} s")
    request = {"type": "stacks", "tasks": [] if names == all_names else names, "seconds": seconds}
    processes: list[ProcessStacks] = []
    counts: Counter[str] = Counter()
    for message in ask(run, request, seconds + ANSWER_WITHIN):
        if message.get("task") in names:
            counts[message["task"]] += 1
            if counts[message["task"]] > MOST_PROCESSES:
                raise PacelineError(f"the captain of {run.name} sent too many processes of {message['task']}")
            processes.append(read_reply(message))
    missing = set(names) - {process.task for process in processes}
    processes += [ProcessStacks(task, problem="the captain did not reply") for task in missing]
    return sorted(processes, key=lambda process: (natural(process.task), process.pid))


def read_reply(message: Message) -> ProcessStacks:
    """The captain does not check what members send. `message`: has a task."""
    try:
        taken = messages.read_member(message, "")
        return read(taken) if isinstance(taken, StacksTaken) else ProcessStacks(message["task"], problem="no stacks")
    except WireError as error:
        return ProcessStacks(message["task"], problem=f"its host sent an invalid reply: {error}")
