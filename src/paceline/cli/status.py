"""`paceline status`: how one run stands, task by task."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from paceline.cli.chosen import readable, refresh
from paceline.cli.options import ContextOption, JsonOption, NamespaceOption, OnOption, ReadArgument
from paceline.cli.say import one_of, print_json

if TYPE_CHECKING:
    from paceline.view.state import Mark, Standing, State


def main(
    run: ReadArgument = None,
    output: JsonOption = "",
    on: OnOption = "",
    context: ContextOption = None,
    namespace: NamespaceOption = None,
) -> int:
    """Show how a run stands: its tasks, its progress, what failed and why; on a cluster also pods and nodes."""
    one_of(output, ("json",))
    from paceline.view import state
    from paceline.view.origin import of_run

    found = readable(run, on, context, namespace)
    refresh(found.folder)
    standing = state.read(found)
    if output:
        pods = {"pods": _pods(standing), "reasons": _reasons(standing)} if _on_cluster(standing) else {}
        more: dict[str, Any] = {"from": of_run(found.folder) or None}
        more |= {"tensorboard": _page(standing)}
        more |= {"saved": _mark(standing.state.saved), "committed": _mark(standing.state.committed)}
        print_json({**standing.report, "tasks": _tasks(standing), "waiting": _waiting(standing.state), **more, **pods})
    else:
        print("\n".join(_text(standing)))
        sys.stdout.flush()
    return 0


def _waiting(state: State) -> dict[str, Any] | None:
    if state.waiting is None:
        return None
    return {key: state.waiting.get(key) for key in ("missing", "since_s", "limit_s")}


def _mark(mark: Mark | None) -> dict[str, Any] | None:
    return None if mark is None else {"step": mark.step, "snapshot": mark.snapshot, "at": mark.at}


def _page(standing: Standing) -> str | None:
    """Where TensorBoard is, which ends with a run on this machine."""
    found = standing.info.get("tensorboard")
    return found if standing.alive and isinstance(found, str) else None


def _on_cluster(standing: Standing) -> bool:
    return standing.info.get("on") == "kubernetes"


def _pods(standing: Standing) -> list[dict[str, Any]]:
    from paceline.backends.kubernetes.seen import kept

    found: list[dict[str, Any]] = kept(standing.folder).get("pods", [])
    return found


def _reasons(standing: Standing) -> list[str]:
    """Why something does not come: a pod, or what should make it."""
    from paceline.backends.kubernetes.seen import kept_reasons

    return [str(reason) for reason in kept_reasons(standing.folder)] if standing.alive else []


def _tasks(standing: Standing) -> list[dict[str, Any]]:
    return [
        {
            "task": task.name, "state": task.state if standing.alive else _over(task.state), "host": task.host,
            "pid": task.pid if standing.alive else None, "generation": task.generation, "step": task.step,
            "memory": task.memory, "exit": task.exit or None, "metrics": task.metrics,
        }
        for task in standing.state.tasks.values()
    ]  # fmt: skip


def _over(state: str) -> str:
    """Nothing runs once the supervisor is gone, whatever the last event of a task was."""
    return "ended" if state in ("starting", "running", "waiting") else state


def _text_of_pods(standing: Standing) -> list[str]:
    from paceline.view.terminal import table
    from paceline.view.words import natural

    pods = sorted(_pods(standing), key=lambda pod: natural(pod["host"]))
    waiting = [f"  {reason}" for reason in _reasons(standing)]
    if not pods:
        return waiting
    rows = [["HOST", "POD", "NODE", "PHASE", "RESTARTS"]]
    for pod in pods:
        phase = "Leaving" if pod["leaving"] else pod["phase"]
        rows.append([pod["host"], pod["pod"], pod["node"] or "-", phase, str(pod["restarts"])])
    return [*table(rows).splitlines(), *waiting, ""]


def _text(standing: Standing) -> list[str]:
    from paceline.view import report as reports
    from paceline.view import runs
    from paceline.view.terminal import table
    from paceline.view.words import size

    told = reports.text(standing.report, reports.snapshots(standing, time.time()))
    told = [line for line in told if not line.endswith(f"paceline status {standing.run}")]
    if runs.at_place(standing.folder):
        told = told[:-1]  # what could be done next is for runs that have an id here
    if page := _page(standing):
        told.insert(-1, f"  {'page':<12} {page}")
    tasks = _tasks(standing)
    told[1:1] = _text_of_pods(standing) if _on_cluster(standing) else []
    if not tasks:
        return told
    memory = any(task["memory"] is not None for task in tasks)
    rows = [["TASK", "STATE", "HOST", "PID", "GENERATION", "STEP", *(["MEMORY"] if memory else []), "EXIT"]]
    for task in tasks:
        used = [size(task["memory"]) if task["memory"] is not None else "-"] if memory else []
        cells = [task["pid"], task["generation"], task["step"]]
        shown = ["-" if cell is None else str(cell) for cell in cells]
        rows.append([task["task"], task["state"], task["host"] or "-", *shown, *used, task["exit"] or "-"])
    return [*told[:1], "", *table(rows).splitlines(), "", *told[1:]]
