"""What `paceline try` and `paceline export` run: the job's command, its folder and its environment."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline.agent.tasks import variable_references
from paceline.errors import USAGE, Argument, PacelineError
from paceline.frameworks import amx_probe
from paceline.job.planning import make_plan
from paceline.plan import CODE_IN_IMAGE, Plan
from paceline.view.files import run_folders
from paceline.view.files.plan_files import read_plan
from paceline.view.files.run_files import DamagedRun, NewerRun
from paceline.view.snapshots.snapshot_locations import Source

# Variables of a task that such a program must not inherit: it would wait for other tasks.
_TASK_VARIABLES = (
    "TF_CONFIG", "CLUSTER_CONFIG", "POD_NAME", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK",
    "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES",
    "JAX_PROCESS_ID", "PET_NNODES", "PET_NODE_RANK", "PET_NPROC_PER_NODE", "PET_MASTER_ADDR", "PET_MASTER_PORT",
)  # fmt: skip
EXPORT_DIR = "PACELINE_EXPORT_DIR"
_CODE_REMEDY = ("pass a folder that contains the code with ", Argument("code"))


class NoProgram(PacelineError):
    """There is no program to run, or no folder to run it in."""

    exit_code = USAGE


@dataclass(frozen=True)
class Program:
    argv: tuple[str, ...]
    env: Mapping[str, str]  # the complete environment
    folder: Path
    job: str  # the job's name
    referring_env: Mapping[str, str] = field(default_factory=dict)  # variables of `env` that refer to Paceline's

    def extended(self, arguments: Sequence[str] = (), **variables: str) -> Program:
        """With these arguments and variables, and with references to Paceline's variables expanded."""
        env = {**self.env, **variables}
        env.update(variable_references.expand_env(self.referring_env, env))
        return Program((*variable_references.expand_command(self.argv, env), *arguments), env, self.folder, self.job)


def find(source: Source, name: str, job: str = "", code: str = "") -> Program:
    """`name`: try or export. `job`: a job file to use instead of the run's. `code`: a folder instead of the job's."""
    plan = planned(source, name, job)
    program = plan.programs[name]
    folder = folder_of(plan, code)
    referring = {key: value for key, value in program.env.items() if variable_references.is_changed(value)}
    plain = {key: value for key, value in program.env.items() if key not in referring}
    env = _environment(source.run, {**plain, **({"PACELINE_TRUST": "1"} if plan.snapshots.trust else {})})
    return Program(_argv(program.command, folder, env.get("PATH")), env, folder, plan.name, referring)


def planned(source: Source, name: str, job: str = "") -> Plan:
    """The plan that has the command."""
    plan = _of_file(source, Path(job)) if job else _of_run(source)
    if name not in plan.programs:
        raise missing_section(source, name, f"{{command: [python, {name}.py]}}", job)
    return plan


def missing_section(source: Source, name: str, example: str, job: str) -> NoProgram:
    """`job`: the job file that was given instead of the run's."""
    add = f"add `{name}: {example}` to the job file"
    remedy = (add,) if job else (add, " and pass it with ", Argument("job"))
    return NoProgram(f"{job or f'the job of {source.run}'} has no `{name}`", remedy=remedy)


def _of_run(source: Source) -> Plan:
    """Plans of other users, from a bucket or a cluster, are never run: anyone who can write there could run any program
    here, with the credentials of this user."""
    folder = source.folder
    if folder is None or not run_folders.is_own(folder) or not (folder / "job.yaml").exists():
        raise NoProgram(
            f"the job file of {source.run} is not on this machine",
            remedy=("pass a job file that has the command with ", Argument("job")),
        )
    try:
        return read_plan(folder)
    except (DamagedRun, NewerRun) as error:
        remedy = ("pass the job file with ", Argument("job"))
        raise NoProgram(f"cannot read the plan of {source.run}: {error}", remedy=remedy) from None


def _of_file(source: Source, path: Path) -> Plan:
    from paceline import job

    elsewhere = source.folder is None or run_folders.on_cluster(source.folder)
    return make_plan(job.load(path, cluster=elsewhere and not source.location.startswith("/")).job)


def folder_of(plan: Plan, code: str) -> Path:
    if code:
        folder = Path(os.path.abspath(os.path.expanduser(code)))  # noqa: PTH100, PTH111
        if not folder.is_dir():
            raise NoProgram("no such folder", where=Argument("code", code))
        return folder
    if plan.code == CODE_IN_IMAGE:
        raise NoProgram("the job's code is in a container image", remedy=_CODE_REMEDY)
    if not Path(plan.code).is_dir():
        raise NoProgram(f"the job's code folder {plan.code} does not exist on this machine", remedy=_CODE_REMEDY)
    return Path(plan.code)


def _environment(run: str, variables: Mapping[str, str]) -> dict[str, str]:
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in _TASK_VARIABLES and (name == "PACELINE_HOME" or not name.startswith("PACELINE_"))
    }
    environment = {**inherited, **variables, "PACELINE_RUN": run}
    return {**environment, **amx_probe.environment(environment)}


def _argv(command: Sequence[str], folder: Path, path: str | None) -> tuple[str, ...]:
    """The command with the program's path, resolved as for a task."""
    from paceline.agent.tasks.python_command import parse_command, with_program_found
    from paceline.backends.local.host_shares import interpreter

    python = parse_command(command, interpreter(), path, str(folder))
    if python is not None:
        return python.argv
    program = with_program_found(command, interpreter(), path)[0]
    first = str(folder / program) if os.sep in program else shutil.which(program, path=path)
    if first is None or not os.access(first, os.X_OK):
        raise NoProgram(f"program {command[0]!r} was not found")
    return (first, *command[1:])
