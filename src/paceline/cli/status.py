"""`paceline status`: the status of one run, task by task."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.opened_runs import readable
from paceline.cli.options import (
    ContextOption,
    EndpointOption,
    NamespaceOption,
    OnOption,
    ReadArgument,
)
from paceline.cli.output import note, one_of, print_json

if TYPE_CHECKING:
    from paceline.view.state.status_reader import Standing

OutputOption = Annotated[
    str,
    typer.Option(
        "-o", "--output", metavar="json|wide", help="Output format; wide adds resources and how long starts took.",
        autocompletion=lambda: ["json", "wide"],
    ),
]  # fmt: skip


def main(
    run: ReadArgument = None,
    output: OutputOption = "",
    on: OnOption = "",
    context: ContextOption = None,
    namespace: NamespaceOption = None,
    endpoint: EndpointOption = "",
) -> int:
    """Show the status of a run: its tasks, progress, failures and their causes; on a cluster also pods and nodes."""
    one_of(output, ("json", "wide"))
    from paceline.client.reading import run_status

    standing = run_status.read(readable(run, on, context, namespace, endpoint), note)
    if output == "json":
        print_json(run_status.json_form(standing))
    else:
        print("\n".join(_text(standing, wide=output == "wide")))
        sys.stdout.flush()
    return 0


def _pod_table(standing: Standing) -> list[str]:
    from paceline.client.reading import run_status
    from paceline.view.text.terminal import table
    from paceline.view.text.wording import natural

    pods = sorted(run_status.pods(standing), key=lambda pod: natural(pod["host"]))
    reasons = [f"  {reason}" for reason in run_status.pending_reasons(standing)]
    if not pods:
        return reasons
    rows = [["HOST", "POD", "NODE", "PHASE", "RESTARTS"]]
    for pod in pods:
        phase = "Terminating" if pod["leaving"] else pod["phase"]
        rows.append([pod["host"], pod["pod"], pod["node"] or "-", phase, str(pod["restarts"])])
    return [*table(rows).splitlines(), *reasons, ""]


def _text(standing: Standing, wide: bool) -> list[str]:
    from paceline.client.reading import run_status
    from paceline.view.files import run_folders
    from paceline.view.report import run_report as reports
    from paceline.view.report import usage
    from paceline.view.text.terminal import table
    from paceline.view.text.wording import size

    problems = [f"  {'damaged':<12} {problem}" for problem in standing.problems]
    *lines, _ = reports.text(standing.report, reports.snapshots(standing, time.time()))  # without the next command
    lines += [f"  {line}" for line in reports.started(standing.report)]
    lines += [f"  {line}" for line in (*usage.memory(standing.report), *usage.goodput(standing.report))]
    lines += [f"  {page:<12} {url}" for page, key in run_status.PAGES.items() if (url := run_status.url(standing, key))]
    lines += problems if standing.report.get("status") != "damaged" else []  # then they are its reason
    command = reports.next_command(standing.report)
    if command and not run_folders.at_location(standing.folder):  # it needs a run id known here
        lines.append(reports.next_line(command))
    tables = (reports.start_table, usage.host_table, usage.task_table) if wide else ()  # the last one first
    for rows in filter(None, (make(standing.report) for make in tables)):
        lines[1:1] = [*table(rows).splitlines(), ""]
    tasks = run_status.tasks(standing)
    lines[1:1] = _pod_table(standing) if run_status.on_cluster(standing) else []
    if not tasks:
        return lines
    has_memory = any(task["memory"] is not None for task in tasks)
    rows = [["TASK", "STATE", "HOST", "PID", "GENERATION", "STEP", *(["MEMORY"] if has_memory else []), "EXIT"]]
    for task in tasks:
        used = [size(task["memory"]) if task["memory"] is not None else "-"] if has_memory else []
        numbers = [task["pid"], task["generation"], task["step"]]
        cells = ["-" if number is None else str(number) for number in numbers]
        rows.append([task["task"], task["state"], task["host"] or "-", *cells, *used, task["exit"] or "-"])
    return [*lines[:1], "", *table(rows).splitlines(), "", *lines[1:]]
