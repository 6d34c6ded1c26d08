"""Finds a run by its id, or by a prefix of it that is unique; otherwise suggests others."""

from __future__ import annotations

from paceline.errors import Argument, Call
from paceline.view.files import run_folders
from paceline.view.files.run_folders import NoRun, Run


def find(id: str | None, remaining: bool = False) -> Run:
    """The run with this id, or with an id that starts with it and is unique; the newest run if omitted.

    `remaining`: include deleted runs whose snapshots remain.
    """
    runs = run_folders.all_runs()
    if remaining and id:
        runs += run_folders.deleted_runs()
    if not runs:
        what = "there are no runs yet" if id is None else f"no run {id!r}: there are no runs yet"
        raise NoRun(what, remedy=("start one with: ", Call("submit", arguments=(Argument("job"),))))
    if id is None:
        return runs[0]
    matching = [run for run in runs if run.name.startswith(id)] if id else []
    exact = [run for run in matching if run.name == id]
    if exact or len(matching) == 1:
        return (exact or matching)[0]
    if matching:
        names = ", ".join(run.name for run in matching[:5]) + (", ..." if len(matching) > 5 else "")
        raise NoRun(f"{id!r} matches {len(matching)} runs: {names}")
    from difflib import get_close_matches

    near = get_close_matches(id, [run.name for run in runs], n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"the newest is {runs[0].name!r};"
    raise NoRun(f"no run {id!r}", remedy=(f"{hint} `", Call("runs"), "` lists all"))
