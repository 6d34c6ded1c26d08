"""The output of tasks: logs of all tasks merged in time order, read incrementally, even while they are written."""

from __future__ import annotations

import heapq
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from paceline.plan import LOG_LIMIT
from paceline.storage.stores.locations import is_bucket
from paceline.view.files import run_folders
from paceline.view.output.tail import LogTail
from paceline.view.text import terminal
from paceline.view.text.wording import natural, size

_TIME = rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"
LINE = re.compile(rb"(" + _TIME + rb") g(\d{1,9}) ([|~]) ?(.*)", re.DOTALL)
_SETTLE = timedelta(seconds=0.02)  # seconds: a line is written to its file at most this long after its timestamp

_REPEAT_S = 60.0  # seconds between two messages about output that was deleted


@dataclass(frozen=True)
class Line:
    at: str
    task: str
    generation: int
    text: str
    progress: bool = False  # the state of a progress bar: the next line of the task may replace it

    def to_json(self) -> dict[str, str | int]:
        return {"at": self.at, "task": self.task, "generation": self.generation, "text": self.text}


class Logs:
    """The logs of a run, or of some of its tasks."""

    def __init__(self, folder: Path, include: Callable[[str], bool] | None = None, since: str | None = None) -> None:
        self._run_folder, self._folder = folder, folder / "logs"
        self._include = include
        self._since = since
        self._tails: dict[str, LogTail] = {}
        self._last: dict[str, tuple[str, int]] = {}
        self._recent: list[Line] = []  # too new to be sorted yet
        self._missed: dict[str, int] = {}  # bytes by task
        self._missed_told_at = -_REPEAT_S

    def backlog(self) -> Iterator[Line]:
        """All lines so far, in time order; at most one chunk per task is in memory."""
        self._find_logs()
        yield from heapq.merge(*(self._all(task) for task in list(self._tails)), key=_time)

    def skip_to_last(self, count: int, generation: int | None = None) -> None:
        """Skip, mostly without reading it, what cannot be among the last `count` lines so far, of this generation if
        one is given. States of progress bars are not counted: later ones may replace them."""
        self._find_logs()
        number = rb"\d{1,9}" if generation is None else str(generation).encode()
        counted = re.compile(_TIME + rb" g" + number + rb" \|")
        for tail in self._tails.values():
            tail.seek_last(count, counted)

    def more(self, unsettled: bool = False) -> list[Line]:
        """Lines written since the last call, in time order. Very new lines wait for the next call: another file may
        still get an older one. `unsettled`: they do not wait."""
        cut = stamp(datetime.now(UTC) + (_SETTLE if unsettled else -_SETTLE))
        self._find_logs()
        new = [line for task, tail in self._tails.items() for line in self._parse(task, tail.read())]
        ready = self._recent + [line for line in new if line.at <= cut]
        self._recent = [line for line in new if line.at > cut]
        return sorted(ready, key=_time)

    def rest(self) -> list[Line]:
        """The remaining lines when nothing more will be written, including incomplete ones."""
        lines = list(self._recent)
        self._recent = []
        self._find_logs()
        for task, tail in self._tails.items():
            lines += self._all(task)
            lines += self._parse(task, filter(None, [tail.rest()]))
        return sorted(lines, key=_time)

    def close(self) -> None:
        for tail in self._tails.values():
            tail.close()

    @property
    def problems(self) -> list[str]:
        """Logs that cannot be read, and why."""
        return [f"logs/{tail.problem}" for tail in self._tails.values() if tail.problem]

    def missed(self, last: bool = False) -> str:
        """What should have been among the lines read so far, but was deleted, and where it is; empty: nothing new. A
        reader that is too slow all the time is told so once a minute, and at the end (`last`)."""
        for task, tail in self._tails.items():
            if count := tail.dropped():
                self._missed[task] = self._missed.get(task, 0) + count
        now = time.monotonic()
        if not self._missed or (now < self._missed_told_at + _REPEAT_S and not last):
            return ""
        amount, tasks = size(sum(self._missed.values())), sorted(self._missed, key=natural)
        self._missed, self._missed_told_at = {}, now
        tasks = tasks[:3] + ([f"{len(tasks) - 3} other tasks"] if len(tasks) > 3 else [])
        names = " and ".join(filter(None, [", ".join(tasks[:-1]), tasks[-1]]))
        return f"not shown: {amount} of the output of {names}, {deleted_reason(self._run_folder)}"

    def _find_logs(self) -> None:
        for task in task_names(self._folder):
            if task not in self._tails and (self._include is None or self._include(task)):
                self._tails[task] = tail = LogTail(self._folder / f"{task}.log")
                if self._since:
                    tail.seek(self._since)

    def _all(self, task: str) -> Iterator[Line]:
        while lines := self._tails[task].read():
            yield from self._parse(task, lines)

    def _parse(self, task: str, lines: Iterable[bytes]) -> Iterator[Line]:
        for raw in lines:
            match = LINE.match(raw)
            if match is None:
                at, generation = self._last.get(task, ("", 0))
                yield Line(at, task, generation, raw.decode("utf-8", "replace"))
                continue
            at, generation = match[1].decode(), int(match[2])
            self._last[task] = at, generation
            yield Line(at, task, generation, match[4].decode("utf-8", "replace"), match[3] == b"~")


def _time(line: Line) -> str:
    return line.at


def task_names(folder: Path) -> list[str]:
    """Tasks with a log in this folder; worker-2 comes before worker-10."""
    try:
        return sorted((path.stem for path in folder.glob("*.log")), key=natural)
    except OSError:
        return []


def deleted_reason(folder: Path) -> str:
    """Why output was deleted, and where it still is."""
    plan = run_folders.plan(folder)
    limit, to = (plan.get(section, {}).get(name) for section, name in (("limits", "log"), ("snapshots", "to")))
    kept = size(limit if isinstance(limit, int) else LOG_LIMIT)
    reason = f"which was deleted: limits.log keeps the last {kept} of each task"
    if isinstance(to, str) and run_folders.on_cluster(folder) and (is_bucket(to) or to.startswith("claim://")):
        return f"{reason}; `paceline logs {to}/{folder.name}` shows all output"
    return reason


def settle(lines: Iterable[Line]) -> Iterator[Line]:
    """Drop states of progress bars that were replaced: only the last one of each remains."""
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
    """Adds the prefix `worker-0 | ` to lines, with equal width and one color per task."""

    def __init__(self, tasks: Iterable[str], colors: bool, times: bool = False) -> None:
        self._order = {task: index for index, task in enumerate(sorted(tasks, key=natural))}
        self._width = max(map(len, self._order), default=0)
        self._colors = colors
        self._times = times

    def __call__(self, line: Line, plain: bool = False) -> str:
        colors = self._colors and not plain
        index = self._order.setdefault(line.task, len(self._order))
        prefix = f"{line.task:<{self._width}} |"
        time = f"{line.at} " if self._times else ""
        return f"{time}{terminal.color(prefix, index) if colors else prefix} {line.text}"


def stamp(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
