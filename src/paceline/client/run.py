"""A run as a Python object: its status, events, output, numbers and snapshots, and how to end it."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.client.control.wait import Deadline, WaitTimeout
from paceline.client.json_form import versioned
from paceline.client.reading.find_run import Target, find_run, refresh
from paceline.errors import Argument, Call, PacelineError
from paceline.view.files import run_folders

if TYPE_CHECKING:
    from paceline.client.control.deletion import Deleted
    from paceline.client.diagnosis.profile import Profile
    from paceline.client.diagnosis.stacks import Stacks
    from paceline.client.reading.run_status import Status
    from paceline.client.snapshots.run_snapshots import Snapshot

# Without a handler of the program, nothing is printed.
_logger = logging.getLogger("paceline.client")
_logger.addHandler(logging.NullHandler())


def log_note(text: str | PacelineError) -> None:
    _logger.warning("%s", text)


@dataclass(frozen=True)
class Event:
    """Something that happened in a run."""

    at: str
    """When it happened: ISO 8601, in UTC."""
    kind: str
    """What happened, such as `step`, `restart` or `committed`; see [events.schema.json](events.schema.json)."""
    generation: int
    """The generation in which it happened."""
    data: dict[str, Any]
    """All fields of the event."""

    def to_dict(self) -> dict[str, Any]:
        """The same as a line of `paceline events -o json`."""
        return versioned(self.data)

    def __str__(self) -> str:
        from paceline.view.state import events
        from paceline.view.text import wording

        return wording.describe(events.Event(self.at, self.kind, self.generation, self.data))


@dataclass(frozen=True)
class LogLine:
    """A line that a task has printed. `str()` is its text."""

    at: str
    """When it was printed: ISO 8601, in UTC."""
    task: str
    """The task that printed it."""
    generation: int
    """The generation in which it was printed."""
    text: str
    """The line."""

    def to_dict(self) -> dict[str, Any]:
        """The same as a line of `paceline logs -o json`."""
        return versioned(vars(self))

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Point:
    """One value of a series, or a summary of the values within 10 s or 5 min."""

    at: float
    """Seconds since 1970."""
    task: str
    """The task or host that reported it."""
    generation: int
    """The generation that reported it."""
    value: float
    """The value, or the mean of several."""
    least: float
    """The smallest of several values."""
    largest: float
    """The largest of several values."""

    def to_dict(self) -> dict[str, Any]:
        """The fields as a dictionary for JSON."""
        return versioned(vars(self))


def _names(task: str | Sequence[str]) -> tuple[str, ...]:
    return (task,) if isinstance(task, str) else tuple(task)


class Run:
    """A run of a job, on this machine or on a cluster. Several threads may use it at the same time.

    A run that was submitted to a cluster, or found with `on="kubernetes"`, belongs to that cluster even if `KUBECONFIG`
    or the current context changes later. A `timeout` also ends requests to a cluster and its credential plugin: the
    call takes at most a few seconds longer, unless the name of the server cannot be resolved.
    """

    def __init__(
        self, id: str, target: Target | None = None, folder: Path | None = None, notes: Sequence[str] = ()
    ) -> None:
        self._id, self._target, self._folder, self._notes = id, target or Target(), folder, tuple(notes)
        self._lock = threading.Lock()

    @property
    def id(self) -> str:
        """The id of the run, such as `digits-3f9a`."""
        return self._id

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks from its submission, such as the address of TensorBoard; empty for other runs."""
        return self._notes

    @property
    def folder(self) -> Path:
        """The folder of the run on this machine."""
        return self._run().folder

    def _run(self, deadline: Deadline | None = None) -> run_folders.Run:
        """The folder of a run on a cluster is created when it is needed first."""
        run = self._run_or_remains(deadline)
        if run_folders.deleted(run.folder):
            raise run_folders.NoRun(f"{self._id} was deleted")
        return run

    def _run_or_remains(self, deadline: Deadline | None = None) -> run_folders.Run:
        """Also a deleted run whose snapshots were kept."""
        folder = self._folder or self._find_folder(deadline or Deadline(self._id))
        if not folder.is_dir():
            raise run_folders.NoRun(f"{self._id} was deleted")
        return run_folders.Run(self._id, folder, self._target.endpoint)

    def _find_folder(self, deadline: Deadline) -> Path:
        if not self._lock.acquire(timeout=max(0.0, min(deadline.remaining, threading.TIMEOUT_MAX))):
            raise deadline.error("been found")
        try:
            if self._folder is None:
                self._folder = find_run(self._id, self._target, until=deadline.until).folder
            return self._folder
        except PacelineError:
            deadline.check("been found")
            raise
        finally:
            self._lock.release()

    def status(self) -> Status:
        """The status of the run and its tasks. On a cluster that cannot be reached: the last known one."""
        from paceline.client.reading import run_status

        return run_status.status_of(run_status.read(self._run(), log_note))

    def events(self, follow: bool = False, timeout: float | None = None) -> Iterator[Event]:
        """The events of the run, oldest first. `follow`: also those to come, until the run ends.

        `timeout`: seconds until `WaitTimeout` is raised if the run has not ended.
        """
        from paceline.client.reading import run_events

        deadline = Deadline(self._id, timeout)
        for batch in run_events.read(self._run(deadline), follow, deadline, log_note):
            for event, _ in batch:
                yield Event(event.at, event.kind, event.generation, event.data)

    def logs(
        self,
        task: str | Sequence[str] = (),
        *,
        follow: bool = False,
        timeout: float | None = None,
        since: str | None = None,
        grep: str | None = None,
        tail: int | None = None,
        generation: int | None = None,
    ) -> Iterator[LogLine]:
        """The output of the run's tasks, in time order. `follow`: also what is printed until the run ends.

        `task`: only these tasks or roles. `since`: only lines newer than an age (`"10m"`) or a date and time. `grep`:
        only lines that contain a match of this regular expression. `tail`: only the last lines. `timeout`: seconds
        until `WaitTimeout` is raised if the run has not ended.
        """
        from paceline.client.reading import run_logs

        tasks = _names(task)
        selection = run_logs.select(generation, grep, tail)
        deadline = Deadline(self._id, timeout)
        lines = run_logs.read(
            self._run(deadline), tasks, follow=follow, deadline=deadline, since=since, tail=tail, selection=selection,
            notify=log_note,
        )  # fmt: skip
        return (LogLine(line.at, line.task, line.generation, line.text) for line in lines)

    def series(self, name: str, task: str = "") -> list[Point]:
        """The values of a metric over time, oldest first, or of `step`, `steps_per_s` or a resource such as `cpu`.

        `task`: only of this task or host.
        """
        from paceline.client.reading import run_series

        points = run_series.read(self._run(), name, task, log_note)
        return [Point(each.at, each.task, each.generation, each.mean, each.least, each.largest) for each in points]

    def snapshots(self, include_superseded: bool = False) -> list[Snapshot]:
        """The committed snapshots of the run, newest first.

        `include_superseded`: also those from which no restart would start.
        """
        from paceline.client.snapshots import run_snapshots, run_store

        run = self._run()
        refresh(run, notify=log_note)
        with closing(run_store.open_run(run, log_note)) as source:
            return run_snapshots.listed(source, include_superseded)

    def copy_snapshot(self, to: str | os.PathLike[str], snapshot: str | None = None) -> Path:
        """Copies a snapshot to a folder, which must be new or empty, and verifies it. Returns the folder.

        `snapshot`: its name or step, or `"best"`; default: the newest.
        """
        from paceline.client.snapshots import run_store
        from paceline.client.snapshots.snapshot_lookup import find_snapshot
        from paceline.view.snapshots import snapshot_listing

        folder = Path(to).expanduser().absolute()
        with closing(run_store.open_run(self._run(), log_note)) as source:
            manifest = source.reader.manifest(find_snapshot(source, source.reader.inventory(), snapshot))
            snapshot_listing.copy(source.transfers, manifest, folder, lambda _: True)
        return folder

    def stacks(self, task: str | Sequence[str] = (), seconds: float = 0.0) -> Stacks:
        """What the tasks do at the moment: the Python stacks of all their threads.

        `task`: only these tasks or roles. `seconds`: take samples for that time.
        """
        from paceline.client.diagnosis.stacks import Stacks, take

        run = self._run()
        refresh(run, notify=log_note)
        return Stacks(self._id, tuple(take(run, _names(task), seconds)))

    def profile(
        self,
        task: str | Sequence[str] = (),
        *,
        steps: int = 20,
        timeout: float = 120.0,
        to: str | os.PathLike[str] | None = None,
    ) -> Profile:
        """Profiles the next steps with the framework's own profiler, and returns the files, which TensorBoard can show.

        `task`: only these tasks or roles; default: all that train. `timeout`: time limit for the steps in seconds, up
        to 3600; if it is reached, the profile contains the steps completed so far. `to`: a folder to copy the files
        to; default: `tensorboard` in the run's folder.
        """
        from paceline.client.diagnosis.profile import Profile, profile_folder, take

        run = self._run()
        refresh(run, notify=log_note)
        folder = None if to is None else Path(to).expanduser().absolute()
        tasks = take(run, _names(task), steps, timeout, folder)
        return Profile(self._id, profile_folder(run, folder), tuple(tasks))

    def wait(self, timeout: float | None = None, until: str = "ended") -> Status:
        """Waits until the run has ended and returns its status.

        A failed run raises no exception: see `Status.succeeded`.

        `until`: wait for another condition: `"step=1000"`, `"snapshot"` or `"snapshot=1000"`; `EndedBefore` is raised
        if the run ends before it. `timeout`: seconds until `WaitTimeout` is raised; the run continues.
        """
        from paceline.client.control.wait import parse_condition, wait
        from paceline.client.reading import run_status

        condition, deadline = parse_condition(until), Deadline(self._id, timeout)
        return run_status.status_of(wait(self._run(deadline), condition, deadline, log_note))

    def scale(self, *, timeout: float | None = None, **hosts: int) -> Status:
        """Changes the number of hosts of a role, as in `run.scale(worker=6)`, waits until the group trains with that
        many, and returns the status of the run. See [elastic runs](elastic.md#scale-a-run).

        `timeout`: seconds until `WaitTimeout` is raised; the change continues. `UsageError`: the role cannot have that
        many hosts.
        """
        from paceline.client.control.scale import scale

        deadline = Deadline(self._id, timeout)
        run = self._run(deadline)
        refresh(run, notify=log_note)
        scale(run, hosts, deadline)
        return self.status()

    def pause(self, *, now: bool = False, within: float = 600.0, timeout: float | None = None) -> Status:
        """Pauses the run: its tasks take a snapshot and end, and its hosts are released until `resume`. Returns its
        status. See [elastic runs](elastic.md#pause-a-run).

        `within`: if no new snapshot is committed within this many seconds, `NotPaused` is raised, and the run
        continues. `now`: do not wait for one: steps since the newest snapshot are repeated. `timeout`: seconds until
        `WaitTimeout` is raised; the run is still being paused (on a cluster, call `pause()` again to release its pods).
        """
        from paceline.client.control.pause import pause

        deadline = Deadline(self._id, timeout)
        run = self._run(deadline)
        refresh(run, notify=log_note)
        pause(run, deadline, now=now, within=within)
        return self.status()

    def resume(self, *, timeout: float | None = None) -> Status:
        """Continues a run that was paused, from its newest snapshot, waits until its tasks have been started, and
        returns its status.

        `timeout`: seconds until `WaitTimeout` is raised; the run is resumed anyway.
        """
        from paceline.client.control.pause import resume

        deadline = Deadline(self._id, timeout)
        run = self._run(deadline)
        refresh(run, notify=log_note)
        resume(run, deadline)
        return self.status()

    def stop(self, now: bool = False) -> Status:
        """Stops the run, waits until it has ended and returns its status. Its tasks get the job's grace period.

        `now`: kill its tasks immediately. Raises `WaitTimeout` if the run is still running well after the grace period.
        """
        from paceline.client.control.stop import API_REASON, is_running, stop

        run = self._run()
        refresh(run, notify=log_note)
        if is_running(run) and not stop(run, now, reason=API_REASON):
            raise WaitTimeout(f"{self._id} is still running", remedy=("see: ", Call("status", self._id)))
        return self.status()

    def delete(self, snapshots: bool = False, force: bool = False) -> Deleted:
        """Deletes the run with its logs and TensorBoard files. Its snapshots are kept, unless `snapshots` is true.

        `force`: kill a run that is still running, remove a run from this machine even if its cluster is unreachable,
        and delete snapshots that cannot be kept because they are in the captain's pod.
        """
        from paceline.client.control import deletion

        run = self._run_or_remains()
        if run_folders.deleted(run.folder) and not snapshots:
            remedy = ("`", Call("delete", self._id, (Argument("snapshots", True),)), "` deletes them")
            raise run_folders.NoRun(f"{self._id} was deleted, except for its snapshots", remedy=remedy)
        refresh(run, notify=log_note)
        deletion.refuse_running([run], [], force)
        if not snapshots and not force and deletion.loses_snapshots(run):
            copy = Call("copy_snapshot", self._id, (Argument("to"),))
            raise deletion.NotDeleted(
                f"the snapshots of {self._id} are in its captain's pod, and would be deleted with it",
                remedy=("copy one with `", copy, "`, or use ", Argument("snapshots", True)),
            )
        separate = deletion.separate_snapshots(run, log_note) if snapshots else None
        return deletion.delete_run(run, snapshots, separate, force)

    def watch(self, timeout: float | None = None) -> None:
        """Shows a table of the run in a notebook, and updates it until the run ends or the cell is interrupted.

        `timeout`: seconds until `WaitTimeout` is raised.
        """
        from paceline.client.notebooks.live_table import watch

        watch(self, timeout)

    def to_dict(self) -> dict[str, Any]:
        """The same as `paceline status -o json`."""
        return self.status().to_dict()

    def __repr__(self) -> str:
        return f"<Run {self._id}>"

    def _repr_html_(self) -> str:
        """What this machine knows: a notebook calls this on its own, so that it must neither fail nor ask a cluster."""
        from paceline.client.notebooks import html
        from paceline.client.reading import run_status
        from paceline.view.state import status_reader

        folder, where = self._folder, self._target  # without the lock, which a thread that asks the cluster may hold
        try:
            if folder is None:
                text = f"in namespace {where.namespace} (context {where.context})" if where.is_cluster else ""
                return html.of_run(self._id, text)
            if not folder.is_dir() or run_folders.deleted(folder):
                return html.of_run(self._id, "was deleted")
            status = run_status.status_of(status_reader.read(run_folders.Run(self._id, folder)))
            is_old = status.is_running and run_folders.on_cluster(folder)
            return html.of_status(status, "last known state; status() asks the cluster" if is_old else "")
        except Exception:  # files that another process deletes in the meantime, or that are damaged
            return html.of_run(self._id)
