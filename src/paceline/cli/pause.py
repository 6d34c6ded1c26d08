"""`paceline pause`: releases the hosts of a run until it is resumed."""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.cli.options import ContextOption, NamespaceOption, OnOption, RunArgument, seconds_of
from paceline.cli.output import note, tell


def main(
    run: RunArgument = None,
    now: Annotated[
        bool,
        typer.Option(
            "--now", help="Do not wait for a new snapshot: steps since the newest one are repeated after the pause."
        ),
    ] = False,
    within: Annotated[
        str,
        typer.Option(
            "--within", metavar="DURATION",
            help="If no new snapshot is committed within this time (default: 10m), the run is not paused.",
        ),
    ] = "",
    timeout: Annotated[
        str,
        typer.Option(
            "--timeout", metavar="DURATION",
            help="Stop waiting after this time, such as 90s, 10m or 1h30m (default: never). The run is paused anyway; "
            "on a cluster, run the command again to release its pods.",
        ),
    ] = "",
    on: OnOption = "",
    context: ContextOption = None,
    namespace: NamespaceOption = None,
) -> int:  # fmt: skip
    """Pause a run: its tasks take a snapshot and end, and its hosts are released until `paceline resume`.

    It keeps its id, its output and its curves. Its captain and TensorBoard continue to run. Time spent paused
    does not count towards time limits, and nothing counts as a failure. Ctrl-C stops waiting; the request remains.

    \b
    Exit codes:
      0    the run is paused
      1    no snapshot was committed in time, so the run continues; or an error
      2    wrong usage
      124  the time limit has passed; the run is still being paused
      130  Ctrl-C; the run is still being paused
    """
    from paceline.client.control.pause import WITHIN_S, pause
    from paceline.client.control.wait import Deadline
    from paceline.client.reading.find_run import Target, find_run, refresh
    from paceline.storage.snapshots.manifest import parse_id
    from paceline.view.files import run_folders

    limit = seconds_of(timeout, "--timeout") if timeout else None
    seconds = seconds_of(within, "--within") if within else WITHIN_S
    target = find_run(run, Target(on, context, namespace))
    refresh(target, notify=note)
    try:
        progress = pause(target, Deadline(target.name, limit), tell, now=now, within=seconds)
    except KeyboardInterrupt:
        command = f"paceline pause {target.name}"
        more = f"; to release its pods, run again: {command}" if run_folders.on_cluster(target.folder) else ""
        tell(f"interrupted; {target.name} is still being paused{more}")
        return 130
    snapshot = parse_id(progress.snapshot) if progress.snapshot else None
    origin = f"from step {snapshot.step}" if snapshot else "from the beginning, as it has no snapshot"
    tell(f"{target.name} is paused; to continue {origin}: paceline resume {target.name}")
    return 0
