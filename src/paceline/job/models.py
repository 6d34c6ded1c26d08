"""The job, as pydantic models: the one place that says which fields there are, what they take and what they mean."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, WithJsonSchema

from paceline.job import values

FRAMEWORKS = ("tensorflow", "torch", "jax", "none")
STRATEGIES = ("multi-worker", "parameter-server")
ROLES = ("chief", "worker", "ps", "evaluator")
MOST_REPLICAS = 100_000
MOST_TASKS_PER_HOST = 1024
MOST_GPUS = 1024

_ALSO_FRAMEWORKS = {"tf": "tensorflow", "keras": "tensorflow", "flax": "jax", "python": "none", "other": "none"}
_ALSO_STRATEGIES = {
    "ps": "parameter-server",
    "parameterserverstrategy": "parameter-server",
    "mirrored": "multi-worker",
    "multiworkermirrored": "multi-worker",
    "multiworkermirroredstrategy": "multi-worker",
}


def _text(pattern: str | None = None, **more: Any) -> dict[str, Any]:
    return {"type": "string", **({"pattern": pattern} if pattern else {"minLength": 1}), **more}


def _number(kind: str, least: int, most: int | None = None) -> dict[str, Any]:
    return {"type": kind, "minimum": least, **({} if most is None else {"maximum": most})}


def _whole(least: int, most: int | None = None) -> tuple[PlainValidator, WithJsonSchema]:
    return PlainValidator(values.whole(least, most)), WithJsonSchema(_number("integer", least, most))


Framework = Annotated[
    str, PlainValidator(values.choice(FRAMEWORKS, _ALSO_FRAMEWORKS)), WithJsonSchema({"enum": list(FRAMEWORKS)})
]
Strategy = Annotated[
    str, PlainValidator(values.choice(STRATEGIES, _ALSO_STRATEGIES)), WithJsonSchema({"enum": list(STRATEGIES)})
]
Name = Annotated[
    str, PlainValidator(values.name), WithJsonSchema(_text(f"^{values.NAME}$", maxLength=values.NAME_LENGTH))
]
Namespace = Annotated[
    str, PlainValidator(values.namespace), WithJsonSchema(_text(f"^{values.LABEL}$", maxLength=values.NAMESPACE_LENGTH))
]
Text = Annotated[str, PlainValidator(values.text), WithJsonSchema(_text(r"\S"))]
Image = Annotated[str, PlainValidator(values.image), WithJsonSchema(_text(r"^\S+$"))]
Switch = Annotated[bool, PlainValidator(values.switch), WithJsonSchema({"type": "boolean"})]
Duration = Annotated[
    float,
    PlainValidator(values.duration),
    WithJsonSchema(
        {"anyOf": [_text(values.DURATION), {"type": "number", "exclusiveMinimum": 0, "maximum": values.LONGEST}]}
    ),
]
Memory = Annotated[
    int,
    PlainValidator(values.memory),
    WithJsonSchema({"anyOf": [_text(values.MEMORY), _number("integer", values.LEAST_MEMORY, values.MOST_MEMORY)]}),
]
Cpu = Annotated[
    float,
    PlainValidator(values.cpu),
    WithJsonSchema({"anyOf": [_text(values.CPU), {"type": "number", "minimum": 0.001, "maximum": values.MOST_CPU}]}),
]
Gpus = Annotated[int, *_whole(0, MOST_GPUS)]
Argument = Annotated[str, PlainValidator(values.argument), WithJsonSchema(_text())]
Command = Annotated[list[Argument], BeforeValidator(values.arguments), Field(min_length=1)]
EnvName = Annotated[str, PlainValidator(values.env_name)]
EnvValue = Annotated[str, PlainValidator(values.env_value), WithJsonSchema({"type": "string"})]
Env = Annotated[
    dict[EnvName, EnvValue],
    WithJsonSchema(
        {"type": "object", "additionalProperties": {"type": "string"}, "propertyNames": {"pattern": values.ENV_NAME}}
    ),
]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


class Group(_Strict):
    """Hosts of one role that are alike."""

    replicas: Annotated[int, *_whole(1, MOST_REPLICAS)] = Field(
        default=1, description="How many hosts. On this machine a host is an agent process."
    )
    tasks_per_host: Annotated[int, *_whole(1, MOST_TASKS_PER_HOST)] | None = Field(
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


class Restart(_Strict):
    """What happens when a task dies or makes no progress."""

    limit: Annotated[int, *_whole(0)] = Field(
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


class Limits(_Strict):
    """How long things may take."""

    start: Duration = Field(
        default=1800.0, description="Time for all hosts to be there, from the first one on.", examples=["30m"]
    )
    runtime: Duration | None = Field(
        default=None,
        description="Time for the whole run, from the first generation on. Unset: no limit.",
        examples=["6h"],
    )
    grace: Duration = Field(
        default=30.0,
        description="Time that tasks have between SIGTERM and SIGKILL when the run is stopped.",
        examples=["30s"],
    )


class Kubernetes(_Strict):
    """Used on a cluster only; on one machine it is checked, and a note says that it is not used."""

    image: Image | None = Field(
        default=None,
        description="The container image that tasks run in.",
        examples=["tensorflow/tensorflow:2.21.0-gpu"],
    )
    namespace: Namespace | None = Field(default=None, description="The namespace to run in.", examples=["team-a"])


Groups = Annotated[list[Group], BeforeValidator(values.groups)]


class Job(_Strict):
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
    code: Text = Field(default=".", description="The folder that tasks run in, relative to the folder of the job file.")
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
        "Unset: one worker. Every framework has `worker`; TensorFlow also has `chief` (exactly one) and `evaluator`, "
        "and with `strategy: parameter-server` `ps`.",
        examples=[{"worker": {"replicas": 3}}],
    )
    restart: Restart = Field(default_factory=lambda: Restart(), description="What happens when a task dies or hangs.")
    limits: Limits = Field(
        default_factory=lambda: Limits(),
        description='How long things may take: "90s", "10m", "1h30m", "2d", or seconds.',
    )
    kubernetes: Kubernetes | None = Field(
        default=None, description="For clusters only: checked here, not used on this machine."
    )


SECTIONS: dict[str, type[BaseModel]] = {"restart": Restart, "limits": Limits, "kubernetes": Kubernetes}
