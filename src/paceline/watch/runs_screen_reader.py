"""A thread that lists runs for the screen of all runs, newest first."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.client.reading.find_run import Target, refresh_all
from paceline.client.run_listing import on_cluster
from paceline.errors import PacelineError
from paceline.view.files import run_folders
from paceline.view.state import status_reader
from paceline.view.text.option_names import text_of
from paceline.watch.runs_model import RunSummary, summary_of

EVERY_S = 1.0
CLUSTER_EVERY_S = 5.0  # each update asks the API server
FIRST = 40  # runs that are shown before the others are read


class RunsReader:
    """`changed` is called in another thread, whenever `runs` is new."""

    def __init__(self, target: Target, changed: Callable[[], None]) -> None:
        self.runs: tuple[RunSummary, ...] | None = None
        self.problem = ""
        self.bug: Exception | None = None  # for the thread of the screen to raise
        self._target, self._changed = target, changed
        self._closing = threading.Event()
        self._ended: dict[str, tuple[float, RunSummary]] = {}  # runs that have ended, with the time of their report
        self._thread = threading.Thread(target=self._read, daemon=True)

    def start(self) -> None:
        self._thread.start()
        if not self._target.is_cluster:
            threading.Thread(target=self._refresh, daemon=True).start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join(0.5)

    def _read(self) -> None:
        while not self._closing.is_set():
            began = time.monotonic()
            try:
                if self._target.is_cluster:
                    self._publish([summary_of(report) for report in on_cluster(self._target)])
                else:
                    self._read_known()
                self.problem = ""
            except (PacelineError, OSError) as error:
                self.problem = text_of(error)
                self._changed()
            except Exception as error:
                self.bug = error
                self._changed()
                return
            took = time.monotonic() - began
            self._closing.wait(
                max(CLUSTER_EVERY_S if self._target.is_cluster else EVERY_S, min(10 * took, CLUSTER_EVERY_S))
            )

    def _read_known(self) -> None:
        runs = run_folders.all_runs()
        summaries: list[RunSummary] = []
        for number, run in enumerate(runs):
            if self._closing.is_set():
                return
            if number == FIRST and self.runs is None:
                self._publish(summaries)
            summaries.append(self._summary(run))
        self._publish(summaries)

    def _summary(self, run: run_folders.Run) -> RunSummary:
        """A run that has ended is not read again, unless its report changes."""
        changed_at = _changed_at(run.folder / "report.json")
        known = self._ended.get(run.name)
        if changed_at is not None and known is not None and known[0] == changed_at:
            return known[1]
        report: dict[str, Any] = status_reader.summary(run)
        where = str(run_folders.info(run.folder).get("on") or "")
        summary = summary_of(report, where="" if where == "local" else where)
        if changed_at is not None and not run_folders.alive(run.folder):
            self._ended[run.name] = changed_at, summary
        return summary

    def _publish(self, runs: list[RunSummary]) -> None:
        self.runs = tuple(runs)
        self._changed()

    def _refresh(self) -> None:
        """Updates the folders of runs on clusters."""
        while not self._closing.wait(CLUSTER_EVERY_S if self.runs is not None else 0.0):
            try:
                refresh_all([run for run in run_folders.all_runs() if run_folders.on_cluster(run.folder)])
            except (PacelineError, OSError) as error:
                self.problem = text_of(error)
            if self.runs is None:
                self._closing.wait(EVERY_S)


def _changed_at(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None
