"""`paceline plan`: what a job file would run, as data; nothing is started."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.options import JobArgument, SetOption
from paceline.cli.say import one_of, tell

if TYPE_CHECKING:
    from paceline.plan import Plan


def main(
    job: JobArgument = "job.yaml",
    overrides: SetOption = None,
    output: Annotated[
        str,
        typer.Option("-o", "--output", metavar="yaml|json", help="The form.", autocompletion=lambda: ["yaml", "json"]),
    ] = "yaml",
) -> None:
    """Show what a job file would run. Starts nothing; the same job gives the same plan, byte for byte."""
    one_of(output, ("yaml", "json"))
    from paceline import plan
    from paceline.job import load
    from paceline.view.origin import resolved

    loaded = load(Path(job), overrides or [])
    for note in loaded.notes:
        tell(f"note: {note}")
    show(resolved(plan.make(loaded.job)), output)


def show(planned: Plan, output: str) -> None:
    from paceline import plan

    if output == "json":
        print(plan.to_json(planned), end="", flush=True)
    else:
        from paceline.view.yaml import dump

        print(dump(plan.to_data(planned)), end="", flush=True)
