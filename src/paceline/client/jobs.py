"""Jobs as Python objects: loaded from a file or built from fields, checked, planned and rendered."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.client.json_form import versioned
from paceline.errors import UsageError
from paceline.job.errors import OVERRIDE, JobError, Problem

if TYPE_CHECKING:
    from paceline.backends.kubernetes.payload.prepare import Prepared
    from paceline.job import LoadedJob
    from paceline.plan import Plan as RunPlan

_SOURCE = "Job(...)"


class Job:
    """A job that is valid on this machine or on a cluster.

    `Job(name="digits", framework="torch", command=["python", "train.py"], roles={"worker": {"replicas": 2}})` has the
    fields of a [job file](job-file.md). Relative paths start at the current folder. Raises `JobError` with all
    problems.
    """

    def __init__(self, **fields: Any) -> None:
        from paceline.job.yaml_writer import write

        try:
            text = write(json.loads(json.dumps(fields, default=os.fspath)))
        except (TypeError, ValueError) as error:
            raise UsageError(f"a field has a value that a job file cannot have: {error}", where=_SOURCE) from None
        self._read(text, _SOURCE, Path.cwd(), ())

    @classmethod
    def _of(cls, text: str, source: str, folder: Path, overrides: Sequence[str]) -> Job:
        job = cls.__new__(cls)
        job._read(text, source, folder, overrides)
        return job

    def _read(self, text: str, source: str, folder: Path, overrides: Sequence[str]) -> None:
        self._input = text, source, folder, tuple(overrides)
        try:
            loaded = self._load(cluster=False)
        except JobError as error:
            loaded = self._load_for_image(error)
        self._loaded = loaded

    def _load_for_image(self, error: JobError) -> LoadedJob:
        """A job with an image may name programs and locations that exist only on a cluster. `error`: why the job is not
        valid on this machine."""
        try:
            loaded = self._load(cluster=True)
        except JobError:
            raise error from None
        if loaded.job.kubernetes is None or not loaded.job.kubernetes.image:
            raise error
        return loaded

    def _load(self, cluster: bool) -> LoadedJob:
        """Raises JobError if it is not valid there."""
        from paceline.job import load_text

        text, source, folder, overrides = self._input
        try:
            return load_text(text, source, folder, overrides, cluster=cluster)
        except JobError as error:
            raise JobError([_worded(each, source) for each in error.problems]) from None

    @property
    def name(self) -> str:
        """The name of the job, with which the ids of its runs start."""
        return self._loaded.job.name

    @property
    def text(self) -> str:
        """The job file, with all changes applied."""
        return self._loaded.text

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks about the job, such as fields that have no effect on this machine."""
        return tuple(self._loaded.notes)

    def to_dict(self) -> dict[str, Any]:
        """The same as `paceline validate -o json`."""
        return validation_form(self._input[1], self._loaded)

    def __repr__(self) -> str:
        return f"<Job {self.name}>"


def _worded(problem: Problem, source: str) -> Problem:
    if problem.is_in_override:
        return replace(problem, file=f"set: {problem.file.removeprefix(OVERRIDE)}")
    # The user has not written the text of such a job, so that its lines tell nothing.
    return replace(problem, line=None, column=None, snippet=None) if source == _SOURCE else problem


def load(path: str | os.PathLike[str], set: Mapping[str, Any] | None = None) -> Job:
    """Loads a job file.

    `set` changes fields, like `--set`: `{"roles.worker.replicas": 4}`. Its values are data: `4` is a number, `"4"` is a
    string. Raises `JobError` with all problems and their lines.
    """
    from paceline.job.loading import read_text
    from paceline.job.overrides import override_of

    try:
        overrides = [override_of(name, value) for name, value in (set or {}).items()]
    except (TypeError, ValueError) as error:
        raise UsageError(f"a field has a value that a job file cannot have: {error}", where="set") from None

    file = Path(path)
    return Job._of(read_text(file), str(file), file.absolute().parent, overrides)


