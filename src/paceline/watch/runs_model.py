"""The table of all runs, as data. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.view.state.events import number, seconds
from paceline.view.text.wording import count, figure, span
from paceline.watch.run_data import main_metric, rank
from paceline.watch.run_screen_model import STATUS_STYLES
from paceline.watch.tables import BOLD, NAME, Column, Row, Span, Table, plain


@dataclass(frozen=True)
class RunSummary:
    run: str
    status: str
    step: int = 0
    loss: float | None = None  # or another metric of its leading task
    restarts: int = 0
    goodput: float | None = None
    began: float | None = None  # seconds since 1970
    ended: float | None = None
    reason: str = ""
    where: str = ""  # kubernetes; empty: this machine


_COLUMNS = (
    Column("RUN"), Column("STATUS"), Column("STEP", is_number=True), Column("LOSS", is_number=True, rank=2),
    Column("RESTARTS", is_number=True, rank=3), Column("GOODPUT", is_number=True, rank=4),
    Column("AGE", is_number=True), Column("DURATION", is_number=True, rank=3), Column("REASON", shrinks_to=24, rank=1),
)  # fmt: skip


def summary_of(report: Mapping[str, Any], where: str = "") -> RunSummary:
    """`report`: what `paceline ls -o json` prints."""
    goodput, reported = report.get("goodput"), report.get("metrics")
    values = reported if isinstance(reported, dict) else {}
    tasks = sorted((task for task in values if isinstance(values[task], dict) and values[task]), key=rank)
    metrics = values[tasks[0]] if tasks else {}
    usual = "" if report.get("status") == "succeeded" else str(report.get("reason") or "")
    reason = "; ".join(report.get("problems") or [usual])
    return RunSummary(
        run=str(report.get("run")),
        status=str(report.get("status")),
        step=int(number(report.get("steps")) or 0),
        loss=number(metrics.get(main_metric(list(metrics)))),
        restarts=len(report.get("restarts") or ()),
        goodput=number(goodput.get("share")) if isinstance(goodput, dict) else None,
        began=seconds(report.get("started")),
        ended=seconds(report.get("ended")),
        reason=" ".join(reason.split()),
        where=where,
    )


def runs_table(runs: Sequence[RunSummary], now: float) -> Table:
    return Table(_COLUMNS, tuple(_row(run, now) for run in runs))


def _row(run: RunSummary, now: float) -> Row:
    age = "-" if run.began is None else span(round(max(0.0, now - run.began)))
    is_timed = run.began is not None and (run.ended is not None or run.status in ("running", "paused"))
    took = span(round((run.ended or now) - run.began)) if run.began is not None and is_timed else "-"
    on = f"on {run.where}" if run.where else ""
    cells = (
        Span(plain(run.run), NAME), Span(run.status, STATUS_STYLES.get(run.status, "")), Span(str(run.step or "-")),
        Span("-" if run.loss is None else figure(run.loss)), Span(str(run.restarts)),
        Span("-" if run.goodput is None else f"{run.goodput:.1%}"), Span(age), Span(took),
        Span(plain("; ".join(filter(None, [on, run.reason])))),
    )  # fmt: skip
    return Row(run.run, cells)


def runs_title(runs: Sequence[RunSummary] | None) -> list[Span]:
    if runs is None:
        return [Span("runs", BOLD), Span("reading...")]
    running = sum(run.status in ("running", "starting") for run in runs)
    return [Span(count(len(runs), "run"), BOLD), Span(f"{running} running")]
