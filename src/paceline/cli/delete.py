"""`paceline delete`: removes runs with what they wrote, their snapshots only where asked to, and nothing else."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.chosen import choose, refresh
from paceline.cli.options import ContextOption, NamespaceOption, OnOption, complete_runs
from paceline.cli.say import complain, confirm, fail, note, tell

if TYPE_CHECKING:
    from paceline.view.places import Source
    from paceline.view.runs import Run


def main(
    run: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN",
            help="Ids, or beginnings; with --snapshots also s3://bucket/path/RUN, claim://name/path/RUN, /folder/RUN.",
            show_default=False,
            autocompletion=complete_runs,
        ),
    ] = None,
    finished: Annotated[bool, typer.Option("--finished", help="All runs that have ended.")] = False,
    snapshots: Annotated[
        bool, typer.Option("--snapshots", help="Also their snapshots, wherever they are; also of runs deleted before.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    force: Annotated[
        bool,
        typer.Option("--force", help="Also runs that still run: they are ended first; and at a place, those that may."),
    ] = False,
    on: OnOption = "",
    context: ContextOption = None,
    namespace: NamespaceOption = None,
) -> int:
    """Delete runs with their logs and TensorBoard files. What was committed stays, unless --snapshots is given."""
    from paceline.view import places, runs

    _finish_what_was_cut_short()
    if bool(run) == finished:
        fail("name the runs to delete, or say --finished" if not run else "name runs or say --finished, not both")
    if finished and (on or context or namespace):
        fail("--finished is for runs that this machine knows; name those of a cluster")
    written = dict.fromkeys(run or [])
    names = [name for name in written if not places.is_place(name)]
    at_places = [_at_place(name, snapshots) for name in written if places.is_place(name)]
    if finished:
        chosen = [each for each in runs.every() if not runs.alive(each.folder)]
        chosen += runs.remains() if snapshots else []
    else:
        found = [_choose(name, snapshots, on, context, namespace) for name in names]
        chosen = list({each.name: each for each in found}.values())
    for each in chosen:
        refresh(each.folder)
    if not chosen and not at_places:
        tell("nothing to delete")
        return 0
    running = [r.name for r in chosen if runs.alive(r.folder)]
    running_there = [source.run for source in at_places if source.alive]
    if running_there or (running and not force):
        names = [*running_there, *running]
        forced = "" if running_there else ", or say --force"
        fail(f"{', '.join(names)} still runs: `paceline stop {names[0]}` first{forced}", 1)
    if not force and (doubts := list(filter(None, (source.doubt() for source in at_places)))):
        fail(f"{doubts[0]}; --force deletes its snapshots all the same", 1)
    elsewhere = {each.name: _elsewhere(each) if snapshots else None for each in chosen}
    if not yes:
        _ask(chosen, [*filter(None, elsewhere.values()), *at_places], snapshots)
    codes = [_delete(each, snapshots, elsewhere[each.name], force) for each in chosen]
    codes += [_delete_snapshots(source) for source in at_places]
    return max(codes)


def _finish_what_was_cut_short() -> None:
    import shutil

    from paceline.view import runs

    for left in runs.runs_folder().glob(".deleting-*"):
        shutil.rmtree(left, ignore_errors=True)
    for run in runs.remains():
        with suppress(OSError):
            _clear(run.folder) if _outlived(run) else _remove(run.folder)


def _choose(name: str, snapshots: bool, on: str, context: str | None, namespace: str | None) -> Run:
    from paceline.view import runs

    found = choose(name, on, context, namespace, remaining=True)
    if runs.deleted(found.folder) and not snapshots:
        fail(f"{found.name} is deleted, all but its snapshots: `paceline delete --snapshots {found.name}` deletes them")
    return found


def _at_place(written: str, snapshots: bool) -> Source:
    if not snapshots:
        fail(f"no run {written!r}: a place is for --snapshots, which deletes the run's snapshots there")
    from paceline.view import places

    return places.at_place(written, note)


def _elsewhere(run: Run) -> Source | None:
    """The run's snapshots, where they do not go with its folder, or with its captain's pod."""
    from paceline.view import places

    own = run.folder / "snapshots"
    if places.in_pod(run) or (places.place_of(run) == str(own) and not own.is_symlink()):
        return None
    return places.of_run(run, note)


def _ask(chosen: list[Run], elsewhere: list[Source], snapshots: bool) -> None:
    from paceline.view import places, runs

    whole = [run.name for run in chosen if not runs.deleted(run.folder)]
    remaining = [run.name for run in chosen if runs.deleted(run.folder)]
    names = ", ".join(whole + remaining) or ", ".join(source.where for source in elsewhere)
    also = f" ({', '.join(source.where for source in elsewhere)})" if elsewhere else ""
    if not whole:
        what = f"delete all snapshots of {', '.join([*remaining, *(source.run for source in elsewhere)])}{also}?"
    elif snapshots:
        what = f"delete {names} with all logs, TensorBoard files and snapshots{also}?"
    else:
        lost = [run.name for run in chosen if places.in_pod(run) and _committed(run)]
        but = f", but for those in the captain's pod of {', '.join(lost)}" if lost else ""
        what = f"delete {names} with all logs and TensorBoard files? Committed snapshots stay{but}."
    confirm(what, f"say --yes to delete {names}" + (" with all snapshots" if snapshots else ""))


def _delete(run: Run, snapshots: bool, elsewhere: Source | None, force: bool) -> int:
    from paceline.view import runs

    forgotten = False
    if runs.on_cluster(run.folder):
        from paceline.backends.kubernetes.cluster import Refused, Unreachable
        from paceline.backends.kubernetes.known import delete

        try:
            delete(run.folder)
        except (Refused, Unreachable) as error:
            complain(f"{run.name}: {error}" + ("" if force else "; --force forgets it here all the same"))
            if not force:
                return 1
            forgotten = True
    elif runs.alive(run.folder):
        from paceline.backends import local
        from paceline.cli.stop import gone

        local.kill(run.folder)
        if not gone(run.folder):
            complain(f"{run.name} does not end; left as it is")
            return 1
    if not _inside(run.folder, runs.runs_folder()):
        complain(f"{run.folder} is not a folder of {runs.runs_folder()}: left as it is")
        return 1
    if elsewhere is not None and forgotten:
        complain(f"its snapshots at {elsewhere.where} are left: it may still run")
    elif elsewhere is not None and _delete_snapshots(elsewhere):
        complain(f"{run.name} is left as it is")
        return 1
    remained = runs.deleted(run.folder)
    try:
        stays = "" if snapshots else _stays(run)
        if not snapshots and not forgotten and _outlived(run):
            (run.folder / runs.DELETED).touch()  # first, so that a deletion that is cut short leaves no half of a run
            _clear(run.folder)
        else:
            _remove(run.folder)
    except OSError as error:
        complain(f"{run.name} could not be deleted: {error.strerror}: {error.filename}")
        return 1
    from paceline.view.restored import forget

    forget(run.name)
    if forgotten:
        tell(f"forgot {run.name} here; on the cluster it may still run")
    else:
        tell(f"deleted {'the snapshots of ' if remained else ''}{run.name}{stays}")
    return 1 if forgotten else 0


def _outlived(run: Run) -> bool:
    """Whether something is left that is found by the run's folder alone: it is in there, or in a volume claim."""
    from paceline.view import places, runs

    return places.holds_committed(run) or (places.in_claim(run) and bool(runs.info(run.folder).get("submitted")))