def validation_form(source: str, job: LoadedJob | JobError) -> dict[str, Any]:
    """What `paceline validate -o json` prints."""
    if isinstance(job, JobError):
        return versioned({"job": source, "valid": False, "problems": [asdict(each) for each in job.problems]})
    fields = {"name": job.job.name, "tasks": tasks_of(job), "notes": list(job.notes)}
    return versioned({"job": source, "valid": True, **fields})


def tasks_of(loaded: LoadedJob) -> dict[str, int]:
    """The number of tasks of each role with which the run starts."""
    from paceline.job.planning import make_plan

    planned = make_plan(loaded.job)
    hosts = planned.first_hosts
    return {role.name: sum(len(host.tasks) for host in hosts if host.role == role.name) for role in planned.roles}


def limits_of_tasks(loaded: LoadedJob) -> dict[str, tuple[int, int]]:
    """The smallest and the largest number of tasks of each role: in an elastic job, they differ."""
    from paceline.job.planning import tasks_per_host

    job = loaded.job
    return {
        role: (
            sum((group.min or group.replicas) * tasks_per_host(job, role, group) for group in groups),
            sum((group.max or group.replicas) * tasks_per_host(job, role, group) for group in groups),
        )
        for role, groups in job.roles.items()
    }


# ---- plans


@dataclass(frozen=True)
class Plan:
    """What a job would run. `str()` is its text as YAML, the same as that of `paceline plan`."""

    name: str
    """The name of the job."""
    hosts: tuple[str, ...]
    """The names of its hosts."""
    tasks: tuple[str, ...]
    """The names of its tasks."""
    _plan: RunPlan = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """The same as `paceline plan -o json`."""
        from paceline import plan

        return versioned(plan.to_data(self._plan))

    def __str__(self) -> str:
        from paceline import plan
        from paceline.view.text.yaml_output import dump

        return dump(plan.to_data(self._plan))


def plan_of(plan: RunPlan) -> Plan:
    hosts, tasks = tuple(host.name for host in plan.hosts), tuple(task.name for task in plan.tasks)
    return Plan(plan.name, hosts, tasks, plan)


def plan(job: Job) -> Plan:
    """What the job would run, without starting anything. The same job always gives the same plan."""
    from paceline.backends.snapshot_origin import resolved
    from paceline.job.planning import make_plan

    return plan_of(resolved(make_plan(job._loaded.job)))


# ---- Kubernetes objects


@dataclass(frozen=True)
class Rendered:
    """The Kubernetes objects of a run. `str()` is their text as YAML, the same as that of `paceline render`."""

    run: str
    """The id of the run."""
    objects: tuple[dict[str, Any], ...]
    """The objects, in the order of their creation."""
    notes: tuple[str, ...] = ()
    """Remarks, such as which files are sent."""

    def to_dict(self) -> dict[str, Any]:
        """The same as `paceline render -o json`."""
        return versioned({"run": self.run, "objects": list(self.objects)})

    def __str__(self) -> str:
        from paceline.view.text.yaml_output import dump

        return "".join(f"---\n{dump(each)}" for each in self.objects)


def render(job: Job, run: str | None = None, with_certificates: bool = False) -> Rendered:
    """Every Kubernetes object of a run, without contacting a cluster.

    `run`: the id of the run; default: a new one. `with_certificates`: include new certificates in the Secret, which
    `kubectl apply` needs.
    """
    return rendered(prepare(job), run, with_certificates)


def rendered(prepared: Prepared, run: str | None, with_certificates: bool) -> Rendered:
    from paceline.backends.kubernetes.objects import run_objects
    from paceline.backends.kubernetes.payload.agent_archive import agent_archive
    from paceline.backends.kubernetes.payload.prepare import certificates
    from paceline.backends.new_run_ids import new_run

    id = new_run(prepared.plan.name, run)
    secrets = certificates() if with_certificates else None
    objects = run_objects.render(prepared.plan, id, agent_archive(), prepared.code, secrets, library=prepared.library)
    return Rendered(id, tuple(objects), prepared.notes)


def prepare(job: Job) -> Prepared:
    """The job as it is sent to a cluster."""
    from paceline.backends.kubernetes.payload import prepare as payload

    return payload.prepare(job._load(cluster=True))
