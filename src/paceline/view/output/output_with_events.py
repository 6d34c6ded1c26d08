"""The order in which output and events of a run are shown together."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.view.output.merged_logs import Line
from paceline.view.state.events import Event

STARTS, ENDS = "generation-formed", "task-exited"
_BEFORE, _EVENT, _AFTER = range(3)  # of output and events with the same time


def in_order(events: Sequence[Event], lines: Sequence[Line]) -> list[Event | Line]:
    """By time. In addition, whatever the clocks of hosts say: the output of a task comes after the event that started
    its generation, and before the event that starts its next one."""
    starts = [(event, set(event.names("tasks"))) for event in events if event.kind == STARTS]

    def position(entry: Event | Line) -> tuple[str, int]:
        if isinstance(entry, Event):
            return entry.at, _EVENT
        at, rank = entry.at, _BEFORE
        for event, tasks in starts:
            if entry.task in tasks and event.generation <= entry.generation and at <= event.at:
                at, rank = event.at, _AFTER
        for event, tasks in starts:
            if entry.task in tasks and event.generation > entry.generation and at >= event.at:
                at, rank = event.at, _BEFORE
        return at, rank

    return sorted([*lines, *events], key=position)
