"""The plan: everything that will run, as data, and as JSON for agents, which read it: standard library only.

job/planning.py makes it from a job.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

VERSION = 1
CAPTAIN = "captain"
TENSORBOARD = "tensorboard"  # the companion role
CODE_IN_IMAGE = "image"  # a value of Plan.code, which is an absolute folder otherwise
KEEP_FINISHED = 3600.0  # default, in seconds
COMMIT = 600.0  # default, in seconds
LOG_LIMIT = 1024**3  # default, in bytes
KEEP = 3  # default number of snapshots
INGEST = "ingest-0"  # the task that builds the data, before any other task starts
INGEST_S = 6 * 3600.0  # default limit
ELASTIC_WAIT = 30.0  # default, in seconds
ELASTIC_EVERY = 120.0  # default, in seconds
SCHEMES = ("s3", "gs", "az")  # of bucket URLs
BUCKETS = tuple(f"{scheme}://" for scheme in SCHEMES)
NAME = r"[a-z]([-a-z0-9]*[a-z0-9])?"  # of jobs and runs
CLAIM = "claim://"
# Environment variables of bucket clients whose value is the path of a file.
_FILE = re.compile(r"GOOGLE_(APPLICATION_CREDENTIALS|SERVICE_ACCOUNT_PATH)|(AWS|AZURE|GOOGLE|SSL)_\w+_FILE")

_LAUNCHER_MODULES = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")

ORDER = ("chief", "worker", "ps", "evaluator")  # of the roles

GROUP = "group"  # restarted together, as one generation
LEAD = "lead"  # parameter-server jobs: ps and chief restart together, and with a chief its workers
ALONE = "alone"  # restarted on its own
HOST = "host"  # the tasks of each host restart together, while those of others continue
TASK = "task"  # each task restarts on its own, while the others continue
BEFORE = "before"  # ingest: it must succeed before any other task starts

# What a receiver can be notified of; the first three are ends of the run.
FAILED, SUCCEEDED, STOPPED, HANG, RESTART = NOTIFY_ON = ("failed", "succeeded", "stopped", "hang", "restart")
JSON, SLACK = NOTIFY_FORMATS = ("json", "slack")

RESTART_SCOPES = (GROUP, HOST, TASK)  # what starts again if one of the tasks that train together dies
OWN = (HOST, TASK)  # those with which other tasks continue

WARN, STOP, ROLLBACK = ON_NAN = ("warn", "stop", "rollback")  # what happens if a metric is NaN or infinite


@dataclass(frozen=True)
class Role:
    name: str
    command: tuple[str, ...]  # empty: a plain tf.distribute.Server
    env: dict[str, str]
    restarts: str  # GROUP, HOST, TASK, LEAD or ALONE
    watched: bool  # checked for hangs
    decides: bool  # the run succeeds once all tasks of the deciding roles have succeeded


@dataclass(frozen=True)
class Program:
    """A command that the user runs on their own machine, with a snapshot of the run."""

    command: tuple[str, ...]
    env: dict[str, str]


@dataclass(frozen=True)
class Task:
    name: str
    role: str
    index: int
    host: str
    local_index: int
    rank: int  # among the tasks that train together; -1 for other tasks, such as evaluators


@dataclass(frozen=True)
class Host:
    name: str
    role: str
    index: int
    group: int  # the number of its host pool in the role
    gpus: int
    cpu: float | None
    memory: int | None
    tasks: tuple[str, ...]
    share: int = 1  # how many examples each of its tasks trains on, in proportion to tasks with share 1


@dataclass(frozen=True)
class Restart:
    limit: int
    hang_after: float | None
    warm: bool
    compile_cache: bool = True
    on_nan: str = WARN  # or STOP or ROLLBACK


@dataclass(frozen=True)
class Limits:
    start: float
    runtime: float | None
    grace: float
    keep_finished: float = KEEP_FINISHED  # clusters only
    commit: float = COMMIT
    evaluation: float | None = None
    log: int = LOG_LIMIT  # bytes of output that are kept of each task


@dataclass(frozen=True)
class ElasticHosts:
    """Hosts of which some may be missing while the others train."""

    role: str
    group: int  # the number of the host pool in the role
    min: int  # the number of these hosts that a generation needs
    replicas: int | None = None  # how many of them the run starts with; None: all


@dataclass(frozen=True)
class Elastic:
    """A generation may start with fewer hosts than the plan has."""

    wait: float  # seconds to wait for missing hosts
    every: float  # seconds between two changes of size that are not due to the loss of a host
    hosts: tuple[ElasticHosts, ...]


@dataclass(frozen=True)
class Snapshots:
    to: str = ""  # an absolute folder or a bucket; empty: the run's own folder
    keep: int = KEEP
    best: tuple[str, bool] | None = None  # a metric, and whether the lowest value is the best
    rate: int | None = None  # limit of what a host sends, in bytes per second
    claim: dict[str, Any] = field(default_factory=dict)  # size, storage_class and access of a claim to create; {}: none
    watch: str = ""  # where tasks keep their own checkpoints: a folder, a file, or a pattern of names of files
    origin: str = ""  # what the run starts from: a run id, the location of a run, or a folder
    trust: bool = False  # whether `origin` is trusted
    commit_every: float | None = None  # seconds between the starts of two commits; None: depends on how long they take
    memory: int | None = None  # bytes of memory of each host that tasks save to; clusters only

    @property
    def in_bucket(self) -> bool:
        return self.to.startswith(BUCKETS)

    @property
    def needs_bucket(self) -> bool:
        """Whether snapshots are written to a bucket, or read from one at the start."""
        return self.in_bucket or self.origin.startswith(BUCKETS)

    @property
    def claimed(self) -> tuple[str, str]:
        return split_claim(self.to)


@dataclass(frozen=True)
class Ingest:
    """Data that is built once, before training."""

    command: tuple[str, ...]
    to: str  # an absolute folder, a bucket, or a folder in a claim
    inputs: tuple[str, ...] | None = None  # what the data is built from; None: the files named in the command
    limit: float = INGEST_S
    again: bool = False  # rebuild the data even if it exists

    @property
    def claimed(self) -> tuple[str, str]:
        return split_claim(self.to)


@dataclass(frozen=True)
class Webhook:
    """A receiver of notifications. Its address may be a secret: then it is in a variable of the captain."""

    url: str = ""
    url_from: str = ""  # name of the variable, instead of `url`
    on: tuple[str, ...] = (FAILED, SUCCEEDED, STOPPED)  # of NOTIFY_ON
    format: str = JSON  # or SLACK


@dataclass(frozen=True)
class Track:
    """Where metrics are sent for experiment tracking."""

    mlflow: str  # address of an MLflow server
    experiment: str
    parameters: dict[str, str] = field(default_factory=dict)  # fields of the job


def split_claim(location: str) -> tuple[str, str]:
    """The name of a volume claim and the folder in it; both empty if the location is not in a claim."""
    if not location.startswith(CLAIM):
        return "", ""
    name, _, path = location[len(CLAIM) :].partition("/")
    return name, path


def with_absolute_paths(environment: Mapping[str, str], folder: str = "") -> dict[str, str]:
    """Make paths of credential files, relative to `folder`, absolute: processes run in other folders.

    >>> with_absolute_paths({"GOOGLE_APPLICATION_CREDENTIALS": "key.json", "AWS_REGION": "here"}, "/home/ada")
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
    strategy: str  # "" if the framework has none
    code: str  # an absolute folder, or CODE_IN_IMAGE
    roles: tuple[Role, ...]
    hosts: tuple[Host, ...]
    tasks: tuple[Task, ...]
    restart: Restart
    limits: Limits
    snapshots: Snapshots = field(default_factory=Snapshots)
    ingest: Ingest | None = None
    tensorboard: dict[str, Any] = field(default_factory=dict)  # image, memory, service, ingress; {}: no TensorBoard
    patch_keras: bool = False
    credentials: dict[str, str] = field(default_factory=dict)  # secret and file; {}: none
    kubernetes: dict[str, Any] = field(default_factory=dict)  # every field of the section; {}: no such section
    programs: dict[str, Program] = field(default_factory=dict)  # `try` and `export`, if the job has them
    serve: dict[str, Any] = field(default_factory=dict)  # every field of the section; {}: no such section
    metrics: bool = False  # whether the captain serves metrics
    env_of: tuple[str, ...] = ()  # other systems whose variables tasks get, too: "jaxjob"
    notify: tuple[Webhook, ...] = ()
    track: Track | None = None
    elastic: Elastic | None = None  # None: every generation has all hosts

    @property
    def code_in_image(self) -> bool:
        """Whether the code is in the container image, not in a local folder: only a cluster can run this plan."""
        return self.code == CODE_IN_IMAGE

    def role(self, name: str) -> Role:
        return next(role for role in self.roles if role.name == name)

    def host(self, name: str) -> Host:
        return next(host for host in self.hosts if host.name == name)

    def task(self, name: str) -> Task:
        return next(task for task in self.tasks if task.name == name)

    def tasks_of(self, role: str) -> list[Task]:
        return [task for task in self.tasks if task.role == role]

    @property
    def led_roles(self) -> tuple[str, ...]:
        """Of an elastic parameter-server job: the roles of which some tasks may be missing while a chief leads the
        others. They restart individually, but which of them take part is fixed when the chief starts."""
        is_led = self.elastic is not None and self.strategy == "parameter-server"
        return tuple(dict.fromkeys(each.role for each in self.elastic.hosts)) if is_led and self.elastic else ()

    @property
    def scalable(self) -> dict[str, ElasticHosts]:
        """By role: the hosts whose number `paceline scale` can change. Not if a role has different kinds of hosts, and
        not in parameter-server jobs."""
        elastic = () if self.elastic is None or self.led_roles else self.elastic.hosts
        return {each.role: each for each in elastic if not any(h.group for h in self.hosts if h.role == each.role)}

    @property
    def sizes(self) -> dict[str, int]:
        """By scalable role: the number of hosts that the run starts with."""
        counts = {role: sum(host.role == role for host in self.hosts) for role in self.scalable}
        return {role: each.replicas or counts[role] for role, each in self.scalable.items()}

    def hosts_of_size(self, sizes: Mapping[str, int]) -> tuple[Host, ...]:
        """The hosts of the run if scalable roles have this many: those with the lowest indexes."""
        return tuple(host for host in self.hosts if host.index < sizes.get(host.role, len(self.hosts)))

    @property
    def first_hosts(self) -> tuple[Host, ...]:
        """The hosts that the run starts with. The plan may have more, which `paceline scale` can add."""
        return self.hosts_of_size(self.sizes)

    @property
    def ingest_task(self) -> Task | None:
        """It runs on the first deciding host, as the captain runs no user code. It belongs to no generation. A damaged
        plan may have no deciding host."""
        deciding = {role.name for role in self.roles if role.decides}
        host = next((host.name for host in self.hosts if host.role in deciding), None)
        return None if self.ingest is None or host is None else Task(INGEST, "ingest", 0, host, 0, -1)

    @property
    def tasks_with_logs(self) -> list[str]:
        """The names of all tasks that write a log."""
        return [*([] if self.ingest is None else [INGEST]), *(task.name for task in self.tasks)]

    @property
    def needs_bucket(self) -> bool:
        """Whether agents or tasks use a bucket: for snapshots, for data, or as named in a command or a variable."""
        to = "" if self.ingest is None else self.ingest.to
        texts = [text for role in self.roles for text in (*role.command, *role.env.values())]
        texts += [] if self.ingest is None else [*self.ingest.command, *(self.ingest.inputs or ())]
        is_named = any(scheme in text for text in texts for scheme in BUCKETS)
        return self.snapshots.needs_bucket or to.startswith(BUCKETS) or is_named

    @property
    def delivers(self) -> bool:
        """Whether anything is sent to external servers."""
        return bool(self.notify or self.track)

    @property
    def restart_scope(self) -> str:
        """What starts again if one of the tasks that train together dies: GROUP, HOST or TASK."""
        return next((role.restarts for role in self.roles if role.restarts in OWN), GROUP)

    @property
    def keeps_addresses(self) -> bool:
        """Whether a task has the same address for the whole run, because others continue when it restarts."""
        return self.strategy == "parameter-server" or self.restart_scope != GROUP

    @property
    def leading_task(self) -> str:
        """The task whose numbers stand for the run: rank 0, or the first one that decides how the run ends."""
        return next(task.name for task in self.tasks if self.role(task.role).decides)

    @property
    def world_size(self) -> int:
        return sum(1 for task in self.tasks if task.rank >= 0)

    def of_generation(self, names: Collection[str]) -> Plan:
        """The plan of a generation in which only these tasks take part: their ranks and indexes are counted anew. Tasks
        that do not train together stay as they are."""
        if self.elastic is None:
            return self
        tasks, rank, indexes = [], 0, dict.fromkeys((role.name for role in self.roles), 0)
        for task in self.tasks:
            if task.rank >= 0 and task.name in names:
                tasks.append(dataclasses.replace(task, rank=rank, index=indexes[task.role]))
                rank, indexes[task.role] = rank + 1, indexes[task.role] + 1
            elif task.role in self.led_roles and task.name in names:
                tasks.append(dataclasses.replace(task, index=indexes[task.role]))
                indexes[task.role] += 1
            elif task.rank < 0 and task.role not in self.led_roles:
                tasks.append(task)
        return dataclasses.replace(self, tasks=tuple(tasks))

    def of_unit(self, task: Task) -> Plan:
        """The plan in which only the tasks that restart together with this one train together, so that their ranks
        begin at 0."""
        if self.restart_scope == GROUP or task.rank < 0:
            return self
        names = {task.name} if self.restart_scope == TASK else set(self.host(task.host).tasks)
        unit = [each for each in self.tasks if each.name in names]
        return dataclasses.replace(self, tasks=tuple(dataclasses.replace(each, rank=r) for r, each in enumerate(unit)))


