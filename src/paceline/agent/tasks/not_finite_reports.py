"""Metrics of this host's tasks that are NaN or infinite: the captain is told once for each metric of an attempt."""

from __future__ import annotations

from typing import Any, Callable

from paceline.agent.captain.events import MemberEvent, MetricNotFinite
from paceline.agent.net.codec import not_finite_text
from paceline.agent.tasks.attempt import Attempt, is_small_integer, text_of
from paceline.plan import INGEST

MOST = 100  # metrics of an attempt
NAME_LIMIT = 100  # characters


class NotFiniteReports:
    def __init__(self, send: Callable[[MemberEvent], None]) -> None:
        """`send`: sends an event to the captain, unless there is no connection."""
        self._send = send
        self._of_task: dict[str, tuple[int, dict[str, MetricNotFinite]]] = {}  # the number of the attempt, its reports

    def add(self, attempt: Attempt, message: dict[str, Any]) -> None:
        """`message`: of the program's process, which may have sent anything."""
        task, step = attempt.task, message.get("step")
        metric, value = text_of(message.get("metric"))[:NAME_LIMIT], not_finite_text(message.get("value"))
        number, reports = self._of_task.get(task.name, (0, {}))
        if number != attempt.number:
            reports = {}
            self._of_task[task.name] = attempt.number, reports
        if not metric or not value or metric in reports or len(reports) >= MOST or task.name == INGEST:
            return
        step = step if is_small_integer(step) else None
        reports[metric] = MetricNotFinite(task.host, task.name, attempt.number, metric, value, step)
        self._send(reports[metric])

    def all(self) -> tuple[MetricNotFinite, ...]:
        """Of the last attempts, for a captain that may not have received them."""
        return tuple(report for _, reports in self._of_task.values() for report in reports.values())
