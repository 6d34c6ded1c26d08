"""Deletes runs with everything they wrote; their snapshots only on request."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.client.json_form import versioned
from paceline.client.reading.find_run import Notify, ignore
from paceline.client.snapshots import run_store
from paceline.errors import Argument, Call, PacelineError
from paceline.storage.local_files import remove_tree
from paceline.view.files import run_folders
from paceline.view.files.run_files import DamagedRun, NewerRun
from paceline.view.files.run_folders import Run
from paceline.view.snapshots import snapshot_locations
from paceline.view.snapshots.snapshot_locations import Source

_FORCE = Argument("force", True)


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
    """What was not deleted, and where it is."""
    kept_at: str = ""
    """The run or the location that `paceline delete --snapshots` deletes it with; empty: nothing was kept."""

    def to_dict(self) -> dict[str, Any]:
        """The fields as a dictionary for JSON."""
        return versioned(vars(self))


def finish_interrupted() -> None:
    """Completes earlier deletions that were interrupted."""
    from paceline.client.functions import function_folders

    function_folders.remove_unused(run_folders.home())
    for folder in run_folders.runs_folder().glob(".deleting-*"):
        remove_tree(str(folder), ignore_errors=True)
    for run in run_folders.deleted_runs():
        with suppress(OSError):
            _clear(run.folder) if _must_keep_folder(run) else _remove(run.folder)


def refuse_running(runs: Sequence[Run], sources: Sequence[Source], force: bool) -> None:
    """Raises NotDeleted if a run is running, or may be. `sources`: snapshots of runs that are unknown here."""
    running = [each.name for each in runs if run_folders.alive(each.folder)]
    running_elsewhere = [source.run for source in sources if source.alive]
    if running_elsewhere or (running and not force):
        names = [*running_elsewhere, *running]
        are = "is" if len(names) == 1 else "are"
        stop = ("run `", Call("stop", names[0]), "` first")
        remedy = stop if running_elsewhere else (*stop, ", or use ", _FORCE)
        raise NotDeleted(f"{', '.join(names)} {are} still running", remedy=remedy)
    if not force and (doubts := list(filter(None, (source.doubt() for source in sources)))):
        raise NotDeleted(doubts[0], remedy=(_FORCE, " deletes its snapshots anyway"))


def separate_snapshots(run: Run, notify: Notify = ignore) -> Source | None:
    """The run's snapshots, if they are not deleted with its folder or with its captain's pod."""
    own = run.folder / "snapshots"
    try:
        location = snapshot_locations.location_of(run)
    except (DamagedRun, NewerRun) as error:
        remedy = ("`", Call("delete", run.name), "` deletes only the run")
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
        from paceline.client.control.stop import wait_until_ended

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
            raise NotDeleted(
                f"{run.name} was not deleted: {error.what}", where=error.where_text, remedy=error.remedy_text
            ) from None
    only_snapshots = run_folders.deleted(run.folder)
    try:
        kept_note, kept_at = ("", "") if with_snapshots else _describe_kept(run)
        if not with_snapshots and not cluster_error and _must_keep_folder(run):
            # Marked first, so that an interrupted deletion does not leave half a run.
            (run.folder / run_folders.DELETED).touch()
            _clear(run.folder)
        else:
            _remove(run.folder)
    except OSError as error:
        raise NotDeleted(f"cannot delete {run.name}: {error.strerror}", where=str(error.filename)) from None
    from paceline.client.functions import function_folders
    from paceline.client.snapshots import restored_snapshots

    restored_snapshots.remove(run.name, run.folder.parents[1])
    function_folders.remove_unused(run.folder.parents[1])
    return Deleted(only_snapshots, cluster_error, snapshots_note, kept_note, kept_at)


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
            remedy = (_FORCE, " removes it from this machine anyway")
            raise NotDeleted(str(error), where=run.name, remedy=remedy) from None
        return str(error)
    return ""


def _must_keep_folder(run: Run) -> bool:
    """Whether snapshots remain that only the run's folder leads to: they are in it, or in a volume claim."""
    submitted = bool(run_folders.info(run.folder).get("submitted"))
    in_claim = _location(run) is not None and snapshot_locations.in_claim(run)
    return snapshot_locations.holds_committed(run) or (in_claim and submitted)


def _has_committed(run: Run) -> bool:
    from paceline.view.state import status_reader

    return status_reader.read(run).state.committed is not None


def _describe_kept(run: Run) -> tuple[str, str]:
    """What remains and where, and the run or location to delete it with."""
    location = _location(run)
    if location is None:
        return "snapshots that are not in its folder are kept: its plan, which says where they are, cannot be read", ""
    if location == str(run.folder / "snapshots"):
        if not snapshot_locations.holds_committed(run):
            return "", ""
        return f"its snapshots are kept in {location}", run.name
    kept = ["snapshots"] if _has_committed(run) else []
    if kept and snapshot_locations.in_pod(run):
        return "its snapshots were deleted with its captain's pod", ""
    submitted = run_folders.info(run.folder).get("submitted")
    kept += ["logs"] if submitted and not snapshot_locations.in_pod(run) else []
    if not kept:
        return "", ""
    address = f"{location.rstrip('/')}/{run.name}"
    return f"its {' and '.join(kept)} are kept at {address}", run.name if snapshot_locations.in_claim(run) else address


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
