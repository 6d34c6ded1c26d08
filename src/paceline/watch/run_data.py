"""Turns the state of a run into the data of its screen: its leading task, and what each task uses. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from paceline.client.reading.run_status import on_cluster, pending_reasons, tasks
from paceline.client.snapshots.run_snapshots import Snapshot
from paceline.view.state.events import number, seconds
from paceline.view.state.run_state import TOTAL_STEPS, State, Task, total_steps
from paceline.view.state.status_reader import Standing
from paceline.view.text.wording import natural
from paceline.watch.history import History, SnapshotRecord, measurements
from paceline.watch.run_screen_model import CurveData, RunData, TaskData

STEPS_PER_S = "steps_per_s"
_ROLES = ("chief", "worker")


def rank(task: str) -> tuple[int, tuple[str, int]]:
    """Sort key: the task whose numbers represent the run comes first."""
    role = task.rpartition("-")[0]
    return (_ROLES.index(role) if role in _ROLES else len(_ROLES), natural(task))


def leading_task(state: State) -> Task | None:
    """The first of the tasks that train and report steps, preferably with metrics."""
    training = [task for task in state.tasks.values() if task.step is not None and not _is_evaluator(task.name)]
    return min(training, key=lambda task: (not task.metrics, rank(task.name)), default=None)


def _is_evaluator(task: str) -> bool:
    return task.rpartition("-")[0] == "evaluator"


def main_metric(names: Sequence[str]) -> str:
    """The metric whose curve is shown: the loss, or else the first one; empty: there is none."""
    candidates = [name for name in names if name != TOTAL_STEPS]
    losses = [name for name in candidates if "loss" in name]
    return "loss" if "loss" in candidates else next(iter([*losses, *candidates]), "")


def run_data(
    standing: Standing,
    history: History,
    curves: Sequence[CurveData] = (),
    stored: Sequence[Snapshot] | None = None,
    gone: Collection[str] = (),
    notes: Sequence[str] = (),
) -> RunData:
    """`stored`: the snapshots in the store; None: not known. `gone`: names of those that it no longer has. `notes`: why
    something is missing."""
    report, state, lead = standing.report, standing.state, leading_task(standing.state)
    values = dict(lead.metrics if lead is not None else state.last_metrics)
    total = total_steps(values)
    values.pop(TOTAL_STEPS, None)
    first = main_metric(list(values))
    ordered = {first: values.pop(first), **values} if first else values
    goodput = report.get("goodput")
    problems = [] if report["status"] == "damaged" else list(standing.problems)
    reasons = pending_reasons(standing) if on_cluster(standing) else []
    speed = state.speed if standing.alive and state.speed else number(report.get("steps_per_s"))
    return RunData(
        run=standing.run,
        status=str(report["status"]),
        reason=str(report.get("reason") or ""),
        where=_where(standing.info),
        began=seconds(report.get("started")),
        ended=seconds(report.get("ended")) or history.ended,
        step=int(report.get("steps") or 0),
        total_steps=total,
        steps_per_s=speed,
        metrics=measurements(ordered),
        goodput=number(goodput.get("share")) if isinstance(goodput, dict) else None,
        restarts=len(report.get("restarts") or ()),
        is_alive=standing.alive,
        tasks=tuple(_tasks(standing)),
        curves=tuple(curves),
        generations=tuple(history.generations()),
        marks=tuple(history.marks()),
        snapshots=tuple(with_stored(history.snapshots(), stored, gone)),
        best=history.best,
        notes=(*notes, *problems, *reasons),
    )


def _where(info: Mapping[str, Any]) -> str:
    if info.get("on") != "kubernetes":
        return ""
    return " ".join(["on", *filter(None, (str(info.get(name) or "") for name in ("context", "namespace")))])


def with_stored(
    known: Sequence[SnapshotRecord], stored: Sequence[Snapshot] | None, gone: Collection[str] = ()
) -> list[SnapshotRecord]:
    """The snapshots that still exist, newest first: those in the store, and those that were committed since it was
    read. Without the store: all that events tell of."""
    remaining = [record for record in known if record.name not in gone]
    if stored is None:
        return remaining
    by_name = {record.name: record for record in known}
    kept = []
    for snapshot in stored:
        record = by_name.get(snapshot.name, SnapshotRecord(snapshot.name, snapshot.step))
        kept.append(
            replace(
                record,
                size=record.size if record.size is not None else snapshot.size,
                evaluation=record.evaluation or measurements(snapshot.metrics),
            )
        )
    names = {record.name for record in kept}
    return [*(record for record in remaining if record.name not in names), *kept]


def _tasks(standing: Standing) -> list[TaskData]:
    resources = standing.report.get("resources")
    used = resources if isinstance(resources, dict) else {}
    task_usage, host_usage = _objects(used.get("tasks")), _objects(used.get("hosts"))
    rows = sorted(tasks(standing), key=lambda task: natural(task["task"]))
    on_host, seen_on_host = Counter(task["host"] for task in rows), Counter[str]()
    data = []
    for task in rows:
        usage = task_usage.get(task["task"], {}) if task["state"] in ("running", "starting") else {}
        host, index = host_usage.get(task["host"], {}) if usage else {}, seen_on_host[task["host"]]
        seen_on_host[task["host"]] += 1
        gpus = _gpus_of(list(_objects(host.get("gpus")).values()), index, on_host[task["host"]])
        data.append(
            TaskData(
                task["task"], task["state"], task["host"], task["generation"], task["step"],
                cpu=_last(usage, "cpu"), memory=_last(usage, "memory") if usage else task["memory"],
                memory_limit=number(usage.get("memory_limit")), gpu=_mean(gpus, "utilization"),
                gpu_memory=_mean(gpus, "memory"), exit=task["exit"] or "",
            )
        )  # fmt: skip
    return data


def _gpus_of(gpus: list[dict[str, Any]], index: int, tasks: int) -> list[dict[str, Any]]:
    """The GPUs of one of several tasks of a host: equal shares, in the order of the tasks, or all if that is not so."""
    share, rest = divmod(len(gpus), tasks)
    return gpus[index * share : (index + 1) * share] if share and not rest else gpus


def _objects(value: Any) -> dict[str, dict[str, Any]]:
    return {name: each for name, each in value.items() if isinstance(each, dict)} if isinstance(value, dict) else {}


def _last(usage: Mapping[str, Any], name: str) -> float | None:
    measured = usage.get(name)
    return number(measured.get("last")) if isinstance(measured, dict) else None


def _mean(gpus: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [value for value in (_last(gpu, name) for gpu in gpus) if value is not None]
    return sum(values) / len(values) if values else None
