"""`paceline events`: the events of a run, as text or as recorded."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer

from paceline.cli.options import ContextOption, EndpointOption, NamespaceOption, OnOption, ReadArgument, use_endpoint
from paceline.cli.output import note, one_of
from paceline.cli.readers import followed, readable

_POLL_S = 0.15


def main(
    run: ReadArgument = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Keep printing until the run ends.")] = False,
    output: Annotated[
        str,
        typer.Option("-o", "--output", metavar="json", help="Print events as recorded, one JSON object per line."),
    ] = "",
    on: OnOption = "",
    context: ContextOption = None,
    namespace: NamespaceOption = None,
    endpoint: EndpointOption = "",
) -> int:
    """Show the events of a run, such as starts, failures, restarts and snapshots."""
    use_endpoint(endpoint)
    one_of(output, ("json",))
    from paceline.view import events
    from paceline.view.wording import clock, describe

    target = readable(run, on, context, namespace, follow)
    file = events.EventFile(target.folder, old=True)
    with followed(target.folder, follow) as has_ended:
        while True:
            is_last = not follow or has_ended()
            while new := file.read():
                for event, line in new:
                    if output:
                        sys.stdout.write(line.decode("utf-8", "replace") + "\n")
                    else:
                        sys.stdout.write(f"{clock(event.at)} g{event.generation:<3} {describe(event)}\n")
            sys.stdout.flush()
            if is_last:
                if file.problem:
                    note(file.problem)
                return 0
            time.sleep(_POLL_S)
