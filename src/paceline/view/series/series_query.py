"""Values of a series for a chart: of some tasks, between two times, reduced to as many points as can be shown."""

from __future__ import annotations

import csv
import io
import math
import time
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from paceline.view.series.point_reduction import COLUMNS, Row, flat_of, joined, reduced_flat, rows_of
from paceline.view.series.series_file_parsing import PROGRESS
from paceline.view.series.series_parts import KEPT, Part, PartCache, is_evaluator, parts_between
from paceline.view.text.wording import natural

T = TypeVar("T")
MOST_LINES = 64  # tasks that are shown on their own
MOST_NAMES = 5000  # that are listed
ALL = "*"  # one line over all tasks that train; of what only evaluators report, over these
_USUAL_POINTS = 800  # of a panel of the page
_PREPARED = 6  # names that a reader probably looks at first
_LEAST_PARTS = 4  # are read however long it takes
_ORDER = (0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15)


@dataclass(frozen=True)
class Name:
    name: str
    kind: str  # progress, metric, evaluation or resource
    tasks: tuple[str, ...]  # tasks or hosts

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "kind": self.kind, "tasks": list(self.tasks)}


def prepare(cache: PartCache, folder: Path) -> None:
    """Reads all files of a long run once, for the charts that are asked for next."""
    parts = list(parts_between(folder))
    if not _is_overview(parts, _USUAL_POINTS):
        return
    for part in _spread(parts):
        began = time.monotonic()
        try:
            cache.overview(part)
        except OSError:
            continue
        time.sleep(time.monotonic() - began)  # requests come first
    for each in names(cache, folder, {})[:_PREPARED]:
        began = time.monotonic()
        read(cache, folder, each.name, [ALL], points=_USUAL_POINTS)
        time.sleep(time.monotonic() - began)


def _is_overview(parts: list[Part], points: int) -> bool:
    """Whether some values of each file are enough, or nearly enough, for this many points."""
    return len(parts) * KEPT >= points / 2


def names(cache: PartCache, folder: Path, evaluated: Mapping[str, Iterable[str]]) -> list[Name]:
    """What can be asked for. The oldest and the newest files are searched. `evaluated`: metrics of evaluators, with
    the tasks. A metric that tasks of both kinds report is listed twice."""
    tasks: dict[tuple[str, str], set[str]] = {}
    parts = list(parts_between(folder))
    newest = {part.tier: part for part in parts}  # of each tier
    for part in {*parts[:1], *newest.values(), *parts[-2:]}:
        try:
            index = cache.index(part)
        except OSError:
            continue
        for name, users in index.tasks.items():
            for task in users:
                tasks.setdefault((_kind(name, task, index.resources), name), set()).add(task)
    for name, evaluators in evaluated.items():
        tasks.setdefault(("evaluation", name), set()).update(evaluators)
    order = {kind: number for number, kind in enumerate(("metric", "evaluation", "progress", "resource"))}
    listed = [Name(name, kind, tuple(sorted(users, key=natural))) for (kind, name), users in tasks.items()]
    return sorted(listed, key=lambda each: (order[each.kind], each.name != "loss", each.name))[:MOST_NAMES]


def _kind(name: str, task: str, resources: Collection[str]) -> str:
    if name in PROGRESS or name in resources:
        return "progress" if name in PROGRESS else "resource"
    return "evaluation" if is_evaluator(task) else "metric"


def read(
    cache: PartCache,
    folder: Path,
    name: str,
    tasks: Collection[str] = (),
    begin: float | None = None,
    end: float | None = None,
    points: int = 1000,
    extra: Mapping[str, list[Row]] | None = None,
    seconds: float = math.inf,
) -> dict[str, Any]:
    """One line for each task, at most MOST_LINES; `tasks` contains ALL: also one over all. `extra`: rows that are not
    in the files, by task. `seconds`: then what was read so far is returned, from files at regular distances."""
    parts = list(parts_between(folder, begin, end))
    query = _Query(cache, parts, name, _is_overview(parts, points), seconds)
    others = extra or {}
    named = [task for task in tasks if task != ALL]
    flats: dict[str, array[float]] = {}
    if ALL in tasks:
        first = begin if begin is not None else min((part.begin for part in parts), default=0.0)
        last = end if end is not None else query.last()
        flats[ALL] = query.joined(max(0.0, last - first) / points) or _mean_of_evaluators(others)
    if named or not tasks:
        values = query.values()
        known = {task for by_task in values for task in by_task} | set(others)
        for task in sorted(known.intersection(named) if tasks else known, key=natural)[:MOST_LINES]:
            flats[task] = _concatenated([*(by_task.get(task) for by_task in values), flat_of(others.get(task, ()))])
    shown = {task: reduced_flat(_between(flat, begin, end), points) for task, flat in flats.items()}
    lines = [{"task": task, "points": [_row(row) for row in rows_of(flat)]} for task, flat in shown.items() if flat]
    return {
        "name": name, "columns": list(COLUMNS), "lines": lines,
        "total_tasks": len(query.tasks() or others if tasks else query.tasks().union(others)),
        "is_partial": query.is_partial,
    }  # fmt: skip


