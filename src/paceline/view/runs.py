"""Where runs live: finds their folders by id, and tells whether anything still runs in one."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class NoRun(Exception):
    """The run that was asked for is not there; the message says what is."""


DELETED = "deleted"  # marks the folder of a run of which only the snapshots are left
PLACE = "place"  # where a run is that this machine knows by the place for its snapshots alone
JOB_GONE = "its Job is gone from the cluster: somebody deleted it, or limits.keep_finished had passed"


@dataclass(frozen=True)
class Run:
    name: str
    folder: Path


def home() -> Path:
    chosen = os.environ.get("PACELINE_HOME")
    return Path(chosen).expanduser().absolute() if chosen else Path.home() / ".local" / "state" / "paceline"


def runs_folder() -> Path:
    return home() / "runs"


def every() -> list[Run]:
    """All runs, newest first."""
    return [run for run in _folders() if not deleted(run.folder)]


def remains() -> list[Run]:
    """Runs that were deleted, and whose snapshots were not."""
    return [run for run in _folders() if deleted(run.folder)]


def deleted(folder: Path) -> bool:
    return (folder / DELETED).exists()


def _folders() -> list[Run]:
    try:
        with os.scandir(runs_folder()) as entries:
            found = [Run(e.name, Path(e.path)) for e in entries if _is_run(e)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise NoRun(f"{runs_folder()} cannot be read: {error.strerror}") from None
    return sorted(found, key=lambda run: (started(run.folder), run.name), reverse=True)


def _is_run(entry: os.DirEntry[str]) -> bool:
    return not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False)


def find(wanted: str | None, remaining: bool = False) -> Run:
    """The run with this id or unique beginning of an id; the newest one where nothing is given.

    `remaining`: also one of which only the snapshots are left.
    """
    runs = every()
    if remaining and wanted:
        runs += remains()
    if not runs:
        hint = "there are no runs yet; start one with: paceline run job.yaml"
        raise NoRun(hint if wanted is None else f"no run {wanted!r}: {hint}")
    if wanted is None:
        return runs[0]
    starting = [run for run in runs if run.name.startswith(wanted)] if wanted else []
    exact = [run for run in starting if run.name == wanted]
    if exact or len(starting) == 1:
        return (exact or starting)[0]
    if starting:
        names = ", ".join(run.name for run in starting[:5]) + (", ..." if len(starting) > 5 else "")
        raise NoRun(f"{wanted!r} is the beginning of {len(starting)} runs: {names}")
    from difflib import get_close_matches

    near = get_close_matches(wanted, [run.name for run in runs], n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"the newest is {runs[0].name!r};"
    raise NoRun(f"no run {wanted!r}; {hint} `paceline ls` lists all")


def taken(folder: Path) -> str:
    """Why there can be no other run of that id."""
    run = folder.name
    if deleted(folder):
        told = f"there are snapshots of an earlier run {run}; `paceline delete --snapshots {run}` removes them"
    else:
        told = f"there is a run {run} already; `paceline delete {run}` removes it"
    return f"{told}, or give another id"


def started(folder: Path) -> str:
    """When the run was started, as ISO text that sorts by time."""
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
    return read_object(folder / "run.json") or {}


def on_cluster(folder: Path) -> bool:
    return info(folder).get("on") == "kubernetes"


def at_place(folder: Path) -> bool:
    return info(folder).get("on") == PLACE


def outcome_known(folder: Path) -> bool:
    """That its Job is gone says nothing of how the run has ended; the place for its snapshots may."""
    report = read_object(folder / "report.json")
    return report is not None and report.get("reason") != JOB_GONE


def read_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None where there is none, or not a whole one."""
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def abandoned(folder: Path) -> bool:
    """Whether the run's submission to a cluster was cut short: whoever submits holds the folder meanwhile."""
    return on_cluster(folder) and info(folder).get("submitted") is False and not _locked(folder / "following")


def alive(folder: Path) -> bool:
    """Whether the run's supervisor lives: it holds the lock as long as it does. Elsewhere: as last seen."""
    if on_cluster(folder) or at_place(folder):
        return not any((folder / name).exists() for name in ("report.json", DELETED)) and not abandoned(folder)
    return _locked(folder / "lock")


def _locked(path: Path) -> bool:
    import fcntl

    try:
        lock = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        # Shared, so that two readers at once do not take each other for the supervisor.
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(lock)
    return False
