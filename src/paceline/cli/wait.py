"""`paceline wait`: waits for the end of a run, for a step or for a snapshot; for scripts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.options import (
    ContextOption,
    EndpointOption,
    JsonOption,
    NamespaceOption,
    OnOption,
    RunArgument,
    seconds_of,
)
from paceline.cli.output import fail, note, one_of, print_json, tell

if TYPE_CHECKING:
    from paceline.client.control.wait import Condition
    from paceline.view.state.status_reader import Standing


def main(
    run: RunArgument = None,
    condition: Annotated[
        str,
        typer.Option(
            "--for", metavar="CONDITION",
            help="ended (default): the run has ended. step=N: training has reached step N. snapshot: the run has "
            "committed a snapshot. snapshot=STEP: it has committed a snapshot of this step or a later one.",
            show_default=False, autocompletion=lambda: ["ended", "step=", "snapshot", "snapshot="],
        ),
    ] = "ended",
    timeout: Annotated[
        str,
        typer.Option(
            "--timeout", metavar="DURATION",
            help="Stop waiting after this time, such as 90s, 10m or 1h30m (default: never).",
        ),
    ] = "",
    output: JsonOption = "",
    on: OnOption = "",
    context: ContextOption = None,
    namespace: NamespaceOption = None,
    endpoint: EndpointOption = "",
) -> int:  # fmt: skip
    """Wait until a run has ended, has reached a step, or has committed a snapshot.

    Returns immediately if the condition is already met. Ctrl-C stops waiting, not the run.

    \b
    Exit codes:
      0    the condition is met; for `ended`: the run succeeded
      1    the run failed (for `ended`), or an error
      2    wrong usage
      3    the run ended before it reached the step or committed the snapshot
      124  the time limit has passed; the run continues
      130  for `ended`: the run was stopped; or Ctrl-C
    """
    one_of(output, ("json",))
    from paceline.client.control.wait import Deadline, parse_condition, wait
    from paceline.client.reading.find_run import Target, find_run
    from paceline.view.snapshots.snapshot_locations import is_location

    if run is not None and is_location(run):
        fail("wait requires a run id, not a location", where=run)
    parsed_condition = parse_condition(condition)
    limit = seconds_of(timeout, "--timeout") if timeout else None
    target = find_run(run, Target(on, context, namespace, endpoint=endpoint))
    try:
        standing = wait(target, parsed_condition, Deadline(target.name, limit), note)
    except KeyboardInterrupt:
        tell(f"interrupted; this does not stop {target.name}")
        return 130
    if output:
        from paceline.client.reading.run_status import wait_form

        print_json(wait_form(standing))
    return _tell(standing, parsed_condition)


def _tell(standing: Standing, condition: Condition) -> int:
    """Prints what happened; returns the exit code."""
    from paceline.client.control.wait import Ended, StepReached
    from paceline.view.files.run_folders import Run
    from paceline.view.report import run_report
    from paceline.view.snapshots.snapshot_locations import described

    if isinstance(condition, Ended):
        from paceline.cli.exit_codes import exit_code

        tell(run_report.headline(standing.report))
        return exit_code(str(standing.report.get("status")), stop_requested=False)
    mark = standing.state.committed
    if isinstance(condition, StepReached):
        tell(f"{standing.run} has reached step {condition.step}")
    elif mark is not None:
        tell(f"{standing.run} has committed {mark}: {described(Run(standing.run, standing.folder), mark.snapshot)}")
    return 0
