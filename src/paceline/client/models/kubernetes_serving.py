"""Serves a run's model from pods on a cluster, until it is stopped."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.client.reading.find_run import ON_CLUSTER, Notify, ignore, refresh
from paceline.client.snapshots.snapshot_lookup import find_snapshot
from paceline.errors import Argument, UsageError
from paceline.plan import CLAIM, CODE_IN_IMAGE
from paceline.storage.stores.locations import is_bucket

if TYPE_CHECKING:
    from paceline.backends.kubernetes.api.cluster import Cluster
    from paceline.backends.kubernetes.objects.serving_objects import Model
    from paceline.backends.kubernetes.serving.deployment import Before
    from paceline.plan import Plan
    from paceline.storage.snapshots.manifest import SnapshotId
    from paceline.view.files.run_folders import Run
    from paceline.view.snapshots.snapshot_locations import Source


@dataclass(frozen=True)
class Serving:
    """The model to serve, and the options that stop serving it."""

    cluster: Cluster
    run: str
    snapshot: SnapshotId
    plan: Plan
    model: Model
    objects: Sequence[dict[str, Any]]
    stop_arguments: tuple[Argument, ...]  # with the run

    def apply(self) -> Before:
        from paceline.backends.kubernetes.serving import deployment

        return deployment.apply(self.cluster, self.run, self.objects)

    def wait(self, on_waiting: Notify) -> None:
        """Raises NotServed if the pods are not ready within limits.start."""
        from paceline.backends.kubernetes.serving import deployment

        deployment.wait(self.cluster, self.run, self.objects[0], self.plan.limits.start, on_waiting)

    def prune(self, before: Before) -> None:
        """Deletes the objects that served an older snapshot."""
        from paceline.backends.kubernetes.serving import deployment

        deployment.prune(self.cluster, self.run, before.maps)

    def addresses(self) -> tuple[str, str]:
        """The address inside the cluster, and a description of the one outside; empty: not reachable from outside."""
        from paceline.backends.kubernetes.objects import serving_objects
        from paceline.backends.kubernetes.serving import deployment

        inside = serving_objects.url(self.plan, self.run, self.model, self.cluster.namespace)
        return inside, deployment.address(self.cluster, self.run, inside[inside.index("/v1/") :])


def prepare_serving(
    run: str | None,
    snapshot: str | None,
    name: str,
    job: str,
    code: str,
    context: str | None,
    namespace: str | None,
    notify: Notify = ignore,
    endpoint: str = "",
) -> Serving:
    """`name`: the model's name in URLs; empty: the job's name. `job`, `code`: used instead of the run's job file and
    code folder."""
    from paceline.backends.kubernetes.api import volume_claims
    from paceline.backends.kubernetes.objects import serving_objects
    from paceline.backends.kubernetes.payload.agent_archive import agent_archive
    from paceline.backends.kubernetes.payload.prepare import library_parts

    with closing(_source(run, context, namespace, notify, endpoint)) as source:
        _check_location(source)
        plan = _planned(source, job)
        cluster = _cluster(source, plan, context, namespace)
        snapshot_id = find_snapshot(source, source.reader.inventory(), snapshot)
        run, location = source.run, source.location
        is_pinned = snapshot not in (None, "newest")
        if is_pinned and (source.alive or source.doubt()):
            notify(
                f"pods that start later also need {snapshot_id}; `snapshots.keep` of the run may delete it before then"
            )
        stop_arguments = _stop_arguments(source, cluster)
    needs_one_node = volume_claims.need_one_node(cluster, serving_objects.claims_of(plan, location))
    model = serving_objects.Model(_name(name or plan.name), str(snapshot_id), location, is_pinned, needs_one_node)
    plan = replace(plan, kubernetes={**plan.kubernetes, "namespace": cluster.namespace})
    plan, parts = _code(plan, code, notify)
    library = library_parts() if is_bucket(location) or plan.needs_bucket else ()
    objects = serving_objects.render(plan, run, model, agent_archive(), parts, library)
    return Serving(cluster, run, snapshot_id, plan, model, objects, stop_arguments)


def stop_serving(run: str | None, context: str | None, namespace: str | None) -> tuple[str, str]:
    """Returns the run, and the namespace in which it was served."""
    from paceline.backends.kubernetes.api.cluster import connect
    from paceline.backends.kubernetes.serving import deployment
    from paceline.view.snapshots.snapshot_locations import is_location

    if run is not None and is_location(run):
        run = run.rstrip("/").rpartition("/")[2]
    known_run = _known_run(run)  # None if it was deleted here: its pods are still serving
    run_context, run_namespace = _cluster_of_run(None if known_run is None else known_run.folder)
    name = run or "" if known_run is None else known_run.name
    cluster = connect(context or run_context, namespace or run_namespace)
    deployment.stop(cluster, name)
    return name, cluster.namespace


def _stop_arguments(source: Source, cluster: Cluster) -> tuple[Argument, ...]:
    run_context, run_namespace = _cluster_of_run(source.folder)
    context = () if cluster.context == run_context else (Argument("context", cluster.context),)
    namespace = () if cluster.namespace == run_namespace else (Argument("namespace", cluster.namespace),)
    return (ON_CLUSTER, *context, *namespace, Argument("stop", True))


def _cluster_of_run(folder: Path | None) -> tuple[str | None, str | None]:
    """Context and namespace of the run, else of its job, if this machine knows them."""
    from paceline.view.files import run_folders

    if folder is None:
        return None, None
    info, plan = run_folders.info(folder), run_folders.plan(folder).get("kubernetes", {})
    return info.get("context") or plan.get("context"), info.get("namespace") or plan.get("namespace")


def _known_run(run: str | None) -> Run | None:
    """None: this machine does not know the run."""
    from paceline.view.files import run_folders, run_lookup

    try:
        return run_lookup.find(run, True)
    except run_folders.NoRun:
        known = [*run_folders.all_runs(), *run_folders.deleted_runs()]
        if run is None or any(each.name.startswith(run) for each in known):
            raise  # there is no run at all, or the prefix is ambiguous
        return None


def _source(run: str | None, context: str | None, namespace: str | None, notify: Notify, endpoint: str) -> Source:
    from paceline.client.snapshots import run_store
    from paceline.view.files import run_folders
    from paceline.view.snapshots import snapshot_locations

    if run is not None and snapshot_locations.is_location(run):
        return run_store.open_location(run, notify, endpoint)
    known_run = _known_run(run)
    if known_run is None:
        from paceline.backends.kubernetes.api.cluster import connect
        from paceline.backends.kubernetes.runs.local_folder import adopt

        known_run = run_folders.Run(str(run), adopt(connect(context, namespace), str(run)))
    known_run = replace(known_run, endpoint=endpoint)
    refresh(known_run, notify=notify)
    return run_store.open_run(known_run, notify)


def _planned(source: Source, job: str) -> Plan:
    from paceline.client.models import job_programs

    plan = job_programs.planned(source, "export", job)
    if not plan.serve:
        raise job_programs.missing_section(source, "serve", "{replicas: 2}", job)
    if not plan.kubernetes.get("image"):
        where = job or f"the job of {source.run}"
        raise UsageError("kubernetes.image is not set", where=where, remedy="set the image that runs export.command")
    return plan


def _cluster(source: Source, plan: Plan, context: str | None, namespace: str | None) -> Cluster:
    """The cluster that was requested, else the run's, else the job's."""
    from paceline.backends.kubernetes.api.cluster import connect
    from paceline.view.files import run_folders

    info = {} if source.folder is None else run_folders.info(source.folder)
    run_context, run_namespace = info.get("context"), info.get("namespace")
    cluster = connect(
        context or run_context or plan.kubernetes["context"],
        namespace or run_namespace or plan.kubernetes["namespace"],
    )
    if source.location.startswith(CLAIM) and (run_context, run_namespace) != (cluster.context, cluster.namespace):
        raise UsageError(
            f"{source.location} is a volume claim in namespace {run_namespace} (context {run_context}): its snapshots "
            "can be served only there"
        )
    return cluster


def _check_location(source: Source) -> None:
    if not is_bucket(source.location) and not source.location.startswith(CLAIM):
        where = "on this machine" if source.location.startswith("/") else "in its captain's pod"
        raise UsageError(
            f"the snapshots of {source.run} are {where}, where serving pods cannot read them",
            remedy="set `snapshots: {to: s3://bucket/path}` (or gs://, az://, claim://name/path) in the job file",
        )


def _name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][-A-Za-z0-9_.]*", name):
        raise UsageError("invalid model name", where=Argument("name", name), remedy="use letters, digits, -, _ and .")
    return name


def _code(plan: Plan, code: str, notify: Notify) -> tuple[Plan, tuple[bytes, ...]]:
    """Returns the plan with the code folder to send, and its archive in parts."""
    from paceline.backends.kubernetes.objects.config_maps import CHUNK
    from paceline.backends.kubernetes.payload.code_archive import collect
    from paceline.client.models import job_programs

    if plan.code == CODE_IN_IMAGE and not code:
        return plan, ()
    folder: Path = job_programs.folder_of(plan, code)
    archive = collect(folder)
    for note in (*archive.notes, f"sending {folder}: {archive.describe()}"):
        notify(note)
    return replace(plan, code=str(folder)), tuple(archive.chunks(CHUNK))
