"""Threads that read one run for its screen, so that the screen never waits for a disk, a cluster or a store."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, replace

from paceline.agent.event_file import OLD
from paceline.client.reading.find_run import refresh
from paceline.client.reading.refreshed_folder import followed
from paceline.client.reading.run_series import from_events
from paceline.client.run import Run
from paceline.client.snapshots.run_snapshots import Snapshot
from paceline.errors import PacelineError
from paceline.view.files import run_folders
from paceline.view.files.run_folders import NoRun
from paceline.view.output.framework_noise import is_noise
from paceline.view.output.merged_logs import Line, Logs
from paceline.view.output.progress_bar_display import ProgressBars
from paceline.view.output.tail import Tail
from paceline.view.series import points as series
from paceline.view.state import events
from paceline.view.state.event_limits import EventLimits
from paceline.view.state.status_reader import StatusReader
from paceline.view.text.option_names import text_of
from paceline.watch.curves import Curve
from paceline.watch.history import KINDS, History
from paceline.watch.run_data import STEPS_PER_S, leading_task, main_metric, run_data
from paceline.watch.run_screen_model import CurveData, RunData
from paceline.watch.tables import shortened

STATE_EVERY_S = 0.5
IDLE_EVERY_S = 1.0  # of a run that has ended
OUTPUT_EVERY_S = 0.25
STORE_EVERY_S = 60.0
STORE_PAUSE_S = 10.0  # at least, even if snapshots are committed more often
RETRY_S = 5.0
KEPT_LINES = 5000  # of the output, in memory
SERIES_LIMIT = 48 * 1024 * 1024  # bytes of the series that are read: of a month, the newest part and samples
EVENTS_LIMIT = 100_000  # steps in events that are read if there are no series
DELETED = "deleted"


@dataclass(frozen=True)
class Output:
    """The newest output. `first`: how many lines came before these."""

    lines: tuple[Line, ...] = ()
    first: int = 0
    note: str = ""


class RunReader:
    """Reads a run until it is closed. `changed` is called in other threads, whenever `data` or `output` is new."""

    def __init__(self, run: Run, changed: Callable[[], None]) -> None:
        self.run = run
        self.data: RunData | None = None
        self.output = Output()
        self.problem = ""  # the run cannot be read at all
        self.bug: Exception | None = None  # for the thread of the screen to raise
        self._changed = changed
        self._closing, self._wake = threading.Event(), threading.Event()
        self._history = History()
        self._stored: list[Snapshot] | None = None
        self._gone: frozenset[str] = frozenset()  # snapshots that the store no longer has
        self._notes: dict[str, str] = {}  # by what is missing
        self._curves = _Curves()
        self._store_due = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        self._start(self._read_state)

    def close(self) -> None:
        self._closing.set()
        self._wake.set()
        self._store_due.set()
        until = time.monotonic() + 0.3
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))  # one that waits for a cluster ends later

    def _start(self, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=self._guarded, args=(target,), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _guarded(self, target: Callable[[], None]) -> None:
        try:
            target()
        except (PacelineError, OSError) as error:
            self._notes[target.__name__] = text_of(error)
            self.problem = self.problem or (text_of(error) if self.data is None else "")
            self._changed()
        except Exception as error:
            self.bug = error
            self._changed()

    # ---- its state

    def _read_state(self) -> None:
        record = run_folders.Run(self.run.id, self.run.folder)
        with closing(StatusReader(record, self._add)) as reader:
            self._publish(reader)
            self._start(self._read_output)
            self._start(self._read_store)
            if run_folders.on_cluster(record.folder):
                self._start(self._follow)
            self._read_old_events()
            while not self._closing.is_set() and (self.data is None or self.data.status != DELETED):
                took = RETRY_S
                try:
                    began = time.monotonic()
                    self._publish(reader)
                    took = time.monotonic() - began
                    self._notes.pop("files", None)
                    if self._read_curves():
                        self._publish(reader)
                except (PacelineError, OSError) as error:  # such as a file server that does not respond
                    self._notes["files"] = text_of(error)
                is_alive = self.data is not None and self.data.is_alive
                self._wake.wait(max(STATE_EVERY_S if is_alive else IDLE_EVERY_S, min(5 * took, RETRY_S)))
                self._wake.clear()

    def _publish(self, reader: StatusReader) -> None:
        try:
            _ = self.run.folder
        except NoRun:
            known = self.data or RunData(self.run.id, DELETED)
            ended = known.ended or time.time()
            self.data = replace(known, status=DELETED, reason="this run was deleted", is_alive=False, ended=ended)
        else:
            standing = reader.read()
            lead = leading_task(standing.state)
            if lead is not None:
                self._curves.select(lead.name, main_metric(list(lead.metrics)))
            notes = tuple(self._notes.values())
            self.data = run_data(standing, self._history, self._curves.data(), self._stored, self._gone, notes)
        self._changed()

    def _add(self, event: events.Event) -> None:
        self._history.add(event)
        if event.kind == "step":
            self._curves.add(event)
        elif event.kind in ("committed", "evaluated"):
            self._store_due.set()

    def _read_old_events(self) -> None:
        """What happened before events.jsonl begins."""
        markers = [f'"event": "{kind}"'.encode() for kind in KINDS]
        folder, limits = self.run.folder, EventLimits()
        if not (folder / OLD).exists():
            return
        with closing(Tail(folder / OLD)) as tail:
            while (lines := tail.read()) and not self._closing.is_set():
                for line in lines:
                    event = events.parse(line) if any(marker in line for marker in markers) else None
                    if event is not None and limits.admit(event):
                        self._history.add(event)

    def _read_curves(self) -> bool:
        """The series of the past, once the leading task is known. Returns whether they were read."""
        task, names = self._curves.unread()
        if not task:
            return False
        is_known = False
        for points in series.read_some(self.run.folder, names, task, SERIES_LIMIT):
            is_known = is_known or any(points.values())
            self._curves.add_earlier(task, points)
            if self._closing.wait(0.001):  # lets the screen react
                return False
        for name in () if is_known else names:
            self._curves.add_earlier(task, {name: from_events(self._record(), name, task, EVENTS_LIMIT)})
        return True

    # ---- the cluster

    def _follow(self) -> None:
        """Keeps the folder of a run on a cluster up to date; fetches the output of one that has ended."""
        folder = self.run.folder
        if not run_folders.alive(folder):
            hosts = {str(task["host"]) for task in run_folders.plan(folder).get("tasks", ()) if "host" in task}
            refresh(self._record(), hosts, self._note_cluster)
            return
        while not self._closing.is_set():
            try:
                with followed(self._record(), follow=True, notify=self._note_cluster) as has_ended:
                    while not self._closing.wait(0.5):
                        if has_ended():
                            return
                        if run_folders.alive(self.run.folder):
                            self._notes.pop("cluster", None)
            except PacelineError as error:
                self._note_cluster(error)
                self._closing.wait(RETRY_S)

    def _note_cluster(self, text: str | PacelineError) -> None:
        self._notes["cluster"] = text_of(text) if isinstance(text, PacelineError) else text

    def _record(self) -> run_folders.Run:
        return run_folders.Run(self.run.id, self.run.folder)

    # ---- its snapshots

    def _read_store(self) -> None:
        while not self._closing.is_set():
            self._store_due.clear()
            known = {snapshot.name for snapshot in self.data.snapshots} if self.data is not None else set()
            try:
                self._stored = self.run.snapshots()
                self._gone |= known - {snapshot.name for snapshot in self._stored}
                self._notes.pop("store", None)
            except (PacelineError, OSError) as error:
                self._stored = None
                self._notes["store"] = f"snapshots are shown from events only: {text_of(error)}"
            self._wake.set()
            if self.data is not None and self.data.status == DELETED:
                return
            self._store_due.wait(STORE_EVERY_S)
            self._closing.wait(STORE_PAUSE_S)

    # ---- its output

    def _read_output(self) -> None:
        folder = self.run.folder
        tasks = max(1, len(self.data.tasks) if self.data is not None else 1)
        with closing(OutputReader(Logs(folder), max(5, 2000 // tasks), hide_noise=True)) as reader:
            is_new = True
            while not self._closing.is_set():
                if is_new:
                    self.output = reader.output()
                    self._changed()
                self._closing.wait(OUTPUT_EVERY_S)
                is_new = reader.read()


class OutputReader:
    """Keeps the newest lines of logs, shortened. States of a progress bar replace each other."""

    def __init__(self, logs: Logs, tail: int, hide_noise: bool = False) -> None:
        self._logs, self._hide_noise = logs, hide_noise
        self._lines: deque[Line] = deque(maxlen=KEPT_LINES)
        self._count = 0
        self._bars = ProgressBars(live=True)
        logs.skip_to_last(tail)
        self._add(logs.backlog())

    def read(self) -> bool:
        """Whether there is anything new."""
        before = self._count, self._bars.states()
        self._add(self._logs.more())
        return before != (self._count, self._bars.states())

    def output(self) -> Output:
        lines = (*self._lines, *self._bars.states())
        return Output(lines, self._count - len(self._lines), "; ".join(self._logs.problems[:1]))

    def _add(self, lines: Iterable[Line]) -> None:
        for line in lines:
            if self._hide_noise and is_noise(line.text):
                continue
            for each in self._bars.add(replace(line, text=shortened(line.text))):
                self._lines.append(each)
                self._count += 1

    def close(self) -> None:
        self._logs.close()


class _Curves:
    """The curves of the leading task: its main metric, and its speed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._task, self._metric = "", ""
        self._is_read = False
        self._curves: dict[str, Curve] = {}

    def select(self, task: str, metric: str) -> None:
        with self._lock:
            if (task, metric) != (self._task, self._metric):
                self._task, self._metric, self._is_read = task, metric, False
                self._curves = {name: Curve() for name in (metric, STEPS_PER_S) if name}

    def add(self, event: events.Event) -> None:
        at = events.seconds(event.at)
        if event.text("task") != self._task or at is None:
            return
        reported = event.get("metrics")
        values = {**(reported if isinstance(reported, dict) else {}), STEPS_PER_S: event.get(STEPS_PER_S)}
        with self._lock:
            for name, curve in self._curves.items():
                value = events.number(values.get(name))
                if value is not None:
                    curve.add(at, value)

    def unread(self) -> tuple[str, list[str]]:
        """The task and the names whose past is not known yet; an empty task: none."""
        with self._lock:
            if self._is_read or not self._task:
                return "", []
            self._is_read = True
            return self._task, list(self._curves)

    def add_earlier(self, task: str, points: dict[str, list[series.Point]]) -> None:
        with self._lock:
            for name, each in points.items() if task == self._task else ():
                if name in self._curves:
                    self._curves[name].add_earlier((point.at, point.mean) for point in each)

    def data(self) -> list[CurveData]:
        with self._lock:
            return [CurveData(name, tuple(curve.points)) for name, curve in self._curves.items()]
