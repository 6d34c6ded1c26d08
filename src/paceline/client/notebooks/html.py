"""HTML of a run and of a list of runs, for notebooks. Everything in it is escaped: tasks choose much of the text."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from paceline.view.text.terminal import clean
from paceline.view.text.wording import metrics, since, size, span

if TYPE_CHECKING:
    from paceline.client.reading.run_status import Status

MOST_ROWS = 200  # of a table: notebooks keep them in their file
MOST_TEXT = 500  # characters of a cell


def of_run(run: str, text: str = "") -> str:
    """A run whose status is unknown."""
    return f"<div><b>{_text(run)}</b> {_text(text)}</div>"


def of_status(status: Status, note: str = "") -> str:
    """One line about the run, and a table of its tasks."""
    form = status.to_dict()
    took = _took(form)
    facts = [
        f"step {status.steps}" if status.steps else "",
        _count(len(status.restarts), "restart"),
        f"{span(took)}" if took is not None else "",
        status.reason if not status.succeeded else "",
        note,
    ]
    head = f"<b>{_text(status.run)}</b> {_text(status.status)}: {_text('; '.join(filter(None, facts)))}"
    rows = [
        [
            task.name, task.state, task.host or "-", "-" if task.step is None else task.step,
            "-" if task.memory is None else size(task.memory), task.exit or "-",
            metrics({name: value for name, value in task.metrics.items() if value is not None}),
        ]
        for task in status.tasks
    ]  # fmt: skip
    return f"<div>{head}{_table(['task', 'state', 'host', 'step', 'memory', 'exit', 'metrics'], rows)}</div>"


def of_list(reports: Sequence[dict[str, Any]]) -> str:
    rows = []
    for report in reports:
        took, restarts = _took(report), report.get("restarts")
        rows.append(
            [
                report.get("run"), report.get("status"), report.get("steps") or "-",
                "-" if restarts is None else len(restarts), report.get("started") or "-",
                "-" if took is None else span(took),
                "" if report.get("status") == "succeeded" else report.get("reason") or "",
            ]
        )  # fmt: skip
    return f"<div>{_table(['run', 'status', 'step', 'restarts', 'started', 'duration', 'reason'], rows)}</div>"


def _table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    if not rows:
        return ""
    shown = rows[:MOST_ROWS]
    more = f"<p>and {len(rows) - len(shown)} more</p>" if len(rows) > len(shown) else ""
    body = "".join(_row("td", row) for row in shown)
    return f"<table><thead>{_row('th', headings)}</thead><tbody>{body}</tbody></table>{more}"


def _row(tag: str, cells: Iterable[object]) -> str:
    return f"<tr>{''.join(f'<{tag}>{_text(cell)}</{tag}>' for cell in cells)}</tr>"


def _text(value: object) -> str:
    text = clean(str(value), colors=False)
    return escape(text if len(text) <= MOST_TEXT else f"{text[: MOST_TEXT - 3]}...")


def _took(report: dict[str, Any]) -> float | None:
    from paceline.view.state.events import seconds

    return since(report.get("started"), seconds(report.get("ended")) or time.time())


def _count(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"
