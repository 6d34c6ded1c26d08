"""Deletes runs with everything they wrote; their snapshots only on request."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.client import run_store
from paceline.client.find import Notify, ignore
from paceline.client.json_form import versioned
from paceline.errors import PacelineError
from paceline.storage.local_files import remove_tree
from paceline.view import run_folders, snapshot_locations
from paceline.view.run_files import DamagedRun, NewerRun
from paceline.view.run_folders import Run
from paceline.view.snapshot_locations import Source


class NotDeleted(PacelineError):
    """The run was not deleted."""


@dataclass(frozen=True)
class Deleted:
    """What was deleted, and what was kept."""

    only_snapshots: bool = False
    """Everything else was deleted earlier."""
    cluster_error: str = ""
    """Why the run could not be deleted on its cluster, where it may still be running."""
    snapshots_note: str = ""
    """What happened to snapshots stored outside the run's folder."""
    kept_note: str = ""
    """What was not deleted, where it is, and how to delete it."""

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON has them."""
        return versioned(vars(self))


def finish_interrupted() -> None:
    """Completes earlier deletions that were interrupted."""
    for folder in run_folders.runs_folder().glob(".deleting-*"):
        remove_tree(str(folder), ignore_errors=True)
    for run in run_folders.remains():
        with suppress(OSError):
            _clear(run.folder) if _must_keep_folder(run) else _remove(run.folder)


def refuse_running(runs: Sequence[Run], sources: Sequence[Source], force: bool) -> None:
    """Raises NotDeleted if a run is running, or may be. `sources`: snapshots of runs that are unknown here."""
    running = [each.name for each in runs if run_folders.alive(each.folder)]
    running_elsewhere = [source.run for source in sources if source.alive]
    if running_elsewhere or (running and not force):
        names = [*running_elsewhere, *running]
        forced = "" if running_elsewhere else ", or use --force"
        are = "is" if len(names) == 1 else "are"
        remedy = f"run `paceline stop {names[0]}` first{forced}"
        raise NotDeleted(f"{', '.join(names)} {are} still running", remedy=remedy)
    if not force and (doubts := list(filter(None, (source.doubt() for source in sources)))):
        raise NotDeleted(doubts[0], remedy="--force deletes its snapshots anyway")


def separate_snapshots(run: Run, notify: Notify = ignore) -> Source | None:
    """The run's snapshots, if they are not deleted with its folder or with its captain's pod."""
    own = run.folder / "snapshots"
    try:
        location = snapshot_locations.location_of(run)
    except (DamagedRun, NewerRun) as error:
        remedy = f"`paceline delete {run.name}` deletes only the run"
        raise NotDeleted(f"it is unknown where {run.name} has its snapshots: {error}", remedy=remedy) from None
    if snapshot_locations.in_pod(run) or (location == str(own) and not own.is_symlink()):
        return None
    return run_store.open_run(run, notify)


def loses_snapshots(run: Run) -> bool:
    """Whether deleting the captain's pod deletes committed snapshots."""
    return _location(run) is not None and snapshot_locations.in_pod(run) and _has_committed(run)


def _location(run: Run) -> str | None:
    """Where the run has its snapshots; None if its plan cannot be read."""
    try:
        return snapshot_locations.location_of(run)
    except (DamagedRun, NewerRun):
        return None


