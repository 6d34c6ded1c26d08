"""`paceline logs`: the output of a run's tasks, merged in time order."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.options import ContextOption, EndpointOption, NamespaceOption, OnOption, ReadArgument, use_endpoint
from paceline.cli.output import fail, note, one_of
from paceline.cli.readers import followed, readable

if TYPE_CHECKING:
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
            "--since", metavar="TIME", help="Only lines newer than an age (90s, 10m, 2h, 1d) or a date and time."
        ),
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
    """Show the output of a run's tasks, merged in time order."""
    use_endpoint(endpoint)
    one_of(output, ("json",))
    from paceline.view import logs

    target = readable(run, on, context, namespace, follow)
    task_names = _task_names(target.folder)
    is_selected = _task_filter(task or [], task_names, target.name)
    reader = logs.Logs(target.folder, is_selected, _timestamp(since) if since else None)
    selected = [name for name in task_names if is_selected is None or is_selected(name)]
    out = Output(selected, generation, times, output)
    with followed(target.folder, follow, _hosts(target.folder, selected)) as has_ended:
        if follow:
            _follow(has_ended, reader, out)
        else:
            out.lines(logs.settle(out.selected(reader.backlog())))
            out.lines(out.selected(reader.rest()))
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
    import re
    from datetime import UTC, datetime, timedelta

    from paceline.view.logs import stamp

    ago = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|h|d)", text.strip())
    try:
        if ago:
            unit = {"s": 1, "m": 60, "h": 3600, "d": 86400}[ago[2]]
            return stamp(datetime.now(UTC) - timedelta(seconds=float(ago[1]) * unit))
        return stamp(datetime.fromisoformat(text.strip()))
    except (ValueError, OverflowError):
        remedy = "use an age (90s, 10m, 2h, 1d) or a date and time (2026-11-15T04:30:00Z)"
        fail("invalid time", where=f"--since {text!r}", remedy=remedy)


def _follow(has_ended: Callable[[], bool], reader: Logs, out: Output) -> None:
    out.live(reader.backlog())
    while True:
        is_last = has_ended()
        new = reader.more()
        out.live(new)
        if is_last:
            break
        if len(new) < 1000:
            time.sleep(_POLL_S)
    out.live(reader.rest())
    out.finish()


class Output:
    """Prints lines to stdout, prefixed and colored or as JSON; on a terminal, progress bars update in place."""

    def __init__(self, tasks: list[str], generation: int | None, times: bool, output: str) -> None:
        from paceline.view.logs import Prefixer
        from paceline.view.progress_bars import ProgressBars
        from paceline.view.terminal import Screen

        self._json = output == "json"
        self._screen = Screen(sys.stdout, live=None if not self._json else False)
        self._prefix: Prefixer = Prefixer(tasks, self._screen.colors, times)
        self._generation = generation
        self._bars = ProgressBars(self._screen.live)

    def selected(self, lines: Iterable[Line]) -> Iterable[Line]:
        return (line for line in lines if self._generation is None or line.generation == self._generation)

    def lines(self, lines: Iterable[Line]) -> None:
        write = sys.stdout.write
        for line in lines:
            write(self._format(line) + "\n")
        sys.stdout.flush()

    def live(self, lines: Iterable[Line]) -> None:
        batch: list[str] = []
        for line in self.selected(lines):
            batch += map(self._format, self._bars.add(line))
            if len(batch) >= 1000:
                self._show(batch)
                batch = []
        self._show([*batch, *map(self._format, self._bars.due())])

    def finish(self) -> None:
        self._show([self._format(line) for line in self._bars.finish()])

    def _show(self, batch: list[str]) -> None:
        self._screen.show(batch, [self._prefix(line, plain=True) for line in self._bars.states()])

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
