"""The JSON Schema of job files, made from the models: `python -m paceline.job.published > docs/job.schema.json`."""

from __future__ import annotations

import json
from typing import Any

from paceline.job.fields import ROLES
from paceline.job.models import Job

_DRAFT = "https://json-schema.org/draft/2020-12/schema"


def schema() -> dict[str, Any]:
    made: dict[str, Any] = _tidied(Job.model_json_schema())
    group = {"$ref": "#/$defs/Group"}
    about = made["properties"]["roles"]
    made["properties"]["roles"] = {
        "type": "object",
        "description": about["description"],
        "examples": about["examples"],
        "properties": {
            role: {
                "description": _ABOUT_ROLES[role],
                "anyOf": [group, {"type": "array", "items": group, "minItems": 1}],
            }
            for role in ROLES
        },
        "additionalProperties": False,
        "minProperties": 1,
    }
    beside = made["properties"]["tensorboard"]
    beside["anyOf"] = [{"type": "boolean"}, {"$ref": beside.pop("$ref")}]
    return {"$schema": _DRAFT, "title": "Paceline job file", **made}


_ABOUT_ROLES = {
    "chief": "TensorFlow only: the one task that leads. A mapping.",
    "worker": "The tasks that train. A mapping, or a list of mappings for unequal hosts.",
    "ps": "TensorFlow with `strategy: parameter-server` only: the tasks that hold the parameters.",
    "evaluator": "Evaluates snapshots beside the training.",
}


def _tidied(part: Any, names: bool = False) -> Any:
    """Without pydantic's titles, and without null: a key that is there has a value. `names`: keys are fields."""
    if isinstance(part, list):
        return [_tidied(item) for item in part]
    if not isinstance(part, dict):
        return part
    if names:
        return {key: _tidied(value) for key, value in part.items()}
    kept = {
        key: _tidied(value, names=key in ("properties", "$defs"))
        for key, value in part.items()
        if key != "title" and not (key == "default" and value is None)
    }
    options = [option for option in kept.get("anyOf", []) if option != {"type": "null"}]
    if len(options) == 1:
        del kept["anyOf"]
        return {**options[0], **kept}
    if options:
        kept["anyOf"] = options
    return kept


def text() -> str:
    return json.dumps(schema(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    print(text(), end="")
