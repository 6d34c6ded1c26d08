"""`paceline events`: the events of a run, as text or as recorded."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from paceline.cli.opened_runs import readable
from paceline.cli.options import ContextOption, EndpointOption, NamespaceOption, OnOption, ReadArgument
from paceline.cli.output import note, one_of


def main(
    run: ReadArgument = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Keep printing until the run ends.")] = False,
    output: Annotated[
        str,
        typer.Option("-o", "--output", metavar="json", help="Print one JSON object per line, with all fields."),
    ] = "",
    on: OnOption = "",
    context: ContextOption = None,
    namespace: NamespaceOption = None,
    endpoint: EndpointOption = "",
) -> int:
    """Show the events of a run, such as starts, failures, restarts and snapshots."""
    one_of(output, ("json",))
    from paceline.client.reading import run_events
    from paceline.errors import SCHEMA_VERSION
    from paceline.view.text.wording import clock, describe

    version = f'{{"schema_version": {SCHEMA_VERSION}, '
    for batch in run_events.read(readable(run, on, context, namespace, endpoint, follow), follow, notify=note):
        for event, line in batch:
            if output:
                sys.stdout.write(version + line.decode("utf-8", "replace").lstrip()[1:] + "\n")
            else:
                sys.stdout.write(f"{clock(event.at)} g{event.generation:<3} {describe(event)}\n")
        sys.stdout.flush()
    return 0
