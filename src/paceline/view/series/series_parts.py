"""The values in the files of series, parsed once for all names, and kept in bounded memory."""

from __future__ import annotations

import math
import os
import threading
from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from paceline.agent import series_files
from paceline.view.series.point_reduction import WIDTH, flat_of, joined, reduced_flats, rows_of
from paceline.view.series.series_file_parsing import Values, parsed, read_lines

KEPT = 30  # points of a file in its overview, for each task
_CACHED = 64 * 1024 * 1024  # bytes of values
_OVERVIEWS = 96 * 1024 * 1024
_JOINED = 32 * 1024 * 1024
_INDEXES = 32 * 1024 * 1024  # bytes
_TASK_SETS = 4000
_GROWING = 8  # files
_ENTRY = 500  # bytes of a key
_NAME = 200  # bytes that a name takes, and the values of a task, besides these

Key = tuple[str, int, int, int]  # of a file: path, inode, size, time
T = TypeVar("T")


@dataclass(frozen=True)
class Part:
    """A file of series."""

    path: str
    begin: float
    tier: int

    @property
    def key(self) -> Key:
        """Of its contents as they are now. Raises OSError."""
        status = os.stat(self.path)  # noqa: PTH116
        return self.path, status.st_ino, status.st_size, status.st_mtime_ns


@dataclass(frozen=True)
class Index:
    """What a file has values of."""

    tasks: Mapping[str, frozenset[str]]  # by name
    last: Mapping[str, float]  # time of the newest value, by name
    resources: frozenset[str]  # names that are resources


@dataclass(frozen=True)
class _JoinedRows:
    rows: array[float]
    before: Key | None  # of the file before it, if it was used
    is_alone: bool  # all tasks report in the first interval: the file before it makes no difference


def parts_between(folder: Path, begin: float | None = None, end: float | None = None) -> Iterator[Part]:
    """The files of a run that may have values between these times, oldest first."""
    for tier in reversed(series_files.TIERS):
        paths = series_files.parts(str(folder / series_files.FOLDER), tier)
        starts = [int(Path(path).stem) for path in paths]
        for number, path in enumerate(paths):
            ends = starts[number + 1] + tier if number + 1 < len(paths) else math.inf
            if (end is None or starts[number] <= end + tier) and (begin is None or ends >= begin - tier):
                yield Part(path, starts[number], tier)


