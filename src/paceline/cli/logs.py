"""`paceline logs`: the output of a run's tasks, merged in time order."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.chosen import readable
from paceline.cli.following import following
from paceline.cli.options import ContextOption, NamespaceOption, OnOption, ReadArgument
from paceline.cli.say import fail, one_of

if TYPE_CHECKING:
    from paceline.view.logs import Line, Logs, Prefixer

_POLL_S = 0.15


def complete_tasks(ctx: typer.Context, incomplete: str) -> list[str]:
    from paceline.view import runs

    try:
        folder = runs.find(ctx.params.get("run")).folder
    except runs.NoRun:
        return []
    return [name for name in _known(folder) if name.startswith(incomplete)]


def main(
    run: ReadArgument = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until the run has ended.")] = False,
    task: Annotated[
        list[str] | None,
        typer.Option(
            "--task", "-t", metavar="NAME", help="Only this task, or this role; repeatable.", show_default=False,
            autocompletion=complete_tasks,
        ),
    ] = None,
    since: Annotated[
        str | None, typer.Option("--since", metavar="TIME", help="Only what is newer: 90s, 10m, 2h, or a date.")
    ] = None,
    generation: Annotated[int | None, typer.Option("--generation", "-g", metavar="N", help="Only this one.")] = None,
    times: Annotated[bool, typer.Option("--times", help="Show the time of each line.")] = False,
    output: Annotated[str, typer.Option("-o", "--output", metavar="json", help="One JSON object a line.")] = "",
    on: OnOption = "",
    context: ContextOption = None,
    namespace: NamespaceOption = None,
) -> int:  # fmt: skip
    """Show the output of a run's tasks, merged in time order."""
    one_of(output, ("json",))
    from paceline.view import logs

    found = readable(run, on, context, namespace, follow)
    known = _known(found.folder)
    wanted = _wanted(task or [], known, found.name)
    reader = logs.Logs(found.folder, wanted, _moment(since) if since else None)
    shown = [name for name in known if wanted is None or wanted(name)]
    out = Output(shown, generation, times, output)
    with following(found.folder, follow, _hosts(found.folder, shown)) as ended:
        if follow:
            _follow(ended, reader, out)
        else:
            out.lines(logs.settle(out.chosen(reader.backlog())))
            out.lines(out.chosen(reader.rest()))
    return 0


def _known(folder: Path) -> list[str]:
    from paceline.view import logs, runs
    from paceline.view.words import natural

    plan = runs.read_object(folder / "plan.json") or {}
    tasks = plan.get("tasks")
    planned = [t.get("name") for t in tasks if isinstance(t, dict)] if isinstance(tasks, list) else []
    return sorted({str(name) for name in planned} | set(logs.task_names(folder / "logs")), key=natural)


def _hosts(folder: Path, tasks: list[str]) -> list[str]:
    """Where these tasks run."""
    from paceline.view import runs

    plan = runs.read_object(folder / "plan.json") or {}
    planned = [task for task in plan.get("tasks") or [] if isinstance(task, dict)]
    return sorted({str(task.get("host")) for task in planned if task.get("name") in tasks})


def _wanted(names: list[str], known: list[str], run: str) -> Callable[[str], bool] | None:
    if not names:
        return None
    for name in names:
        if known and not any(_matches(task, name) for task in known):
            from difflib import get_close_matches

            near = get_close_matches(name, known, n=1)
            fail(
                f"{run} has no task {name!r}; "
                + (f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known[:20])}")
            )
    return lambda task: any(_matches(task, name) for name in names)


def _matches(task: str, name: str) -> bool:
    return task == name or task.rpartition("-")[0] == name


def _moment(text: str) -> str:
    """A time as it stands in logs, from `10m` (ago) or a date and time."""
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
        fail(f"--since {text!r}: it takes how long ago (90s, 10m, 2h, 1d) or a date and time (2026-11-15T04:30:00Z)")


def _follow(ended: Callable[[], bool], reader: Logs, out: Output) -> None:
    out.live(reader.backlog())
    while True:
        over = ended()
        new = reader.more()
        out.live(new)
        if over:
            break
        if len(new) < 1000:
            time.sleep(_POLL_S)
    out.live(reader.rest())
    out.finish()


class Output:
    """Lines to stdout: prefixed and coloured, or as JSON; progress bars replaced in place on a terminal."""

    def __init__(self, tasks: list[str], generation: int | None, times: bool, output: str) -> None:
        from paceline.view.logs import Prefixer
        from paceline.view.terminal import Screen

        self._json = output == "json"
        self._screen = Screen(sys.stdout, live=None if not self._json else False)
        self._prefix: Prefixer = Prefixer(tasks, self._screen.colours, times)
        self._generation = generation
        self._progress: dict[str, Line] = {}

    def chosen(self, lines: Iterable[Line]) -> Iterable[Line]:
        return (line for line in lines if self._generation is None or line.generation == self._generation)

    def lines(self, lines: Iterable[Line]) -> None:
        write = sys.stdout.write
        for line in lines:
            write(self._form(line) + "\n")
        sys.stdout.flush()

    def live(self, lines: Iterable[Line]) -> None:
        batch: list[str] = []
        for line in self.chosen(lines):
            before = self._progress.pop(line.task, None)
            if before is not None and before.generation != line.generation:
                batch.append(self._form(before))
            if line.progress:
                self._progress[line.task] = line
            else:
                batch.append(self._form(line))
            if len(batch) >= 1000:
                self._show(batch)
                batch = []
        self._show(batch)

    def finish(self) -> None:
        left = [self._form(line) for line in self._progress.values()]
        self._progress.clear()
        self._show(left)

    def _show(self, batch: list[str]) -> None:
        self._screen.show(batch, [self._prefix(line, plain=True) for line in self._progress.values()])

    def _form(self, line: Line) -> str:
        if self._json:
            import json

            data: dict[str, Any] = {"at": line.at, "task": line.task, "generation": line.generation, "text": line.text}
            return json.dumps(data, ensure_ascii=False)
        if not self._screen.live:
            return self._prefix(line)
        from dataclasses import replace

        from paceline.view.terminal import clean

        return self._prefix(replace(line, text=clean(line.text, self._screen.colours)))
