"""The numbers in the lines of a file of series, by name and task. A file has thousands of lines: the usual cases are
handled for all of them at once, without a loop over single numbers."""

from __future__ import annotations

import math
import os
from array import array
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain, pairwise
from typing import Any

from paceline.agent import series_files
from paceline.storage.regular_files import open_regular
from paceline.view.series.point_reduction import WIDTH

HOST = "host_"  # prefix of the resources of hosts
PROGRESS = ("step", "steps_per_s")
_RECEIVED, _SENT = "received_bytes_per_s", "sent_bytes_per_s"  # tasks have no such numbers
_NUMBERS = frozenset((int, float))
_LARGEST = 1e308
_DENSE = 20  # if a line has at least one in 20 of all names, on average, every name is looked up in every line

Line = Mapping[str, Any]
Values = dict[str, dict[str, "array[float]"]]  # by name and task: rows, one after the other; step may be NaN


def read_lines(path: str, begin: int) -> tuple[list[Line], int]:
    """As series_files.read_part, with a parser that is several times as fast; and the position after the last line."""
    with os.fdopen(open_regular(path, follow=True), "rb") as file:
        file.seek(begin)
        data = file.read(series_files.READ_LIMIT)
    end = data.rfind(b"\n") + 1
    values = _parsed_json(data[:end].split(b"\n"))
    lines = [line for line in values if type(line) is dict and type(line.get("task")) is str]
    return [line for line in lines if type(line.get("at")) in _NUMBERS and abs(line["at"]) <= _LARGEST], begin + end


def _parsed_json(lines: Sequence[bytes]) -> list[Any]:
    from pydantic_core import from_json

    try:
        return [from_json(line) for line in lines if line]
    except ValueError:  # some are damaged
        values = []
        for line in lines:
            with suppress(ValueError):
                values.append(from_json(line))
        return values


def parsed(lines: Iterable[Line]) -> tuple[Values, frozenset[str]]:
    """The values in the lines of a file, and the names that are resources."""
    by_task: defaultdict[str, list[Line]] = defaultdict(list)
    for line in lines:
        by_task[line["task"]].append(line)
    in_order = list(chain.from_iterable(by_task.values()))  # those of a task are neighbours, oldest first
    reports = [line for line in in_order if type(line.get("metrics")) is dict]
    metrics = [line["metrics"] for line in reports]
    measured = [line for line in in_order if "resources" in line]
    used = [resources_of(line["resources"]) for line in measured]
    steps = [line for line in in_order if "step" in line or "steps_per_s" in line]
    names = [_names(metrics), _names(used), set(PROGRESS) if steps else set()]
    values: Values = {}
    if len(set().union(*names)) == sum(map(len, names)):
        head = _Head(steps)
        for name in PROGRESS:
            _add(values, name, head, steps)
        _add_all(values, names[0], head if reports == steps else _Head(reports), metrics)
        _add_all(values, names[1], _Head(measured), used)
    else:  # a program reports a metric that has the name of a resource: the resource counts, if a line has both
        _add_all(values, set().union(*names), _Head(in_order), [_fields(line) for line in in_order])
    return values, frozenset(names[1])


def _names(fields: Iterable[Line]) -> set[str]:
    return set(chain.from_iterable(fields))


def _fields(line: Line) -> dict[str, Any]:
    metrics = line.get("metrics")
    progress = {name: line[name] for name in PROGRESS if name in line}
    return {**(metrics if type(metrics) is dict else {}), **resources_of(line.get("resources")), **progress}


class _Head:
    """What the rows of all names have in common."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self.tasks = [line["task"] for line in lines]
        self.rows = array("d", bytes(8 * WIDTH * len(lines)))
        self.rows[0::WIDTH] = array("d", [line["at"] for line in lines])
        steps = [line.get("step") for line in lines]
        numbers = _numbers(steps) if set(map(type, steps)) <= _NUMBERS else None
        self.rows[1::WIDTH] = array("d", map(_step, steps)) if numbers is None else numbers
        generations = [line.get("generation") for line in lines]
        self.rows[2::WIDTH] = array("d", [each if type(each) is int else 0 for each in generations])
        starts = [number for number, task in enumerate(self.tasks) if not number or task != self.tasks[number - 1]]
        limits = pairwise([*starts, len(lines)])
        self.places = [(self.tasks[begin], begin * WIDTH, end * WIDTH) for begin, end in limits]


def _add_all(values: Values, names: Collection[str], head: _Head, fields: Sequence[Line]) -> None:
    """`names`: all that occur in the fields. A program may report each of many thousands in a few lines only."""
    if len(names) * len(fields) <= _DENSE * sum(map(len, fields)):
        for name in names:
            _add(values, name, head, fields)
        return
    places: defaultdict[str, list[int]] = defaultdict(list)
    for number, each in enumerate(fields):
        for name in each:
            places[name].append(number)
    for name, numbers in places.items():
        by_task = _one_by_one(head, numbers, [fields[number][name] for number in numbers])
        if by_task:
            values[name] = by_task


def _add(values: Values, name: str, head: _Head, fields: Sequence[Line]) -> None:
    column = [each.get(name) for each in fields]
    ranges = _ranges(column)
    if ranges is None:
        by_task = _one_by_one(head, range(len(column)), column)
    else:
        rows = head.rows[:]
        rows[3::WIDTH], rows[4::WIDTH], rows[5::WIDTH] = ranges
        by_task = {task: rows[begin:end] for task, begin, end in head.places}
    if by_task:
        values[name] = by_task


def _ranges(column: Sequence[Any]) -> tuple[array[float], array[float], array[float]] | None:
    """Means, least and largest values; None: some are missing, or are not numbers."""
    types = set(map(type, column))
    if types <= _NUMBERS:
        numbers = _numbers(column)
        return None if numbers is None else (numbers, numbers, numbers)
    if not types <= {list, *_NUMBERS}:
        return None
    ranges = [value if type(value) is list else (value, value, value) for value in column]
    if set(map(len, ranges)) != {3}:
        return None
    least, mean, largest = (
        _numbers(each) if set(map(type, each)) <= _NUMBERS else None for each in zip(*ranges, strict=True)
    )
    return None if mean is None or least is None or largest is None else (mean, least, largest)


def _numbers(column: Sequence[Any]) -> array[float] | None:
    """None: one of them is not finite, or too large."""
    return array("d", column) if sum(map(abs, column)) <= _LARGEST else None


def _one_by_one(head: _Head, numbers: Sequence[int], column: Sequence[Any]) -> dict[str, array[float]]:
    """The rows with a value. `numbers`: those of the rows of the column."""
    by_task: dict[str, array[float]] = {}
    for number, value in zip(numbers, column, strict=True):
        least, mean, largest = value if type(value) is list and len(value) == 3 else (value, value, value)
        if all(type(each) in _NUMBERS and -_LARGEST <= each <= _LARGEST for each in (least, mean, largest)):
            rows = by_task.setdefault(head.tasks[number], array("d"))
            rows.extend(head.rows[number * WIDTH : number * WIDTH + 3])
            rows.extend((mean, least, largest))
    return by_task


def resources_of(used: Any) -> dict[str, Any]:
    """The resources in a report of a task or a host. Those of a host have a prefix: a mean over tasks and hosts would
    have no meaning."""
    if not isinstance(used, dict):
        return {}
    is_host = _RECEIVED in used or _SENT in used
    return {f"{HOST}{name}": value for name, value in used.items()} if is_host else used


def _step(value: Any) -> float:
    """Of a report, or the largest of several."""
    last = value[-1] if type(value) is list and value else value
    return float(last) if series_files.is_number(last) else math.nan