def launcher_of(command: Sequence[str]) -> str | None:
    """The launcher that a command of a torch job runs: it starts the processes of its host itself. None: no launcher.

    >>> launcher_of(["torchrun", "train.py"]), launcher_of(["python", "-um", "torch.distributed.run", "train.py"])
    ('torchrun', 'torch.distributed.run')
    >>> launcher_of(["accelerate", "launch", "train.py"]), launcher_of(["python", "train.py", "-m", "accelerate"])
    ('accelerate launch', None)
    """
    program, arguments = command[0].rpartition("/")[2] if command else "", iter(command[1:])
    if program == "torchrun":
        return program
    if program == "accelerate":
        return "accelerate launch" if next(arguments, "") == "launch" else None
    if not re.fullmatch(r"python[0-9.]*", program):
        return None
    for argument in arguments:
        if re.fullmatch("-[a-zA-Z]*m", argument):
            module = next(arguments, "")
            return module if module in _LAUNCHER_MODULES else None
        if argument in ("-X", "-W"):
            next(arguments, "")
        elif not argument.startswith("-"):
            return None
    return None


def to_data(plan: Plan) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(plan)))
    # Plans without these fields look as they always have.
    if not plan.env_of:
        del data["env_of"]
    if not plan.metrics:
        del data["metrics"]
    if not plan.notify:
        del data["notify"]
    if plan.track is None:
        del data["track"]
    if plan.elastic is None:
        del data["elastic"]
    for hosts in data.get("elastic", {}).get("hosts", ()):
        if hosts["replicas"] is None:
            del hosts["replicas"]
    for host in data["hosts"]:
        if host["share"] == 1:
            del host["share"]
    if plan.restart.compile_cache:
        del data["restart"]["compile_cache"]
    if plan.restart.on_nan == WARN:
        del data["restart"]["on_nan"]
    if plan.limits.log == LOG_LIMIT:
        del data["limits"]["log"]
    if plan.snapshots.commit_every is None:
        del data["snapshots"]["commit_every"]
    if plan.snapshots.memory is None:
        del data["snapshots"]["memory"]
    return data


