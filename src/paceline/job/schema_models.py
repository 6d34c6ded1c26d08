"""The job as pydantic models, which define the fields of a job file, their values and their meaning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model

from paceline.job import kubernetes_values, values
from paceline.job.fields import (
    MAX_REPLICAS,
    MAX_SHARE,
    MAX_TASKS_PER_HOST,
    Command,
    Cpu,
    Duration,
    Env,
    EnvOf,
    Framework,
    Gpus,
    Keras,
    Memory,
    Name,
    OnNan,
    Scope,
    Strategy,
    Strict,
    Switch,
    Text,
    whole,
)
from paceline.job.ingest_section import Ingest
from paceline.job.kubernetes_section import ITEMS, Credentials, Kubernetes
from paceline.job.model_section import Export, Try
from paceline.job.notify_section import Notify
from paceline.job.serve_section import Serve
from paceline.job.snapshots_section import Best, Claim, Snapshots
from paceline.job.tensorboard_section import Ingress, TensorBoard, TensorBoardField
from paceline.job.track_section import Track, parameters
from paceline.plan import COMMIT, ELASTIC_EVERY, ELASTIC_WAIT, GROUP, KEEP_FINISHED, LOG_LIMIT, WARN


class HostPool(Strict):
    """Identical hosts of one role."""

    replicas: Annotated[int, *whole(1, MAX_REPLICAS)] = Field(
        default=1, description="The number of hosts. On one machine, a host is an agent process."
    )
    min: Annotated[int, *whole(1, MAX_REPLICAS)] | None = Field(
        default=None,
        description="The number of these hosts that training needs: with fewer than `replicas`, it continues with "
        "those that are there; see [elastic runs](elastic.md). Workers only. Default: all.",
        examples=[2],
    )
    max: Annotated[int, *whole(1, MAX_REPLICAS)] | None = Field(
        default=None,
        description="The largest number of these hosts that `paceline scale` can set during the run; see [elastic "
        "runs](elastic.md#scale-a-run). Workers only. Default: `replicas`.",
        examples=[8],
    )
    tasks_per_host: Annotated[int, *whole(1, MAX_TASKS_PER_HOST)] | None = Field(
        default=None,
        description="The number of tasks on each host. Default: one per GPU, or one without GPUs; one in a torch job "
        "whose command is torchrun or another launcher.",
    )
    share: Annotated[int, *whole(1, MAX_SHARE)] | None = Field(
        default=None,
        description="How many examples of each batch a task of these hosts gets, in proportion to the others: with 2, "
        "twice as many as tasks with 1. For hosts of unequal speed; see [unequal shares](elastic.md#unequal-shares). "
        "Chief and workers only, not in torch and parameter-server jobs. Default: 1.",
        examples=[2],
    )
    gpus: Gpus | None = Field(
        default=None,
        description="GPUs of each host. Default: the job's `gpus` for chief and worker, none for ps and evaluator.",
    )
    cpu: Cpu | None = Field(default=None, description="Cores of each host. Default: the job's `cpu`.")
    memory: Memory | None = Field(default=None, description="Memory of each host. Default: the job's `memory`.")
    command: Command | None = Field(
        default=None,
        description="The command for the tasks of this role, instead of the job's `command`. The same in all host "
        "pools.",
    )
    env: Env = Field(
        default_factory=dict,
        description="Environment variables for this role. They override the job's `env`. The same in all host pools.",
    )


class Restart(Strict):
    """What happens when a task dies, makes no progress, or reports NaN."""

    limit: Annotated[int, *whole(0)] = Field(
        default=10,
        description="How often the same cause may restart tasks without a new step or snapshot before the run fails.",
    )
    hang_after: Duration | None = Field(
        default=None,
        description="Time without progress after which tasks are considered hung. "
        "Default: the larger of 10 minutes and five times the longest interval so far.",
        examples=["10m"],
    )
    warm: Switch = Field(
        default=True,
        description="Keep a spare interpreter that has already imported the framework, for fast restarts.",
    )
    compile_cache: Switch = Field(
        default=True,
        description="Keep what JAX and torch compile, for later starts; see [compiled "
        "code](failures.md#compiled-code). JAX and torch only.",
    )
    scope: Scope = Field(
        default=GROUP,
        description="What restarts when a task dies. `group`: all tasks that train together. `host`: the tasks of "
        "its host. `task`: only this task. The others continue, so the program has to tolerate losses itself; see "
        "[programs that tolerate losses](failures.md#programs-that-tolerate-losses). Only for "
        "`framework: torch` and `none`.",
    )
    on_nan: OnNan = Field(
        default=WARN,
        description="What happens when a task reports a metric that is [NaN or infinite](failures.md#nan). `warn`: an "
        "event. `stop`: the run fails. `rollback`: the group restarts from the newest snapshot before that step.",
    )


class Elastic(Strict):
    """How the number of hosts changes, for roles with `min` or `max`."""

    wait: Duration = Field(
        default=ELASTIC_WAIT,
        description="How long the run waits for all hosts, counted from the first one, before it starts with fewer. "
        "Also how long a host that joins later may take to import what its tasks need; after that it joins without a "
        "spare.",
        examples=["30s"],
    )
    every: Duration = Field(
        default=ELASTIC_EVERY,
        description="The minimum time between a change of the number of hosts and the next interruption of training to "
        "add hosts.",
        examples=["2m"],
    )


class TensorFlow(Strict):
    """Which Keras TensorFlow programs use."""

    patch_keras: Switch = Field(
        default=True,
        description="Make `fit`, `evaluate` and `predict` of Keras 3 work on several workers, if the version of Keras "
        "was tested with this; see [Keras](keras.md).",
    )
    keras: Keras | None = Field(
        default=None,
        description="`legacy`: `tf.keras` is the tf_keras package (`TF_USE_LEGACY_KERAS=1`), and Keras 3 is not "
        "patched. Default: `tf.keras` is Keras 3.",
    )


class Limits(Strict):
    """Limits of time, and of the output that is kept."""

    start: Duration = Field(
        default=1800.0,
        description="Time for all hosts to start, counted from the first host; and for a pod of `serve` to become "
        "ready.",
        examples=["30m"],
    )
    runtime: Duration | None = Field(
        default=None,
        description="Time for the whole run, counted from the first generation, without time spent paused. "
        "Default: no limit.",
        examples=["6h"],
    )
    grace: Duration = Field(
        default=30.0,
        description="Time between SIGTERM (after Ctrl-C: SIGINT) and SIGKILL for tasks when the run is stopped, or, "
        "including a final snapshot, when their host is evicted or shut down. Also the time for an evaluator that does "
        "not use `follow()` to finish, and the time for saved snapshots to be committed before a restart continues "
        "without them.",
        examples=["30s"],
    )
    commit: Duration = Field(
        default=COMMIT,
        description="Time for the last snapshot to be committed after training has ended.",
        examples=["10m"],
    )
    evaluation: Duration | None = Field(
        default=None,
        description="Time for an evaluator to evaluate each remaining snapshot after training has ended. "
        "Default: the larger of 10 minutes and five times the longest evaluation so far.",
        examples=["30m"],
    )
    keep_finished: Duration = Field(
        default=KEEP_FINISHED,
        description="How long a finished run stays on a cluster. Not used on one machine.",
        examples=["1h"],
    )
    log: Memory = Field(
        default=LOG_LIMIT,
        description="Size of the output that is kept of each task, on its host and on your machine; the oldest is "
        "deleted first. A bucket or a claim gets all output of a run on a cluster; see "
        "[what is kept](what-is-kept.md#logs).",
        examples=["1Gi"],
    )


Pools = Annotated[list[HostPool], BeforeValidator(values.pools)]


class _Job(Strict):
    """One training job."""

    model_config = ConfigDict(defer_build=False)

    name: Name = Field(description="The prefix of the id of every run of this job.", examples=["digits"])
    framework: Framework = Field(
        description="The framework. It determines the environment of tasks, and what is restarted after a failure."
    )
    strategy: Strategy | None = Field(
        default=None, description="The distribution strategy; TensorFlow only. Default: `multi-worker`."
    )
    command: Command | None = Field(
        default=None,
        description="The command that every task runs in the `code` folder, as a list of arguments. They may "
        "contain [`$PACELINE_RANK` and the like](what-a-task-is-given.md#references-in-the-job-file). A role can have "
        "its own. Optional for the ps and worker roles of a parameter-server job: without a command, they run a plain "
        "`tf.distribute.Server` (workers only if the job has a chief).",
        examples=[["python", "train.py", "--epochs", "20"]],
    )
    code: Text = Field(
        default=".",
        description="The folder that tasks run in, relative to the folder of the job file. Or `image`, on a cluster: "
        "the code is in the container image. Write `./image` for a folder of that name.",
        examples=[".", "image"],
    )
    env: Env = Field(
        default_factory=dict,
        description="Environment variables for every task. Values are strings: put numbers in quotes. They may contain "
        "[`$PACELINE_RANK` and the like](what-a-task-is-given.md#references-in-the-job-file).",
        examples=[{"DATA": "/data/digits", "SEED": "7"}],
    )
    env_of: EnvOf = Field(
        default_factory=list,
        description="Other systems whose variables tasks also get, for programs written for them; JAX only. `jaxjob`: "
        "those of Kubeflow's JAXJob.",
        examples=[["jaxjob"]],
    )
    cpu: Cpu | None = Field(
        default=None, description='Cores of each host: a number, or millicores as in "500m".', examples=[4, "500m"]
    )
    memory: Memory | None = Field(
        default=None,
        description="Memory of each host: Ki, Mi, Gi, Ti (1024), k, M, G, T (1000), or bytes.",
        examples=["8Gi"],
    )
    gpus: Gpus | None = Field(
        default=None, description="GPUs of each chief and worker host. Default: none.", examples=[1]
    )
    roles: dict[str, Pools] = Field(
        default_factory=lambda: {"worker": [HostPool()]},
        description="The roles and the hosts of each: a mapping, or a list of mappings if hosts differ. "
        "Default: one worker. Every framework has `worker` and `evaluator`; TensorFlow also has `chief` (exactly one), "
        "and `ps` with `strategy: parameter-server`.",
        examples=[{"worker": {"replicas": 3}}],
    )
    snapshots: Snapshots = Field(
        default_factory=lambda: Snapshots(), description="Where snapshots are stored, and which are kept."
    )
    ingest: Ingest | None = Field(default=None, description="Data that is created once, before training.")
    tensorboard: TensorBoardField = Field(
        default=None,
        description="Serve TensorBoard during the run, with what tasks write to `PACELINE_TENSORBOARD_DIR`; on a "
        "cluster until `limits.keep_finished` has passed.",
    )
    metrics: Switch = Field(
        default=False,
        description="Serve [metrics](metrics.md) for Prometheus during the run: on this machine on a free port of the "
        "loopback address, which `status` shows; on a cluster on port 7736 of the captain's pod.",
    )
    tensorflow: TensorFlow = Field(
        default_factory=lambda: TensorFlow(), description="Which Keras TensorFlow programs use; TensorFlow only."
    )
    credentials: Credentials | None = Field(
        default=None,
        description="A file from a Secret, for tasks. Used on clusters only.",
    )
    restart: Restart = Field(
        default_factory=lambda: Restart(), description="What happens when a task dies, hangs, or reports NaN."
    )
    elastic: Elastic = Field(
        default_factory=lambda: Elastic(),
        description="How the number of hosts changes during the run, for roles with `min` or `max`; see [elastic "
        "runs](elastic.md).",
        examples=[{"wait": "30s", "every": "2m"}],
    )
    notify: Annotated[list[Notify], BeforeValidator(kubernetes_values.items("mappings"))] = Field(
        default_factory=list,
        description="Webhooks to notify when the run ends, hangs or restarts; see [notifications](notifications.md).",
        examples=[[{"url_from": "SLACK_URL", "format": "slack", "on": ["failed", "hang"]}]],
    )
    track: Track | None = Field(
        default=None,
        description="The MLflow server that gets the metrics, parameters and status of the run; see "
        "[MLflow](notifications.md#mlflow).",
        examples=[{"mlflow": "https://mlflow.example.com"}],
    )
    limits: Limits = Field(
        default_factory=lambda: Limits(),
        description='Limits of time: "90s", "10m", "1h30m", "2d", or a number of seconds; and of the output kept.',
    )
    kubernetes: Kubernetes | None = Field(
        default=None, description="Settings for clusters. Checked, but not used, on one machine."
    )
    export: Export | None = Field(
        default=None,
        description="The command that `paceline export RUN --to DIR` runs.",
        examples=[{"command": ["python", "export.py"]}],
    )
    serve: Serve | None = Field(
        default=None,
        description="How `paceline serve RUN --on kubernetes` serves the exported model. Used on clusters only.",
        examples=[{"replicas": 2, "memory": "2Gi"}],
    )

    @property
    def parameters(self) -> dict[str, str]:
        """The fields that describe the training, for experiment tracking."""
        return parameters(self)

    @property
    def programs(self) -> dict[str, list[str]]:
        """The commands of `try` and `export`, if set."""
        sections: dict[str, Try | Export | None] = {"try": getattr(self, "try"), "export": self.export}
        return {name: section.command for name, section in sections.items() if section is not None}


if TYPE_CHECKING:
    Job = _Job
else:  # `try` is a keyword
    _TRY = Field(
        default=None,
        description="The command that `paceline try RUN -- ARGS` runs.",
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
    "elastic": Elastic,
    "limits": Limits,
    "tensorboard": TensorBoard,
    "track": Track,
    "kubernetes": Kubernetes,
}


def model_at(path: tuple[str | int, ...]) -> type[BaseModel]:
    """The model of the mapping at this path of a job."""
    if not path:
        return Job
    if path[0] == "snapshots" and len(path) > 1:
        return Best if path[1] == "best" else Claim
    if path[0] == "tensorboard" and len(path) > 1:
        return Ingress
    if path[0] == "notify":
        return Notify
    if path[0] == "kubernetes" and len(path) > 2:
        return ITEMS[str(path[1])]
    return SECTIONS.get(str(path[0]), HostPool)
