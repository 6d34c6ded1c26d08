"""The plan: everything that will run, as data. Made from a job without I/O; agents read it: standard library only."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.job.models import Group, Job

VERSION = 1
CAPTAIN = "captain"
TENSORBOARD = "tensorboard"  # the companion
CODE_IN_IMAGE = "image"  # as Plan.code; a folder is an absolute path there
KEEP_FINISHED = 3600.0
COMMIT = 600.0
KEEP = 3
INGEST = "ingest-0"  # the task that makes the data, before all others
INGEST_S = 6 * 3600.0
BUCKETS = ("s3://", "gs://", "az://")
CLAIM = "claim://"
# Variables that hold the path of a file, of those that clients of buckets read.
_FILE = re.compile(r"GOOGLE_(APPLICATION_CREDENTIALS|SERVICE_ACCOUNT_PATH)|(AWS|AZURE|GOOGLE|SSL)_\w+_FILE")

GROUP = "group"  # restarted together, as one generation
LEAD = "lead"  # parameter-server jobs: ps and chief restart together, and with a chief its workers
ALONE = "alone"  # restarted by itself
BEFORE = "before"  # ingest: it has succeeded before any other starts


@dataclass(frozen=True)
class Role:
    name: str
    command: tuple[str, ...]  # empty: a plain tf.distribute.Server
    env: dict[str, str]
    restarts: str  # GROUP, LEAD or ALONE
    watched: bool  # judged for hangs
    decides: bool  # the run succeeds when all tasks of the deciding roles have succeeded


@dataclass(frozen=True)
class Program:
    """What a person runs with a snapshot of the run, on a machine of theirs."""

    command: tuple[str, ...]
    env: dict[str, str]


@dataclass(frozen=True)
class Task:
    name: str
    role: str
    index: int
    host: str
    local_index: int
    rank: int  # position among the tasks that train together; -1 for those outside (evaluator)


@dataclass(frozen=True)
class Host:
    name: str
    role: str
    index: int
    group: int
    gpus: int
    cpu: float | None
    memory: int | None
    tasks: tuple[str, ...]


@dataclass(frozen=True)
class Restart:
    limit: int
    hang_after: float | None
    warm: bool


@dataclass(frozen=True)
class Limits:
    start: float
    runtime: float | None
    grace: float
    keep_finished: float = KEEP_FINISHED  # clusters only
    commit: float = COMMIT
    evaluation: float | None = None


@dataclass(frozen=True)
class Snapshots:
    to: str = ""  # an absolute folder or a bucket; empty: the run's own folder
    keep: int = KEEP
    best: tuple[str, bool] | None = None  # a metric, and whether the lowest is the best
    rate: int | None = None  # bytes a second that a host may send
    claim: dict[str, Any] = field(default_factory=dict)  # size, storage_class and access of one to be made; {}: none
    watch: str = ""  # a folder that tasks keep their own checkpoints in
    origin: str = ""  # what the run starts from: a run's id, a place with a run in it, or a folder
    trust: bool = False  # of what it starts from

    @property
    def in_bucket(self) -> bool:
        return self.to.startswith(BUCKETS)

    @property
    def needs_bucket(self) -> bool:
        """Whether there is one to be written to, or to start from."""
        return self.in_bucket or self.origin.startswith(BUCKETS)

    @property
    def claimed(self) -> tuple[str, str]:
        return in_claim(self.to)


@dataclass(frozen=True)
class Ingest:
    """Data that is made once, before training."""

    command: tuple[str, ...]
    to: str  # an absolute folder, a bucket, or a folder in a claim
    inputs: tuple[str, ...] | None = None  # what the data is made from; None: the files that the command names
    limit: float = INGEST_S
    again: bool = False  # make it anew, though it is there

    @property
    def claimed(self) -> tuple[str, str]:
        return in_claim(self.to)


def in_claim(place: str) -> tuple[str, str]:
    """The name of a volume claim and the folder in it; empty where it is another place."""
    if not place.startswith(CLAIM):
        return "", ""
    name, _, path = place[len(CLAIM) :].partition("/")
    return name, path


def absolute(environment: Mapping[str, str], folder: str = "") -> dict[str, str]:
    """With the whole path of credentials that it names relative to `folder`, for processes that work elsewhere.

    >>> absolute({"GOOGLE_APPLICATION_CREDENTIALS": "key.json", "AWS_REGION": "here"}, "/home/ada")
    {'GOOGLE_APPLICATION_CREDENTIALS': '/home/ada/key.json', 'AWS_REGION': 'here'}
    """
    return {
        name: os.path.abspath(os.path.join(folder, value)) if value and _FILE.fullmatch(name) else value  # noqa: PTH100, PTH118
        for name, value in environment.items()
    }


@dataclass(frozen=True)
class Plan:
    version: int
    name: str
    framework: str
    strategy: str  # "" where the framework has none
    code: str  # an absolute folder, or CODE_IN_IMAGE
    roles: tuple[Role, ...]
    hosts: tuple[Host, ...]
    tasks: tuple[Task, ...]
    restart: Restart
    limits: Limits
    snapshots: Snapshots = field(default_factory=Snapshots)
    ingest: Ingest | None = None
    tensorboard: dict[str, Any] = field(default_factory=dict)  # image, memory, service, ingress; {}: there is none
    patch_keras: bool = False
    credentials: dict[str, str] = field(default_factory=dict)  # secret and file; {} where there are none
    kubernetes: dict[str, Any] = field(default_factory=dict)  # every field of the section; {} where there is none
    programs: dict[str, Program] = field(default_factory=dict)  # `try` and `export`, where the job has them
    serve: dict[str, Any] = field(default_factory=dict)  # every field of the section; {} where there is none

    @property
    def code_in_image(self) -> bool:
        """Only a cluster can run this plan: the code is in the container image, not in a folder here."""
        return self.code == CODE_IN_IMAGE

    def role(self, name: str) -> Role:
        return next(role for role in self.roles if role.name == name)

    def host(self, name: str) -> Host:
        return next(host for host in self.hosts if host.name == name)

    def tasks_of(self, role: str) -> list[Task]:
        return [task for task in self.tasks if task.role == role]

    @property
    def ingest_task(self) -> Task | None:
        """On the first host that decides: the captain runs no code of the user's. It is no task of a generation."""
        if self.ingest is None:
            return None
        host = next(host.name for host in self.hosts if self.role(host.role).decides)
        return Task(INGEST, "ingest", 0, host, 0, -1)

    @property
    def written(self) -> list[str]:
        """The tasks that have a log."""
        return [*([] if self.ingest is None else [INGEST]), *(task.name for task in self.tasks)]

    @property
    def needs_bucket(self) -> bool:
        """Whether agents or tasks speak to one: where snapshots or data are, or as a command or a variable names it."""
        to = "" if self.ingest is None else self.ingest.to
        words = [word for role in self.roles for word in (*role.command, *role.env.values())]
        words += [] if self.ingest is None else [*self.ingest.command, *(self.ingest.inputs or ())]
        named = any(scheme in word for word in words for scheme in BUCKETS)
        return self.snapshots.needs_bucket or to.startswith(BUCKETS) or named

    @property
    def world_size(self) -> int:
        return sum(1 for task in self.tasks if task.rank >= 0)


