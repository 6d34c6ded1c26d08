"""The page docs/job-file.md, made from the models: `python -m paceline.job.reference > docs/job-file.md`."""

from __future__ import annotations

import json
from typing import Any

from paceline.job import schema
from paceline.job.checks import allowed_roles
from paceline.job.cluster import ITEMS
from paceline.job.fields import FRAMEWORKS, STRATEGIES
from paceline.job.models import SECTIONS
from paceline.job.values import SET_BY_PACELINE
from paceline.job.writing import write

EXAMPLE: dict[str, Any] = {
    "name": "digits",
    "framework": "tensorflow",
    "strategy": "multi-worker",
    "command": ["python", "train.py", "--epochs", "20"],
    "env": {"SEED": "7"},
    "roles": {
        "worker": {"replicas": 3, "cpu": 2, "memory": "4Gi"},
        "evaluator": {"replicas": 1},
    },
    "restart": {"limit": 10, "hang_after": "10m"},
    "limits": {"start": "30m", "runtime": "6h", "grace": "30s"},
}
CLUSTER: dict[str, Any] = {
    **{key: EXAMPLE[key] for key in ("name", "framework", "command")},
    "roles": {"worker": {"replicas": 4, "gpus": 1, "cpu": 4, "memory": "16Gi"}},
    "tensorboard": {"memory": "2Gi"},
    "credentials": {"secret": "store-key", "file": "key.json"},
    "limits": {"runtime": "6h", "keep_finished": "1h"},
    "kubernetes": {
        "image": "tensorflow/tensorflow:2.21.0-gpu",
        "namespace": "team-a",
        "node_selector": {"example.com/pool": "gpu"},
        "tolerations": [{"key": "nvidia.com/gpu", "effect": "NoSchedule"}],
        "placement": "pack",
        "volumes": [{"mount": "/data", "claim": "digits", "read_only": True}, {"mount": "/scratch", "empty": "20Gi"}],
        "env_from": [{"secret": "tracking", "prefix": "TRACKING_"}],
    },
}


def page() -> str:
    made = schema()
    parts = [
        "<!-- Made by `python -m paceline.job.reference`; a test keeps it equal to the models. -->",
        "# The job file",
        "A job is one YAML file (YAML 1.2, UTF-8). Three fields are needed: `name`, `framework` and `command`.",
        f"```yaml\n{write(EXAMPLE)}```",
        "A key that is not on this page is refused, and so is a field that has no effect under the chosen framework or "
        "strategy. Everything that is wrong is reported at once, each with its line. `paceline validate job.yaml` "
        "checks a file and starts nothing; `job.schema.json`, beside this page, is its JSON Schema for editors.",
        "## Fields",
        _table(made["properties"], made["required"]),
        "## Groups of hosts: `roles.<role>`",
        made["$defs"]["Group"]["description"] + " A role is one group, or a list of groups for unequal hosts:",
        "```yaml\nroles:\n  worker:\n    - {replicas: 1, gpus: 8}\n    - {replicas: 4, gpus: 1}\n```",
        _table(made["$defs"]["Group"]["properties"], []),
        "Roles that a job may have:",
        _roles(),
    ]
    for section, model in SECTIONS.items():
        parts += [f"## `{section}`", *_part(made["$defs"][model.__name__])]
        if section == "snapshots":
            for name in ("best", "claim"):
                parts += [f"### `snapshots.{name}`", *_part(made["$defs"][name.capitalize()])]
        if section == "tensorboard":
            parts += ["### `tensorboard.ingress`", *_part(made["$defs"]["Ingress"])]
    parts.append(f"A job for a cluster:\n\n```yaml\n{write(CLUSTER)}```")
    for field, item in ITEMS.items():
        parts += [f"### Items of `kubernetes.{field}`", *_part(made["$defs"][item.__name__])]
    parts += [
        "## Variables that Paceline sets",
        "These, and all that start with `PACELINE_`, cannot be set by `env`: "
        + ", ".join(f"`{name}`" for name in sorted(SET_BY_PACELINE))
        + ". `OMP_NUM_THREADS` can.",
        "## Overrides: `--set`",
        "`--set roles.worker.replicas=4` replaces one value from the command line, with the same checks. "
        "The value is YAML (`--set restart.warm=false`, `--set 'command=[python, other.py]'`); variables, labels and "
        "words of a command stay the text that they are (`--set env.SEED=7`). Items of a list are counted from 0 "
        "(`--set roles.worker.0.gpus=8`).",
    ]
    return "\n\n".join(parts) + "\n"


def _part(model: dict[str, Any]) -> list[str]:
    return [model["description"], _table(model["properties"], model.get("required", []))]


def _table(fields: dict[str, Any], required: list[str]) -> str:
    rows = ["| field | takes | unless set | meaning |", "|---|---|---|---|"]
    for name, field in fields.items():
        default = "needed" if name in required else _default(field)
        rows.append(f"| `{name}` | {_takes(field)} | {default} | {_meaning(field)} |")
    return "\n".join(rows)


def _default(field: dict[str, Any]) -> str:
    if "default" not in field:
        return ""
    value = field["default"]
    return f"`{value:g} s`" if isinstance(value, float) else f"`{json.dumps(value)}`"


def _takes(field: dict[str, Any]) -> str:
    if "enum" in field:
        return " or ".join(f"`{value}`" for value in field["enum"])
    if "anyOf" in field and "$ref" in field["anyOf"][-1]:
        return f"{_takes(field['anyOf'][0])}, or a {_takes(field['anyOf'][-1])}"
    if "anyOf" in field:
        words = [value for option in field["anyOf"] for value in option.get("enum", [])]
        return " or ".join([_range(field["anyOf"][0]), *map("`{}`".format, words)]) if words else "number or text"
    if "$ref" in field:
        name = _name(field["$ref"]).lower()
        above = "tensorboard" if name == "ingress" else "snapshots"
        return f"mapping, [see below](#{name if name in SECTIONS else f'{above}{name}'})"
    kinds = {"array": "list of text", "object": "mapping", "boolean": "true or false", "string": "text"}
    if field["type"] == "integer":
        return _range(field)
    inner = _name(field.get("items", {}).get("$ref", ""))
    below = next((f"#items-of-kubernetes{name}" for name, item in ITEMS.items() if item.__name__ == inner), None)
    return f"list of mappings, [see below]({below})" if below else kinds[str(field["type"])]


def _name(ref: str) -> str:
    return ref.rpartition("/")[2]


def _range(field: dict[str, Any]) -> str:
    most = f" to {field['maximum']}" if "maximum" in field else " or more"
    return str(field["minimum"]) + most


def _meaning(field: dict[str, Any]) -> str:
    text = str(field["description"])
    if field.get("examples"):
        text += " Example: " + ", ".join(f"`{json.dumps(example)}`" for example in field["examples"])
    return text.replace("|", "\\|")


def _roles() -> str:
    rows = ["| framework | strategy | roles |", "|---|---|---|"]
    for framework in FRAMEWORKS:
        for strategy in STRATEGIES if framework == "tensorflow" else (None,):
            names = ", ".join(f"`{role}`" for role in allowed_roles(framework, strategy))
            rows.append(f"| `{framework}` | {f'`{strategy}`' if strategy else ''} | {names} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(page(), end="")
