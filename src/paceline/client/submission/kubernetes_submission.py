"""Submits a job to a cluster."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.backends.kubernetes.api.cluster import Cluster
    from paceline.backends.kubernetes.payload.prepare import Prepared
    from paceline.plan import Plan

_TRIES = 5  # attempts: a generated run id may already exist


def cluster_of(plan: Plan, context: str | None, namespace: str | None) -> Cluster:
    """The cluster that was requested, else the job's."""
    from paceline.backends.kubernetes.api.cluster import connect

    return connect(context or plan.kubernetes["context"], namespace or plan.kubernetes["namespace"])


@contextmanager
def submitted(
    prepared: Prepared, cluster: Cluster, run_id: str | None, interrupted: Callable[[], bool]
) -> Iterator[Path]:
    """Yields the folder of the new run, locked while it is followed. `run_id`: None: generate one."""
    from paceline.backends.kubernetes.objects import names
    from paceline.backends.kubernetes.objects.run_objects import render
    from paceline.backends.kubernetes.payload.agent_archive import agent_archive
    from paceline.backends.kubernetes.payload.prepare import Taken, certificates
    from paceline.backends.kubernetes.runs import local_folder
    from paceline.backends.kubernetes.runs.pod_lines import try_lock
    from paceline.backends.kubernetes.runs.submit import NotCleanedUp, submit
    from paceline.backends.new_run_ids import new_run
    from paceline.view.files import run_folders

    section = {**prepared.plan.kubernetes, "namespace": cluster.namespace}
    plan, agent, secrets = replace(prepared.plan, kubernetes=section), agent_archive(), certificates()
    for tries_left in reversed(range(1 if run_id else _TRIES)):
        run = new_run(plan.name, run_id)
        objects = render(plan, run, agent, prepared.code, secrets, suspended=True, library=prepared.library)
        try:
            # Before anything exists on the cluster, so that `ls` and `delete` know the run even if we are killed.
            folder = local_folder.make_folder(plan, prepared.text, cluster, run)
        except Taken:
            if not tries_left:
                raise
            continue
        submission = {names.SUBMISSION: str(run_folders.info(folder)["submission"])}
        objects[0]["metadata"].setdefault("annotations", {}).update(submission)
        with try_lock(folder):
            try:
                submit(cluster, run, objects, interrupted, partial(local_folder.save_job_uid, folder))
            except NotCleanedUp:
                raise
            except BaseException as error:
                shutil.rmtree(folder, ignore_errors=True)
                if isinstance(error, Taken) and tries_left:
                    continue
                raise
            local_folder.mark_submitted(folder)
            yield folder
            return


def published_tensorboard(cluster: Cluster, run: str, plan: Plan) -> str:
    """Where TensorBoard of the run can be reached; empty: not published, or unknown."""
    from paceline.backends.kubernetes.api.cluster import Refused, Unreachable
    from paceline.backends.kubernetes.runs.tensorboard import published

    try:
        return published(cluster, run, plan.tensorboard)
    except (Refused, Unreachable):
        return ""


def monitor_metrics(cluster: Cluster, folder: Path, plan: Plan) -> str:
    """If the run serves metrics, tells the Prometheus Operator where. Returns why that was not possible."""
    if not plan.metrics:
        return ""
    from paceline.backends.kubernetes.api.cluster import Refused, Unreachable
    from paceline.backends.kubernetes.runs import prometheus_pod_monitor
    from paceline.backends.kubernetes.runs.submit import owner_of
    from paceline.view.files import run_folders

    owner = owner_of(folder.name, str(run_folders.info(folder).get("uid")))
    try:
        return prometheus_pod_monitor.create(cluster, plan, folder.name, owner)
    except (Refused, Unreachable) as error:
        return str(error)