class PartCache:
    """Threads may share it: while one parses a file, others that need it wait for the result. All methods raise
    OSError: a file may be summed up, and deleted, at any time."""

    def __init__(self, limit: int = _CACHED) -> None:
        self._locks = [threading.Lock() for _ in range(16)]
        self._values: _Recent[Values] = _Recent(limit)
        self._overviews: _Recent[Values] = _Recent(_OVERVIEWS)
        self._indexes: _Recent[Index] = _Recent(_INDEXES)
        self._joined: _Recent[_JoinedRows] = _Recent(_JOINED)
        self._growing: dict[str, _Parsed] = {}  # files that are probably written to, by path
        self._growing_lock = threading.Lock()
        self._task_sets: dict[frozenset[str], frozenset[str]] = {}  # most files have the same tasks

    def values(self, part: Part) -> Values:
        key = part.key
        values = self._values.get(key)
        if values is None:
            with self._lock(key):
                values = self._values.get(key)
                if values is None:
                    values = self._parse(key)
                    self._values.add(key, values, _size(values))
        return values

    def overview(self, part: Part) -> Values:
        """About KEPT points for each name and task."""
        key = part.key
        values = self._overviews.get(key)
        if values is None:
            with self._lock(key):
                values = self._overviews.get(key)
                if values is None:
                    values = _reduced(self._values.get(key) or self._parse(key))
                    self._overviews.add(key, values, _size(values))
        return values

    def index(self, part: Part) -> Index:
        index = self._indexes.get(part.key)
        if index is None:
            self.values(part)
            index = self._indexes.get(part.key)
        return index or Index({}, {}, frozenset())  # it was written to in the meantime

    def has(self, part: Part, is_overview: bool) -> bool:
        """Whether nothing has to be parsed."""
        return (self._overviews if is_overview else self._values).get(part.key) is not None

    def known_tasks(self, part: Part, name: str) -> frozenset[str]:
        """Those that have values of this name, if the file was parsed."""
        try:
            index = self._indexes.get(part.key)
        except OSError:
            index = None
        return index.tasks.get(name, frozenset()) if index is not None else frozenset()

    def joined(
        self, part: Part, before: Part | None, name: str, width: float, is_overview: bool, *, only_known: bool = False
    ) -> array[float] | None:
        """The mean of all tasks but evaluators, in intervals of this width, as rows. `before`: the file before it: its
        last values count for tasks that report later, if it was parsed. `only_known`: None if it takes some time."""
        key = part.key, name, width, is_overview
        known = self._joined.get(key)
        if before is not None and not self.has(before, is_overview):
            before = None
        before_key = None if before is None else before.key
        if known is not None and (before is None or known.is_alone or known.before == before_key):
            return known.rows
        if only_known:
            return None
        joined = self._join(part, before, name, width, is_overview)
        self._joined.add(key, joined, _ENTRY + len(joined.rows) * joined.rows.itemsize)
        return joined.rows

    def _join(self, part: Part, before: Part | None, name: str, width: float, is_overview: bool) -> _JoinedRows:
        def values(part: Part) -> dict[str, array[float]]:
            by_task = (self.overview if is_overview else self.values)(part).get(name, {})
            return {task: flat for task, flat in by_task.items() if not is_evaluator(task)}

        by_task = values(part)
        last = {} if before is None else {task: rows_of(flat[-WIDTH:])[0] for task, flat in values(before).items()}
        rows = joined(by_task, max(width, part.tier), last)
        begins = [flat[0] for flat in by_task.values()]
        is_alone = not begins or max(begins) - min(begins) < max(width, part.tier)
        return _JoinedRows(flat_of(rows), None if before is None else before.key, is_alone)

    def _lock(self, key: Key) -> threading.Lock:
        return self._locks[hash(key) % len(self._locks)]

    def _parse(self, key: Key) -> Values:
        """Of a file that has only grown, what is new."""
        path, inode, size, _ = key
        with self._growing_lock:
            before = self._growing.pop(path, None)
        if before is None or before.inode != inode or before.end > size:
            before = _Parsed(inode, 0, {}, frozenset())
        lines, end = read_lines(path, before.end)
        new, resources = parsed(lines)
        values = _combined(before.values, new) if before.values else new
        resources |= before.resources
        with self._growing_lock:
            self._growing[path] = _Parsed(inode, end, values, resources)
            while len(self._growing) > _GROWING:
                self._growing.pop(next(iter(self._growing)))
        if len(self._task_sets) > _TASK_SETS:
            self._task_sets.clear()
        users = {name: frozenset(by_task) for name, by_task in values.items()}
        tasks = {name: self._task_sets.setdefault(each, each) for name, each in users.items()}
        last = {name: max(flat[-WIDTH] for flat in by_task.values()) for name, by_task in values.items()}
        self._indexes.add(key, Index(tasks, last, resources), _ENTRY + _NAME * len(tasks))
        return values


@dataclass(frozen=True)
class _Parsed:
    inode: int
    end: int  # position after the last line
    values: Values
    resources: frozenset[str]


def _combined(before: Values, new: Values) -> Values:
    """Other threads may still read the values before."""
    values = dict(before)
    for name, by_task in new.items():
        own = values[name] = dict(before.get(name, {}))
        for task, flat in by_task.items():
            own[task] = own[task] + flat if task in own else flat
    return values


def is_evaluator(task: str) -> bool:
    return task.startswith("evaluator-")


class _Recent(Generic[T]):
    """The most recently used entries, up to a size."""

    def __init__(self, limit: int) -> None:
        self._limit, self._size, self._lock = limit, 0, threading.Lock()
        self._entries: OrderedDict[Hashable, tuple[int, T]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Hashable) -> T | None:
        with self._lock:
            if key not in self._entries:
                return None
            self._entries.move_to_end(key)
            return self._entries[key][1]

    def add(self, key: Hashable, entry: T, size: int) -> None:
        with self._lock:
            self._size -= self._entries.pop(key, (0, entry))[0]
            self._entries[key] = size, entry
            self._size += size
            while self._size > self._limit and len(self._entries) > 1:
                self._size -= self._entries.popitem(last=False)[1][0]


def _size(values: Values) -> int:
    return sum(_NAME + len(flat) * flat.itemsize for by_task in values.values() for flat in by_task.values())


def _reduced(values: Values) -> Values:
    of_tasks: dict[str, dict[str, array[float]]] = {}
    for name, by_task in values.items():
        for task, flat in by_task.items():
            of_tasks.setdefault(task, {})[name] = flat
    reduced: Values = {name: {} for name in values}
    for task, own in of_tasks.items():
        for name, flat in reduced_flats(own, KEPT).items():
            reduced[name][task] = flat
    return reduced
