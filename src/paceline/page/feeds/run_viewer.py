"""What one client that looks at a run was sent, and what is new for it."""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

from paceline.page.feeds.run_feed import Point, Row, RunFeed
from paceline.view.output import log_windows, merged_logs, merged_windows
from paceline.view.output.log_windows import Query, Window
from paceline.view.series.point_reduction import Latest
from paceline.view.series.series_parts import is_evaluator
from paceline.view.series.series_query import ALL, MOST_LINES

LINES = 1000  # of output in one message
_POLL_S = 0.4  # for new output
_BEHIND = 4 * 1024 * 1024  # bytes: a client that is further behind skips to the newest lines
_LEAST_LINES, _LEAST_BEHIND = 20, 64 * 1024  # of a task, if there are many
_MOST_EVENTS = 500  # in one message
_MOST_POINTS = 5_000

Changes = list[tuple[str, Any]]


class RunViewer:
    def __init__(
        self,
        feed: RunFeed,
        series: Collection[str] = (),
        tasks: Collection[str] = (),
        output: Output | MergedOutput | None = None,
    ) -> None:
        """`series`: names whose new values are sent, of these tasks; ALL: their mean."""
        self._feed, self._series, self._tasks, self._output = feed, frozenset(series), frozenset(tasks), output
        self._status: object = None
        self._rows: dict[str, Row] | None = None
        self._event = self._point = -1
        self._latest: dict[str, Latest] = {}
        self.poll_s = _POLL_S if output is not None else None

    @property
    def has_more(self) -> bool:
        """Whether more can be sent at once."""
        return self._output is not None and self._output.has_more

    def changes(self) -> Changes:
        feed = self._feed
        is_over = feed.is_over
        with feed.lock:
            changes: Changes = []
            if feed.status is not self._status:
                self._status = feed.status
                changes.append(("status", feed.status))
            changes += self._task_changes()
            changes += self._new_events()
            changes += self._new_points()
        return changes + (self._output.changes(is_over) if self._output is not None else [])

    def _task_changes(self) -> Changes:
        rows, before = self._feed.tasks, self._rows
        self._rows = rows
        if before is None:
            return [("tasks", {"full": True, "tasks": list(rows.values()), "gone": []})]
        changed = [row for name, row in rows.items() if before.get(name) is not row]
        gone = [name for name in before if name not in rows]
        return [("tasks", {"full": False, "tasks": changed, "gone": gone})] if changed or gone else []

    def _new_events(self) -> Changes:
        reader, last = self._feed.reader, self._event
        self._event = reader.count
        if last < 0 or last >= reader.count:
            return []
        new = reader.selected(after=last, limit=_MOST_EVENTS, newest=True)
        skipped = reader.count - last - len(new)
        return [("events", {"events": [each.to_json() for each in new], "skipped": skipped})]

    def _new_points(self) -> Changes:
        feed, last = self._feed, self._point
        self._point = feed.point_count
        if last < 0 or not self._series:
            return []
        tasks = self._tasks or frozenset([*list(feed.tasks)[:MOST_LINES], *feed.reader.joined])
        new: list[Point] = []
        for count, point in reversed(feed.points):
            if count <= last:
                break
            if point["name"] in self._series:
                new.append(point)
        new.reverse()
        points = [point for point in new if point["task"] in tasks][-_MOST_POINTS:]
        points += self._means(new) if ALL in tasks else []
        return [("points", {"points": points})] if points else []

    def _means(self, points: list[Point]) -> list[Point]:
        """One point for each name that has new values: the mean of the last ones of all tasks."""
        newest: dict[str, float] = {}
        for point in points:
            if is_evaluator(point["task"]):
                continue
            value, step = float(point["value"]), point["step"]
            if math.isfinite(value):
                row = point["at"], math.nan if step is None else step, point["generation"], value, value, value
                self._latest.setdefault(point["name"], Latest()).add(row, point["task"])
                newest[point["name"]] = max(point["at"], newest.get(point["name"], 0.0))
        means = []
        for name, newest_at in newest.items():
            mean = self._latest[name].mean(newest_at)
            if mean is not None:
                at, step, generation, value, least, largest = mean
                numbers = {"value": value, "least": least, "largest": largest}
                head = {"name": name, "task": ALL, "at": at, "step": None if math.isnan(step) else int(step)}
                means.append({**head, "generation": int(generation), **numbers})
        return means


