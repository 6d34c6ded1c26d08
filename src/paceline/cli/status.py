"""`paceline status`: the status of one run, task by task."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.options import (
    ContextOption,
    EndpointOption,
    NamespaceOption,
    OnOption,
    ReadArgument,
    use_endpoint,
)
from paceline.cli.output import one_of, print_json
from paceline.cli.readers import readable, refresh

if TYPE_CHECKING:
    from paceline.view.run_state import Standing, State

OutputOption = Annotated[
    str,
    typer.Option(
        "-o", "--output", metavar="json|wide", help="Output format; wide adds resources and how long starts took.",
        autocompletion=lambda: ["json", "wide"],
    ),
]  # fmt: skip

_PAGES = {"tensorboard": "tensorboard", "metrics": "metrics_url"}  # what the text calls them -> their key


def main(
    run: ReadArgument = None,
    output: OutputOption = "",
    on: OnOption = "",
    context: ContextOption = None,
    namespace: NamespaceOption = None,
    endpoint: EndpointOption = "",
) -> int:
    """Show the status of a run: its tasks, progress, failures and their causes; on a cluster also pods and nodes."""
    use_endpoint(endpoint)
    one_of(output, ("json", "wide"))
    from paceline.view import run_state
    from paceline.view.snapshot_locations import origin_of

    target = readable(run, on, context, namespace)
    refresh(target.folder)
    standing = run_state.read(target)
    if output == "json":
        pods = {"pods": _pods(standing), "reasons": _reasons(standing)} if _on_cluster(standing) else {}
        more: dict[str, Any] = {"from": origin_of(target.folder) or None}
        more |= {key: _url(standing, key) for key in _PAGES.values()}
        marks = {"saved": standing.state.saved, "committed": standing.state.committed}
        more |= {name: mark and mark.to_json() for name, mark in marks.items()}
        print_json({**standing.report, "tasks": _tasks(standing), "waiting": _waiting(standing.state), **more, **pods})
    else:
        print("\n".join(_text(standing, wide=output == "wide")))
        sys.stdout.flush()
    return 0


def _waiting(state: State) -> dict[str, Any] | None:
    if state.waiting is None:
        return None
    return {key: state.waiting.get(key) for key in ("missing", "since_s", "limit_s")}


def _url(standing: Standing, key: str) -> str | None:
    """The URL of TensorBoard or of the metrics, which are served only as long as a run on this machine."""
    url = standing.info.get(key)
    return url if standing.alive and isinstance(url, str) else None


def _on_cluster(standing: Standing) -> bool:
    return standing.info.get("on") == "kubernetes"


def _pods(standing: Standing) -> list[dict[str, Any]]:
    from paceline.backends.kubernetes.runs.pod_records import load

    return load(standing.folder)


def _reasons(standing: Standing) -> list[str]:
    """Why a pod does not start, or is not created."""
    from paceline.backends.kubernetes.runs.pod_records import load_reasons

    return [str(reason) for reason in load_reasons(standing.folder)] if standing.alive else []


def _tasks(standing: Standing) -> list[dict[str, Any]]:
    return [
        {
            "task": task.name, "state": task.state if standing.alive else _final_state(task.state), "host": task.host,
            "pid": task.pid if standing.alive else None, "generation": task.generation, "step": task.step,
            "memory": task.memory if standing.alive else None, "exit": task.exit or None, "metrics": task.metrics,
        }
        for task in standing.state.tasks.values()
    ]  # fmt: skip


def _final_state(state: str) -> str:
    """No task runs once the supervisor has exited, whatever its last event was."""
    return "ended" if state in ("starting", "running", "waiting") else state


def _pod_table(standing: Standing) -> list[str]:
    from paceline.view.terminal import table
    from paceline.view.wording import natural

    pods = sorted(_pods(standing), key=lambda pod: natural(pod["host"]))
    reasons = [f"  {reason}" for reason in _reasons(standing)]
    if not pods:
        return reasons
    rows = [["HOST", "POD", "NODE", "PHASE", "RESTARTS"]]
    for pod in pods:
        phase = "Terminating" if pod["leaving"] else pod["phase"]
        rows.append([pod["host"], pod["pod"], pod["node"] or "-", phase, str(pod["restarts"])])
    return [*table(rows).splitlines(), *reasons, ""]


def _text(standing: Standing, wide: bool) -> list[str]:
    from paceline.view import run_folders, usage
    from paceline.view import run_report as reports
    from paceline.view.terminal import table
    from paceline.view.wording import size

    problems = [f"  {'damaged':<12} {problem}" for problem in standing.problems]
    *lines, _ = reports.text(standing.report, reports.snapshots(standing, time.time()))  # without the next command
    lines += [f"  {line}" for line in reports.started(standing.report)]
    lines += [f"  {line}" for line in (*usage.memory(standing.report), *usage.goodput(standing.report))]
    lines += [f"  {page:<12} {url}" for page, key in _PAGES.items() if (url := _url(standing, key))]
    lines += problems if standing.report.get("status") != "damaged" else []  # then they are its reason
    command = reports.next_command(standing.report)
    if command and not run_folders.at_location(standing.folder):  # it needs a run id known here
        lines.append(reports.next_line(command))
    tables = (reports.start_table, usage.host_table, usage.task_table) if wide else ()  # the last one first
    for rows in filter(None, (make(standing.report) for make in tables)):
        lines[1:1] = [*table(rows).splitlines(), ""]
    tasks = _tasks(standing)
    lines[1:1] = _pod_table(standing) if _on_cluster(standing) else []
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
