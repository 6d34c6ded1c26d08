"""`paceline stacks`: what the tasks of a run are doing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.options import ContextOption, JsonOption, NamespaceOption, OnOption, RunArgument
from paceline.cli.output import note, one_of, print_json, tell

if TYPE_CHECKING:
    from paceline.view.diagnosis.stacks import ProcessStacks


def main(
    run: RunArgument = None,
    task: Annotated[
        list[str] | None,
        typer.Option("--task", "-t", metavar="NAME", help="Only this task or role (repeatable).", show_default=False),
    ] = None,
    seconds: Annotated[
        float,
        typer.Option(
            "--seconds", metavar="N", show_default=False,
            help="Take samples for N seconds (up to 60), and write a flame graph (SVG) and a file for speedscope "
            "(https://www.speedscope.app) to the current folder.",
        ),
    ] = 0.0,
    output: JsonOption = "",
    on: OnOption = "",
    context: ContextOption = None,
    namespace: NamespaceOption = None,
) -> int:  # fmt: skip
    """Show what the tasks of a run are doing: the Python stacks of all their threads, innermost frame first.

    Tasks with the same stacks are shown once. The tasks keep running. This also works if they hang.

    Exit code: 0 if there is at least one stack, otherwise 1.
    """
    one_of(output, ("json",))
    from paceline.client.diagnosis.stacks import Stacks, take
    from paceline.client.reading.find_run import Target, find_run, refresh
    from paceline.view.diagnosis.stacks import describe

    target = find_run(run, Target(on, context, namespace))
    refresh(target, notify=note)
    processes = take(target, task or [], seconds, tell)
    has_stacks = any(process.threads for process in processes)
    files = _write(target.name, processes) if seconds and has_stacks else []
    if output:
        print_json(Stacks(target.name, tuple(processes), tuple(files)).to_dict())
    elif seconds:
        for process in processes:
            if process.problem:
                tell(f"{process.task}: no stacks: {process.problem}")
        for file in files:
            print(file)
    else:
        for line in describe(processes):
            print(line)
    return 0 if has_stacks else 1


def _write(run: str, processes: list[ProcessStacks]) -> list[str]:
    """The names of the new files in the current folder."""
    import json
    import time
    from pathlib import Path

    from paceline.view.diagnosis import flame_graph

    name = f"{run}-{time.strftime('%H%M%S')}"
    texts = {
        f"{name}.svg": flame_graph.svg(processes, f"{run} at {time.strftime('%Y-%m-%d %H:%M:%S')}"),
        f"{name}.speedscope.json": json.dumps(flame_graph.speedscope(processes, run)),
    }
    for file, text in texts.items():
        with Path(file).open("x", encoding="utf-8", errors="replace") as new:  # never through a link of somebody else
            new.write(text)
    return list(texts)
