"""`paceline plan`: prints what a job file would run, without starting anything."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.options import JobArgument, SetOption
from paceline.cli.output import one_of, tell

if TYPE_CHECKING:
    from paceline.plan import Plan


def main(
    job: JobArgument = "job.yaml",
    overrides: SetOption = None,
    output: Annotated[
        str,
        typer.Option(
            "-o", "--output", metavar="yaml|json", help="Output format.", autocompletion=lambda: ["yaml", "json"]
        ),
    ] = "yaml",
) -> None:
    """Show what a job file would run, without starting anything.

    The same job always gives the same plan, byte for byte.
    """
    one_of(output, ("yaml", "json"))
    from paceline.backends.snapshot_origin import resolved
    from paceline.job import load
    from paceline.job.planning import make_plan

    loaded = load(Path(job), overrides or [])
    for note in loaded.notes:
        tell(f"note: {note}")
    show(resolved(make_plan(loaded.job)), output)


def show(planned: Plan, output: str) -> None:
    from paceline.client.jobs import plan_of

    wrapped = plan_of(planned)
    if output == "json":
        import json

        print(json.dumps(wrapped.to_dict(), indent=1, sort_keys=True), flush=True)
    else:
        print(wrapped, end="", flush=True)
