"""Reads steps, reported numbers and resources of a run over time; see agent/series_files.py for the files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.agent import series_files


@dataclass(frozen=True)
class Point:
    """One report, or what several were within 10 s or 5 min."""

    at: float  # seconds since 1970
    task: str
    generation: int
    least: float
    mean: float
    largest: float


def read(folder: Path, name: str, task: str = "") -> list[Point]:
    """The values of `step`, `steps_per_s`, a metric or a resource, oldest first. `task`: only of this task or host."""
    points = []
    for tier in reversed(series_files.TIERS):
        for path in series_files.parts(str(folder / series_files.FOLDER), tier):
            try:
                lines = series_files.read_part(path)
            except OSError:
                continue  # summed up in the meantime, or damaged
            points += [point for line in lines if (point := _point(line, name)) and task in ("", point.task)]
    return sorted(points, key=lambda point: point.at)


def read_some(folder: Path, names: Sequence[str], task: str, limit: int) -> Iterator[dict[str, list[Point]]]:
    """The values of these names of one task, newest file first: at most about `limit` bytes of files are read. If there
    are more, a quarter of these bytes are the newest files, and the rest are evenly spaced older ones."""
    paths = [
        path
        for tier in reversed(series_files.TIERS)
        for path in series_files.parts(str(folder / series_files.FOLDER), tier)
    ]
    most = max(4, limit // series_files.PART)
    newest, older = paths[-(most // 4) :], paths[: -(most // 4)]
    stride = -(-len(older) // (most - most // 4)) or 1
    marker = b'"task":' + json.dumps(task).encode()
    for path in reversed(older[::stride] + newest):
        try:
            lines = series_files.read_part(path, marker)
        except OSError:
            continue  # summed up in the meantime, or damaged
        points = {name: [point for line in lines if (point := _point(line, name)) is not None] for name in names}
        yield {name: [point for point in points[name] if point.task == task] for name in names}


def _point(line: dict[str, Any], name: str) -> Point | None:
    groups = [line.get(key) for key in ("resources", "metrics")]
    fields: dict[str, Any] = {k: v for group in groups if isinstance(group, dict) for k, v in group.items()} | line
    value, generation = fields.get(name), line.get("generation")
    values = value if isinstance(value, list) else [value] * 3
    if len(values) != 3 or not all(map(series_files.is_number, values)):
        return None
    return Point(line["at"], line["task"], generation if isinstance(generation, int) else 0, *values)
