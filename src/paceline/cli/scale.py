"""`paceline scale`: changes the number of hosts of a run while it continues."""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer

from paceline.cli.options import ContextOption, NamespaceOption, OnOption, complete_runs, seconds_of
from paceline.cli.output import fail, note, tell
from paceline.cli.typer_commands import Verb

_EXAMPLE = "for example: paceline scale RUN worker=4"


class COMMAND(Verb):
    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return ["[OPTIONS] [RUN] ROLE=N"]  # generated, it would look like a list of pairs


def main(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN] ROLE=N", show_default=False, autocompletion=complete_runs,
            help="Run id or a unique prefix of it (default: the newest run), and the number of hosts of a role.",
        ),
    ] = None,
    timeout: Annotated[
        str,
        typer.Option(
            "--timeout", metavar="DURATION",
            help="Stop waiting after this time, such as 90s, 10m or 1h30m (default: never). The change continues.",
        ),
    ] = "",
    on: OnOption = "",
    context: ContextOption = None,
    namespace: NamespaceOption = None,
) -> int:  # fmt: skip
    """Change the number of worker hosts of a run, between `min` and `max`, and wait until the change is complete.

    \b
    Example:
      paceline scale digits-3f9a worker=6

    New hosts prepare while the others train. Hosts leave, those with the highest numbers first, once a snapshot of the
    group is committed. Then the group restarts from a snapshot. Ctrl-C stops waiting; the change
    continues.

    \b
    Exit codes:
      0    the run has that many hosts
      1    an error
      2    wrong usage, or the run cannot have that many hosts
      124  the time limit has passed; the change continues
      130  Ctrl-C; the change continues
    """
    from paceline.client.control.scale import scale
    from paceline.client.control.wait import Deadline
    from paceline.client.reading.find_run import Target, find_run, refresh
    from paceline.view.text.wording import count

    runs = [argument for argument in arguments or () if "=" not in argument]
    sizes = [argument for argument in arguments or () if "=" in argument]
    if len(runs) > 1 or len(sizes) != 1:
        fail("scale requires one role and its number of hosts, and at most one run", remedy=_EXAMPLE)
    role, _, number = sizes[0].partition("=")
    if not re.fullmatch("[0-9]{1,9}", number):
        fail("invalid number of hosts", where=sizes[0], remedy=_EXAMPLE)
    limit = seconds_of(timeout, "--timeout") if timeout else None
    target = find_run(runs[0] if runs else None, Target(on, context, namespace))
    refresh(target, notify=note)
    try:
        scale(target, {role: int(number)}, Deadline(target.name, limit), tell)
    except KeyboardInterrupt:
        tell(f"interrupted; {target.name} is still being scaled")
        return 130
    tell(f"{target.name}: {role} has {count(int(number), 'host')}")
    return 0
