"""`paceline ls`: all runs, newest first."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.chosen import cluster_of, refresh
from paceline.cli.options import ContextOption, NamespaceOption
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
    on: Annotated[
        str, typer.Option("--on", metavar="WHERE", help="kubernetes: all runs in the namespace, of others too.")
    ] = "",
    context: ContextOption = None,
    namespace: NamespaceOption = None,
) -> None:
    """List runs, newest first: those of this machine, here and on clusters, or all in a namespace of a cluster."""
    one_of(output, ("json", "wide", "name"))
    cluster = cluster_of(on, context, namespace)
    if cluster is None:
        _list_known(output)
        return
    from paceline.backends.kubernetes.listing import listed

    reports = listed(cluster)
    if output == "name":
        for report in reports:
            print(report["run"])
    elif output == "json":
        print_json(reports)
    elif not reports:
        tell(f"no runs in namespace {cluster.namespace} of {cluster.context}")
    else:
        _show(reports, [[] for _ in reports], [], output == "wide")


def _list_known(output: str) -> None:
    from paceline.view import runs

    found = runs.every()
    if output == "name":
        for run in found:
            print(run.name)
        return
    from paceline.view import state

    _refresh([run.folder for run in found if runs.on_cluster(run.folder)])
    reports = [state.summary(run) for run in found]
    if output == "json":
        print_json(reports)
        return
    if not found:
        tell("no runs yet; start one with: paceline run job.yaml")
        return
    more = [[str(runs.info(run.folder).get("framework", "")), str(run.folder)] for run in found]
    _show(reports, more, ["FRAMEWORK", "FOLDER"], output == "wide")


def _refresh(folders: list[Path]) -> None:
    """Those on clusters that had not ended when they were last seen; a few at a time."""
    open_ones = [folder for folder in folders if not (folder / "report.json").exists()]
    if open_ones:
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(refresh, open_ones))


def _show(reports: list[dict[str, Any]], more: list[list[str]], heads: list[str], wide: bool) -> None:
    from paceline.view.terminal import table

    rows = [["RUN", "STATUS", "STEP", "RESTARTS", "AGE", "TOOK", *(heads if wide else []), "REASON"]]
    for report, extra in zip(reports, more, strict=True):
        rows.append([report["run"], *_cells(report), *(extra if wide else []), _reason(report, wide)])
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
        "-" if report.get("restarts") is None else str(len(report["restarts"])),
        span(round(age)) if age is not None else "-",
        span(took) if took is not None and (report.get("ended") or report.get("status") == "running") else "-",
    ]


def _reason(report: dict[str, Any], wide: bool) -> str:
    reason = "" if report.get("status") == "succeeded" else " ".join(str(report.get("reason") or "").split())
    return reason if wide or len(reason) <= 60 else reason[:57] + "..."
