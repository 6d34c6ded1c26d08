"""Reads the series of some tasks, from the oldest line on; the position outlives the process.

Lines that were summed up before they were read (see agent/series_files.py) are read from the coarser files. Some lines
may then be read twice: readers have to ignore steps that they have seen."""

from __future__ import annotations

import os
from collections.abc import Set
from typing import Any

from paceline.agent.deliveries.saved_state import save_position, saved_offset
from paceline.agent.fast_dataclass import record
from paceline.agent.series_files import FOLDER, TIERS, is_number, parts
from paceline.storage.json_values import parse_json, read_json
from paceline.storage.regular_files import open_regular
from paceline.storage.snapshots.manifest import INVALID_FIELDS

CHUNK = 1024 * 1024  # bytes read at a time

Line = dict[str, Any]


@record
class Position:
    path: str = ""  # the file that is being read; empty: none
    offset: int = 0
    at: float = 0.0  # time of the last line, in seconds since 1970


class SeriesReader:
    def __init__(self, folder: str, tasks: Set[str], state_file: str) -> None:
        self._folder, self._tasks, self._state_file = f"{folder}/{FOLDER}", tasks, state_file
        self.position = self._load()
        self._saved = self.position
        self._backlog: list[str] | None = None  # coarser files that are still to be read; None: not looked for

    def read(self) -> tuple[list[Line], Position] | None:
        """The next lines, and the position after them; None if there are none yet, or they cannot be read now."""
        try:
            return self._read()
        except OSError:
            return None

    def _read(self) -> tuple[list[Line], Position] | None:
        while True:
            files = parts(self._folder, TIERS[0])
            if self.position.path not in files and self._backlog is None:
                self._backlog = self._coarser_files()
            if self._backlog:
                lines_and_end = self._lines(self._backlog[0], 0)
                if lines_and_end is None:
                    self._backlog = None  # it was summed up in the meantime: look again
                    continue
                del self._backlog[0]
                lines, _ = lines_and_end
                return lines, Position("", 0, _last(lines, self.position.at))
            if not files:
                return None
            later = [path for path in files if _first(path) > _first(self.position.path)]
            path, offset = self.position.path, self.position.offset
            if path not in files:
                path, offset = files[0], 0
            lines_and_end = self._lines(path, offset)
            if lines_and_end is None:
                continue  # it was summed up just now
            self._backlog = None
            lines, end = lines_and_end
            if end > offset or path != self.position.path:
                return lines, Position(path, end, _last(lines, self.position.at))
            if not later:
                return None
            self.position = Position(later[0], 0, self.position.at)

    def advance(self, position: Position) -> None:
        self.position = position

    def save(self) -> None:
        if self.position != self._saved and save_position(self._state_file, vars(self.position)):
            self._saved = self.position

    def _load(self) -> Position:
        try:
            state = read_json(self._state_file)
            return Position(str(state["path"]), saved_offset(state), float(state["at"]))
        except (OSError, *INVALID_FIELDS):
            return Position()

    def _coarser_files(self) -> list[str]:
        """Those with lines after the position, the coarsest first: their lines are the oldest."""
        return [
            path
            for tier in reversed(TIERS[1:])
            for files in [parts(self._folder, tier)]
            for path, following in zip(files, (*files[1:], ""))
            if not following or _first(following) >= self.position.at - tier
        ]

    def _lines(self, path: str, offset: int) -> tuple[list[Line], int] | None:
        """Complete lines of the tasks from `offset` on, and where they end; None if the file does not exist. Raises
        OSError if it cannot be read."""
        try:
            with os.fdopen(open_regular(path, follow=True), "rb") as file:
                file.seek(offset)
                data = file.read(CHUNK if offset or _tier(path) == TIERS[0] else -1)
        except FileNotFoundError:
            return None
        data = data[: data.rfind(b"\n") + 1]
        return [line for line in map(self._parse, data.splitlines()) if line is not None], offset + len(data)

    def _parse(self, data: bytes) -> Line | None:
        try:
            line = parse_json(data)
        except ValueError:
            return None
        if not isinstance(line, dict) or not isinstance(line.get("task"), str) or not is_number(line.get("at")):
            return None
        return line if line["task"] in self._tasks else None


def _first(path: str) -> int:
    name = os.path.basename(path)[:-6]
    return int(name) if name.isdigit() else -1


def _tier(path: str) -> int:
    return int(os.path.basename(os.path.dirname(path)))


def _last(lines: list[Line], at: float) -> float:
    return max([at, *(float(line["at"]) for line in lines)])
