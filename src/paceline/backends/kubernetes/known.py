"""Runs on a cluster that this machine knows of by their folder: brought up to date, stopped, deleted."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from lightkube.resources.batch_v1 import Job
from lightkube.resources.core_v1 import Pod

from paceline.backends.kubernetes import names
from paceline.backends.kubernetes.cluster import Cluster, connect
from paceline.backends.kubernetes.mirror import Mirror
from paceline.backends.kubernetes.running import Running
from paceline.backends.kubernetes.submit import withdraw
from paceline.view import runs


def reopen(folder: Path) -> Running:
    info = runs.info(folder)
    cluster = connect(info["context"], info["namespace"])
    hosts = len((runs.read_object(folder / "plan.json") or {}).get("hosts", ()))
    return Running(cluster, folder.name, folder, Mirror(cluster, folder.name, folder, hosts))


def refresh(folder: Path) -> Running:
    """Fetch what the cluster knows by now, once."""
    running = reopen(folder)
    cluster, run = running.cluster, folder.name
    labels: dict[str, Any] = {names.RUN_LABEL: run}
    pods = cluster.ask("list pods", lambda: list(cluster.client.list(Pod, labels=labels)))
    for pod in pods:
        running.mirror.fetch(pod)
    if _finished(cluster, run):
        running.keep_outcome()
    return running


def _finished(cluster: Cluster, run: str) -> bool:
    jobs = cluster.ask("list Jobs", partial(cluster.client.list, Job, fields={"metadata.name": run}))
    conditions = [each for job in jobs for each in (job.status.conditions if job.status else None) or []]
    return any(each.type in ("Complete", "Failed") and each.status == "True" for each in conditions)


def delete(folder: Path) -> None:
    """Everything of the run on the cluster; its folder here is left to the caller."""
    running = reopen(folder)
    withdraw(running.cluster, folder.name)
    running.kill_pods()
