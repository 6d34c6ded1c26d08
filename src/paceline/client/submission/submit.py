"""Starts runs of jobs and of functions, on this machine or on a cluster; they continue when this process ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.client.jobs import Job, prepare
from paceline.client.reading.find_run import Target
from paceline.client.run import Run
from paceline.errors import UsageError
from paceline.view.files import run_folders

if TYPE_CHECKING:
    from paceline.plan import Plan


def submit(
    job: Job | Callable[..., object],
    on: str = "local",
    *,
    context: str | None = None,
    namespace: str | None = None,
    run: str | None = None,
    rebuild_data: bool = False,
    endpoint: str = "",
    arguments: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Run:
    """Starts a run, which continues when this process ends. `on`: `"local"`, this machine, or `"kubernetes"`.

    `context`, `namespace`: of the cluster, as for kubectl. `run`: the id of the run; default: the name of the job with
    a random suffix. `rebuild_data`: rebuild the data with the job's `ingest`, even if it exists. `endpoint`: the server
    of the job's bucket, if this machine must use a different one than the tasks to read it.

    `job` may be a function: `submit(train, workers=2, framework="torch", arguments={"epochs": 3})`. It is sent as
    source if it is self-contained, otherwise with cloudpickle; `Run.notes` tells which. `arguments`: its keyword
    arguments. `workers`: the number of worker hosts. Other fields are those of a
    [job file](job-file.md), such as `gpus`, `snapshots` or `kubernetes`. `UsageError`: the function cannot be sent.
    """
    target = Target(on, context, namespace, endpoint=endpoint)
    submit_to = _submit_to_cluster if target.is_cluster else _start_here
    if not isinstance(job, Job):
        from paceline.client.functions import function_folders
        from paceline.client.functions.function_jobs import job_of

        try:
            with function_folders.submitting():
                job, note = job_of(job, arguments or {}, fields, target.is_cluster)
                return submit_to(job, target, run, rebuild_data, (note,))
        finally:
            function_folders.remove_unused(run_folders.home())
    if fields or arguments is not None:
        names = [*fields, *(["arguments"] if arguments is not None else [])]
        raise UsageError(f"{', '.join(names)}: only for a function", remedy="change the job: client.load(..., set={})")
    return submit_to(job, target, run, rebuild_data, ())


def _start_here(job: Job, target: Target, run_id: str | None, rebuild_data: bool, notes: tuple[str, ...]) -> Run:
    from paceline.backends import local
    from paceline.client.submission.plan_cache import plan_of
    from paceline.client.submission.plans import with_origin

    planned = plan_of(job._load(cluster=False))
    plan = with_origin(_with_data(planned.plan, rebuild_data), check=True)
    page, note = local.page_for(plan)
    shown = f"TensorBoard: http://{page}/" if page else note
    run, folder = local.create(plan, planned.text, run_id)
    local.start_detached(plan, run, folder, page)
    all_notes = [*notes, *planned.notes, *local.caveats(plan), *filter(None, [shown])]
    return Run(run, target, folder, all_notes)


def _submit_to_cluster(job: Job, target: Target, run_id: str | None, rebuild_data: bool, notes: tuple[str, ...]) -> Run:
    from paceline.client.submission.kubernetes_submission import (
        cluster_of,
        monitor_metrics,
        published_tensorboard,
        submitted,
    )

    prepared = prepare(job)
    prepared = replace(prepared, plan=_with_data(prepared.plan, rebuild_data))
    folder: Path
    with (
        closing(cluster_of(prepared.plan, target.context, target.namespace)) as cluster,
        submitted(prepared, cluster, run_id, lambda: False) as folder,
    ):
        tensorboard = published_tensorboard(cluster, folder.name, prepared.plan)
        metrics = monitor_metrics(cluster, folder, prepared.plan)
    where = Target("kubernetes", cluster.context, cluster.namespace, cluster.kubeconfig, target.endpoint)
    return Run(folder.name, where, folder, [*notes, *prepared.notes, *filter(None, [tensorboard, metrics])])


def _with_data(plan: Plan, rebuild_data: bool) -> Plan:
    from paceline.client.submission.plans import with_rebuilt_data

    return with_rebuilt_data(plan) if rebuild_data else plan
