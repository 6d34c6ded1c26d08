"""The folders of runs: lists them, and determines whether a run is still active."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import USAGE, Argument, Call, PacelineError
from paceline.view.files import run_files
from paceline.view.files.run_files import DamagedRun


class NoRun(PacelineError):
    """The run does not exist; the message suggests others."""

    exit_code = USAGE


class RunExists(PacelineError):
    """The id belongs to another run on this machine."""

    exit_code = USAGE


class NoHome(PacelineError):
    """There is no folder for the files of this user."""

    exit_code = USAGE


DELETED = "deleted"  # marks the folder of a deleted run whose snapshots remain
LOCATION = "place"  # `on` of a run that this machine knows only by the location of its snapshots
JOB_DELETED = "job-deleted"  # `cause` of a run whose Job no longer exists, so that its outcome is unknown
JOB_DELETED_REASON = "its Job no longer exists on the cluster: a user deleted it, or limits.keep_finished has passed"
STARTING_S = 15.0  # seconds until a run without events and without a supervisor was never started
COPY_LIMIT = 4 * 1024**3  # bytes of output of another user's run that are copied to this machine
JSON_LIMIT = 16 * 1024**2  # bytes of its plan or its report, which readers parse again and again


@dataclass(frozen=True)
class Run:
    name: str
    folder: Path
    endpoint: str = ""  # the server of its bucket that the user has chosen; empty: that of its job or the environment


def home() -> Path:
    configured = os.environ.get("PACELINE_HOME")
    try:
        return Path(configured).expanduser().absolute() if configured else Path.home() / ".local" / "state" / "paceline"
    except RuntimeError:
        raise NoHome("this user has no home folder", remedy="set HOME, or PACELINE_HOME to a folder for runs") from None


def runs_folder() -> Path:
    return home() / "runs"


def all_runs() -> list[Run]:
    """All runs, newest first."""
    return [run for run in _folders() if not deleted(run.folder)]


def deleted_runs() -> list[Run]:
    """Deleted runs whose snapshots remain."""
    return [run for run in _folders() if deleted(run.folder)]


def deleted(folder: Path) -> bool:
    return _exists(folder / DELETED)


def _exists(path: Path) -> bool:
    """False also for a file in a folder that this user cannot read."""
    try:
        return path.exists()
    except OSError:
        return False


def _folders() -> list[Run]:
    try:
        with os.scandir(runs_folder()) as entries:
            runs = [Run(e.name, Path(e.path)) for e in entries if _is_run(e)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise NoRun(f"cannot read the folder of runs: {error.strerror}", where=str(runs_folder())) from None
    return sorted(runs, key=lambda run: (started(run.folder), run.name), reverse=True)


def _is_run(entry: os.DirEntry[str]) -> bool:
    return not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False)


def taken(folder: Path) -> RunExists:
    """The error for a run id that already exists."""
    run = folder.name
    if deleted(folder):
        delete = Call("delete", run, (Argument("snapshots", True),))
        remedy = ("delete them with `", delete, "`, or choose another id")
        return RunExists(f"snapshots of an earlier run {run} exist", remedy=remedy)
    remedy = ("delete it with `", Call("delete", run), "`, or choose another id")
    return RunExists(f"run {run} already exists", remedy=remedy)


def started(folder: Path) -> str:
    """The start time of the run, as ISO text that sorts by time."""
    at = info(folder).get("started")
    if isinstance(at, str):
        return at
    from datetime import UTC, datetime

    for path in (folder / "plan.json", folder):
        try:
            moment = datetime.fromtimestamp(path.stat().st_mtime, UTC)
            return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")
        except OSError:
            continue
    return ""


def info(folder: Path) -> dict[str, Any]:
    """The valid fields of run.json."""
    return run_files.info(folder).fields or {}


def plan(folder: Path) -> dict[str, Any]:
    """The valid fields of plan.json; {} if it cannot be read."""
    return run_files.plan(folder).fields or {}


def cluster_of(folder: Path) -> tuple[str | None, str | None]:
    """Context and namespace of a run on a cluster. DamagedRun: run.json does not tell."""
    contents = run_files.info(folder)
    fields = contents.fields or {}
    if "context" in fields and "namespace" in fields:
        return fields["context"], fields["namespace"]
    raise contents.error or DamagedRun("is damaged: it does not name the cluster of the run", where="run.json")


def on_cluster(folder: Path) -> bool:
    return info(folder).get("on") == "kubernetes"


def copy_limit(folder: Path) -> int | None:
    """How many bytes of output of a run may be copied into its folder. None: no limit, as this user's own run."""
    return None if is_own(folder) else min(COPY_LIMIT, shutil.disk_usage(folder).free // 2)


def is_own(folder: Path) -> bool:
    """Whether this user started or submitted the run from here. Otherwise its files came from a cluster or a store:
    they are data, and must not decide where credentials go or which program runs.

    Nothing that is fetched is written to run.json or job.yaml. Runs that an older version submitted have only the
    latter."""
    known = info(folder)
    if "adopted" in known:
        return known["adopted"] is False
    is_local = bool(known) and "on" not in known
    return is_local or (folder / "job.yaml").exists()


def at_location(folder: Path) -> bool:
    return info(folder).get("on") == LOCATION


def outcome_known(folder: Path) -> bool:
    """A deleted Job does not tell how the run ended; the location of its snapshots may."""
    report = run_files.report(folder).fields
    return report is not None and report.get("cause") != JOB_DELETED


def read_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None if it does not exist or is incomplete."""
    try:
        return run_files.load_object(path)
    except DamagedRun:
        return None


def abandoned(folder: Path) -> bool:
    """Whether the submission to a cluster was interrupted: a process that submits locks the folder."""
    return on_cluster(folder) and info(folder).get("submitted") is False and not _locked(folder / "following")


def alive(folder: Path) -> bool:
    """Whether the run's supervisor lives: it holds a lock until it ends. For other runs: the last known state."""
    if on_cluster(folder) or at_location(folder):
        return not any(_exists(folder / name) for name in ("report.json", DELETED)) and not abandoned(folder)
    return _locked(folder / "lock")


def is_starting(folder: Path) -> bool:
    """Whether the run was just created: it has neither a lock nor events for a moment, until its supervisor starts."""
    try:
        names = {path.name for path in folder.iterdir()}
        is_new = time.time() - folder.stat().st_mtime < STARTING_S
        return is_new and not names & {"events.jsonl", "report.json"}
    except OSError:  # this user cannot read it
        return False


def _locked(path: Path) -> bool:
    import fcntl

    try:
        lock = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        # Shared, so that concurrent readers do not mistake each other for the supervisor.
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(lock)
    return False
