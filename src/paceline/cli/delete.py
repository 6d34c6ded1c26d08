"""`paceline delete`: removes runs with all they wrote, and nothing else."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.chosen import choose, refresh
from paceline.cli.options import ContextOption, NamespaceOption, OnOption, complete_runs
from paceline.cli.say import complain, fail, tell

if TYPE_CHECKING:
    from paceline.view.runs import Run


def main(
    run: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN", help="Ids, or beginnings of them.", show_default=False, autocompletion=complete_runs
        ),
    ] = None,
    finished: Annotated[bool, typer.Option("--finished", help="All runs that have ended.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Also runs that still run: they are ended first.")] = False,
    on: OnOption = "",
    context: ContextOption = None,
    namespace: NamespaceOption = None,
) -> int:
    """Delete runs with their logs, snapshots and TensorBoard files."""
    import shutil

    from paceline.view import runs

    for left in runs.runs_folder().glob(".deleting-*"):  # by a deletion that was cut short
        shutil.rmtree(left, ignore_errors=True)
    if bool(run) == finished:
        fail("name the runs to delete, or say --finished" if not run else "name runs or say --finished, not both")
    if finished and (on or context or namespace):
        fail("--finished is for runs that this machine knows; name those of a cluster")
    chosen = (
        [r for r in runs.every() if not runs.alive(r.folder)]
        if finished
        else list(
            {found.name: found for found in (choose(name, on, context, namespace) for name in run or [])}.values()
        )
    )
    for each in chosen:
        refresh(each.folder)
    if not chosen:
        tell("nothing to delete")
        return 0
    running = [r.name for r in chosen if runs.alive(r.folder)]
    if running and not force:
        fail(f"{', '.join(running)} still runs: `paceline stop {running[0]}` first, or say --force", 1)
    if not yes:
        _ask(chosen)
    return max(_delete(r, force) for r in chosen)


def _ask(chosen: list[Run]) -> None:
    names = ", ".join(run.name for run in chosen)
    if not sys.stdin.isatty():
        fail(f"say --yes to delete {names}")
    sys.stderr.write(f"delete {names} with all logs, snapshots and TensorBoard files? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        fail("nothing was deleted", 1)


def _delete(run: Run, force: bool) -> int:
    import shutil

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
    aside = run.folder.with_name(f".deleting-{run.name}")
    if not _inside(run.folder, runs.runs_folder()):
        complain(f"{run.folder} is not a folder of {runs.runs_folder()}: left as it is")
        return 1
    try:
        # Out of the way first, so that a deletion that is cut short leaves no half of a run in the list.
        run.folder.rename(aside)
        shutil.rmtree(aside)
    except OSError as error:
        complain(f"{run.name} could not be deleted: {error.strerror}: {error.filename}")
        return 1
    tell(f"forgot {run.name} here; on the cluster it may still run" if forgotten else f"deleted {run.name}")
    return 1 if forgotten else 0


def _inside(folder: Path, parent: Path) -> bool:
    return folder.parent == parent and not folder.is_symlink() and folder.resolve().parent == parent.resolve()
