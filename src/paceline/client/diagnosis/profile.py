"""Profiles of the tasks of a run, by the profiler of their framework, as files for TensorBoard."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.agent.net import messages
from paceline.agent.net.frames import Message, WireError
from paceline.agent.profile_messages import (
    ANSWER_WITHIN,
    FINISH_WITHIN,
    FOLDER,
    MOST_BYTES,
    MOST_SECONDS,
    MOST_STEPS,
    ProfileTaken,
    profiled_tasks,
)
from paceline.client.diagnosis.task_requests import ask, select, wanted_tasks
from paceline.client.json_form import versioned
from paceline.client.reading.find_run import Notify, ignore
from paceline.errors import Argument, Call, PacelineError, UsageError
from paceline.storage.regular_files import open_regular
from paceline.storage.snapshots.manifest import is_safe_path
from paceline.view.files import run_folders
from paceline.view.files.plan_files import read_plan
from paceline.view.files.run_folders import Run
from paceline.view.text.wording import natural, size


@dataclass(frozen=True)
class TaskProfile:
    """The profile of one task."""

    task: str
    """The name of the task."""
    steps: int = 0
    """How many steps were profiled."""
    files: tuple[Path, ...] = ()
    """Its files."""
    problem: str = ""
    """Why there are no files, or why they show fewer steps than requested."""

    def to_dict(self) -> dict[str, Any]:
        """An item of `tasks` of `paceline profile -o json`, with a `schema_version`."""
        return versioned(self.fields())

    def fields(self) -> dict[str, Any]:
        """The same as `to_dict`, without `schema_version`."""
        return {"task": self.task, "steps": self.steps, "problem": self.problem, "files": list(map(str, self.files))}


@dataclass(frozen=True)
class Profile:
    """The profiles of the tasks of a run."""

    run: str
    """The id of the run."""
    folder: Path
    """The folder to open in TensorBoard."""
    tasks: tuple[TaskProfile, ...]
    """The profile of each task."""

    def to_dict(self) -> dict[str, Any]:
        """The same as `paceline profile -o json`."""
        tasks = [task.fields() for task in self.tasks]
        return versioned({"run": self.run, "folder": str(self.folder), "tasks": tasks})


def profile_folder(run: Run, to: Path | None) -> Path:
    """The folder to open in TensorBoard."""
    return to or run.folder / "tensorboard"


def take(
    run: Run,
    tasks: Sequence[str] = (),
    steps: int = 20,
    seconds: float = 120.0,
    to: Path | None = None,
    notify: Notify = ignore,
) -> list[TaskProfile]:
    """Profiles the next steps of these tasks, by default of all that train, and returns their files.

    `tasks`: names of tasks or roles. `seconds`: in which the steps have to be completed. `to`: a folder to copy the
    files to; default: that of the run's TensorBoard files.
    """
    if not 1 <= steps <= MOST_STEPS:
        raise UsageError("invalid value", where=Argument("steps", steps), remedy=f"use 1 to {MOST_STEPS}")
    if not 1 <= seconds <= MOST_SECONDS:
        raise UsageError("invalid value", where=Argument("timeout", seconds), remedy=f"use 1 to {MOST_SECONDS:g} s")
    names = _select(run, tasks)
    request = {"type": "profile", "tasks": names if tasks else [], "steps": steps, "seconds": seconds}
    notify(f"profiling the next {steps} steps of {names[0] if len(names) == 1 else f'{len(names)} tasks'}")
    profiles: dict[str, TaskProfile] = {}
    replies = []
    for message in ask(run, request, seconds + FINISH_WITHIN + ANSWER_WITHIN):
        if message.get("task") in names and message["task"] not in profiles:
            taken = read_reply(message)
            profiles[taken.task] = TaskProfile(taken.task, taken.steps, (), taken.problem)
            replies.append(taken)
    for task in set(names) - set(profiles):
        profiles[task] = TaskProfile(task, problem="the captain did not reply")
    for taken in replies:
        if taken.files:
            notify(f"{taken.task}: {taken.steps} steps, {size(sum(taken.files.values()))}")
            profiles[taken.task] = _with_files(run, profiles[taken.task], taken, to)
    return sorted(profiles.values(), key=lambda profile: natural(profile.task))


def _select(run: Run, tasks: Sequence[str]) -> list[str]:
    plan = read_plan(run.folder)
    if plan.framework == "none":
        raise PacelineError(
            f"{run.name} cannot be profiled: it uses no framework (framework: none)",
            remedy=("to see what its tasks are doing: ", Call("stacks", run.name, (Argument("seconds", 10),))),
        )
    names = wanted_tasks(run, sorted(profiled_tasks(plan), key=natural))
    others = {task.name for task in plan.tasks} - set(profiled_tasks(plan))
    for each in tasks:
        if each in others or (each in {name.rpartition("-")[0] for name in others}):
            remedy = f"the tasks that train are {', '.join(names[:20])}"
            raise UsageError(f"{each} cannot be profiled: it runs no training steps", remedy=remedy)
    return select(tasks, names, run.name)


def read_reply(message: Message) -> ProfileTaken:
    """The captain does not check what members send, and a task may have written any files. `message`: has a task."""
    try:
        taken = messages.read_member(message, "")
        if not isinstance(taken, ProfileTaken):
            raise WireError("not a profile")
        is_valid = all(is_safe_path(path) and path.startswith(f"{FOLDER}/") for path in taken.files)
        is_valid = is_valid and all(0 <= each <= MOST_BYTES for each in taken.files.values())
        if not is_valid or sum(taken.files.values()) > MOST_BYTES:
            raise WireError("invalid files")
    except WireError as error:
        return ProfileTaken("", 0, message["task"], f"its host sent an invalid reply: {error}")
    return taken


def _with_files(run: Run, profile: TaskProfile, taken: ProfileTaken, to: Path | None) -> TaskProfile:
    target = profile_folder(run, to)
    try:
        if run_folders.on_cluster(run.folder):
            from paceline.backends.kubernetes.runs.host_files import fetch

            host = next(task.host for task in read_plan(run.folder).tasks if task.name == taken.task)
            fetch(run.folder, host, "tensorboard", taken.files, target)
        elif to is not None:
            for path, amount in taken.files.items():
                _copy(run.folder / "tensorboard" / path, target / path, amount)
    except (OSError, PacelineError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return replace(profile, problem=f"its files cannot be copied: {reason}")
    return replace(profile, files=tuple(target / path for path in sorted(taken.files)))


def _copy(source: Path, target: Path, amount: int) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(open_regular(str(source)), "rb") as file, target.open("wb") as copy:
        shutil.copyfileobj(file, copy)
        if copy.tell() != amount:
            raise OSError(f"{source} has changed")
