"""The time of a run by kind, and what its tasks and hosts have used, as text: from the fields of its report."""

from __future__ import annotations

from typing import Any

from paceline.agent.goodput import KINDS
from paceline.view.state.events import number
from paceline.view.text.wording import count, natural, size, span

KIND_NAMES = {
    "stalled": "stalled by snapshots",
    "lost": "lost and redone",
    "waiting": "waiting for hosts",
}
NO_STEPS = "no steps are reported: training counts from the start of the tasks"
SINCE = "counted since {}: what earlier captains recorded is lost"
_SHOWN_TASKS = 4
_GIB = 2**30


def goodput(report: dict[str, Any]) -> list[str]:
    """The share of training that counts, and a table of all kinds that are not 0."""
    measured = report.get("goodput")
    if not isinstance(measured, dict):
        return []
    seconds, wall = measured["seconds"], number(measured["wall_s"]) or 0.0
    times = {kind: number(seconds.get(kind)) or 0.0 for kind in KINDS}
    rows = [
        f"{'':<12} {KIND_NAMES.get(kind, kind):<20}  {span(time):>12}  {_percent(time, wall):>6}"
        for kind, time in sorted(times.items(), key=lambda item: (item[0] != "training", -item[1]))
        if time >= 0.05
    ]
    head = f"{'goodput':<12} {_percent(times['training'], wall)} of {span(wall)}"
    notes = [] if measured.get("reports_steps", True) or not times["training"] else [f"{'':<12} {NO_STEPS}"]
    since = measured.get("since")
    return [head, *rows, *notes, *([f"{'':<12} {SINCE.format(since)}"] if since else [])]


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f}%" if whole > 0 else "-"


def memory(report: dict[str, Any]) -> list[str]:
    """The tasks that came closest to their limits: worker-2 peaked at 7.4 of 8 GiB."""
    peaks = {}
    for task, used in _users(report, "tasks").items():
        peak, limit = _amount(used, "memory", "peak"), number(used.get("memory_limit"))
        if peak is not None and limit:
            peaks[task] = peak / limit, f"{task} peaked at {of_limit(peak, limit)}"
    texts = [peaks[task][1] for task in sorted(peaks, key=lambda task: (-peaks[task][0], natural(task)))]
    more = len(texts) - _SHOWN_TASKS
    shown = texts[:_SHOWN_TASKS] + ([f"... and {count(more, 'other task')} at less"] if more > 0 else [])
    return [f"{'' if line else 'memory':<12} {text}" for line, text in enumerate(shown)]


def of_limit(amount: float, limit: float) -> str:
    """
    >>> of_limit(7.4 * 2**30, 2**33), of_limit(2**20, 2**33), of_limit(2**20, 2**28)
    ('7.4 of 8 GiB', '1 MiB of 8 GiB', '1 of 256 MiB')
    """
    unit, scale = ("GiB", _GIB) if limit >= _GIB else ("MiB", 2**20)
    total = f"{limit / scale:.1f}".removesuffix(".0")
    if amount < scale / 10:
        return f"{size(amount)} of {total} {unit}"
    return f"{amount / scale:.1f}".removesuffix(".0") + f" of {total} {unit}"


def task_table(report: dict[str, Any]) -> list[list[str]]:
    """What each task has used; [] if nothing was measured."""
    rows = [["TASK", "CORES", "PEAK", "MEMORY", "PEAK", "LIMIT", "READ/S", "WRITTEN/S"]]
    for task, used in sorted(_users(report, "tasks").items(), key=lambda item: natural(item[0])):
        cores = [_amount(used, "cpu", of) for of in ("mean", "peak")]
        amounts = [_amount(used, "memory", "mean"), _amount(used, "memory", "peak"), number(used.get("memory_limit"))]
        amounts += [_amount(used, name, "mean") for name in ("read_bytes_per_s", "written_bytes_per_s")]
        rows.append([task, *("-" if c is None else f"{c:.2f}" for c in cores), *map(_size, amounts)])
    return rows if len(rows) > 1 else []


def host_table(report: dict[str, Any]) -> list[list[str]]:
    """What each host and its GPUs have used; [] if nothing was measured."""
    rows = [["HOST", "GPU", "BUSY", "MEMORY", "PEAK", "LIMIT", "RECEIVED/S", "SENT/S"]]
    for host, used in sorted(_users(report, "hosts").items(), key=lambda item: natural(item[0])):
        rates = [_size(_amount(used, name, "mean")) for name in ("received_bytes_per_s", "sent_bytes_per_s")]
        rows.append([host, "-", "-", *_memory_cells(used), *rates])
        for index, gpu in _objects(used.get("gpus")).items():
            busy = _amount(gpu, "utilization", "mean")
            rows.append([host, index, "-" if busy is None else f"{busy:.0%}", *_memory_cells(gpu), "-", "-"])
    return rows if len(rows) > 1 else []


def _memory_cells(used: dict[str, Any]) -> list[str]:
    amounts = [_amount(used, "memory", "mean"), _amount(used, "memory", "peak"), number(used.get("memory_limit"))]
    return [_size(amount) for amount in amounts]


def _users(report: dict[str, Any], group: str) -> dict[str, dict[str, Any]]:
    resources = report.get("resources")
    return _objects(resources.get(group)) if isinstance(resources, dict) else {}


def _objects(value: Any) -> dict[str, dict[str, Any]]:
    """A report may be damaged."""
    return {name: each for name, each in value.items() if isinstance(each, dict)} if isinstance(value, dict) else {}


def _amount(used: dict[str, Any], name: str, of: str) -> float | None:
    """`of`: last, mean or peak."""
    measured = used.get(name)
    return number(measured.get(of)) if isinstance(measured, dict) else None


def _size(amount: float | None) -> str:
    return "-" if amount is None else size(amount)
