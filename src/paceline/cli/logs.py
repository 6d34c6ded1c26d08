"""`paceline logs`: the output of a run's tasks, merged in time order."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.options import ContextOption, EndpointOption, NamespaceOption, OnOption, ReadArgument, use_endpoint
from paceline.cli.output import fail, note, one_of
from paceline.cli.readers import followed, readable

if TYPE_CHECKING:
    import re

    from paceline.view.logs import Line, Logs, Prefixer

_POLL_S = 0.15


def complete_tasks(ctx: typer.Context, incomplete: str) -> list[str]:
    from paceline.view import run_folders

    try:
        folder = run_folders.find(ctx.params.get("run")).folder
    except run_folders.NoRun:
        return []
    return [name for name in _task_names(folder) if name.startswith(incomplete)]


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
    use_endpoint(endpoint)
    one_of(output, ("json",))
    pattern = _pattern(grep) if grep is not None else None
    if tail is not None and tail < 0:
        fail("must not be negative", where=f"--tail {tail}")
    from paceline.view import logs

    target = readable(run, on, context, namespace, follow)
    task_names = _task_names(target.folder)
    is_selected = _task_filter(task or [], task_names, target.name)
    reader = logs.Logs(target.folder, is_selected, _timestamp(since) if since else None)
    selected = [name for name in task_names if is_selected is None or is_selected(name)]
    out = Output(selected, generation, pattern, times, output)
    with followed(target.folder, follow, _hosts(target.folder, selected)) as has_ended:
        if tail is not None and pattern is None:  # with a pattern, how far to go back is known only after reading
            reader.skip_to_last(tail, generation)
        if follow:
            _follow(has_ended, reader, out, tail)
        else:
            lines = out.matching(_all(reader, out))
            out.lines(lines if tail is None else deque(lines, maxlen=tail))
            out.note(reader.missed(last=True))
    for problem in reader.problems:
        note(problem)
    return 0


def _task_names(folder: Path) -> list[str]:
    from paceline.view import logs, run_folders
    from paceline.view.wording import natural

    planned = {task["name"] for task in run_folders.plan(folder).get("tasks", ())}
    return sorted(planned | set(logs.task_names(folder / "logs")), key=natural)


def _hosts(folder: Path, tasks: list[str]) -> list[str]:
    """The hosts that run these tasks."""
    from paceline.view import run_folders

    planned = run_folders.plan(folder).get("tasks", ())
    return sorted({task["host"] for task in planned if task["name"] in tasks and "host" in task})


def _task_filter(names: list[str], task_names: list[str], run: str) -> Callable[[str], bool] | None:
    if not names:
        return None
    for name in names:
        if task_names and not any(_matches(task, name) for task in task_names):
            from difflib import get_close_matches

            near = get_close_matches(name, task_names, n=1)
            remedy = f"did you mean {near[0]!r}?" if near else f"its tasks are {', '.join(task_names[:20])}"
            fail(f"{run} has no task {name!r}", remedy=remedy)
    return lambda task: any(_matches(task, name) for name in names)


def _matches(task: str, name: str) -> bool:
    return task == name or task.rpartition("-")[0] == name


def _timestamp(text: str) -> str:
    """A timestamp as in the logs, from `10m` (ago) or a date and time."""
    from datetime import UTC, datetime, timedelta

    from paceline.job.values import parse_duration
    from paceline.view.logs import stamp

    age = parse_duration("".join(text.split()))
    try:
        if age is not None:
            return stamp(datetime.now(UTC) - timedelta(seconds=age))
        return stamp(datetime.fromisoformat(text.strip()))
    except (ValueError, OverflowError):
        remedy = "use an age (90s, 10m, 1h30m, 1d) or a date and time (2026-11-15T04:30:00Z)"
        fail("invalid time", where=f"--since {text!r}", remedy=remedy)


def _pattern(text: str) -> re.Pattern[str]:
    import re
    import warnings

    try:
        with warnings.catch_warnings(action="ignore"):  # what may mean something else in a later version of Python
            return re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        fail(f"invalid regular expression: {error}", where=f"--grep {text!r}")


def _all(reader: Logs, out: Output) -> Iterator[Line]:
    from paceline.view.logs import settle

    yield from settle(out.selected(reader.backlog()))
    yield from out.selected(reader.rest())


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

    def __init__(
        self, tasks: list[str], generation: int | None, pattern: re.Pattern[str] | None, times: bool, output: str
    ) -> None:
        from paceline.view.logs import Prefixer
        from paceline.view.progress_bars import ProgressBars
        from paceline.view.terminal import Screen

        self._json = output == "json"
        self._screen = Screen(sys.stdout, live=None if not self._json else False)
        self._prefix: Prefixer = Prefixer(tasks, self._screen.colors, times)
        self._generation = generation
        self._pattern = pattern
        self._bars = ProgressBars(self._screen.live)

    def selected(self, lines: Iterable[Line]) -> Iterable[Line]:
        return (line for line in lines if self._generation is None or line.generation == self._generation)

    def matching(self, lines: Iterable[Line]) -> Iterable[Line]:
        """Lines whose text, without colors, contains a match. To be used once it is known which states of a progress
        bar are shown: a state that matches may have been replaced by one that does not."""
        from paceline.view.terminal import clean

        pattern = self._pattern
        return lines if pattern is None else (line for line in lines if pattern.search(clean(line.text, colors=False)))

    def lines(self, lines: Iterable[Line]) -> None:
        write = sys.stdout.write
        for line in lines:
            write(self._format(line) + "\n")
        sys.stdout.flush()

    def live(self, lines: Iterable[Line], tail: int | None = None) -> None:
        """`tail`: show only the last of these lines."""
        shown = self.matching(each for line in self.selected(lines) for each in self._bars.add(line))
        batch: list[str] = []
        for line in shown if tail is None else deque(shown, maxlen=tail):
            batch.append(self._format(line))
            if len(batch) >= 1000:
                self._show(batch)
                batch = []
        self._show([*batch, *map(self._format, self.matching(self._bars.due()))])

    def note(self, text: str) -> None:
        if text and self._screen.live:
            self._show([f"note: {text}"])
        elif text:
            note(text)

    def finish(self) -> None:
        self._show([self._format(line) for line in self.matching(self._bars.finish())])

    def _show(self, batch: list[str]) -> None:
        bars = self.matching(self._bars.states())
        self._screen.show(batch, [self._prefix(line, plain=True) for line in bars])

    def _format(self, line: Line) -> str:
        if self._json:
            import json

            data: dict[str, Any] = {"at": line.at, "task": line.task, "generation": line.generation, "text": line.text}
            return json.dumps(data, ensure_ascii=False)
        if not self._screen.live:
            return self._prefix(line)
        from dataclasses import replace

        from paceline.view.terminal import clean

        return self._prefix(replace(line, text=clean(line.text, self._screen.colors)))
