"""The job, as pydantic models: the one place that says which fields there are, what they take and what they mean."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model

from paceline.job import values
from paceline.job.board import Beside, Ingress, TensorBoard
from paceline.job.cluster import ITEMS, Credentials, Kubernetes
from paceline.job.fields import (
    MOST_REPLICAS,
    MOST_TASKS_PER_HOST,
    Command,
    Cpu,
    Duration,
    Env,
    Framework,
    Gpus,
    Keras,
    Memory,
    Name,
    Strategy,
    Strict,
    Switch,
    Text,
    whole,
)
from paceline.job.ingest import Ingest
from paceline.job.programs import Export, Try
from paceline.job.serving import Serve
from paceline.job.snapshots import Best, Claim, Snapshots
from paceline.plan import COMMIT, KEEP_FINISHED


class Group(Strict):
    """Hosts of one role that are alike."""

    replicas: Annotated[int, *whole(1, MOST_REPLICAS)] = Field(
        default=1, description="How many hosts. On this machine a host is an agent process."
    )
    tasks_per_host: Annotated[int, *whole(1, MOST_TASKS_PER_HOST)] | None = Field(
        default=None, description="How many tasks each host holds. Unset: one a GPU, and one where there is no GPU."
    )
    gpus: Gpus | None = Field(
        default=None,
        description="GPUs of each host. Unset: the job's `gpus` for chief and worker, none for ps and evaluator.",
    )
    cpu: Cpu | None = Field(default=None, description="Cores of each host. Unset: the job's `cpu`.")
    memory: Memory | None = Field(default=None, description="Memory of each host. Unset: the job's `memory`.")
    command: Command | None = Field(
        default=None,
        description="What the tasks of this role run, instead of the job's `command`. The same for all groups.",
    )
    env: Env = Field(
        default_factory=dict, description="Variables for this role, over those of the job. The same for all groups."
    )


class Restart(Strict):
    """What happens when a task dies or makes no progress."""

    limit: Annotated[int, *whole(0)] = Field(
        default=10, description="How many restarts a cause may have without a new step or snapshot; then the run fails."
    )
    hang_after: Duration | None = Field(
        default=None,
        description="Time without progress after which tasks count as hung. "
        "Unset: the larger of 10 minutes and five times the longest gap seen.",
        examples=["10m"],
    )
    warm: Switch = Field(
        default=True,
        description="Keep an interpreter ready that has already imported the framework, for fast restarts.",
    )


class TensorFlow(Strict):
    """How programs of TensorFlow find Keras."""

    patch_keras: Switch = Field(
        default=True,
        description="Make `fit`, `evaluate` and `predict` of Keras 3 work on several workers, where the version is one "
        "that this was tested with; see [Keras](keras.md).",
    )
    keras: Keras | None = Field(
        default=None,
        description="`legacy`: `tf.keras` is the tf_keras package, by `TF_USE_LEGACY_KERAS=1`; Keras 3 is not patched "
        "then. Unset: it is Keras 3.",
    )


class Limits(Strict):
    """How long things may take."""

    start: Duration = Field(
        default=1800.0,
        description="Time for all hosts to be there, from the first one on; for a pod of `serve` to be ready.",
        examples=["30m"],
    )
    runtime: Duration | None = Field(
        default=None,
        description="Time for the whole run, from the first generation on. Unset: no limit.",
        examples=["6h"],
    )
    grace: Duration = Field(
        default=30.0,
        description="Time that tasks have between SIGTERM and SIGKILL when the run is stopped, and, with the snapshot "
        "that is taken before, when their host is told to go; for an evaluator to finish that does not `follow()`; and "
        "for what was saved to be committed before a restart goes on without it.",
        examples=["30s"],
    )
    commit: Duration = Field(
        default=COMMIT,
        description="Time for the last snapshot to be committed once training has ended.",
        examples=["10m"],
    )
    evaluation: Duration | None = Field(
        default=None,
        description="Time that an evaluator has, once training has ended, for each snapshot that is left. "
        "Unset: the larger of 10 minutes and five times the longest evaluation so far.",
        examples=["30m"],
    )
    keep_finished: Duration = Field(
        default=KEEP_FINISHED,
        description="How long a run that has ended stays on a cluster. Not used on this machine.",
        examples=["1h"],
    )


Groups = Annotated[list[Group], BeforeValidator(values.groups)]


class _Job(Strict):
    """One training job."""

    model_config = ConfigDict(defer_build=False)

    name: Name = Field(description="Begins the id of every run of this job.", examples=["digits"])
    framework: Framework = Field(
        description="Decides the environment that tasks are given, and which failure restarts what."
    )
    strategy: Strategy | None = Field(
        default=None, description="How a TensorFlow job trains; TensorFlow only, where it is `multi-worker` unless set."
    )
    command: Command | None = Field(
        default=None,
        description="What every task runs, as a list of words, in the `code` folder. A role may have its own. "
        "ps and worker of a parameter-server job may go without: they then run a plain `tf.distribute.Server` "
        "(a worker only where the job has a chief).",
        examples=[["python", "train.py", "--epochs", "20"]],
    )
    code: Text = Field(
        default=".",
        description="The folder that tasks run in, relative to the folder of the job file. Or the word `image`: the "
        "code is in the container image, on a cluster. A folder of that name is written `./image`.",
        examples=[".", "image"],
    )
    env: Env = Field(
        default_factory=dict,
        description="Variables for every task. Values are text: put numbers in quotes.",
        examples=[{"DATA": "/data/digits", "SEED": "7"}],
    )
    cpu: Cpu | None = Field(
        default=None, description='Cores of each host: a number, or thousandths as in "500m".', examples=[4, "500m"]
    )
    memory: Memory | None = Field(
        default=None,
        description="Memory of each host: Ki, Mi, Gi, Ti (1024), k, M, G, T (1000), or bytes.",
        examples=["8Gi"],
    )
    gpus: Gpus | None = Field(
        default=None, description="GPUs of each host of chief and worker. Unset: none.", examples=[1]
    )
    roles: dict[str, Groups] = Field(
        default_factory=lambda: {"worker": [Group()]},
        description="The roles, and the hosts of each: a mapping, or a list of mappings where hosts are unequal. "
        "Unset: one worker. Every framework has `worker` and `evaluator`; TensorFlow also has `chief` (exactly one), "
        "and with `strategy: parameter-server` `ps`.",
        examples=[{"worker": {"replicas": 3}}],
    )
    snapshots: Snapshots = Field(
        default_factory=lambda: Snapshots(), description="Where snapshots go, and which are kept."
    )
    ingest: Ingest | None = Field(default=None, description="Data that is made once, before training.")
    tensorboard: Beside = Field(
        default=None,
        description="Serve TensorBoard beside the run, with what tasks write to `PACELINE_TENSORBOARD_DIR`; on a "
        "cluster until `limits.keep_finished` has passed.",
    )
    tensorflow: TensorFlow = Field(
        default_factory=lambda: TensorFlow(), description="Which Keras TensorFlow programs use; TensorFlow only."
    )
    credentials: Credentials | None = Field(
        default=None,
        description="A file of a Secret that tasks are given. For clusters only: not used on this machine.",
    )
    restart: Restart = Field(default_factory=lambda: Restart(), description="What happens when a task dies or hangs.")
    limits: Limits = Field(
        default_factory=lambda: Limits(),
        description='How long things may take: "90s", "10m", "1h30m", "2d", or seconds.',
    )
    kubernetes: Kubernetes | None = Field(
        default=None, description="For clusters only: checked here, not used on this machine."
    )
    export: Export | None = Field(
        default=None,
        description="What `paceline export RUN --to DIR` runs.",
        examples=[{"command": ["python", "export.py"]}],
    )
    serve: Serve | None = Field(
        default=None,
        description="How `paceline serve RUN --on kubernetes` serves the exported model. Not used on this machine.",
        examples=[{"replicas": 2, "memory": "2Gi"}],
    )

    @property
    def programs(self) -> dict[str, list[str]]:
        """By name, those that there are."""
        given: dict[str, Try | Export | None] = {"try": getattr(self, "try"), "export": self.export}
        return {name: program.command for name, program in given.items() if program is not None}


if TYPE_CHECKING:
    Job = _Job
else:  # `try` is a keyword
    _TRY = Field(
        default=None,
        description="What `paceline try RUN -- ARGS` runs.",
        examples=[{"command": ["python", "translate.py"]}],
    )
    Job = create_model("Job", __base__=_Job, __doc__=_Job.__doc__, **{"try": (Try | None, _TRY)})


SECTIONS: dict[str, type[BaseModel]] = {
    "snapshots": Snapshots,
    "try": Try,
    "export": Export,
    "serve": Serve,
    "ingest": Ingest,
    "tensorflow": TensorFlow,
    "credentials": Credentials,
    "restart": Restart,
    "limits": Limits,
    "tensorboard": TensorBoard,
    "kubernetes": Kubernetes,
}


def model_at(path: tuple[str | int, ...]) -> type[BaseModel]:
    """The model of the mapping at this place of a job."""
    if not path:
        return Job
    if path[0] == "snapshots" and len(path) > 1:
        return Best if path[1] == "best" else Claim
    if path[0] == "tensorboard" and len(path) > 1:
        return Ingress
    if path[0] == "kubernetes" and len(path) > 2:
        return ITEMS[str(path[1])]
    return SECTIONS.get(str(path[0]), Group)
