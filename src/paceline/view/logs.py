"""The output of tasks: logs of all tasks merged in time order, read bit by bit, also while they are written."""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from paceline.view import terminal
from paceline.view.tail import Tail
from paceline.view.words import natural

_LINE = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z) g(\d+) ([|~]) ?(.*)", re.DOTALL)
_SETTLE = timedelta(seconds=0.02)  # a line is in its file at most this long after its time


@dataclass(frozen=True)
class Line:
    at: str
    task: str
    generation: int
    text: str
    progress: bool = False  # the state of a progress bar: the next line of the task may take its place


class Logs:
    """The logs of a run, or of some of its tasks."""

    def __init__(self, folder: Path, wanted: Callable[[str], bool] | None = None, since: str | None = None) -> None:
        self._folder = folder / "logs"
        self._wanted = wanted
        self._since = since
        self._tails: dict[str, Tail] = {}
        self._last: dict[str, tuple[str, int]] = {}
        self._held: list[Line] = []

    def backlog(self) -> Iterator[Line]:
        """All that is written so far, in time order; no more than a chunk a task in memory."""
        self._look()
        yield from heapq.merge(*(self._all(task) for task in list(self._tails)), key=_time)

    def more(self) -> list[Line]:
        """What was written since, in time order. Lines so new that another file may hold an older one wait a turn."""
        cut = stamp(datetime.now(UTC) - _SETTLE)
        self._look()
        new = [line for task, tail in self._tails.items() for line in self._parse(task, tail.read())]
        ready = self._held + [line for line in new if line.at <= cut]
        self._held = [line for line in new if line.at > cut]
        return sorted(ready, key=_time)

    def rest(self) -> list[Line]:
        """What is left when nothing more will be written, with lines that were never finished."""
        lines = list(self._held)
        self._held = []
        self._look()
        for task, tail in self._tails.items():
            lines += self._all(task)
            lines += self._parse(task, filter(None, [tail.rest()]))
        return sorted(lines, key=_time)

    def close(self) -> None:
        for tail in self._tails.values():
            tail.close()

    def _look(self) -> None:
        for task in task_names(self._folder):
            if task not in self._tails and (self._wanted is None or self._wanted(task)):
                self._tails[task] = tail = Tail(self._folder / f"{task}.log")
                if self._since:
                    tail.seek(self._since)

    def _all(self, task: str) -> Iterator[Line]:
        while lines := self._tails[task].read():
            yield from self._parse(task, lines)

    def _parse(self, task: str, lines: Iterable[bytes]) -> Iterator[Line]:
        for raw in lines:
            found = _LINE.match(raw)
            if found is None:
                at, generation = self._last.get(task, ("", 0))
                yield Line(at, task, generation, raw.decode("utf-8", "replace"))
                continue
            at, generation = found[1].decode(), int(found[2])
            self._last[task] = at, generation
            yield Line(at, task, generation, found[4].decode("utf-8", "replace"), found[3] == b"~")


def _time(line: Line) -> str:
    return line.at


def task_names(folder: Path) -> list[str]:
    """The tasks that have a log in this folder, worker-2 before worker-10."""
    try:
        return sorted((path.stem for path in folder.glob("*.log")), key=natural)
    except OSError:
        return []


def settle(lines: Iterable[Line]) -> Iterator[Line]:
    """Without the states of progress bars that something took the place of: only the last one of each stays."""
    pending: dict[str, Line] = {}
    for line in lines:
        before = pending.pop(line.task, None)
        if before is not None and before.generation != line.generation:
            yield before
        if line.progress:
            pending[line.task] = line
        else:
            yield line
    yield from sorted(pending.values(), key=_time)


class Prefixer:
    """Puts `worker-0 | ` before lines, equally wide and each task in its colour."""

    def __init__(self, tasks: Iterable[str], colours: bool, times: bool = False) -> None:
        self._order = {task: index for index, task in enumerate(sorted(tasks, key=natural))}
        self._width = max(map(len, self._order), default=0)
        self._colours = colours
        self._times = times

    def __call__(self, line: Line, plain: bool = False) -> str:
        colours = self._colours and not plain
        index = self._order.setdefault(line.task, len(self._order))
        prefix = f"{line.task:<{self._width}} |"
        time = f"{line.at} " if self._times else ""
        return f"{time}{terminal.colour(prefix, index) if colours else prefix} {line.text}"


def stamp(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
