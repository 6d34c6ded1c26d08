"""Reads a complete plan from data that may be damaged, or written by another version of Paceline."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from pathlib import Path
from typing import Any

from paceline.plan import VERSION, Plan
from paceline.view.files.run_files import (
    LARGEST_COUNT,
    DamagedRun,
    as_shown,
    is_number,
    load_object,
    newer_plan,
    parse_json,
)

# The least and the largest value of numbers, by field. Readers calculate, wait and count with them.
_DURATIONS = (
    "limits.start", "limits.runtime", "limits.grace", "limits.keep_finished", "limits.commit", "limits.evaluation",
    "restart.hang_after", "snapshots.commit_every", "ingest.limit", "elastic.wait", "elastic.every",
)  # fmt: skip
_COUNTS = (
    "restart.limit", "snapshots.keep", "hosts.index", "hosts.group", "hosts.gpus", "hosts.cpu", "tasks.index",
    "tasks.local_index", "elastic.hosts.group", "elastic.hosts.min", "elastic.hosts.replicas",
)  # fmt: skip
_RANGES: dict[str, tuple[int, int]] = {
    **dict.fromkeys((*_DURATIONS, *_COUNTS), (0, LARGEST_COUNT)),
    **dict.fromkeys(("hosts.memory", "snapshots.rate", "limits.log"), (0, 2**63)),
    "tasks.rank": (-1, LARGEST_COUNT),
    "hosts.share": (1, LARGEST_COUNT),
}


def read_plan(folder: Path) -> Plan:
    """The plan of a run. DamagedRun, NewerRun: it cannot be used; the message names the file."""
    data = load_object(folder / "plan.json")
    if data is None:
        raise DamagedRun("does not exist", where=str(folder / "plan.json"))
    return plan_of(data)


def parse_plan(text: str, where: str) -> Plan:
    try:
        return plan_of(parse_json(text), where)
    except ValueError as error:
        raise DamagedRun(str(error), where=where) from None


def plan_of(data: Any, where: str = "plan.json") -> Plan:
    """Unknown fields are ignored: an addition that must not be ignored increases the version."""
    version: Any = data.get("version") if isinstance(data, dict) else None
    if is_number(version) and version > VERSION:
        raise newer_plan(version, where)
    try:
        plan: Plan = _convert(data, Plan, "")
        return plan
    except _Mismatch as error:
        raise DamagedRun(f"is damaged: {error}", where=where) from None


class _Mismatch(Exception):
    """The text says which field cannot be used."""


def _convert(value: Any, kind: Any, name: str) -> Any:
    """The value as JSON has it -> the value of this type; `name`: of its field."""
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _record(value, kind, name)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        return None if value is None else _convert(value, arguments[0], name)
    if origin is tuple and isinstance(value, list):
        if arguments[-1] is Ellipsis:
            return tuple(_convert(each, arguments[0], name) for each in value)
        if len(arguments) == len(value):
            return tuple(_convert(each, argument, name) for each, argument in zip(value, arguments, strict=True))
    if origin is dict and isinstance(value, dict):
        return {key: _convert(each, arguments[1], f"{name}.{key}") for key, each in value.items()}
    if (kind is float and type(value) in (int, float)) or (kind is int and type(value) is int):
        least, largest = _RANGES.get(name, (-(2**63), 2**63))
        if not least <= value <= largest:  # also if it is not a number
            raise _Mismatch(f"`{name}` cannot be {as_shown(value)}")
        return value
    if kind in (str, bool) and type(value) is kind:
        return value
    raise _Mismatch(f"`{name}` has the wrong type")


def _record(value: Any, kind: type[Any], name: str) -> Any:
    if not isinstance(value, dict):
        raise _Mismatch(f"`{name}` is not an object" if name else "it is not a JSON object")
    values = {}
    for field, (annotation, required) in _fields(typing.cast(Any, kind)).items():
        label = f"{name}.{field}" if name else field
        if field in value:
            values[field] = _convert(value[field], annotation, label)
        elif required:
            raise _Mismatch(f"`{label}` is missing")
    return kind(**values)


@functools.cache
def _fields(kind: Any) -> dict[str, tuple[Any, bool]]:
    """name -> type, and whether it is required."""
    hints = typing.get_type_hints(kind)
    missing = dataclasses.MISSING
    return {
        each.name: (hints[each.name], each.default is missing and each.default_factory is missing)
        for each in dataclasses.fields(kind)
    }
