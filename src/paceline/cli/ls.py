"""`paceline ls`: all runs, newest first."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Any

import typer

from paceline.cli.say import one_of, print_json, tell


def main(
    output: Annotated[
        str,
        typer.Option(
            "-o",
            "--output",
            metavar="json|wide|name",
            help="The form.",
            autocompletion=lambda: ["json", "wide", "name"],
        ),
    ] = "",
) -> None:
    """List runs, newest first."""
    one_of(output, ("json", "wide", "name"))
    from paceline.view import runs

    found = runs.every()
    if output == "name":
        for run in found:
            print(run.name)
        return
    from paceline.view import state

    reports = [state.summary(run) for run in found]
    if output == "json":
        print_json(reports)
        return
    if not found:
        tell("no runs yet; start one with: paceline run job.yaml")
        return
    from paceline.view.terminal import table

    wide = output == "wide"
    head = ["RUN", "STATUS", "STEP", "RESTARTS", "AGE", "TOOK"]
    rows = [head + (["FRAMEWORK", "FOLDER"] if wide else []) + ["REASON"]]
    for run, report in zip(found, reports, strict=True):
        extra = [str(runs.info(run.folder).get("framework", "")), str(run.folder)] if wide else []
        rows.append([run.name, *_cells(report), *extra, _reason(report, wide)])
    print(table(rows))
    sys.stdout.flush()


def _cells(report: dict[str, Any]) -> list[str]:
    from paceline.view.events import seconds
    from paceline.view.words import since, span

    now = time.time()
    age = since(report.get("started"), now)
    took = since(report.get("started"), seconds(report.get("ended") or "") or now)
    return [
        str(report.get("status")),
        str(report.get("steps") or "-"),
        str(len(report.get("restarts") or [])),
        span(round(age)) if age is not None else "-",
        span(took) if took is not None and (report.get("ended") or report.get("status") == "running") else "-",
    ]


def _reason(report: dict[str, Any], wide: bool) -> str:
    reason = "" if report.get("status") == "succeeded" else " ".join(str(report.get("reason") or "").split())
    return reason if wide or len(reason) <= 60 else reason[:57] + "..."