def _mean_of_evaluators(rows: Mapping[str, list[Row]]) -> array[float]:
    return flat_of(joined({task: flat_of(own) for task, own in rows.items()}, 1.0))


def _concatenated(flats: Iterable[array[float] | None]) -> array[float]:
    result = array("d")
    for flat in flats:
        result.extend(flat or ())
    return result


def _between(flat: array[float], begin: float | None, end: float | None) -> array[float]:
    return flat if begin is None and end is None else flat_of(rows_of(flat, begin, end))


class _Query:
    """The values of one name in some files. `is_overview`: some values of each file are enough. `seconds`: what is not
    known by then is left out, and `is_partial` is set."""

    def __init__(self, cache: PartCache, parts: list[Part], name: str, is_overview: bool, seconds: float) -> None:
        self._cache, self._parts, self._name = cache, parts, name
        self._is_overview, self._seconds = is_overview, seconds
        self._began, self._results = math.inf, 0
        self.is_partial = False

    def last(self) -> float:
        """The time of the newest value; 0: there is none."""
        for part in reversed(self._parts):
            try:
                last = self._cache.index(part).last.get(self._name)
            except OSError:
                continue
            if last is not None:
                return last
        return 0.0

    def tasks(self) -> set[str]:
        """All that have values, in the files that were parsed."""
        return set().union(*(self._cache.known_tasks(part, self._name) for part in self._parts))

    def values(self) -> list[Mapping[str, array[float]]]:
        """By task, in the order of the files."""
        read = self._cache.overview if self._is_overview else self._cache.values

        def values(part: Part) -> Mapping[str, array[float]] | None:
            if self._is_late() and not self._cache.has(part, self._is_overview):
                return None
            return read(part).get(self._name, {})

        return self._of_parts(values)

    def joined(self, width: float) -> array[float]:
        """The mean of all tasks. The width is rounded to a power of two: results can be reused while the run
        continues."""
        width = 2.0 ** math.floor(math.log2(width)) if width > 0 else 0.0
        before = dict(zip(self._parts, [None, *self._parts], strict=False))

        def joined(part: Part) -> array[float] | None:
            return self._cache.joined(
                part, before[part], self._name, width, self._is_overview, only_known=self._is_late()
            )

        return _concatenated(self._of_parts(joined))

    def _of_parts(self, read: Callable[[Part], T | None]) -> list[T]:
        """In the order of the files, which are read in another order."""
        results: dict[Part, T] = {}
        self._began, self._results = time.monotonic(), 0
        for part in _spread(self._parts):
            try:
                result = read(part)
            except OSError:
                continue  # summed up in the meantime, or damaged
            if result is None:
                self.is_partial = True
            else:
                results[part] = result
                self._results += 1
        return [results[part] for part in self._parts if part in results]

    def _is_late(self) -> bool:
        return self._results >= _LEAST_PARTS and time.monotonic() - self._began > self._seconds


def _spread(parts: list[Part]) -> list[Part]:
    """First every 16th, then those between: whatever time there is, what was read covers the whole run."""
    return [part for first in _ORDER for part in parts[first :: len(_ORDER)]]


def table(
    cache: PartCache,
    folder: Path,
    wanted: Collection[str],
    tasks: Collection[str],
    extra: Iterable[tuple[str, str, Row]],
) -> Iterator[str]:
    """All values as CSV, in pieces."""
    yield _csv([["name", "task", "generation", "at", "step", "value", "least", "largest"]])
    if rows := [_record(name, task, row) for name, task, row in extra]:
        yield _csv(rows)
    for part in parts_between(folder):
        try:
            values = cache.values(part)
        except OSError:
            continue
        rows = [
            _record(name, task, row)
            for name in wanted
            for task, flat in values.get(name, {}).items()
            if not tasks or task in tasks
            for row in rows_of(flat)
        ]
        if rows:
            yield _csv(rows)


def _record(name: str, task: str, row: Row) -> list[Any]:
    at, step, generation, value, least, largest = _row(row)
    return [_plain(name), _plain(task), generation, at, "" if step is None else step, value, least, largest]


def _plain(text: str) -> str:
    """Programs choose the names: a spreadsheet must not take one for a formula."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text


def _csv(rows: list[list[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    return text.getvalue()


def _row(row: Row) -> list[float | int | None]:
    at, step, generation, *values = row
    return [at, None if math.isnan(step) else int(step), int(generation), *values]
