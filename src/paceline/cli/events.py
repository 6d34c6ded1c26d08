"""`paceline events`: the events of a run, as text or as recorded."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer

from paceline.cli.options import ContextOption, EndpointOption, NamespaceOption, OnOption, ReadArgument, use_endpoint
from paceline.cli.output import one_of
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
    tail = events.follow(target.folder)
    with followed(target.folder, follow) as has_ended:
        while True:
            is_last = not follow or has_ended()
            while lines := tail.read():
                for line in lines:
                    event = events.parse(line)
                    if event is None:
                        continue
                    if output:
                        sys.stdout.write(line.decode("utf-8", "replace") + "\n")
                    else:
                        sys.stdout.write(f"{clock(event.at)} g{event.generation:<3} {describe(event)}\n")
            sys.stdout.flush()
            if is_last:
                return 0
            time.sleep(_POLL_S)
