"""Steps, metrics and resources of a run over time."""

from __future__ import annotations

from paceline.client.find import Notify, ignore, refresh
from paceline.view import events, series
from paceline.view.run_folders import Run
from paceline.view.series import Point


def read(run: Run, name: str, task: str = "", notify: Notify = ignore) -> list[Point]:
    """The values of `step`, `steps_per_s`, a metric or a resource, oldest first."""
    refresh(run.folder, notify=notify)
    points = series.read(run.folder, name, task)
    return points or _from_events(run, name, task)


def _from_events(run: Run, name: str, task: str) -> list[Point]:
    """For a run of a version that kept no series, or one that was read from its bucket: the steps in its events."""
    points = []
    for event in events.read(run.folder):
        if event.kind != "step" or task not in ("", event.text("task")):
            continue
        metrics = event.get("metrics")
        value = events.number({**(metrics if isinstance(metrics, dict) else {}), **event.data}.get(name))
        at = events.seconds(event.at)
        if value is not None and at is not None:
            points.append(Point(at, event.text("task"), event.generation, value, value, value))
    return points
