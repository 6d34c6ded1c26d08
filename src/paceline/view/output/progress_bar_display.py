"""Progress bars of tasks: lines that overwrite themselves, shown in place or, if output is redirected, now and then."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from paceline.view.output.merged_logs import Line
from paceline.view.text.wording import natural

LINE_EVERY_S = 10.0  # between two printed states of a bar, if they cannot be shown in place


class ProgressBars:
    def __init__(self, live: bool, now: Callable[[], float] = time.monotonic) -> None:
        """`live`: the states are shown in place, by the caller."""
        self._live, self._now = live, now
        self._states: dict[str, Line] = {}  # the latest state of each task's bar
        self._printed: dict[str, tuple[float, Line | None]] = {}  # when a state was last printed, and which

    def add(self, line: Line) -> list[Line]:
        """The lines to print, now that a task has printed this one."""
        before = self._states.get(line.task)
        lines = [] if before is None or before.generation == line.generation else self._end([line.task])
        if line.progress:
            self._states[line.task] = line
            self._printed.setdefault(line.task, (self._now(), None))
            return lines
        self._states.pop(line.task, None)
        self._printed.pop(line.task, None)
        return [*lines, line]

    def end_before(self, tasks: Iterable[str], generation: int) -> list[Line]:
        """A generation of these tasks starts: the last states of earlier ones, which nothing replaces any more."""
        return self._end(
            [task for task in tasks if task in self._states and self._states[task].generation < generation]
        )

    def due(self) -> list[Line]:
        """States to print because none was printed for a while; none if they are shown in place."""
        if self._live:
            return []
        now = self._now()
        lines = []
        for line in self.states():
            printed_at, printed = self._printed[line.task]
            if now - printed_at >= LINE_EVERY_S and line != printed:
                self._printed[line.task] = now, line
                lines.append(line)
        return lines

    def states(self) -> list[Line]:
        """The latest states, always in the same order."""
        return sorted(self._states.values(), key=lambda line: natural(line.task))

    def finish(self) -> list[Line]:
        """The last states, when nothing more is printed."""
        return self._end([line.task for line in self.states()])

    def _end(self, tasks: list[str]) -> list[Line]:
        lines = []
        for task in tasks:
            state, (_, printed) = self._states.pop(task), self._printed.pop(task)
            lines += [state] if state != printed else []
        return lines
