"""`paceline resume`: continues a paused run."""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.cli.options import ContextOption, NamespaceOption, OnOption, RunArgument, seconds_of
from paceline.cli.output import note, tell


def main(
    run: RunArgument = None,
    timeout: Annotated[
        str,
        typer.Option(
            "--timeout", metavar="DURATION",
            help="Stop waiting after this time, such as 90s, 10m or 1h30m (default: never). The run is resumed anyway.",
        ),
    ] = "",
    on: OnOption = "",
    context: ContextOption = None,
    namespace: NamespaceOption = None,
) -> int:  # fmt: skip
    """Continue a run that was paused, from its newest snapshot, and wait until its tasks have been started.

    It may have to wait for hosts. If the run is still being paused, this cancels the pause. Ctrl-C stops waiting; the
    request remains.

    \b
    Exit codes:
      0    the tasks of the run have been started
      1    an error
      2    wrong usage
      124  the time limit has passed; the run is still being resumed
      130  Ctrl-C; the run is still being resumed
    """
    from paceline.client.control.pause import resume
    from paceline.client.control.wait import Deadline
    from paceline.client.reading.find_run import Target, find_run, refresh
    from paceline.view.files import run_folders

    limit = seconds_of(timeout, "--timeout") if timeout else None
    target = find_run(run, Target(on, context, namespace))
    refresh(target, notify=note)
    try:
        resume(target, Deadline(target.name, limit), tell)
    except KeyboardInterrupt:
        command = f"paceline resume {target.name}"
        more = f"; if it gets no pods, run again: {command}" if run_folders.on_cluster(target.folder) else ""
        tell(f"interrupted; {target.name} is still being resumed{more}")
        return 130
    tell(f"{target.name} continues")
    return 0
