"""Steps, reported numbers and resources of a run over time: every report of the last hour, means over 10 s of the last
day, and means over 5 min of the time before.

<folder>/series/<seconds>/<first>.jsonl, where <seconds> is 1, 10 or 300, and <first> the time of the first line, in
seconds since 1970. A line is a JSON object: `at` (seconds since 1970), `task`, `generation`, and numbers: `step`,
`steps_per_s`, and `metrics` by name; or `resources` by name, of a task, or of a host, whose name is in `task`. In the
folders 10 and 300, `at` is the beginning of an interval, and each number is a list [least, mean, largest], unless all
were equal. Each report is in one folder only: what is too old for a folder is summarized in the next one. The first
line of each file has the version of this format.
"""

from __future__ import annotations

import calendar
import json
import os
import re
import time
from collections.abc import Iterable, Mapping
from typing import Any

from paceline.agent.resource_usage import series_of
from paceline.agent.run_files import Appender
from paceline.storage.json_values import parse_json
from paceline.storage.regular_files import append_to_regular, open_regular

FOLDER = "series"
VERSION = 1
PART = 1024 * 1024  # bytes of a file; summing one up takes about 0.1 s
TIERS = (1, 10, 300)  # seconds
LONGEST = PART // 16  # bytes of a report; metrics of a longer one are left out
READ_LIMIT = 16 * PART  # bytes of a file: it is larger only if it is damaged
_NAME = re.compile(r"([1-9][0-9]{0,14}|0)\.jsonl")
_KEPT_S = {1: 3600, 10: 24 * 3600}
_KEPT_PARTS = {1: 64, 10: 96, 300: 384}  # of the last tier, the oldest are deleted


class Series:
    def __init__(self, folder: str) -> None:
        self._folder = f"{folder}/{FOLDER}"
        self._file: Appender | None = None
        self._size = 0

    def add(self, event: Mapping[str, Any]) -> None:
        """`event`: of the kind `step` or `resources`. What cannot be written is dropped: training does not depend on
        it."""
        at = seconds(event.get("at"))
        if at is None:
            return
        if event.get("event") == "resources":
            generation, used = event.get("generation"), series_of(event)
            lines = [{"task": name, "generation": generation, "resources": used[name]} for name in used]
        else:
            lines = [{name: event.get(name) for name in ("task", "generation", "step", "steps_per_s", "metrics")}]
        data = b"".join(_encode_short({"at": at, **line}) for line in lines)
        if not data:
            return
        try:
            if self._file is None:
                self._open(at)
        except OSError:
            return
        assert self._file is not None
        if self._file.write(data):
            self._size += len(data)
        if self._size >= PART:
            self._file.close()
            self._file = None
            self._sum_up(at)

    def _open(self, at: float) -> None:
        """The newest file is continued, unless it is large."""
        folder = f"{self._folder}/{TIERS[0]}"
        os.makedirs(folder, mode=0o700, exist_ok=True)
        files = parts(self._folder, TIERS[0])
        path = files[-1] if files else ""
        if not path or os.stat(path).st_size >= PART:
            path = _begin(folder, at)
        self._file, self._size = Appender(path, lambda problem: None), os.stat(path).st_size

    def _sum_up(self, now: float) -> None:
        """Moves the oldest files of each tier on, if they are too old or too many."""
        for tier, longer in zip(TIERS, (*TIERS[1:], 0)):
            files = parts(self._folder, tier)
            while len(files) > 1:
                is_old = tier in _KEPT_S and _first(files[1]) < now - _KEPT_S[tier]
                if not is_old and len(files) <= _KEPT_PARTS[tier]:
                    break
                path = files.pop(0)
                try:
                    if longer:
                        self._append(longer, summed_up(read_part(path), longer))
                    os.unlink(path)
                except OSError:
                    return  # the disk is full: again at the next part

    def _append(self, tier: int, lines: list[dict[str, Any]]) -> None:
        if not lines:
            return
        folder, data = f"{self._folder}/{tier}", b"".join(map(_encode, lines))
        os.makedirs(folder, mode=0o700, exist_ok=True)
        files = parts(self._folder, tier)
        has_room = bool(files) and os.stat(files[-1]).st_size + len(data) <= PART
        path = files[-1] if has_room else _begin(folder, lines[0]["at"])
        with os.fdopen(append_to_regular(path), "wb") as file:
            file.write(data)


