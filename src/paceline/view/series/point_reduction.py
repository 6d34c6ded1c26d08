"""Reduces values over time to fewer points: means of intervals, with the least and the largest value. Pure."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

COLUMNS = ("at", "step", "generation", "value", "least", "largest")
WIDTH = len(COLUMNS)
Row = tuple[float, float, float, float, float, float]  # at, step, generation, value, least, largest; step may be NaN

_STALE_S = 60.0  # a task that reports nothing for so long, or for several intervals, is not part of a mean any more
_STALE_INTERVALS = 5


def flat_of(rows: Iterable[Row]) -> array[float]:
    """Rows, one after the other."""
    return array("d", [number for row in rows for number in row])


def rows_of(flat: array[float], begin: float | None = None, end: float | None = None) -> list[Row]:
    """Those between two times."""
    numbers = iter(flat)
    rows: Iterator[Row] = zip(numbers, numbers, numbers, numbers, numbers, numbers, strict=True)
    if begin is None and end is None:
        return list(rows)
    first, last = -math.inf if begin is None else begin, math.inf if end is None else end
    return [row for row in rows if first <= row[0] <= last]


def reduced(rows: Iterable[Row], points: int) -> list[Row]:
    """At most about this many points, one for each interval of equal length."""
    return rows_of(reduced_flat(flat_of(rows), points))


def reduced_flat(flat: array[float], points: int) -> array[float]:
    """The same, of rows that are one after the other in an array. Without a loop over all rows: there are millions."""
    times = flat[::WIDTH].tolist()
    if times != sorted(times):  # of several files, or a clock was set back
        flat = flat_of(sorted(rows_of(flat)))
    return flat if len(flat) <= points * WIDTH else _means(flat, _intervals(flat, points))


def reduced_flats(flats: Mapping[str, array[float]], points: int) -> dict[str, array[float]]:
    """The same, of several names of one task, most of which have values at the same times."""
    known: dict[tuple[bytes, bytes], list[int] | None] = {}
    result = {}
    for name, flat in flats.items():
        if len(flat) <= points * WIDTH:
            result[name] = flat
            continue
        key = flat[::WIDTH].tobytes(), flat[2::WIDTH].tobytes()
        if key not in known:
            times = flat[::WIDTH].tolist()
            known[key] = _intervals(flat, points) if times == sorted(times) else None
        ends = known[key]
        result[name] = reduced_flat(flat, points) if ends is None else _means(flat, ends)
    return result


def _intervals(flat: array[float], points: int) -> list[int]:
    """Where each interval ends, in rows."""
    at, generations = flat[::WIDTH].tolist(), flat[2::WIDTH]
    width = (at[-1] - at[0]) / points
    ends: list[int] = []
    begin, number = 0, len(at)
    while begin < number:
        limit = at[0] + ((at[begin] - at[0]) // width + 1) * width if width else math.inf
        begin = _same(generations, begin, max(begin + 1, bisect_left(at, limit, begin)))
        ends.append(begin)
    return ends


def _means(flat: array[float], ends: Sequence[int]) -> array[float]:
    values, least, largest = (flat[column::WIDTH].tolist() for column in (3, 4, 5))
    begins = [0, *ends[:-1]]
    pieces = [slice(begin, end) for begin, end in zip(begins, ends, strict=True)]
    result = array("d", bytes(8 * WIDTH * len(ends)))
    result[0::WIDTH] = array("d", [flat[begin * WIDTH] for begin in begins])
    result[1::WIDTH] = array("d", [flat[end * WIDTH - WIDTH + 1] for end in ends])
    result[2::WIDTH] = array("d", [flat[begin * WIDTH + 2] for begin in begins])
    result[3::WIDTH] = array("d", [_mean_of(values[piece]) for piece in pieces])
    result[4::WIDTH] = array("d", [min(least[piece]) for piece in pieces])
    result[5::WIDTH] = array("d", [max(largest[piece]) for piece in pieces])
    return result


def _same(generations: array[float], begin: int, end: int) -> int:
    """The end of the rows that have the generation of the first one."""
    first = generations[begin]
    if generations[end - 1] == first:
        return end
    return next(index for index in range(begin, end) if generations[index] != first)


def _mean_of(values: Sequence[float]) -> float:
    try:
        return math.fsum(values) / len(values)
    except OverflowError:
        return math.fsum(value / len(values) for value in values)


def _mean(rows: list[Row]) -> Row:
    if len(rows) == 1:
        return rows[0]
    at, _, generation, _, _, _ = rows[0]
    mean = _mean_of([row[3] for row in rows])
    return at, rows[-1][1], generation, mean, min(row[4] for row in rows), max(row[5] for row in rows)


class Latest:
    """The last value of each task in the newest generation."""

    def __init__(self) -> None:
        self._rows: dict[str, Row] = {}
        self.generation = -math.inf

    def add(self, row: Row, task: str) -> None:
        if row[2] > self.generation:
            self._rows, self.generation = {}, row[2]
        self._rows[task] = row

    def add_interval(self, rows: Sequence[Row], tasks: Sequence[str]) -> None:
        """Of each task the mean."""
        generations = {row[2] for row in rows}
        if generations == {self.generation} and len(set(tasks)) == len(tasks):  # the usual case
            self._rows.update(zip(tasks, rows, strict=True))
            return
        by_task: dict[str, list[Row]] = {}
        for row, task in zip(rows, tasks, strict=True):
            by_task.setdefault(task, []).append(row)
        for task, own in by_task.items():
            self.add(_mean(own), task)

    def mean(self, at: float, stale_s: float = _STALE_S) -> Row | None:
        """Over all tasks that have reported within the last seconds before this time."""
        self._rows = {task: row for task, row in self._rows.items() if at - row[0] <= stale_s}
        rows = list(self._rows.values())
        if not rows:
            return None
        step = max((row[1] for row in rows if not math.isnan(row[1])), default=math.nan)
        mean = _mean_of([row[3] for row in rows])
        return at, step, self.generation, mean, min(row[4] for row in rows), max(row[5] for row in rows)


def joined(by_task: Mapping[str, array[float]], width: float, last: Mapping[str, Row] | None = None) -> list[Row]:
    """One line over all tasks: in each interval the mean of all tasks. If a task has reported nothing in the interval,
    its last value counts. `width`: seconds of an interval, at least those between two reports of a task. `last`: the
    values of tasks before their first rows."""
    latest = Latest()
    for task, row in sorted((last or {}).items(), key=lambda item: item[1][2]):
        latest.add(row, task)
    tasks = [task for task, flat in by_task.items() for _ in range(0, len(flat), WIDTH)]
    rows = [row for flat in by_task.values() for row in rows_of(flat)]
    order = sorted(range(len(rows)), key=[row[0] for row in rows].__getitem__)
    tasks, rows = [tasks[number] for number in order], [rows[number] for number in order]
    times, newest = [row[0] for row in rows], list(accumulate((row[2] for row in rows), max))
    stale_s = max(_STALE_S, _STALE_INTERVALS * width)
    result: list[Row] = []
    begin = 0
    while begin < len(rows):
        end = max(begin + 1, bisect_left(times, times[begin] + width, begin))
        end = min(end, bisect_right(newest, newest[begin], begin))  # a new generation begins a new interval
        latest.add_interval(rows[begin:end], tasks[begin:end])
        mean = latest.mean(times[begin], stale_s)
        result += [] if mean is None else [mean]
        begin = end
    return result
