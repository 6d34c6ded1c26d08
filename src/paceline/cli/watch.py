"""`paceline watch`: a live view of one run, or of all runs, in the terminal."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from paceline.cli.options import ContextOption, NamespaceOption, OnOption, complete_runs
from paceline.cli.output import fail

WatchArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN",
        help="Run id or a unique prefix of it (default: all runs).",
        show_default=False,
        autocompletion=complete_runs,
    ),
]


def main(
    run: WatchArgument = None,
    on: OnOption = "",
    context: ContextOption = None,
    namespace: NamespaceOption = None,
) -> int:
    """Watch a run in the terminal: progress, tasks, failures, snapshots and output, updated as it runs.

    \b
    Examples:
      paceline watch                Show all runs; Enter opens one
      paceline watch digits-3f9a    Show one run

    Press ? for a list of keys. Quitting does not stop the run. Without a terminal, use `paceline status`.
    """
    _check_terminal(run)
    from paceline.client.reading.find_run import Target, find_run
    from paceline.client.run import Run

    target = Target(on, context, namespace).resolved()
    record = None
    if run is not None:
        known = find_run(run, target)
        record = Run(known.name, target, folder=known.folder)
    from paceline.watch import terminal_guard

    terminal_guard.run_in_child()
    from paceline.watch.view import show

    return show(record, target)


def _check_terminal(run: str | None) -> None:
    instead = f"use `paceline status{f' {run}' if run else ''}`" if run else "use `paceline ls` or `paceline status`"
    for stream, name in ((sys.stdin, "standard input"), (sys.stdout, "standard output")):
        if not stream.isatty():
            fail(f"{name} is not a terminal", remedy=instead)
    if os.environ.get("TERM", "") in ("", "dumb", "unknown"):
        kind = os.environ.get("TERM", "")
        fail(f"this terminal cannot move its cursor (TERM={kind})", remedy=f"{instead}, or set TERM")