def parts(folder: str, tier: int) -> list[str]:
    """The files of a tier, oldest first. `folder`: of the series. Others, such as pipes, are ignored."""
    try:
        with os.scandir(f"{folder}/{tier}") as entries:
            names = [entry.name for entry in entries if entry.is_file()]
    except OSError:
        return []
    numbers = sorted(map(int, filter(None, map(_number, names))))
    return [f"{folder}/{tier}/{number}.jsonl" for number in numbers]


def read_part(path: str, marker: bytes = b"") -> list[dict[str, Any]]:
    """The lines of a file; damaged lines are left out. `marker`: only lines that contain it, which is much faster."""
    lines = []
    with os.fdopen(open_regular(path, follow=True), "rb") as file:
        for data in file.read(READ_LIMIT).split(b"\n"):
            if marker not in data:
                continue
            try:
                line = parse_json(data)
            except ValueError:
                continue
            if isinstance(line, dict) and is_number(line.get("at")) and isinstance(line.get("task"), str):
                lines.append(line)
    return lines


def summed_up(lines: Iterable[Mapping[str, Any]], tier: int) -> list[dict[str, Any]]:
    """One line for each interval, task and generation."""
    groups: dict[tuple[int, str, int], list[Mapping[str, Any]]] = {}
    for line in lines:
        generation = line.get("generation")
        key = int(line["at"]) // tier * tier, line["task"], generation if isinstance(generation, int) else 0
        groups.setdefault(key, []).append(line)
    return [
        {"at": at, "task": task, "generation": generation, **_progress(group), **_resources(group)}
        for (at, task, generation), group in sorted(groups.items())
    ]


def _progress(group: list[Mapping[str, Any]]) -> dict[str, Any]:
    reports = [line for line in group if "step" in line]
    numbers = {name: _range(line.get(name) for line in reports) for name in ("step", "steps_per_s")}
    return {**numbers, "metrics": _ranges(reports, "metrics")} if reports else {}


def _resources(group: list[Mapping[str, Any]]) -> dict[str, Any]:
    used = _ranges(group, "resources")
    return {"resources": used} if used else {}


def _encode(line: Mapping[str, Any]) -> bytes:
    return json.dumps(line, separators=(",", ":")).encode() + b"\n"


def _encode_short(line: dict[str, Any]) -> bytes:
    """Without the metrics if they are too long; empty if the rest is, too."""
    data = _encode(line)
    if len(data) > LONGEST:
        data = _encode({**line, "metrics": {}})
    return data if len(data) <= LONGEST else b""


def _ranges(lines: list[Mapping[str, Any]], key: str) -> dict[str, Any]:
    """Of all numbers below this key."""
    values: dict[str, list[Any]] = {}
    for line in lines:
        numbers = line.get(key)
        for name, value in numbers.items() if isinstance(numbers, dict) else ():
            values.setdefault(name, []).append(value)
    return {name: _range(values[name]) for name in sorted(values)}


def _range(values: Iterable[Any]) -> Any:
    """The least, the mean and the largest of numbers, or of such ranges; one number if all are equal."""
    ranges = [value if isinstance(value, list) else [value] * 3 for value in values]
    ranges = [value for value in ranges if len(value) == 3 and all(map(is_number, value))]
    if not ranges:
        return None
    least, largest = min(value[0] for value in ranges), max(value[2] for value in ranges)
    mean = sum(value[1] / len(ranges) for value in ranges)
    return least if least == largest else [least, float(f"{mean:.8g}"), largest]


def is_number(value: Any) -> bool:
    return type(value) in (int, float) and -1e308 <= value <= 1e308


def seconds(at: Any) -> float | None:
    """Of a time in an event, such as 2026-11-15T04:30:11.123Z, since 1970.

    >>> seconds("1970-01-01T00:01:00.500Z")
    60.5
    """
    try:
        since = calendar.timegm(time.strptime(at[:19], "%Y-%m-%dT%H:%M:%S")) + float(at[19:23])
    except (TypeError, ValueError, IndexError, KeyError, OverflowError):
        return None
    return since if 0 <= since < 1e12 else None


def _number(name: str) -> str:
    """The number in the name of a file; empty: it is not one of these files."""
    match = _NAME.fullmatch(name)
    return match[1] if match else ""


def _first(path: str) -> int:
    return int(os.path.basename(path)[:-6])


def _begin(folder: str, at: float) -> str:
    """A new file: its name is later than that of any other."""
    numbers = [int(number) for number in map(_number, os.listdir(folder)) if number]
    path = f"{folder}/{max([int(at), *(number + 1 for number in numbers)])}.jsonl"
    with open(path, "xb") as file:
        file.write(_encode({"version": VERSION}))
    return path
