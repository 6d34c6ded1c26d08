"""`paceline logs`: the output of a run's tasks, merged in time order."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.opened_runs import followed, readable
from paceline.cli.options import ContextOption, EndpointOption, NamespaceOption, OnOption, ReadArgument
from paceline.cli.output import note, one_of

if TYPE_CHECKING:
    from paceline.client.reading.run_logs import Selection
    from paceline.view.output.merged_logs import Line, Logs, Prefixer

_POLL_S = 0.15


def complete_tasks(ctx: typer.Context, incomplete: str) -> list[str]:
    from paceline.client.reading.run_logs import task_names
    from paceline.view.files import run_folders, run_lookup

    try:
        folder = run_lookup.find(ctx.params.get("run")).folder
    except run_folders.NoRun:
        return []
    return [name for name in task_names(folder) if name.startswith(incomplete)]


def main(
    run: ReadArgument = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Keep printing until the run ends.")] = False,
    task: Annotated[
        list[str] | None,
        typer.Option(
            "--task", "-t", metavar="NAME", help="Only output of this task or role (repeatable).", show_default=False,
            autocompletion=complete_tasks,
        ),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            "--since", metavar="TIME", help="Only lines newer than an age (90s, 10m, 1h30m, 1d) or a date and time."
        ),
    ] = None,
    grep: Annotated[
        str | None,
        typer.Option("--grep", metavar="PATTERN", help="Only lines that contain a match of this regular expression."),
    ] = None,
    tail: Annotated[
        int | None,
        typer.Option("--tail", metavar="N", help="Only the last N lines of all tasks; with -f, also all later ones."),
    ] = None,
    generation: Annotated[
        int | None, typer.Option("--generation", "-g", metavar="N", help="Only output of this generation.")
    ] = None,
    times: Annotated[bool, typer.Option("--times", help="Show the time of each line.")] = False,
    output: Annotated[str, typer.Option("-o", "--output", metavar="json", help="Print one JSON object per line.")] = "",
    on: OnOption = "",
    context: ContextOption = None,
    namespace: NamespaceOption = None,
    endpoint: EndpointOption = "",
) -> int:  # fmt: skip
    """Show the output of a run's tasks, merged in time order.

    \b
    Examples:
      paceline logs --tail 100                          Show the last 100 lines of the newest run
      paceline logs --grep '(?i)error|nan' --since 1h   Search what was printed in the last hour
      paceline logs -f digits-3f9a --grep 'val_loss'    Follow a run, and show only these lines

    Options can be combined: --tail counts the lines that the others select.
    """
    one_of(output, ("json",))
    from paceline.client.reading import run_logs

    selection = run_logs.select(generation, grep, tail)
    target = readable(run, on, context, namespace, endpoint, follow)
    opened = run_logs.open_logs(target, task or [], since)
    reader = opened.reader
    out = Output(opened.tasks, selection, times, output)
    with followed(target, follow, opened.hosts) as has_ended:
        if tail is not None and grep is None:  # with a pattern, how far to go back is known only after reading
            reader.skip_to_last(tail, generation)
        if follow:
            _follow(has_ended, reader, out, tail)
        else:
            lines = selection.every(reader)
            out.lines(lines if tail is None else deque(lines, maxlen=tail))
            out.note(reader.missed(last=True))
    for problem in reader.problems:
        note(problem)
    return 0


def _follow(has_ended: Callable[[], bool], reader: Logs, out: Output, tail: int | None) -> None:
    out.live(reader.backlog(), tail)
    while True:
        out.note(reader.missed())
        is_last = has_ended()
        new = reader.more()
        out.live(new)
        if is_last:
            break
        if len(new) < 1000:
            time.sleep(_POLL_S)
    out.live(reader.rest())
    out.finish()
    out.note(reader.missed(last=True))


class Output:
    """Prints lines to stdout, prefixed and colored or as JSON; on a terminal, progress bars update in place."""

    def __init__(self, tasks: list[str], selection: Selection, times: bool, output: str) -> None:
        from paceline.view.output.merged_logs import Prefixer
        from paceline.view.output.progress_bar_display import ProgressBars
        from paceline.view.text.terminal import Screen

        self._json = output == "json"
        self._screen = Screen(sys.stdout, live=None if not self._json else False)
        self._prefix: Prefixer = Prefixer(tasks, self._screen.colors, times)
        self._selection = selection
        self._bars = ProgressBars(self._screen.live)

    def lines(self, lines: Iterable[Line]) -> None:
        write = sys.stdout.write
        for line in lines:
            write(self._format(line) + "\n")
        sys.stdout.flush()

    def live(self, lines: Iterable[Line], tail: int | None = None) -> None:
        """`tail`: show only the last of these lines."""
        shown = self._selection.matching(
            each for line in self._selection.selected(lines) for each in self._bars.add(line)
        )
        batch: list[str] = []
        for line in shown if tail is None else deque(shown, maxlen=tail):
            batch.append(self._format(line))
            if len(batch) >= 1000:
                self._show(batch)
                batch = []
        self._show([*batch, *map(self._format, self._selection.matching(self._bars.due()))])

    def note(self, text: str) -> None:
        if text and self._screen.live:
            self._show([f"note: {text}"])
        elif text:
            note(text)

    def finish(self) -> None:
        self._show([self._format(line) for line in self._selection.matching(self._bars.finish())])

    def _show(self, batch: list[str]) -> None:
        bars = self._selection.matching(self._bars.states())
        self._screen.show(batch, [self._prefix(line, plain=True) for line in bars])

    def _format(self, line: Line) -> str:
        if self._json:
            import json

            from paceline.client.json_form import versioned

            return json.dumps(versioned(line.to_json()), ensure_ascii=False)
        if not self._screen.live:
            return self._prefix(line)
        from dataclasses import replace

        from paceline.view.text.terminal import clean

        return self._prefix(replace(line, text=clean(line.text, self._screen.colors)))
