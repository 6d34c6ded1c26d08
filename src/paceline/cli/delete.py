"""`paceline delete`: deletes runs with everything they wrote; their snapshots only with --snapshots."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.options import ContextOption, EndpointOption, NamespaceOption, OnOption, complete_runs
from paceline.cli.output import confirm, fail, note, print_error, tell, text_of

if TYPE_CHECKING:
    from paceline.view.files.run_folders import Run
    from paceline.view.snapshots.snapshot_locations import Source


def main(
    run: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN",
            help="Run ids or unique prefixes; with --snapshots also locations: s3://bucket/path/RUN, "
            "claim://name/path/RUN or /folder/RUN.",
            show_default=False,
            autocompletion=complete_runs,
        ),
    ] = None,
    finished: Annotated[bool, typer.Option("--finished", help="Delete all runs that have ended.")] = False,
    snapshots: Annotated[
        bool,
        typer.Option(
            "--snapshots",
            help="Delete snapshots as well, wherever they are stored. Also works for runs that were already deleted.",
        ),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Delete even if the run is or may be running (it is killed first) or its cluster is unreachable.",
        ),
    ] = False,
    on: OnOption = "",
    context: ContextOption = None,
    namespace: NamespaceOption = None,
    endpoint: EndpointOption = "",
) -> int:
    """Delete runs with their logs and TensorBoard files.

    Committed snapshots are kept unless --snapshots is given.
    """
    from paceline.client.control import deletion
    from paceline.client.reading.find_run import Target, find_run, refresh
    from paceline.client.snapshots import run_store
    from paceline.view.files import run_folders
    from paceline.view.snapshots.snapshot_locations import is_location

    deletion.finish_interrupted()
    if bool(run) == finished:
        fail("name runs or use --finished, not both" if run else "name the runs to delete, or use --finished")
    target = Target(on, context, namespace, endpoint=endpoint)
    if finished and target.is_given:
        fail("--finished covers only runs known to this machine", remedy="name the runs on the cluster")
    arguments = list(dict.fromkeys(run or []))
    locations = [argument for argument in arguments if is_location(argument)]
    if locations and not snapshots:
        fail(
            f"{locations[0]} is a location, not a run id", remedy="use --snapshots to delete the run's snapshots there"
        )
    sources = [run_store.open_location(location, note, endpoint) for location in locations]
    if finished:
        runs = [each for each in run_folders.all_runs() if not run_folders.alive(each.folder)]
        runs += run_folders.deleted_runs() if snapshots else []
    else:
        named = [find_run(name, target, also_deleted=True) for name in arguments if name not in locations]
        runs = list({each.name: each for each in named}.values())
    for each in runs:
        if not snapshots and not finished and run_folders.deleted(each.folder):
            remedy = f"`paceline delete --snapshots {each.name}` deletes them"
            fail(f"{each.name} is already deleted, except for its snapshots", remedy=remedy)
        refresh(each, notify=note)
    if not runs and not sources:
        tell("nothing to delete")
        return 0
    deletion.refuse_running(runs, sources, force)
    separate = {each.name: deletion.separate_snapshots(each, note) if snapshots else None for each in runs}
    if not yes:
        _confirm(runs, [*filter(None, separate.values()), *sources], snapshots)
    codes = [_delete(each, snapshots, separate[each.name], force) for each in runs]
    codes += [_delete_snapshots(source) for source in sources]
    return max(codes)


def _confirm(runs: list[Run], separate: list[Source], snapshots: bool) -> None:
    from paceline.client.control.deletion import loses_snapshots
    from paceline.view.files import run_folders

    whole = [run.name for run in runs if not run_folders.deleted(run.folder)]
    snapshots_only = [run.name for run in runs if run_folders.deleted(run.folder)]
    names = ", ".join(whole + snapshots_only) or ", ".join(source.address for source in separate)
    also = f" ({', '.join(source.address for source in separate)})" if separate else ""
    if not whole:
        runs_of_snapshots = [*snapshots_only, *(source.run for source in separate)]
        question = f"delete all snapshots of {', '.join(runs_of_snapshots)}{also}?"
    elif snapshots:
        question = f"delete {names} with all logs, TensorBoard files and snapshots{also}?"
    else:
        lost = [run.name for run in runs if loses_snapshots(run)]
        but = f", except those in the captain's pod of {', '.join(lost)}" if lost else ""
        question = f"delete {names} with all logs and TensorBoard files? Committed snapshots are kept{but}."
    confirm(question, f"use --yes to delete {names}" + (" with all snapshots" if snapshots else ""))


def _delete(run: Run, snapshots: bool, separate: Source | None, force: bool) -> int:
    from paceline.client.control.deletion import NotDeleted, delete_run

    try:
        deleted = delete_run(run, snapshots, separate, force)
    except NotDeleted as error:
        print_error(error)
        return 1
    if deleted.cluster_error:
        print_error(f"{run.name}: {deleted.cluster_error}")
        if deleted.snapshots_note:
            print_error(deleted.snapshots_note)
        tell(f"removed {run.name} from this machine; it may still be running on the cluster")
        return 1
    if deleted.snapshots_note:
        tell(deleted.snapshots_note)
    kept = f"; {deleted.kept_note}" if deleted.kept_note else ""
    kept += f": `paceline delete --snapshots {deleted.kept_at}` deletes them" if deleted.kept_at else ""
    tell(f"deleted {'the snapshots of ' if deleted.only_snapshots else ''}{run.name}{kept}")
    return 0


def _delete_snapshots(source: Source) -> int:
    from paceline.client.control.deletion import delete_snapshots
    from paceline.errors import PacelineError
    from paceline.view.snapshots.snapshot_locations import NoClaim

    try:
        delete_snapshots(source)
    except NoClaim as error:
        tell(f"{text_of(error)}: the snapshots of {source.run} are already deleted")
        return 0
    except PacelineError as error:
        print_error(error)
        return 1
    tell(f"deleted the snapshots of {source.run} at {source.address}")
    return 0
