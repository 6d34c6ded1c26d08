"""Data to Job: pydantic's errors as findings, and the part of the job that is right, so that all is checked at once."""

from __future__ import annotations

import copy
from typing import Any

from pydantic import BaseModel, ValidationError

from paceline.job.cluster import ALSO_CALLED, SOURCES, Kubernetes, Volume
from paceline.job.errors import BadValueError, Finding, described, did_you_mean, listed, visible
from paceline.job.fields import FRAMEWORKS
from paceline.job.models import SECTIONS, Group, Job, model_at
from paceline.job.programs import NAMES as PROGRAMS
from paceline.job.writing import write

Path = tuple[str | int, ...]

MOST_ERRORS = 100
_OF_NAMES = ("env", "node_selector", "labels", "annotations")
_STAND_INS = {"name": "job", "framework": "none"}


def validate(data: dict[str, Any]) -> tuple[Job, list[Finding], list[Path]]:
    """The job, what is wrong with its fields, and the paths whose values were left out for that."""
    findings: list[Finding] = []
    broken: list[Path] = []
    for _ in range(5):  # a value left out can bring others into view, never many times
        try:
            return Job.model_validate(data), findings, broken
        except ValidationError as error:
            data = copy.deepcopy(data)
            found: list[Finding] = []
            # From the back: taking items out of a list moves those that follow.
            for number, item in reversed(list(enumerate(error.errors(include_url=False)))):
                path = _path(item)
                missing = item["type"] == "missing"
                if number < MOST_ERRORS and not (missing and path in broken):
                    found.insert(0, _finding(path, item))
                broken.append(path)
                _leave_out(data, path[:-1] if missing and len(path) > 1 else path)
            findings += found
    return Job(name="job", framework="none"), findings, [*broken, ("roles",), ("framework",)]


def _path(item: Any) -> Path:
    """Where pydantic found the error; for a wrong key it adds one more step."""
    path: Path = tuple(item["loc"])
    return path[:-1] if _at_key(item) else path


def _at_key(item: Any) -> bool:
    """Whether the key itself is wrong: only mappings of names to text have that. A person may write "[key]" too."""
    path: Path = tuple(item["loc"])
    return item["type"] == "value_error" and len(path) > 2 and path[-1] == "[key]" and path[-3] in _OF_NAMES


def _finding(path: Path, item: Any) -> Finding:
    kind = item["type"]
    if kind == "extra_forbidden":
        return _unknown(path)
    if kind == "missing":
        return _missing(path)
    if kind == "value_error":
        return _refused(path, item, at_key=_at_key(item))
    hint = allowed = None
    if path == ("roles",):
        hint = "write roles: {worker: {replicas: 2}}"
    elif path[-1] == "env":
        hint = "write env: {NAME: value}"
    elif path[0] == "kubernetes" and len(path) == 2:
        hint = f"write {path[1]}: {{name: value}}"
    else:
        allowed = listed(sorted(model_at(path).model_fields))
        hint = f"write {path[0]}: {{command: [python, {path[0]}.py]}}" if path[0] in PROGRAMS else None
    return Finding(path, f"must be a mapping, got {described(item['input'])}", hint, allowed)


def _refused(path: Path, item: Any, at_key: bool) -> Finding:
    error = item["ctx"]["error"]
    if not isinstance(error, BadValueError):
        raise error
    return Finding((*path, *error.inside), error.message, error.hint, error.allowed, at_key or error.at_key)


def _missing(path: Path) -> Finding:
    field = model_at(path[:-1]).model_fields[str(path[-1])]
    if path == ("framework",):
        return Finding(path, "is missing", "write framework: none for a program of no framework", listed(FRAMEWORKS))
    example = field.examples[0] if field.examples else None
    return Finding(path, "is missing", f"write {write({str(path[-1]): example}).strip()}" if example else None)


def _unknown(path: Path) -> Finding:
    key = str(path[-1])
    model = model_at(path[:-1])
    names = sorted(model.model_fields)
    folded = key.lower().replace("_", "").replace("-", "")
    if model is Volume and folded in ("hostpath", "host"):
        message = "a folder of the node cannot be mounted: the restricted Pod Security level forbids it"
        return Finding(path, message, f"use one of {listed(SOURCES)}", at_key=True)
    also = ALSO_CALLED.get(folded)
    hint = f'did you mean "{also}"?' if also in names else did_you_mean(key, names) or _elsewhere(key)
    if path == ("snapshots", "mirror"):
        hint = "remove it: on a cluster, the hosts that wrote the newest one keep a copy by themselves"
    return Finding(path, f'unknown key "{visible(key, 60)}"', hint, listed(names), at_key=True)


def _elsewhere(key: str) -> str | None:
    """For a key that is right in another place: that place."""
    if key in ("worker", "chief", "ps", "evaluator"):
        return f'did you mean "roles.{key}"?'
    if key == "workers":
        return 'did you mean "roles.worker.replicas"?'
    places: dict[str, type[BaseModel]] = {"kubernetes": Kubernetes, "roles.worker": Group, **SECTIONS}
    for section, model in places.items():
        if key in model.model_fields:
            return f'did you mean "{section}.{key}"?'
    return f'did you mean "{key}", one level up?' if key in Job.model_fields else None


def _leave_out(data: dict[str, Any], path: Path) -> None:
    if path in (("name",), ("framework",)):
        data[str(path[0])] = _STAND_INS[str(path[0])]
        return
    holder: Any = data
    for step in path[:-1]:
        # A role that is one mapping has an index in pydantic's paths, but not in the data.
        if not (isinstance(holder, dict) and step == 0):
            holder = holder[step]
    if isinstance(holder, dict) and path[-1] == 0:
        holder.clear()
    elif isinstance(holder, list) and (len(holder) > 1 or path[0] == "kubernetes"):
        del holder[path[-1]]  # type: ignore[arg-type]
    elif isinstance(holder, list):  # groups and commands are never empty
        holder[0] = {} if path[0] == "roles" and len(path) == 3 else "left-out"
    else:
        holder.pop(path[-1], None)
