"""`paceline events`: what happened in a run, in words or as the raw lines."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer

from paceline.cli.chosen import readable
from paceline.cli.following import following
from paceline.cli.options import ContextOption, NamespaceOption, OnOption, ReadArgument
from paceline.cli.say import one_of

_POLL_S = 0.15


def main(
    run: ReadArgument = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until the run has ended.")] = False,
    output: Annotated[
        str,
        typer.Option("-o", "--output", metavar="json", help="The events as they were written, one JSON object a line."),
    ] = "",
    on: OnOption = "",
    context: ContextOption = None,
    namespace: NamespaceOption = None,
) -> int:
    """Show what happened in a run."""
    one_of(output, ("json",))
    from paceline.view import events
    from paceline.view.words import clock, say

    found = readable(run, on, context, namespace, follow)
    tail = events.follow(found.folder)
    with following(found.folder, follow) as ended:
        while True:
            over = not follow or ended()
            while lines := tail.read():
                for line in lines:
                    event = events.parse(line)
                    if event is None:
                        continue
                    if output:
                        sys.stdout.write(line.decode("utf-8", "replace") + "\n")
                    else:
                        sys.stdout.write(f"{clock(event.at)} g{event.generation:<3} {say(event)}\n")
            sys.stdout.flush()
            if over:
                return 0
            time.sleep(_POLL_S)
