"""`paceline stop`: stops a run and waits until it has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.options import ContextOption, NamespaceOption, OnOption, RunArgument
from paceline.cli.output import note, tell

if TYPE_CHECKING:
    from paceline.view.state.events import Event


def main(
    run: RunArgument = None,
    now: Annotated[bool, typer.Option("--now", help="Kill all tasks immediately, without a grace period.")] = False,
    on: OnOption = "",
    context: ContextOption = None,
    namespace: NamespaceOption = None,
) -> int:
    """Stop a run and wait until all its processes have ended.

    Tasks receive SIGTERM and have the job's grace period to finish. Exit code: 0 if the run has ended, otherwise 1.
    """
    from paceline.client.control.stop import grace_of, is_running, stop
    from paceline.client.reading.find_run import Target, find_run, refresh
    from paceline.view.files import run_folders
    from paceline.view.state import status_reader
    from paceline.view.text.wording import span

    target = find_run(run, Target(on, context, namespace))
    refresh(target, notify=note)
    if not is_running(target):
        tell(f"{target.name} is not running: it {_outcome(status_reader.summary(target)['status'])}")
        return 0
    if not now:
        tell(f"stopping {target.name}: tasks have {span(grace_of(target))} to finish")
    elif run_folders.on_cluster(target.folder):
        tell(f"stopping {target.name}")
    ended = stop(target, now, _show)
    tell(
        f"{target.name} has stopped" if ended else f"{target.name} is still running; see: paceline status {target.name}"
    )
    return 0 if ended else 1


def _show(event: Event) -> None:
    from paceline.view.text.wording import describe

    if event.kind == "task-exited":
        tell(f"  {describe(event)}")


def _outcome(status: str) -> str:
    from paceline.view.text.wording import outcome

    return "has not started yet" if status == "starting" else outcome(status)
