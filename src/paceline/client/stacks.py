"""What the tasks of a run are doing: their Python stacks, once or as samples over some seconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from paceline.agent.net import messages
from paceline.agent.net.frames import Message, WireError
from paceline.agent.net.stacks_request import END
from paceline.agent.stacks import MOST_SECONDS, StacksTaken
from paceline.client.find import Notify, ignore
from paceline.client.stop import is_running
from paceline.errors import PacelineError, UsageError
from paceline.job.similar_names import did_you_mean
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
    if not is_running(run):
        raise PacelineError(f"{run.name} is not running", remedy=f"see: paceline status {run.name}")
    if seconds:
        notify(f"taking samples for {seconds:g} s")
    processes: list[ProcessStacks] = []
    counts: Counter[str] = Counter()
    is_complete = False
    for message in _messages(run.folder, [] if names == all_names else names, seconds):
        is_complete = message["type"] == END
        if message.get("task") in names:
            counts[message["task"]] += 1
            if counts[message["task"]] > MOST_PROCESSES:
                raise PacelineError(f"the captain of {run.name} sent too many processes of {message['task']}")
            processes.append(read_reply(message))
    if not processes and not is_complete:
        remedy = "try again; a run that an earlier version of Paceline started cannot reply"
        raise PacelineError(f"the captain of {run.name} did not reply", remedy=remedy)
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


def select(wanted: Sequence[str], names: Sequence[str], run: str) -> list[str]:
    """Those of the names that are wanted, as tasks or as their roles; without any: all."""
    for each in wanted:
        if not any(each in (name, name.rpartition("-")[0]) for name in names):
            remedy = did_you_mean(each, names) or f"its tasks are {', '.join(names[:20])}"
            raise UsageError(f"{run} has no task {each!r}", remedy=remedy)
    return [name for name in names if not wanted or name in wanted or name.rpartition("-")[0] in wanted]


def _messages(folder: Path, tasks: list[str], seconds: float) -> Iterator[Message]:
    if run_folders.on_cluster(folder):
        from paceline.backends.kubernetes.runs.stacks_request import ask_for_stacks as ask_on_cluster

        return ask_on_cluster(folder, tasks, seconds)
    from paceline.backends.local.stacks_request import ask_for_stacks

    return ask_for_stacks(folder, tasks, seconds)
