"""One run, kept up to date while someone looks at it: its status, tasks, events and new values of its series."""

from __future__ import annotations

import socket
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from paceline.agent.resource_usage import series_of
from paceline.client.json_form import finite
from paceline.client.reading import run_status
from paceline.client.reading.refreshed_folder import followed
from paceline.errors import PacelineError
from paceline.page.feeds.feed import Feed
from paceline.page.feeds.run_list import place
from paceline.view.files import run_folders
from paceline.view.files.run_files import is_measurement
from paceline.view.files.run_folders import NoRun, Run
from paceline.view.report import run_report
from paceline.view.series.series_file_parsing import resources_of
from paceline.view.state.events import Event, number, seconds
from paceline.view.state.run_reader import RunReader
from paceline.view.state.run_state import total_steps
from paceline.view.state.status_reader import Standing
from paceline.view.text.option_names import text_of
from paceline.view.text.wording import natural

_POLL_S = 0.5
_STATUS_S = 1.0  # seconds between two calculations of the status while nothing happens
_FOLLOW_AGAIN_S = 30.0
_RECENT = 20_000  # values that a slow client may still get
_WARNINGS = 100
_RESTARTS = 200
_LEFT_OUT = ("tasks", "stacks", "resources", "starts", "metrics")  # of the status: they are large

Point = dict[str, Any]
Row = dict[str, Any]


class RunFeed(Feed):
    def __init__(self, key: str, run: Run) -> None:
        super().__init__(_POLL_S)
        self.key, self.run = key, run
        self.reader = RunReader(run)
        self.status: dict[str, Any] = {}
        self.tasks: dict[str, Row] = {}
        self.points: deque[tuple[int, Point]] = deque(maxlen=_RECENT)
        self.point_count = 0
        self.is_dropped = False
        self._is_first = True
        self._assessed_at = 0.0
        self._following = ExitStack()
        self._has_ended: Callable[[], bool] | None = None
        self._follow_at = 0.0  # when to try again to follow a run on a cluster
        self._notice = ""  # why a run on a cluster is shown in its last known state

    # ---- in the thread of the feed

    def update(self) -> None:
        if not self.run.folder.is_dir() or run_folders.deleted(self.run.folder):
            raise NoRun(f"{self.run.name} was deleted")
        is_over = self._is_over()
        alive = not is_over and run_folders.alive(self.run.folder)
        with self.lock:
            new = self.reader.update(None if self._is_first else self._add_points)
        now = time.monotonic()
        if new or is_over or self._is_first or (alive and now - self._assessed_at > _STATUS_S):
            self._assess(alive)
            self._assessed_at = now
        self._is_first, self.is_over = False, is_over
        if is_over:
            self.publish()

    def _is_over(self) -> bool:
        """Whether the run has ended. A run on a cluster is followed from the second time on: it may take long to
        respond, and the last known state is shown first. If it cannot be reached, that is tried again later."""
        if self._has_ended is None and self._is_first and run_folders.on_cluster(self.run.folder):
            return False
        if self._has_ended is None and time.monotonic() < self._follow_at:
            return False
        try:
            if self._has_ended is None:
                self._notice = ""
                self._has_ended = self._following.enter_context(followed(self.run, True, notify=self._note))
            return self._has_ended()
        except NoRun:
            raise
        except PacelineError as error:
            self._note(error)
            self._following.close()
            self._following, self._has_ended = ExitStack(), None
            self._follow_at = time.monotonic() + _FOLLOW_AGAIN_S
            return False

    def _note(self, text: str | PacelineError) -> None:
        self._notice = text_of(text) if isinstance(text, PacelineError) else text

    def close(self) -> None:
        """The reader remains: what it has read is shown to the next viewer at once."""
        self._following.close()
        self._following, self._has_ended = ExitStack(), None
        if self.is_dropped:
            self.reader.close()

    def drop(self) -> None:
        """Called in the event loop when this feed is not used any more."""
        self.is_dropped = True
        if self.is_idle:
            self.reader.close()
        else:
            self.leave_soon()

    def _assess(self, alive: bool) -> None:
        with self.lock:
            standing = self.reader.standing(alive)
            rows = {row["task"]: row for row in self._rows(standing)}
            tasks = {name: self.tasks[name] if self.tasks.get(name) == row else row for name, row in rows.items()}
            status = self._status(standing, rows)
            if status != self.status or any(self.tasks.get(name) is not row for name, row in tasks.items()):
                self.status, self.tasks = status if status != self.status else self.status, tasks
                self.publish()

    def _rows(self, standing: Standing) -> list[Row]:
        rows: list[Row] = finite(run_status.tasks(standing))
        for row in rows:
            phase = self.reader.timeline.phase(row["task"])
            row["role"] = row["task"].rpartition("-")[0]
            row["phase"], row["since"] = (phase.kind, phase.begin) if phase is not None else (None, None)
            row["host"] = row["host"] or self.reader.hosts.get(row["task"], "")
        return sorted(rows, key=lambda row: natural(row["task"]))

    def _status(self, standing: Standing, rows: dict[str, Row]) -> dict[str, Any]:
        form, state, info = run_status.json_form(standing), standing.state, standing.info
        wanted = [row for name, row in rows.items() if state.is_wanted(name)]
        return {
            **{name: value for name, value in form.items() if name not in _LEFT_OUT},
            "restarts": form["restarts"][-_RESTARTS:] if form.get("restarts") else [],
            "restart_count": len(form.get("restarts") or ()), "key": self.key, "is_live": standing.alive,
            "total_steps": total_steps(state.last_metrics),
            "progress_at": state.progress_at or None, "metrics": finite(dict(state.last_metrics)),
            "warnings": state.warnings[-_WARNINGS:], "problems": [*standing.problems, *filter(None, [self._notice])],
            "job": info.get("job") or state.job, "framework": info.get("framework") or state.framework,
            "strategy": info.get("strategy") or state.strategy, **place(self.run, info),
            "machine": info.get("machine") or socket.gethostname(),
            "task_count": len(wanted), "task_states": dict(Counter(row["state"] for row in wanted)),
            "hosts": sorted({*self.reader.wanted_hosts(), *(row["host"] for row in wanted)} - {""}, key=natural),
            "events": self.reader.count, "next": run_report.next_command(standing.report),
        }  # fmt: skip

    def _add_points(self, event: Event) -> None:
        for point in points_of(event):
            self.point_count += 1
            self.points.append((self.point_count, point))


def points_of(event: Event) -> list[Point]:
    """The values in an event, as series have them."""
    at = seconds(event.at)
    if at is None:
        return []
    if event.kind == "resources":
        return [
            {"name": name, "task": user, "at": at, "step": None, "generation": event.generation, "value": value}
            for user, used in series_of(event.data).items()
            for name, value in resources_of(used).items()
        ]
    if event.kind not in ("step", "evaluated"):
        return []
    step, metrics = event.get("step"), event.get("metrics")
    reported = metrics.items() if isinstance(metrics, dict) else ()
    values = {name: value for name, value in reported if is_measurement(value)}
    if event.kind == "step":
        values |= {name: value for name in ("step", "steps_per_s") if (value := number(event.get(name))) is not None}
    head = {"task": event.text("task"), "at": at, "step": step, "generation": event.generation}
    return [{"name": name, **head, "value": value} for name, value in values.items()]