class Output:
    """New lines of the output of a task."""

    def __init__(self, path: Path, position: int, share: int = 1) -> None:
        """`position`: from which on lines are sent; -1: the end. `share`: how many tasks are sent."""
        self._path, self._position = path, position
        self._limit, self._behind = max(_LEAST_LINES, LINES // share), max(_LEAST_BEHIND, _BEHIND // share)
        self._seen: object = None
        self.has_more = False

    def changes(self, is_over: bool) -> Changes:
        try:
            status = self._path.stat()
            seen = status.st_ino, status.st_size, is_over
            if seen == self._seen and not self.has_more:
                return []
            window, skipped = self._read(is_over)
        except OSError:
            return []  # again the next time
        self._seen, self._position, self.has_more = seen, window.next, len(window.lines) >= self._limit
        if not window.lines and not skipped:
            return []
        lines = [line.to_json() for line in window.lines]
        task = self._path.stem
        return [("lines", {"task": task, "lines": lines, "next": window.next, "end": window.end, "skipped": skipped})]

    def _read(self, is_final: bool) -> tuple[Window, int]:
        """The next lines, and how many bytes were skipped: those that were deleted, or would take too long to send."""
        first, end = log_windows.limits(self._path)
        position = self._position if self._position >= 0 else end
        skipped = max(0, first - position)
        if end - position - skipped > self._behind:
            window = log_windows.read(self._path, Query(backward=True, limit=self._limit, is_final=is_final))
            return window, max(0, window.begin - position)
        return log_windows.read(self._path, Query(position + skipped, limit=self._limit, is_final=is_final)), skipped


class MergedOutput:
    """New lines of the output of all tasks. Those of a host may arrive late: what was sent is known for each task, so
    that none is missing, though it may not be in order."""

    def __init__(self, folder: Path, position: int) -> None:
        """`position`: from which on lines are sent; -1: the end."""
        self._folder, self._position = folder, position
        self._outputs: dict[str, Output] = {}
        self._is_first = True

    @property
    def has_more(self) -> bool:
        return any(output.has_more for output in self._outputs.values())

    def changes(self, is_over: bool) -> Changes:
        tasks = merged_logs.task_names(self._folder)
        lines: list[dict[str, Any]] = []
        skipped = 0
        for number, task in enumerate(tasks):
            if task not in self._outputs:
                self._outputs[task] = Output(self._folder / f"{task}.log", self._begin(task, number), len(tasks))
            for _, data in self._outputs[task].changes(is_over):
                skipped += data["skipped"]
                for line in data["lines"]:
                    position = merged_windows.position_of(line["at"], number) if line["at"] else self._position
                    self._position = max(self._position, position)
                    lines.append({**line, "task": task, "byte": line["position"], "position": position})
        self._is_first = False
        if not lines and not skipped:
            return []
        lines.sort(key=lambda line: line["position"])
        end = self._position + 1
        return [("lines", {"task": ALL, "lines": lines, "next": end, "end": end, "skipped": skipped})]

    def _begin(self, task: str, number: int) -> int:
        """Of a task that has just started, everything."""
        if not self._is_first:
            return 0
        path = self._folder / f"{task}.log"
        return -1 if self._position < 0 else merged_windows.byte_position(path, number, self._position)


class OutputViewer:
    """A client that gets only output."""

    poll_s = _POLL_S

    def __init__(self, feed: RunFeed, output: Output | MergedOutput) -> None:
        self._feed, self._output = feed, output

    @property
    def has_more(self) -> bool:
        return self._output.has_more

    def changes(self) -> Changes:
        return self._output.changes(self._feed.is_over)