def delete_run(run: Run, with_snapshots: bool, separate: Source | None, force: bool) -> Deleted:
    """`separate`: snapshots to delete that are outside the run's folder. `force`: kill a run that is still running, and
    remove a run from this machine even if its cluster is unreachable."""
    cluster_error = snapshots_note = ""
    if run_folders.on_cluster(run.folder):
        cluster_error = _delete_on_cluster(run, force)
    elif run_folders.alive(run.folder):
        from paceline.backends import local
        from paceline.client.stop import wait_until_ended

        local.kill(run.folder)
        if not wait_until_ended(run.folder):
            raise NotDeleted(f"{run.name} did not end and was not deleted")
    if not _is_folder_of(run):
        raise NotDeleted(f"{run.folder} is not the folder of {run.name} and was not deleted")
    if separate is not None and cluster_error:
        snapshots_note = f"its snapshots at {separate.address} were not deleted: the run may still be running"
    elif separate is not None:
        try:
            delete_snapshots(separate)
            snapshots_note = f"deleted the snapshots of {separate.run} at {separate.address}"
        except snapshot_locations.NoClaim as error:
            snapshots_note = f"{error}: the snapshots of {separate.run} are already deleted"
        except PacelineError as error:
            raise NotDeleted(f"{run.name} was not deleted: {error}") from None
    only_snapshots = run_folders.deleted(run.folder)
    try:
        kept_note = "" if with_snapshots else _describe_kept(run)
        if not with_snapshots and not cluster_error and _must_keep_folder(run):
            # Marked first, so that an interrupted deletion does not leave half a run.
            (run.folder / run_folders.DELETED).touch()
            _clear(run.folder)
        else:
            _remove(run.folder)
    except OSError as error:
        raise NotDeleted(f"cannot delete {run.name}: {error.strerror}", where=str(error.filename)) from None
    from paceline.client import restored_snapshots

    restored_snapshots.remove(run.name, run.folder.parents[1])
    return Deleted(only_snapshots, cluster_error, snapshots_note, kept_note)


def delete_snapshots(source: Source) -> None:
    """Deletes all snapshots of a run. Raises NoClaim if they were already deleted with their volume claim."""
    try:
        run_store.delete_all(source)
    finally:
        source.close()


def _delete_on_cluster(run: Run, force: bool) -> str:
    """Returns why the run could not be deleted on its cluster; empty: it was deleted."""
    from paceline.backends.kubernetes.api.cluster import Refused, Unreachable
    from paceline.backends.kubernetes.runs.local_folder import delete

    try:
        delete(run.folder)
    except (Refused, Unreachable) as error:
        if not force:
            remedy = "--force removes it from this machine anyway"
            raise NotDeleted(str(error), where=run.name, remedy=remedy) from None
        return str(error)
    return ""


def _must_keep_folder(run: Run) -> bool:
    """Whether snapshots remain that only the run's folder leads to: they are in it, or in a volume claim."""
    submitted = bool(run_folders.info(run.folder).get("submitted"))
    in_claim = _location(run) is not None and snapshot_locations.in_claim(run)
    return snapshot_locations.holds_committed(run) or (in_claim and submitted)


def _has_committed(run: Run) -> bool:
    from paceline.view import run_state

    return run_state.read(run).state.committed is not None


def _describe_kept(run: Run) -> str:
    location = _location(run)
    if location is None:
        return "snapshots that are not in its folder are kept: its plan, which says where they are, cannot be read"
    if location == str(run.folder / "snapshots"):
        if not snapshot_locations.holds_committed(run):
            return ""
        return f"its snapshots are kept in {location}: `paceline delete --snapshots {run.name}` deletes them"
    kept = ["snapshots"] if _has_committed(run) else []
    if kept and snapshot_locations.in_pod(run):
        return "its snapshots were deleted with its captain's pod"
    submitted = run_folders.info(run.folder).get("submitted")
    kept += ["logs"] if submitted and not snapshot_locations.in_pod(run) else []
    if not kept:
        return ""
    address = f"{location.rstrip('/')}/{run.name}"
    argument = run.name if snapshot_locations.in_claim(run) else address
    return f"its {' and '.join(kept)} are kept at {address}: `paceline delete --snapshots {argument}` deletes them"


def _remove(folder: Path) -> None:
    # Renamed first, so that an interrupted deletion does not leave half a run in the list.
    renamed = folder.with_name(f".deleting-{folder.name}")
    folder.rename(renamed)
    remove_tree(str(renamed))


def _clear(folder: Path) -> None:
    """Deletes everything but the snapshots and, for a run on a cluster, the files needed to find them."""
    on_cluster = ("run.json", "plan.json") if run_folders.on_cluster(folder) else ()
    kept_names = {"snapshots", run_folders.DELETED, *on_cluster}
    for entry in folder.iterdir():
        if entry.name in kept_names:
            continue
        if entry.is_dir() and not entry.is_symlink():
            remove_tree(str(entry))
        else:
            entry.unlink()


def _is_folder_of(run: Run) -> bool:
    """False for an id that is a path, such as `../other`, and for a link to a folder elsewhere."""
    folder = run.folder
    return folder.name == run.name and not folder.is_symlink() and folder.resolve().parent == folder.parent.resolve()