ORDER = ("chief", "worker", "ps", "evaluator")


def make(job: Job) -> Plan:
    """The plan of a checked job. The same job gives the same plan, byte for byte."""
    roles: list[Role] = []
    hosts: list[Host] = []
    tasks: list[Task] = []
    rank = 0
    parameter_server = job.strategy == "parameter-server"
    for name in ORDER:
        groups = job.roles.get(name)
        if not groups:
            continue
        first = groups[0]
        roles.append(
            Role(
                name=name,
                command=tuple(first.command if first.command is not None else job.command or []),
                env={**_chosen_keras(job), **job.env, **first.env},
                restarts=_restarts(name, parameter_server),
                watched=name in ("chief", "worker"),
                decides=name == ("chief" if "chief" in job.roles else "worker"),
            )
        )
        in_group = name in ("chief", "worker") and not parameter_server
        host_index = task_index = 0
        for group_index, group in enumerate(groups):
            gpus = gpus_of(job, name, group)
            per_host = tasks_per_host(job, name, group)
            for _ in range(group.replicas):
                host = f"{name}-host-{host_index}"
                names = tuple(f"{name}-{task_index + i}" for i in range(per_host))
                hosts.append(
                    Host(
                        host, name, host_index, group_index, gpus,
                        _first(group.cpu, job.cpu, None), _first(group.memory, job.memory, None), names,
                    )
                )  # fmt: skip
                for local, task in enumerate(names):
                    tasks.append(Task(task, name, task_index + local, host, local, rank if in_group else -1))
                    rank += in_group
                host_index += 1
                task_index += per_host
    return Plan(
        version=VERSION,
        name=job.name,
        framework=job.framework,
        strategy=job.strategy or "",
        code=job.code,
        roles=tuple(roles),
        hosts=tuple(hosts),
        tasks=tuple(tasks),
        restart=Restart(job.restart.limit, job.restart.hang_after, job.restart.warm),
        limits=Limits(
            job.limits.start,
            job.limits.runtime,
            job.limits.grace,
            job.limits.keep_finished,
            job.limits.commit,
            job.limits.evaluation,
        ),
        snapshots=_snapshots(job),
        ingest=_ingest(job),
        tensorboard=job.tensorboard.model_dump() if job.tensorboard is not None else {},
        patch_keras=job.framework == "tensorflow" and job.tensorflow.patch_keras and job.tensorflow.keras is None,
        credentials=job.credentials.model_dump() if job.credentials is not None else {},
        kubernetes=job.kubernetes.model_dump() if job.kubernetes is not None else {},
        programs={
            name: Program(tuple(command), {**_chosen_keras(job), **job.env}) for name, command in job.programs.items()
        },
        serve=job.serve.model_dump() if job.serve is not None else {},
    )


