"""What the tasks of a run are doing: their Python stacks, once or as samples over some seconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.agent.net import messages
from paceline.agent.net.frames import Message, WireError
from paceline.agent.stack_messages import ANSWER_WITHIN, MOST_SECONDS, StacksTaken
from paceline.client.diagnosis.task_requests import ask, select, wanted_tasks
from paceline.client.json_form import versioned
from paceline.client.reading.find_run import Notify, ignore
from paceline.errors import Argument, PacelineError, UsageError
from paceline.view.diagnosis.stacks import ProcessStacks, describe, read
from paceline.view.files import run_folders
from paceline.view.files.run_folders import Run
from paceline.view.text.wording import natural

MOST_PROCESSES = 256  # of a task; members send fewer


@dataclass(frozen=True)
class Stacks:
    """What the tasks of a run did at one moment, or for some seconds. `str()` is the text of `paceline stacks`."""

    run: str
    """The id of the run."""
    processes: tuple[ProcessStacks, ...]
    """The processes of its tasks, each with the Python stacks of its threads."""
    files: tuple[str, ...] = ()
    """Files that `paceline stacks --seconds` has written."""

    def to_dict(self) -> dict[str, Any]:
        """The same as `paceline stacks -o json`."""
        tasks = [process.fields() for process in self.processes]
        return versioned({"run": self.run, "files": list(self.files), "tasks": tasks})

    def __str__(self) -> str:
        return "\n".join(describe(list(self.processes)))


def take(run: Run, tasks: Sequence[str] = (), seconds: float = 0.0, notify: Notify = ignore) -> list[ProcessStacks]:
    """The processes of these tasks, in the order of the tasks; without tasks: of all.

    `tasks`: names of tasks or roles. `seconds`: take samples for that time; 0: one.
    """
    if not 0 <= seconds <= MOST_SECONDS:
        raise UsageError("invalid value", where=Argument("seconds", seconds), remedy=f"use 1 to {MOST_SECONDS:g}")
    planned = sorted((task["name"] for task in run_folders.plan(run.folder).get("tasks", ())), key=natural)
    all_names = wanted_tasks(run, planned)
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