def from_data(data: dict[str, Any]) -> Plan:
    if data.get("version") != VERSION:
        raise ValueError(
            f"this run was started by a newer Paceline (plan version {data.get('version')!r}); "
            f"upgrade Paceline to read it: this one supports only version {VERSION}"
        )
    return Plan(
        **{
            **data,
            "roles": tuple(Role(**{**role, "command": tuple(role["command"])}) for role in data["roles"]),
            "hosts": tuple(Host(**{**host, "tasks": tuple(host["tasks"])}) for host in data["hosts"]),
            "tasks": tuple(Task(**task) for task in data["tasks"]),
            "restart": Restart(**data["restart"]),
            "limits": Limits(**data["limits"]),
            "snapshots": _snapshots_from(data["snapshots"]),
            "programs": {name: program_from(program) for name, program in data.get("programs", {}).items()},
            "ingest": _ingest_from(data.get("ingest")),
            "env_of": tuple(data.get("env_of", ())),
            "notify": tuple(Webhook(**{**each, "on": tuple(each["on"])}) for each in data.get("notify", ())),
            "track": Track(**data["track"]) if data.get("track") else None,
            "elastic": _elastic_from(data.get("elastic")),
        }
    )


def program_from(data: dict[str, Any]) -> Program:
    return Program(tuple(data["command"]), dict(data["env"]))


def _snapshots_from(data: dict[str, Any]) -> Snapshots:
    best = data["best"]
    return Snapshots(**{**data, "best": None if best is None else (best[0], best[1])})


def _elastic_from(data: dict[str, Any] | None) -> Elastic | None:
    if data is None:
        return None
    return Elastic(data["wait"], data["every"], tuple(ElasticHosts(**each) for each in data["hosts"]))


def _ingest_from(data: dict[str, Any] | None) -> Ingest | None:
    if data is None:
        return None
    inputs = None if data["inputs"] is None else tuple(data["inputs"])
    return Ingest(**{**data, "command": tuple(data["command"]), "inputs": inputs})


def to_json(plan: Plan) -> str:
    return json.dumps(to_data(plan), indent=1, sort_keys=True) + "\n"


def cluster(plan: Plan) -> Iterator[tuple[str, list[Task]]]:
    """The roles of a TensorFlow cluster spec, in order, with their tasks: all but the evaluator."""
    for role in plan.roles:
        if role.name != "evaluator":
            yield role.name, plan.tasks_of(role.name)
