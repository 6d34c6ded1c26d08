"""The output of a run's tasks: selects tasks, times, generations and lines."""

from __future__ import annotations

import re
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from paceline.client.control.wait import Deadline
from paceline.client.reading.find_run import Notify, ignore
from paceline.client.reading.refreshed_folder import followed
from paceline.errors import Argument, UsageError
from paceline.view.files import run_folders
from paceline.view.files.run_folders import Run
from paceline.view.output import merged_logs
from paceline.view.output.merged_logs import Line, Logs
from paceline.view.output.progress_bar_display import ProgressBars
from paceline.view.text.terminal import clean
from paceline.view.text.wording import natural

POLL_S = 0.15
_WARNINGS = threading.Lock()


@dataclass(frozen=True)
class Selection:
    """Which lines of the output are wanted."""

    generation: int | None = None
    pattern: re.Pattern[str] | None = None

    def selected(self, lines: Iterable[Line]) -> Iterable[Line]:
        return (line for line in lines if self.generation is None or line.generation == self.generation)

    def matching(self, lines: Iterable[Line]) -> Iterable[Line]:
        """Lines whose text, without colors, contains a match. To be used once it is known which states of a progress
        bar are shown: a state that matches may have been replaced by one that does not."""
        pattern = self.pattern
        return lines if pattern is None else (line for line in lines if pattern.search(clean(line.text, colors=False)))

    def every(self, reader: Logs) -> Iterator[Line]:
        """All lines so far, in time order."""
        settled = merged_logs.settle(self.selected(reader.backlog()))
        yield from self.matching(settled)
        yield from self.matching(self.selected(reader.rest()))


@dataclass(frozen=True)
class OpenedLogs:
    reader: Logs
    tasks: list[str]  # whose output is read
    hosts: list[str]  # that run these tasks


def open_logs(run: Run, tasks: Sequence[str] = (), since: str | None = None) -> OpenedLogs:
    """`tasks`: names of tasks or roles; none: all. `since`: an age (10m) or a date and time."""
    names = task_names(run.folder)
    is_selected = _task_filter(tasks, names, run.name)
    reader = Logs(run.folder, is_selected, _timestamp(since) if since else None)
    selected = [name for name in names if is_selected is None or is_selected(name)]
    return OpenedLogs(reader, selected, _hosts(run.folder, selected))


def read(
    run: Run,
    tasks: Sequence[str] = (),
    *,
    follow: bool = False,
    deadline: Deadline | None = None,
    since: str | None = None,
    tail: int | None = None,
    selection: Selection,
    notify: Notify = ignore,
) -> Iterator[Line]:
    """The lines of these tasks, in time order. Of a progress bar, only states that are not replaced soon."""
    opened, deadline = open_logs(run, tasks, since), deadline or Deadline(run.name)
    reader = opened.reader
    with closing(reader), followed(run, follow, opened.hosts, notify, deadline.until) as has_ended:
        if tail is not None and selection.pattern is None:  # otherwise, how far to go back is known only after reading
            reader.skip_to_last(tail, selection.generation)
        if follow:
            yield from _followed(reader, selection, tail, has_ended, deadline)
        else:
            lines = selection.every(reader)
            yield from lines if tail is None else deque(lines, maxlen=tail)
        for problem in filter(None, [reader.missed(last=True), *reader.problems]):
            notify(problem)


def _followed(
    reader: Logs, selection: Selection, tail: int | None, has_ended: Callable[[], bool], deadline: Deadline
) -> Iterator[Line]:
    bars = ProgressBars(live=False)

    def shown(lines: Iterable[Line]) -> Iterable[Line]:
        return selection.matching(each for line in selection.selected(lines) for each in bars.add(line))

    first = shown(reader.backlog())
    yield from first if tail is None else deque(first, maxlen=tail)
    is_last = False
    while not is_last:
        is_last = has_ended()
        yield from shown(reader.more())
        yield from selection.matching(bars.due())
        if not is_last:
            deadline.check("ended")
            time.sleep(POLL_S)
    yield from shown(reader.rest())
    yield from selection.matching(bars.finish())


def task_names(folder: Path) -> list[str]:
    planned = {task["name"] for task in run_folders.plan(folder).get("tasks", ())}
    return sorted(planned | set(merged_logs.task_names(folder / "logs")), key=natural)


def _hosts(folder: Path, tasks: list[str]) -> list[str]:
    planned = run_folders.plan(folder).get("tasks", ())
    return sorted({task["host"] for task in planned if task["name"] in tasks and "host" in task})


def _task_filter(names: Sequence[str], tasks: list[str], run: str) -> Callable[[str], bool] | None:
    if not names:
        return None
    for name in names:
        if tasks and not any(_matches(task, name) for task in tasks):
            from difflib import get_close_matches

            near = get_close_matches(name, tasks, n=1)
            remedy = f"did you mean {near[0]!r}?" if near else f"its tasks are {', '.join(tasks[:20])}"
            raise UsageError(f"{run} has no task {name!r}", remedy=remedy)
    return lambda task: any(_matches(task, name) for name in names)


def _matches(task: str, name: str) -> bool:
    return task == name or task.rpartition("-")[0] == name


def _timestamp(text: str) -> str:
    """A timestamp as in the logs, from `10m` (ago) or a date and time."""
    from paceline.job.values import parse_duration

    age = parse_duration("".join(text.split()))
    try:
        if age is not None:
            return merged_logs.stamp(datetime.now(UTC) - timedelta(seconds=age))
        return merged_logs.stamp(datetime.fromisoformat(text.strip()))
    except (ValueError, OverflowError):
        remedy = "use an age (90s, 10m, 1h30m, 1d) or a date and time (2026-11-15T04:30:00Z)"
        raise UsageError("invalid time", where=Argument("since", text), remedy=remedy) from None


def select(generation: int | None = None, grep: str | None = None, tail: int | None = None) -> Selection:
    """`grep`: a regular expression that lines must contain."""
    pattern = _pattern(grep) if grep is not None else None
    if tail is not None and tail < 0:
        raise UsageError("must not be negative", where=Argument("tail", tail))
    return Selection(generation, pattern)


def _pattern(text: str) -> re.Pattern[str]:
    try:
        # Warnings about what may mean something else in a later version of Python. The filters belong to all threads.
        with _WARNINGS, warnings.catch_warnings(action="ignore"):
            return re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise UsageError(f"invalid regular expression: {error}", where=Argument("grep", text)) from None
