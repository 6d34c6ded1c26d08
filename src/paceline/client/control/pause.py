"""Pauses a run, which releases its hosts, and resumes it later; waits until that is complete."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from paceline.agent.captain.ledger import HALTING, NOT_PAUSED, PAUSED, RESUMING, SAVING, STAGES
from paceline.agent.net.frames import Message
from paceline.client.control.stop import is_running
from paceline.client.control.wait import Deadline
from paceline.client.diagnosis.task_requests import LONGEST_REASON, NoReply, ask, names_in
from paceline.client.reading.find_run import Notify, ignore
from paceline.errors import Argument, Call, PacelineError, UsageError
from paceline.storage.snapshots.manifest import parse_id
from paceline.view.files import run_folders
from paceline.view.files.run_folders import Run
from paceline.view.text.wording import join

ANSWER_S = 10.0  # seconds in which a captain replies
POLL_S, CLUSTER_POLL_S = 0.2, 2.0
PATIENCE_S = 60.0  # seconds without a reply while a captain restarts
WITHIN_S = 600.0  # seconds in which a snapshot has to be committed, unless a user states another time
LONGEST_S = 1e9


class NotPaused(PacelineError):
    """The run was not paused and continues: it has committed no new snapshot in time."""


@dataclass(frozen=True)
class Progress:
    """How far a pause is, as the captain sees it."""

    stage: str
    problem: str  # why the last request was not carried out
    is_late: bool  # because no snapshot was committed in time
    snapshot: str | None  # from which the run continues
    step: int  # the highest that was reported
    leaving: tuple[str, ...]  # the first of the hosts that have not left
    missing: tuple[str, ...]  # the first of the hosts that have not joined

    def __str__(self) -> str:
        if self.stage == SAVING:
            return "waiting for a snapshot to be committed"
        if self.stage == HALTING:
            return "waiting for tasks to end"
        if self.stage == PAUSED:
            return f"waiting for {join(self.leaving)} to leave" if self.leaving else "waiting for pods to end"
        return f"waiting for {join(self.missing)}" if self.missing else "waiting for tasks to start"


class Backend(Protocol):
    """What has to be done besides what the captain does."""

    captain_ends_members: bool

    def release_hosts(self, progress: Progress) -> bool:
        """Of a paused run: take the next step; whether all its hosts are released."""

    def are_hosts_released(self, progress: Progress) -> bool: ...

    def are_hosts_gone(self) -> bool:
        """Whether hosts cannot start although the captain may wait for them: one that has lost its notes does not know
        that the run is paused."""

    def get_hosts(self) -> None: ...


def pause(
    run: Run, deadline: Deadline, notify: Notify = ignore, *, now: bool = False, within: float = WITHIN_S
) -> Progress:
    """Returns once the hosts of the run are released. `now`: do not wait for a snapshot. `within`: the seconds in which
    one has to be committed. NotPaused: none was, and the run continues. WaitTimeout: it is still being paused."""
    if not 0 <= within <= LONGEST_S:
        raise UsageError("invalid value", where=Argument("within", within), remedy="use a number of seconds")
    with _backend(run) as backend:
        progress = _ask(run, {"type": "pause", "query": True})
        if progress.stage == PAUSED and backend.are_hosts_released(progress):
            raise PacelineError(f"{run.name} is already paused", remedy=("to continue: ", Call("resume", run.name)))
        releases = backend.captain_ends_members
        progress = _ask(run, {"type": "pause", "within": within, "now": now, "releases": releases})
        last_notice = ""
        while True:
            if progress.stage in (NOT_PAUSED, RESUMING):
                raise _not_paused(run, progress)
            if progress.stage == PAUSED and backend.release_hosts(progress):
                return progress
            last_notice = _notify(progress, last_notice, notify)
            deadline.check("been paused", f"it is still {last_notice}")
            progress = _next(run, "pause", deadline)


def resume(run: Run, deadline: Deadline, notify: Notify = ignore) -> None:
    """Returns once the tasks of the run have been started. WaitTimeout: they have not, and the run still resumes."""
    with _backend(run) as backend:
        progress = _ask(run, {"type": "resume", "query": True})
        if progress.stage == NOT_PAUSED and not backend.are_hosts_gone():
            raise PacelineError(f"{run.name} is not paused", remedy=("see: ", Call("status", run.name)))
        if progress.stage in (SAVING, HALTING, PAUSED):
            progress = _ask(run, {"type": "resume"})
        last_notice = ""
        while True:
            if progress.stage in (SAVING, HALTING, PAUSED):
                raise PacelineError(f"another request has paused {run.name}")
            try:
                backend.get_hosts()
            except PacelineError as error:
                raise error.after(f"{run.name} is being resumed, but its hosts may not start") from error
            if progress.stage == NOT_PAUSED:
                return
            last_notice = _notify(progress, last_notice, notify)
            deadline.check("started its tasks", f"it is still {last_notice}")
            progress = _next(run, "resume", deadline)


def _not_paused(run: Run, progress: Progress) -> PacelineError:
    if not progress.problem:
        return PacelineError(f"{run.name} was not paused: another request has resumed it")
    if not progress.is_late:
        return PacelineError(f"{run.name} was not paused: {progress.problem}")
    snapshot = parse_id(progress.snapshot) if progress.snapshot else None
    origin = f"from step {snapshot.step}" if snapshot else "from the beginning, as it has no snapshot"
    remedy = (
        "set a longer ",
        Argument("within"),
        "; or use ",
        Argument("now", True),
        f": the run then continues later {origin}",
    )
    return NotPaused(f"{run.name} was not paused and continues: {progress.problem}", remedy=remedy)


def _notify(progress: Progress, last: str, notify: Notify) -> str:
    if str(progress) != last:
        notify(str(progress))
    return str(progress)


def _next(run: Run, kind: str, deadline: Deadline) -> Progress:
    """The progress a moment later; the captain may restart in between."""
    silent_since = 0.0
    while True:
        pause = CLUSTER_POLL_S if run_folders.on_cluster(run.folder) else POLL_S
        time.sleep(max(0.0, min(pause, deadline.remaining)))
        try:
            return _ask(run, {"type": kind, "query": True})
        except NoReply:
            silent_since = silent_since or time.monotonic()
            if time.monotonic() - silent_since > PATIENCE_S:
                raise


def _ask(run: Run, request: Message) -> Progress:
    if not is_running(run):
        action = "resumed" if request["type"] == "resume" else "paused"
        remedy = ("see: ", Call("status", run.name))
        raise PacelineError(f"{run.name} cannot be {action}: it is not running", remedy=remedy)
    for message in ask(run, request, ANSWER_S):
        stage: Any = message.get("stage")
        step, snapshot = message.get("step"), message.get("snapshot")
        if stage in STAGES and type(step) is int:
            return Progress(
                stage, str(message.get("problem") or "")[:LONGEST_REASON], message.get("late") is True,
                snapshot if isinstance(snapshot, str) else None, step,
                names_in(message, "leaving"), names_in(message, "missing"),
            )  # fmt: skip
    raise PacelineError(f"the captain of {run.name} sent an invalid reply")


# ---- backends


@contextmanager
def _backend(run: Run) -> Iterator[Backend]:
    if not run_folders.on_cluster(run.folder):
        yield _Local(run)
        return
    if not is_running(run):  # before its Jobs are asked for
        yield _Local(run)
        return
    from paceline.backends.kubernetes.runs.local_folder import reopen

    with closing(reopen(run.folder)) as running:
        yield _OnCluster(run, running.cluster)


class _Local:
    captain_ends_members = True

    def __init__(self, run: Run) -> None:
        self._run = run

    def release_hosts(self, progress: Progress) -> bool:
        return not progress.leaving

    def are_hosts_released(self, progress: Progress) -> bool:
        return not progress.leaving

    def are_hosts_gone(self) -> bool:
        return False

    def get_hosts(self) -> None:
        from paceline.backends.local.scale_request import start_hosts

        start_hosts(self._run.folder)


class _OnCluster:
    """A member that exits with 0 would complete its Job, so pods are ended by suspending it."""

    captain_ends_members = False

    def __init__(self, run: Run, cluster: Any) -> None:
        self._run, self._cluster = run, cluster

    def release_hosts(self, progress: Progress) -> bool:
        from paceline.backends.kubernetes.runs.job_suspension import suspend

        return suspend(self._cluster, self._run.name)

    def are_hosts_released(self, progress: Progress) -> bool:
        from paceline.backends.kubernetes.runs.job_suspension import is_suspended

        return is_suspended(self._cluster, self._run.name)

    def are_hosts_gone(self) -> bool:
        from paceline.backends.kubernetes.runs.job_suspension import is_any_suspended

        return is_any_suspended(self._cluster, self._run.name)

    def get_hosts(self) -> None:
        from paceline.backends.kubernetes.runs.job_suspension import unsuspend

        unsuspend(self._cluster, self._run.name)
