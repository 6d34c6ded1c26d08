"""What a captain, and a reader of a run's files, add to its metrics in the same way."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from paceline.agent.goodput import KINDS
from paceline.agent.metrics import families as fam
from paceline.agent.metrics.openmetrics_text import Samples

MOST_NAMES = 100  # of numbers that one task reports
MOST_GPUS = 64  # of a host
_OF_TASKS = {
    fam.TASK_CPU: "cpu", fam.TASK_MEMORY: "memory", fam.TASK_READ: "read_bytes_per_s",
    fam.TASK_WRITTEN: "written_bytes_per_s",
}  # fmt: skip
_OF_HOSTS = {
    fam.HOST_MEMORY: "memory", fam.HOST_RECEIVED: "received_bytes_per_s", fam.HOST_SENT: "sent_bytes_per_s",
}  # fmt: skip


def known_cause(cause: str) -> str:
    return cause if cause in fam.CAUSES else "other"


def add_restarts(samples: Samples, restarts: Mapping[str, int]) -> None:
    """`restarts`: by known cause. Causes without a restart have the value 0, so that an increase can be seen."""
    for cause in fam.CAUSES:
        samples.add(fam.RESTARTS, restarts.get(cause, 0), cause)


def add_reported(samples: Samples, metrics: Mapping[str, Mapping[str, float]]) -> None:
    """`metrics`: task -> name -> number. If there are too many, each task has its share of them."""
    share = max(1, min(MOST_NAMES, fam.REPORTED.most // max(1, len(metrics))))
    for task, reported in samples.first(metrics.items(), fam.REPORTED.most):
        for name, value in samples.first(reported.items(), share):
            samples.add(fam.REPORTED, value, task, name)


def add_goodput(samples: Samples, goodput: Any) -> None:
    """`goodput`: as in a report."""
    if not isinstance(goodput, dict):
        return
    seconds = goodput.get("seconds")
    for kind in KINDS:
        samples.add(fam.TIME, _number(seconds, kind), kind)
    if goodput.get("reports_steps"):  # otherwise it is not known what was lost
        samples.add(fam.GOODPUT, _number(goodput, "share"))


def add_disk(samples: Samples, folder: str) -> None:
    try:
        disk = os.statvfs(folder)
    except OSError:
        return
    samples.add(fam.DISK_FREE, disk.f_bavail * disk.f_frsize)
    samples.add(fam.DISK_SIZE, disk.f_blocks * disk.f_frsize)


def add_resources(samples: Samples, resources: Any, tasks: Collection[str], hosts: Collection[str]) -> None:
    """`resources`: as in a report. `tasks`, `hosts`: those that are up; what others used last no longer matters."""
    if not isinstance(resources, dict):
        return
    for task, usage in _selected(samples, resources.get("tasks"), tasks):
        for family, number in _OF_TASKS.items():
            samples.add(family, _number(usage.get(number), "last"), task)
        samples.add(fam.TASK_MEMORY_PEAK, _number(usage.get("memory"), "peak"), task)
    for host, usage in _selected(samples, resources.get("hosts"), hosts):
        for family, number in _OF_HOSTS.items():
            samples.add(family, _number(usage.get(number), "last"), host)
        samples.add(fam.HOST_MEMORY_LIMIT, _number(usage, "memory_limit"), host)
        gpus = usage.get("gpus")
        for gpu, busy in samples.first(gpus.items(), MOST_GPUS) if isinstance(gpus, dict) else ():
            samples.add(fam.GPU_BUSY, _number(busy.get("utilization"), "last"), host, gpu)
            samples.add(fam.GPU_MEMORY, _number(busy.get("memory"), "last"), host, gpu)
            samples.add(fam.GPU_MEMORY_LIMIT, _number(busy, "memory_limit"), host, gpu)


def _selected(samples: Samples, usages: Any, names: Collection[str]) -> Iterable[tuple[str, dict[str, Any]]]:
    """The usages of these names that are well-formed."""
    every = usages.items() if isinstance(usages, dict) else ()
    return samples.first([(name, usage) for name, usage in every if name in names and isinstance(usage, dict)])


def _number(fields: Any, name: str) -> float | None:
    value = fields.get(name) if isinstance(fields, dict) else None
    return value if isinstance(value, (int, float)) else None
