"""What `paceline try` and `paceline export` run: the job's command, where it runs, and what it is given."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline import plan as plans
from paceline.frameworks import amx
from paceline.plan import CODE_IN_IMAGE, Plan
from paceline.view import runs
from paceline.view.places import Source

# What a task of a run has, and a program beside it must not: it would wait for others.
_OF_TASKS = (
    "TF_CONFIG", "CLUSTER_CONFIG", "POD_NAME", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK",
    "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES",
    "JAX_PROCESS_ID",
)  # fmt: skip
EXPORT_DIR = "PACELINE_EXPORT_DIR"


class NoProgram(Exception):
    """There is nothing to run, or nowhere to run it; the message says what to write."""


@dataclass(frozen=True)
class Program:
    argv: tuple[str, ...]
    env: Mapping[str, str]  # all of it
    folder: Path
    job: str  # the job's name

    def given(self, arguments: Sequence[str] = (), **more: str) -> Program:
        return Program((*self.argv, *arguments), {**self.env, **more}, self.folder, self.job)


def find(source: Source, name: str, job: str = "", code: str = "") -> Program:
    """`name`: try or export. `job`: a job file that says it instead of the run's; `code`: another folder."""
    plan = planned(source, name, job)
    program = plan.programs[name]
    folder = folder_of(plan, code)
    env = _environment(source.run, {**program.env, **({"PACELINE_TRUST": "1"} if plan.snapshots.trust else {})})
    return Program(_argv(program.command, folder, env.get("PATH")), env, folder, plan.name)


def planned(source: Source, name: str, job: str = "") -> Plan:
    """The plan that has the command."""
    found = _of_file(source, Path(job)) if job else _of_run(source, name)
    if name not in found.programs:
        where = job or f"the job of {source.run}"
        raise NoProgram(
            f"{where} says nothing of `{name}`: write `{name}: {{command: [python, {name}.py]}}` into the job file"
            + ("" if job else ", and give that with --job FILE")
        )
    return found


def _of_run(source: Source, name: str) -> Plan:
    """A plan that came from elsewhere is not run: whoever can write to a bucket could have anything run here."""
    if source.folder is None or not (source.folder / "job.yaml").exists():
        raise NoProgram(
            f"{source.run} was not started from this machine, or its job is not here any more: say which job file has "
            f"the command, with --job FILE"
        )
    data = runs.read_object(source.folder / "plan.json")
    try:
        return plans.from_data(data or {})
    except (ValueError, KeyError, TypeError) as error:
        raise NoProgram(f"the plan of {source.run} cannot be read ({error}): give the job file with --job") from None


def _of_file(source: Source, path: Path) -> Plan:
    from paceline import job

    elsewhere = source.folder is None or runs.on_cluster(source.folder)
    return plans.make(job.load(path, cluster=elsewhere and not source.place.startswith("/")).job)


def folder_of(planned: Plan, code: str) -> Path:
    if code:
        folder = Path(code).expanduser().absolute()
        if not folder.is_dir():
            raise NoProgram(f"--code {code}: there is no such folder")
        return folder
    if planned.code == CODE_IN_IMAGE:
        raise NoProgram("the job's code is in a container image: say which folder here has it, with --code DIR")
    if not Path(planned.code).is_dir():
        raise NoProgram(f"the job's code folder {planned.code} is not here: say which one has it, with --code DIR")
    return Path(planned.code)


def _environment(run: str, more: Mapping[str, str]) -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _OF_TASKS and (name == "PACELINE_HOME" or not name.startswith("PACELINE_"))
    }
    given = {**kept, **more, "PACELINE_RUN": run}
    return {**given, **amx.environment(given)}


def _argv(command: Sequence[str], folder: Path, path: str | None) -> tuple[str, ...]:
    """With the program's path, found as for a task."""
    from paceline.agent.command import understand
    from paceline.backends.local.resources import interpreter

    python = understand(command, interpreter(), path, str(folder))
    if python is not None:
        return python.argv
    first = str(folder / command[0]) if os.sep in command[0] else shutil.which(command[0], path=path)
    if first is None or not os.access(first, os.X_OK):
        raise NoProgram(f"the program {command[0]!r} is not found")
    return (first, *command[1:])
