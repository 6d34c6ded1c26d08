"""What the fields of a job take: each type with its reader and with its part of the JSON Schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, WithJsonSchema

from paceline.job import values

FRAMEWORKS = ("tensorflow", "torch", "jax", "none")
STRATEGIES = ("multi-worker", "parameter-server")
KERAS = ("legacy",)
ROLES = ("chief", "worker", "ps", "evaluator")
MOST_REPLICAS = 100_000
MOST_TASKS_PER_HOST = 1024
MOST_GPUS = 1024

_ALSO_FRAMEWORKS = {"tf": "tensorflow", "keras": "tensorflow", "flax": "jax", "python": "none", "other": "none"}
_ALSO_KERAS = {"tfkeras": "legacy", "keras": "legacy", "old": "legacy"}
_ALSO_STRATEGIES = {
    "ps": "parameter-server",
    "parameterserverstrategy": "parameter-server",
    "mirrored": "multi-worker",
    "multiworkermirrored": "multi-worker",
    "multiworkermirroredstrategy": "multi-worker",
}


def text_schema(pattern: str | None = None, **more: Any) -> dict[str, Any]:
    return {"type": "string", **({"pattern": pattern} if pattern else {"minLength": 1}), **more}


def number_schema(kind: str, least: int, most: int | None = None) -> dict[str, Any]:
    return {"type": kind, "minimum": least, **({} if most is None else {"maximum": most})}


def whole(least: int, most: int | None = None) -> tuple[PlainValidator, WithJsonSchema]:
    return PlainValidator(values.whole(least, most)), WithJsonSchema(number_schema("integer", least, most))


def choice(names: tuple[str, ...], also_called: Mapping[str, str]) -> tuple[PlainValidator, WithJsonSchema]:
    return PlainValidator(values.choice(names, also_called)), WithJsonSchema({"enum": list(names)})


Framework = Annotated[str, *choice(FRAMEWORKS, _ALSO_FRAMEWORKS)]
Strategy = Annotated[str, *choice(STRATEGIES, _ALSO_STRATEGIES)]
Keras = Annotated[str, *choice(KERAS, _ALSO_KERAS)]
Name = Annotated[
    str, PlainValidator(values.name), WithJsonSchema(text_schema(f"^{values.NAME}$", maxLength=values.NAME_LENGTH))
]
Text = Annotated[str, PlainValidator(values.text), WithJsonSchema(text_schema(r"\S"))]
Switch = Annotated[bool, PlainValidator(values.switch), WithJsonSchema({"type": "boolean"})]
Duration = Annotated[
    float,
    PlainValidator(values.duration),
    WithJsonSchema(
        {"anyOf": [text_schema(values.DURATION), {"type": "number", "exclusiveMinimum": 0, "maximum": values.LONGEST}]}
    ),
]
Memory = Annotated[
    int,
    PlainValidator(values.memory),
    WithJsonSchema(
        {"anyOf": [text_schema(values.MEMORY), number_schema("integer", values.LEAST_MEMORY, values.MOST_MEMORY)]}
    ),
]
Cpu = Annotated[
    float,
    PlainValidator(values.cpu),
    WithJsonSchema(
        {"anyOf": [text_schema(values.CPU), {"type": "number", "minimum": 0.001, "maximum": values.MOST_CPU}]}
    ),
]
Gpus = Annotated[int, *whole(0, MOST_GPUS)]
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
    """A mapping of the job file: other keys than its fields are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)
