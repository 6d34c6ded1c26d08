"""The types of job file fields: each with its validator and its JSON Schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, WithJsonSchema

from paceline.job import kubernetes_values, values
from paceline.plan import GROUP, HOST, NAME, ON_NAN, RESTART_SCOPES, TASK

FRAMEWORKS = ("tensorflow", "torch", "jax", "none")
STRATEGIES = ("multi-worker", "parameter-server")
KERAS = ("legacy",)
ENV_OF = ("jaxjob",)
ROLES = ("chief", "worker", "ps", "evaluator")
MAX_REPLICAS = 100_000
MAX_TASKS_PER_HOST = 1024
MAX_GPUS = 1024
MAX_SHARE = 1000

_FRAMEWORK_ALIASES = {"tf": "tensorflow", "keras": "tensorflow", "flax": "jax", "python": "none", "other": "none"}
_KERAS_ALIASES = {"tfkeras": "legacy", "keras": "legacy", "old": "legacy"}
_ON_NAN_ALIASES = {"fail": "stop", "end": "stop", "restart": "rollback", "restore": "rollback", "ignore": "warn"}
_SCOPE_ALIASES = {"all": GROUP, "job": GROUP, "pod": HOST, "node": HOST, "worker": TASK, "process": TASK}
_ENV_OF_ALIASES = {"jax": "jaxjob", "kubeflow": "jaxjob"}
_STRATEGY_ALIASES = {
    "ps": "parameter-server",
    "parameterserverstrategy": "parameter-server",
    "mirrored": "multi-worker",
    "multiworkermirrored": "multi-worker",
    "multiworkermirroredstrategy": "multi-worker",
}


def text_schema(pattern: str | None = None, **more: Any) -> dict[str, Any]:
    return {"type": "string", **({"pattern": pattern} if pattern else {"minLength": 1}), **more}


def number_schema(kind: str, minimum: int, maximum: int | None = None) -> dict[str, Any]:
    return {"type": kind, "minimum": minimum, **({} if maximum is None else {"maximum": maximum})}


def whole(minimum: int, maximum: int | None = None) -> tuple[PlainValidator, WithJsonSchema]:
    return PlainValidator(values.whole(minimum, maximum)), WithJsonSchema(number_schema("integer", minimum, maximum))


def choice(names: tuple[str, ...], aliases: Mapping[str, str]) -> tuple[PlainValidator, WithJsonSchema]:
    return PlainValidator(values.choice(names, aliases)), WithJsonSchema({"enum": list(names)})


Framework = Annotated[str, *choice(FRAMEWORKS, _FRAMEWORK_ALIASES)]
Strategy = Annotated[str, *choice(STRATEGIES, _STRATEGY_ALIASES)]
Keras = Annotated[str, *choice(KERAS, _KERAS_ALIASES)]
Scope = Annotated[str, *choice(RESTART_SCOPES, _SCOPE_ALIASES)]
OnNan = Annotated[str, *choice(ON_NAN, _ON_NAN_ALIASES)]
EnvOf = Annotated[
    list[Annotated[str, *choice(ENV_OF, _ENV_OF_ALIASES)]], BeforeValidator(kubernetes_values.items("names"))
]
Name = Annotated[
    str, PlainValidator(values.name), WithJsonSchema(text_schema(f"^{NAME}$", maxLength=values.NAME_LENGTH))
]
Text = Annotated[str, PlainValidator(values.text), WithJsonSchema(text_schema(r"\S"))]
Switch = Annotated[bool, PlainValidator(values.switch), WithJsonSchema({"type": "boolean"})]
Duration = Annotated[
    float,
    PlainValidator(values.duration),
    WithJsonSchema(
        {
            "anyOf": [
                text_schema(values.DURATION),
                {"type": "number", "exclusiveMinimum": 0, "maximum": values.MAX_SECONDS},
            ]
        }
    ),
]
Memory = Annotated[
    int,
    PlainValidator(values.memory),
    WithJsonSchema(
        {"anyOf": [text_schema(values.MEMORY), number_schema("integer", values.MIN_MEMORY, values.MAX_MEMORY)]}
    ),
]
Cpu = Annotated[
    float,
    PlainValidator(values.cpu),
    WithJsonSchema(
        {"anyOf": [text_schema(values.CPU), {"type": "number", "minimum": 0.001, "maximum": values.MAX_CPU}]}
    ),
]
Gpus = Annotated[int, *whole(0, MAX_GPUS)]
Argument = Annotated[str, PlainValidator(values.argument), WithJsonSchema(text_schema())]
Command = Annotated[list[Argument], BeforeValidator(values.arguments), Field(min_length=1)]
EnvName = Annotated[str, PlainValidator(values.env_name)]
EnvValue = Annotated[str, PlainValidator(values.env_value), WithJsonSchema({"type": "string"})]
Env = Annotated[
    dict[EnvName, EnvValue],
    WithJsonSchema(
        {"type": "object", "additionalProperties": {"type": "string"}, "propertyNames": {"pattern": values.ENV_NAME}}
    ),
]


class Strict(BaseModel):
    """A mapping in the job file that rejects unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)
