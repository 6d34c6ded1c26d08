"""Validates data as a Job: turns pydantic's errors into findings, and keeps the valid part for further checks."""

from __future__ import annotations

import copy
from typing import Any

from pydantic import BaseModel, ValidationError

from paceline.job.errors import BadValueError, Finding, describe, join_names, visible
from paceline.job.fields import FRAMEWORKS
from paceline.job.kubernetes_section import FIELD_ALIASES, SOURCES, Kubernetes, Volume
from paceline.job.model_section import NAMES as PROGRAMS
from paceline.job.schema_models import SECTIONS, HostPool, Job, model_at
from paceline.job.similar_names import did_you_mean
from paceline.job.yaml_writer import write

Path = tuple[str | int, ...]

MAX_ERRORS = 100
_STRING_MAPPINGS = ("env", "node_selector", "labels", "annotations")
_PLACEHOLDERS = {"name": "job", "framework": "none"}


def validate(data: dict[str, Any]) -> tuple[Job, list[Finding], list[Path]]:
    """The job, the problems of its fields, and the paths of values that were removed because of them."""
    findings: list[Finding] = []
    broken: list[Path] = []
    for _ in range(5):  # removing a value can reveal other errors, but only a few times
        try:
            return Job.model_validate(data), findings, broken
        except ValidationError as error:
            data = copy.deepcopy(data)
            new_findings: list[Finding] = []
            # In reverse order, since removing an item of a list moves the items after it.
            for number, item in reversed(list(enumerate(error.errors(include_url=False)))):
                path = _path(item)
                missing = item["type"] == "missing"
                if number < MAX_ERRORS and not (missing and path in broken):
                    new_findings.insert(0, _finding(path, item))
                broken.append(path)
                _remove(data, path[:-1] if missing and len(path) > 1 else path)
            findings += new_findings
    return Job(name="job", framework="none"), findings, [*broken, ("roles",), ("framework",)]


def _path(item: Any) -> Path:
    """The path of the error. For a wrong key, pydantic adds one more step."""
    path: Path = tuple(item["loc"])
    return path[:-1] if _is_at_key(item) else path


def _is_at_key(item: Any) -> bool:
    """Whether the key itself is wrong, as in mappings of names to strings. Users may also write a key "[key]"."""
    path: Path = tuple(item["loc"])
    return item["type"] == "value_error" and len(path) > 2 and path[-1] == "[key]" and path[-3] in _STRING_MAPPINGS


def _finding(path: Path, item: Any) -> Finding:
    kind = item["type"]
    if kind == "extra_forbidden":
        return _unknown(path)
    if kind == "missing":
        return _missing(path)
    if kind == "value_error":
        return _invalid(path, item, at_key=_is_at_key(item))
    hint = allowed = None
    if path == ("roles",):
        hint = "write roles: {worker: {replicas: 2}}"
    elif path[-1] == "env":
        hint = "write env: {NAME: value}"
    elif path[0] == "kubernetes" and len(path) == 2:
        hint = f"write {path[1]}: {{name: value}}"
    else:
        allowed = join_names(sorted(model_at(path).model_fields))
        hint = f"write {path[0]}: {{command: [python, {path[0]}.py]}}" if path[0] in PROGRAMS else None
    return Finding(path, f"must be a mapping, got {describe(item['input'])}", hint, allowed)


def _invalid(path: Path, item: Any, at_key: bool) -> Finding:
    error = item["ctx"]["error"]
    if not isinstance(error, BadValueError):
        raise error
    return Finding((*path, *error.inside), error.message, error.hint, error.allowed, at_key or error.at_key)


def _missing(path: Path) -> Finding:
    field = model_at(path[:-1]).model_fields[str(path[-1])]
    if path == ("framework",):
        return Finding(
            path, "is missing", "write framework: none for a program without a framework", join_names(FRAMEWORKS)
        )
    example = field.examples[0] if field.examples else None
    return Finding(path, "is missing", f"write {write({str(path[-1]): example}).strip()}" if example else None)


def _unknown(path: Path) -> Finding:
    key = str(path[-1])
    model = model_at(path[:-1])
    names = sorted(model.model_fields)
    folded = key.lower().replace("_", "").replace("-", "")
    if model is Volume and folded in ("hostpath", "host"):
        message = "a folder of the node cannot be mounted: the restricted Pod Security level forbids it"
        return Finding(path, message, f"use one of {join_names(SOURCES)}", at_key=True)
    alias = FIELD_ALIASES.get(folded)
    hint = f'did you mean "{alias}"?' if alias in names else did_you_mean(key, names) or _elsewhere(key)
    if path == ("snapshots", "mirror"):
        hint = "remove it: on a cluster, the hosts that wrote the newest snapshot keep a copy automatically"
    return Finding(path, f'unknown key "{visible(key, 60)}"', hint, join_names(names), at_key=True)


def _elsewhere(key: str) -> str | None:
    """A hint for a key that is valid in another section."""
    if key in ("worker", "chief", "ps", "evaluator"):
        return f'did you mean "roles.{key}"?'
    if key == "workers":
        return 'did you mean "roles.worker.replicas"?'
    sections: dict[str, type[BaseModel]] = {"kubernetes": Kubernetes, "roles.worker": HostPool, **SECTIONS}
    for section, model in sections.items():
        if key in model.model_fields:
            return f'did you mean "{section}.{key}"?'
    return f'did you mean "{key}", one level up?' if key in Job.model_fields else None


def _remove(data: dict[str, Any], path: Path) -> None:
    if path in (("name",), ("framework",)):
        data[str(path[0])] = _PLACEHOLDERS[str(path[0])]
        return
    parent: Any = data
    for step in path[:-1]:
        # A role that is a single mapping has an index in pydantic's paths, but not in the data.
        if not (isinstance(parent, dict) and step == 0):
            parent = parent[step]
    if isinstance(parent, dict) and path[-1] == 0:
        parent.clear()
    elif isinstance(parent, list) and (len(parent) > 1 or path[0] in ("kubernetes", "env_of", "notify")):
        del parent[path[-1]]  # type: ignore[arg-type]
    elif isinstance(parent, list):  # pools and commands must not be empty
        parent[0] = {} if path[0] == "roles" and len(path) == 3 else "left-out"
    else:
        parent.pop(path[-1], None)
