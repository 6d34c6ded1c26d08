"""Steps, metrics and resources of a run over time."""

from __future__ import annotations

from collections import deque

from paceline.client.reading.find_run import Notify, ignore, refresh
from paceline.view.files.run_folders import Run
from paceline.view.series import points as series
from paceline.view.series.points import Point
from paceline.view.state import events


def read(run: Run, name: str, task: str = "", notify: Notify = ignore) -> list[Point]:
    """The values of `step`, `steps_per_s`, a metric or a resource, oldest first."""
    refresh(run, notify=notify)
    points = series.read(run.folder, name, task)
    return points or from_events(run, name, task)


def from_events(run: Run, name: str, task: str, most: int | None = None) -> list[Point]:
    """For a run of a version that kept no series, or one that was read from its bucket: the steps in its events.
    `most`: how many; the newest."""
    points: deque[Point] = deque(maxlen=most)
    for event in events.read(run.folder):
        if event.kind != "step" or task not in ("", event.text("task")):
            continue
        metrics = event.get("metrics")
        value = events.number({**(metrics if isinstance(metrics, dict) else {}), **event.data}.get(name))
        at = events.seconds(event.at)
        if value is not None and at is not None:
            points.append(Point(at, event.text("task"), event.generation, value, value, value))
    return list(points)
