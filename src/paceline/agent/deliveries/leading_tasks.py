"""The task whose metrics stand for the run: in an elastic run, the first one of each generation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from paceline.agent.deliveries.event_reader import EventReader
from paceline.agent.deliveries.series_reader import Line
from paceline.plan import Plan

MOST = 10_000  # generations that are remembered, at least


class LeadingTasks:
    def __init__(self, plan: Plan, folder: str) -> None:
        """`folder`: of the run."""
        deciding = [task.name for task in plan.tasks if plan.role(task.role).decides]
        names = deciding if plan.elastic is not None else [plan.leading_task]
        self._order = {name: number for number, name in enumerate(names)}
        self.names = self._order.keys()
        self._events = EventReader(folder, "")
        self._formed: dict[int, str] = {}  # by generation, from the events
        self._reporting: dict[int, str] = {}  # the same if there is no event: of the tasks that report, the first

    def select(self, lines: list[Line]) -> list[Line]:
        """The lines of leading tasks, among lines of the tasks `names`, in the order of the generations: lines that
        were summed up are in the order of the tasks."""
        if len(self.names) == 1 or not lines:
            return lines
        self._read_events()  # of these lines, too: the event is written before
        lines = sorted(lines, key=_generation)
        for line in lines:
            if "step" in line:
                self._add(self._reporting, _generation(line), [line["task"]])
        return [line for line in lines if line["task"] == self._of(_generation(line))]

    def _of(self, generation: int) -> str | None:
        """Without the event, the captain's node was lost: the next captain has a folder of its own."""
        return self._formed.get(generation) or self._reporting.get(generation)

    def _read_events(self) -> None:
        while events := self._events.read():
            for event, _ in events:
                if event.get("event") == "generation-formed" and isinstance(event.get("tasks"), list):
                    self._add(self._formed, _generation(event), event["tasks"])
            self._events.advance(events[-1][1])

    def _add(self, leading: dict[int, str], generation: int, tasks: Iterable[Any]) -> None:
        """An event names only the tasks that start: within a generation, an evaluator may start again."""
        known = [leading[generation]] if generation in leading else []
        names = [*known, *(task for task in tasks if isinstance(task, str) and task in self._order)]
        if names:
            leading[generation] = min(names, key=self._order.__getitem__)
        if len(leading) > 2 * MOST:
            for old in sorted(leading)[:MOST]:
                del leading[old]


def _generation(fields: dict[str, Any]) -> int:
    generation = fields.get("generation")
    return generation if type(generation) is int else 0
