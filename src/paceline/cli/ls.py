"""`paceline ls`: lists runs, newest first."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Any

import typer

from paceline.cli.options import ContextOption, NamespaceOption
from paceline.cli.output import note, one_of, print_json, tell


def main(
    output: Annotated[
        str,
        typer.Option(
            "-o",
            "--output",
            metavar="json|wide|name",
            help="Output format.",
            autocompletion=lambda: ["json", "wide", "name"],
        ),
    ] = "",
    on: Annotated[
        str,
        typer.Option(
            "--on",
            metavar="local|kubernetes",
            help="local (default): runs known to this machine. kubernetes: all runs in a namespace, of all users.",
        ),
    ] = "",
    context: ContextOption = None,
    namespace: NamespaceOption = None,
) -> None:
    """List runs, newest first.

    Lists the runs known to this machine, here and on clusters; with --on kubernetes, all runs in a namespace.
    """
    one_of(output, ("json", "wide", "name"))
    from paceline.client.reading.find_run import Target

    target = Target(on, context, namespace)
    if not target.is_cluster:
        _list_known(output)
        return
    from paceline.client.run_listing import on_cluster

    reports = on_cluster(target)
    if output == "name":
        for report in reports:
            print(report["run"])
    elif output == "json":
        print_json(reports)
    elif not reports:
        searched = target.resolved()
        tell(f"no runs in namespace {searched.namespace} (context {searched.context})")
    else:
        _show(reports, [[] for _ in reports], [], output == "wide")


def _list_known(output: str) -> None:
    from paceline.view.files import run_folders

    if output == "name":
        for run in run_folders.all_runs():
            print(run.name)
        return
    from paceline.client.run_listing import known

    listed = known(note)
    runs, reports = [run for run, _ in listed], [report for _, report in listed]
    if output == "json":
        print_json(reports)
        return
    if not runs:
        tell("no runs yet; start one with: paceline run job.yaml")
        return
    extra_cells: list[list[str]] = [[] for _ in runs]
    if output == "wide":
        extra_cells = [[str(run_folders.info(run.folder).get("framework", "")), str(run.folder)] for run in runs]
    _show(reports, extra_cells, ["FRAMEWORK", "FOLDER"], output == "wide")


def _show(reports: list[dict[str, Any]], extra_cells: list[list[str]], extra_headings: list[str], wide: bool) -> None:
    from paceline.view.text.terminal import table

    rows = [["RUN", "STATUS", "STEP", "RESTARTS", "AGE", "DURATION", *(extra_headings if wide else []), "REASON"]]
    for report, extra in zip(reports, extra_cells, strict=True):
        rows.append([report["run"], *_cells(report), *(extra if wide else []), _reason(report, wide)])
    print(table(rows))
    sys.stdout.flush()


def _cells(report: dict[str, Any]) -> list[str]:
    from paceline.view.state.events import seconds
    from paceline.view.text.wording import since, span

    now = time.time()
    age = since(report.get("started"), now)
    took = since(report.get("started"), seconds(report.get("ended")) or now)
    return [
        str(report.get("status")),
        str(report.get("steps") or "-"),
        "-" if report.get("restarts") is None else str(len(report["restarts"])),
        span(round(age)) if age is not None else "-",
        span(took)
        if took is not None and (report.get("ended") or report.get("status") in ("running", "paused"))
        else "-",
    ]


def _reason(report: dict[str, Any], wide: bool) -> str:
    text = "" if report.get("status") == "succeeded" else str(report.get("reason") or "")
    reason = " ".join("; ".join(report.get("problems") or [text]).split())
    return reason if wide or len(reason) <= 60 else reason[:57] + "..."
