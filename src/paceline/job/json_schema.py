"""The JSON Schema of job files, from the models: `python -m paceline.job.json_schema > docs/job.schema.json`."""

from __future__ import annotations

import json
from typing import Any

from paceline.job.fields import ROLES
from paceline.job.schema_models import Job

_DRAFT = "https://json-schema.org/draft/2020-12/schema"


def schema() -> dict[str, Any]:
    document: dict[str, Any] = _simplify(Job.model_json_schema())
    pool = {"$ref": "#/$defs/HostPool"}
    roles = document["properties"]["roles"]
    document["properties"]["roles"] = {
        "type": "object",
        "description": roles["description"],
        "examples": roles["examples"],
        "properties": {
            role: {
                "description": _ROLE_DESCRIPTIONS[role],
                "anyOf": [pool, {"type": "array", "items": pool, "minItems": 1}],
            }
            for role in ROLES
        },
        "additionalProperties": False,
        "minProperties": 1,
    }
    tensorboard = document["properties"]["tensorboard"]
    tensorboard["anyOf"] = [{"type": "boolean"}, {"$ref": tensorboard.pop("$ref")}]
    return {"$schema": _DRAFT, "title": "Paceline job file", **document}


_ROLE_DESCRIPTIONS = {
    "chief": "TensorFlow only: the one task that coordinates the others. A mapping.",
    "worker": "The tasks that train. A mapping, or a list of mappings if hosts differ.",
    "ps": "TensorFlow with `strategy: parameter-server` only: the tasks that store the parameters.",
    "evaluator": "The tasks that evaluate snapshots during training.",
}


def _simplify(part: Any, names: bool = False) -> Any:
    """Remove pydantic's titles, and null, since keys must have a value. `names`: the keys are field names."""
    if isinstance(part, list):
        return [_simplify(item) for item in part]
    if not isinstance(part, dict):
        return part
    if names:
        return {key: _simplify(value) for key, value in part.items()}
    simplified = {
        key: _simplify(value, names=key in ("properties", "$defs"))
        for key, value in part.items()
        if key != "title" and not (key == "default" and value is None)
    }
    options = [option for option in simplified.get("anyOf", []) if option != {"type": "null"}]
    if len(options) == 1:
        del simplified["anyOf"]
        return {**options[0], **simplified}
    if options:
        simplified["anyOf"] = options
    return simplified


def text() -> str:
    return json.dumps(schema(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    print(text(), end="")