def _chosen_keras(job: Job) -> dict[str, str]:
    """`tf.keras` is then tf_keras; read when TensorFlow is imported."""
    return {"TF_USE_LEGACY_KERAS": "1"} if job.tensorflow.keras == "legacy" else {}


def _snapshots(job: Job) -> Snapshots:
    given = job.snapshots
    best = None if given.best is None else (given.best.metric, given.best.mode == "min")
    claim = {} if given.claim is None else given.claim.model_dump()
    return Snapshots(given.to or "", given.keep, best, given.rate, claim, given.watch or "", given.origin, given.trust)


def _ingest(job: Job) -> Ingest | None:
    given = job.ingest
    if given is None:
        return None
    inputs = None if given.inputs is None else tuple(given.inputs)
    return Ingest(tuple(given.command), given.to, inputs, given.limit)


def gpus_of(job: Job, role: str, group: Group) -> int:
    """GPUs of each host. The job's own number is for the roles that train: ps and evaluator ask for themselves."""
    return int(_first(group.gpus, job.gpus if role in ("chief", "worker") else None, 0))


def tasks_per_host(job: Job, role: str, group: Group) -> int:
    return int(_first(group.tasks_per_host, max(1, gpus_of(job, role, group))))


def _restarts(role: str, parameter_server: bool) -> str:
    if role == "evaluator":
        return ALONE
    if parameter_server:
        return ALONE if role == "worker" else LEAD
    return GROUP


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def to_data(plan: Plan) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(plan)))
    return data


def from_data(data: dict[str, Any]) -> Plan:
    if data.get("version") != VERSION:
        raise ValueError(f"plan version {data.get('version')!r} is not {VERSION}: made by another version of Paceline")
    return Plan(
        **{
            **data,
            "roles": tuple(Role(**{**role, "command": tuple(role["command"])}) for role in data["roles"]),
            "hosts": tuple(Host(**{**host, "tasks": tuple(host["tasks"])}) for host in data["hosts"]),
            "tasks": tuple(Task(**task) for task in data["tasks"]),
            "restart": Restart(**data["restart"]),
            "limits": Limits(**data["limits"]),
            "snapshots": _snapshots_from(data["snapshots"]),
            "programs": {name: program_from(each) for name, each in data.get("programs", {}).items()},
            "ingest": _ingest_from(data.get("ingest")),
        }
    )


def program_from(data: dict[str, Any]) -> Program:
    return Program(tuple(data["command"]), dict(data["env"]))


def _snapshots_from(data: dict[str, Any]) -> Snapshots:
    best = data["best"]
    return Snapshots(**{**data, "best": None if best is None else (best[0], best[1])})


def _ingest_from(data: dict[str, Any] | None) -> Ingest | None:
    if data is None:
        return None
    inputs = None if data["inputs"] is None else tuple(data["inputs"])
    return Ingest(**{**data, "command": tuple(data["command"]), "inputs": inputs})


def to_json(plan: Plan) -> str:
    return json.dumps(to_data(plan), indent=1, sort_keys=True) + "\n"


def cluster(plan: Plan) -> Iterator[tuple[str, list[Task]]]:
    """The roles that belong to a TensorFlow cluster spec, in order: never the evaluator."""
    for role in plan.roles:
        if role.name != "evaluator":
            yield role.name, plan.tasks_of(role.name)
