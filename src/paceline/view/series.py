"""Reads steps, reported numbers and resources of a run over time; see agent/series.py for the files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.agent import series


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
    for tier in reversed(series.TIERS):
        for path in series.parts(str(folder / series.FOLDER), tier):
            try:
                lines = series.read_part(path)
            except OSError:
                continue  # summed up in the meantime, or damaged
            points += [point for line in lines if (point := _point(line, name)) and task in ("", point.task)]
    return sorted(points, key=lambda point: point.at)


def _point(line: dict[str, Any], name: str) -> Point | None:
    groups = [line.get(key) for key in ("resources", "metrics")]
    fields: dict[str, Any] = {k: v for group in groups if isinstance(group, dict) for k, v in group.items()} | line
    value, generation = fields.get(name), line.get("generation")
    values = value if isinstance(value, list) else [value] * 3
    if len(values) != 3 or not all(map(series.is_number, values)):
        return None
    return Point(line["at"], line["task"], generation if isinstance(generation, int) else 0, *values)