def _committed(run: Run) -> bool:
    from paceline.view import state

    return state.read(run).state.committed is not None


def _stays(run: Run) -> str:
    """What is not deleted, where it is, and how to delete it."""
    from paceline.view import places, runs

    place = places.place_of(run)
    if place == str(run.folder / "snapshots"):
        if not places.holds_committed(run):
            return ""
        return f"; its snapshots stay in {place}: `paceline delete --snapshots {run.name}` deletes them"
    what = ["snapshots"] if _committed(run) else []
    if what and places.in_pod(run):
        return "; its snapshots went with its captain's pod"
    what += ["logs"] if runs.info(run.folder).get("submitted") and not places.in_pod(run) else []
    if not what:
        return ""
    where = f"{place.rstrip('/')}/{run.name}"
    called = run.name if places.in_claim(run) else where
    return f"; its {' and '.join(what)} stay at {where}: `paceline delete --snapshots {called}` deletes them"


def _delete_snapshots(source: Source) -> int:
    from paceline.storage.store import StoreError
    from paceline.view import places

    try:
        places.delete_all(source)
    except places.NoClaim as error:
        tell(f"{error}, nor the snapshots of {source.run}")
        return 0
    except (StoreError, places.OutOfReach) as error:
        complain(str(error))
        return 1
    finally:
        source.close()
    tell(f"deleted the snapshots of {source.run} at {source.where}")
    return 0


def _remove(folder: Path) -> None:
    import shutil

    # Out of the way first, so that a deletion that is cut short leaves no half of a run in the list.
    aside = folder.with_name(f".deleting-{folder.name}")
    folder.rename(aside)
    shutil.rmtree(aside)


def _clear(folder: Path) -> None:
    """All but the snapshots, and what leads to those on a cluster."""
    import shutil

    from paceline.view import runs

    kept = {"snapshots", runs.DELETED, *(("run.json", "plan.json") if runs.on_cluster(folder) else ())}
    for entry in folder.iterdir():
        if entry.name in kept:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _inside(folder: Path, parent: Path) -> bool:
    return folder.parent == parent and not folder.is_symlink() and folder.resolve().parent == parent.resolve()
