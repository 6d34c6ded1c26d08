"""The local folder of a run on a cluster: create, adopt, refresh, follow and delete it."""

from __future__ import annotations

import base64
import math
import os
import time
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from lightkube.resources.batch_v1 import Job
from lightkube.resources.core_v1 import ConfigMap, Event, Pod

from paceline import plan as plans
from paceline.agent.run_files import replace
from paceline.backends import archive_import
from paceline.backends.kubernetes.api import kubeconfig
from paceline.backends.kubernetes.api.cluster import Cluster, Refused, Unreachable, connect
from paceline.backends.kubernetes.objects import names
from paceline.backends.kubernetes.payload.prepare import Taken
from paceline.backends.kubernetes.runs.mirror import Mirror, finished
from paceline.backends.kubernetes.runs.pod_lines import try_lock
from paceline.backends.kubernetes.runs.running import WHOLE, Running
from paceline.backends.kubernetes.runs.submit import withdraw
from paceline.backends.new_run_ids import run_identity
from paceline.errors import Argument, Call
from paceline.plan import CAPTAIN, Plan
from paceline.storage.snapshots.manifest import Damaged, Newer
from paceline.storage.stores.locations import is_bucket
from paceline.storage.stores.protocol import StoreError
from paceline.view.files import run_folders
from paceline.view.files.plan_files import parse_plan, read_plan
from paceline.view.files.run_files import DamagedRun
from paceline.view.snapshots import snapshot_locations
from paceline.view.state import status_reader

CUT = "cut"  # a file with the reason why only a part of what the run has uploaded was imported
# By folder of a run, the kubeconfig with which this process has submitted or found the run. KUBECONFIG may name another
# one later, with a context of the same name: its cluster must not get requests about this run.
_kubeconfigs: dict[Path, tuple[Path, ...]] = {}


def make_folder(plan: Plan, text: str, cluster: Cluster, run: str, adopted: bool = False) -> Path:
    """Create the folder, before anything of the run exists on the cluster. `adopted`: another user or another machine
    has submitted the run."""
    folder = run_folders.runs_folder() / run
    try:
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.mkdir(mode=0o700)
        (folder / "logs").mkdir()
    except FileExistsError:
        error = run_folders.taken(folder)
        raise Taken(error.what, remedy=error.remedy_text) from None
    target = {"on": "kubernetes", "context": cluster.context, "namespace": cluster.namespace, "submitted": False}
    # Before the plan, which must not be mistaken for one of this user if this process is killed now.
    submission = {} if adopted else {"submission": os.urandom(16).hex()}
    target |= _kubeconfig_record(cluster)
    replace(str(folder / "run.json"), {**run_identity(run, plan), **target, "adopted": adopted, **submission})
    (folder / "plan.json").write_text(plans.to_json(plan))
    if text:
        (folder / "job.yaml").write_text(text)
    _kubeconfigs[folder] = cluster.kubeconfig
    return folder


def save_job_uid(folder: Path, uid: str) -> None:
    """`uid`: that of the captain's Job, saved because a later Job may have the same name."""
    replace(str(folder / "run.json"), {**run_folders.info(folder), "uid": uid})


def mark_submitted(folder: Path) -> None:
    replace(str(folder / "run.json"), {**run_folders.info(folder), "submitted": True})


def adopt(cluster: Cluster, run: str) -> Path:
    """A folder for a run that another user or another machine has submitted."""
    folder = run_folders.runs_folder() / run
    if folder.is_dir():
        info = run_folders.info(folder)
        if (info.get("context"), info.get("namespace")) != (cluster.context, cluster.namespace):
            existing = "on this machine"
            if info.get("context"):
                existing = f"in namespace {info.get('namespace')} (context {info['context']})"
            raise run_folders.NoRun(
                f"{run} is already the id of a run {existing}: this machine cannot have two runs with the same id"
            )
        jobs = _jobs(cluster, run)
        if any(_is_replaced(folder, job) for job in jobs):
            raise run_folders.NoRun(
                f"the id {run} belongs to an earlier run here and to another run on the cluster",
                remedy=("`", Call("delete", run), "` removes only the earlier run"),
            )
        if jobs:
            _use_kubeconfig(folder, cluster)
        elif info.get("server") not in (None, cluster.server):  # another cluster than the run's
            raise run_folders.NoRun(
                f"{run} belongs to a different cluster: it was submitted to {info.get('server')}",
                remedy="set KUBECONFIG to the kubeconfig of that cluster",
            )
        return folder
    try:
        job = cluster.request(f"read the Job {run}", partial(cluster.client.get, Job, run))
        config_map = cluster.request(f"read the plan of {run}", partial(cluster.client.get, ConfigMap, f"{run}-plan"))
    except Refused as refused:
        if refused.reason == "NotFound":
            raise run_folders.NoRun(
                f"no run {run!r} in namespace {cluster.namespace} (context {cluster.context})",
                remedy=(
                    "`",
                    Call("runs", arguments=(Argument("on", "kubernetes"),)),
                    f"` lists the runs; `kubectl delete job {run}` removes a run without a plan",
                ),
            ) from None
        raise
    folder = make_folder(_planned(run, config_map), "", cluster, run, adopted=True)
    save_job_uid(folder, str(job.metadata.uid if job.metadata else ""))
    if _is_released(job):
        mark_submitted(folder)
    return folder


def _planned(run: str, config_map: Any) -> Plan:
    """The plan in a ConfigMap, which anyone in the namespace may have written."""
    try:
        text = (config_map.data or {}).get("plan.json")
        if text is None:
            packed = base64.b64decode((config_map.binaryData or {})["plan.json.gz"])
            reader = zlib.decompressobj(wbits=31)
            text = reader.decompress(packed, run_folders.JSON_LIMIT).decode()  # a ConfigMap holds 1 MiB
            if not reader.eof:
                raise ValueError(f"it is larger than {run_folders.JSON_LIMIT >> 20} MiB, or incomplete")
        return parse_plan(text, "plan.json")
    except (ValueError, KeyError, TypeError, AttributeError, zlib.error, DamagedRun) as error:
        raise run_folders.NoRun(
            f"cannot read the plan of {run} in the ConfigMap {run}-plan: {type(error).__name__}: {error}"
        ) from None


def _jobs(cluster: Cluster, run: str) -> list[Any]:
    """The captain's Job, if it exists."""
    fields: dict[str, Any] = {"metadata.name": run}
    return cluster.request("list Jobs", lambda: list(cluster.client.list(Job, fields=fields)))


def is_running(cluster: Cluster, folder: Path) -> bool:
    """Whether the captain's Job exists and has not finished."""
    jobs = [job for job in _jobs(cluster, folder.name) if not _is_replaced(folder, job)]
    return any(not finished(job) and not job.metadata.deletionTimestamp for job in jobs)


def _is_released(job: Any) -> bool:
    return not (job.spec and job.spec.suspend)


def _is_replaced(folder: Path, job: Any) -> bool:
    """Whether this is the Job of another run with the same id. If this user's submission was interrupted before the uid
    of its Job was saved, the Job is recognized by its annotation."""
    info, annotations = run_folders.info(folder), job.metadata.annotations or {}
    if info.get("uid"):
        return str(info["uid"]) != str(job.metadata.uid)
    return bool(info.get("submission")) and annotations.get(names.SUBMISSION) != info["submission"]


def connect_for(folder: Path, until: float = math.inf) -> Cluster:
    """Connect to the cluster of the run with this folder. Sends no request yet. `until`: a time of time.monotonic(), at
    which all requests end."""
    return connect(*run_folders.cluster_of(folder), _kubeconfigs.get(folder) or _kubeconfig_of(folder), until)


def _kubeconfig_of(folder: Path) -> tuple[Path, ...]:
    """The files to use for a run that another process has submitted: those that KUBECONFIG names, if their context has
    the same server, as their credentials may be newer; otherwise those that were used then."""
    info = run_folders.info(folder)
    recorded, server = tuple(Path(path) for path in info.get("kubeconfig", ())), info.get("server")
    if not recorded or not server:
        return ()  # an older version of Paceline has submitted it
    with suppress(kubeconfig.InvalidKubeconfig):
        files = kubeconfig.find_files()
        if kubeconfig.read_context(files, info.get("context")).cluster.server == server:
            return tuple(files)
    existing = tuple(path for path in recorded if path.is_file())
    if not existing:
        raise Unreachable(
            f"{folder.name} was submitted with {' and '.join(map(str, recorded))}, which no longer exists",
            remedy=f"set KUBECONFIG to a kubeconfig whose context {info.get('context')} has the server {server}",
        )
    return existing


def _use_kubeconfig(folder: Path, cluster: Cluster) -> None:
    """Use this kubeconfig for the run, also in later processes."""
    _kubeconfigs[folder] = cluster.kubeconfig
    record = _kubeconfig_record(cluster)
    info = run_folders.info(folder)
    if {name: info.get(name) for name in record} != record:
        replace(str(folder / "run.json"), {**info, **record})


def _kubeconfig_record(cluster: Cluster) -> dict[str, Any]:
    return {"kubeconfig": [str(path) for path in cluster.kubeconfig], "server": cluster.server}


def reopen(folder: Path, cluster: Cluster | None = None, until: float = math.inf) -> Running:
    """The caller closes it. `until`: a time of time.monotonic(), at which all requests end."""
    cluster = cluster or connect_for(folder, until)
    plan = read_plan(folder)
    return Running(cluster, folder.name, folder, Mirror(cluster, folder.name, folder, plan))


def refresh(run: run_folders.Run, hosts: set[str] | None = None, until: float = math.inf) -> None:
    """Fetch events and the output of these hosts from the cluster, once. Also fetch what the run has uploaded to its
    bucket, if the run has ended or the cluster does not respond. `until`: a time of time.monotonic(), at which all
    requests end."""
    folder = run.folder
    with try_lock(folder) as is_locked:
        if not is_locked or (folder / WHOLE).exists():
            return  # another process follows the run, or everything was fetched
        try:
            with closing(reopen(folder, until=until)) as running:
                _refresh_from(running, run, hosts or set(), until)
        except Unreachable:
            with suppress(StoreError, Damaged, Newer):
                _import_uploaded(run, hosts or set(), until)
            if not run_folders.outcome_known(folder):
                raise


def _refresh_from(running: Running, run: run_folders.Run, hosts: set[str], until: float) -> None:
    cluster, folder, mirror = running.cluster, run.folder, running.mirror
    labels: dict[str, Any] = {names.RUN_LABEL: run.name}
    jobs: list[Any] = cluster.request("list Jobs", lambda: list(cluster.client.list(Job, labels=labels)))
    current = next((each for each in jobs if each.metadata.name == run.name), None)
    job = None if current is None or _is_replaced(folder, current) else current
    if job is not None and not run_folders.info(folder).get("uid"):
        save_job_uid(folder, job.metadata.uid)
    if not run_folders.info(folder).get("submitted"):
        if job is None or not _is_released(job):
            return
        mark_submitted(folder)
    mirror.job_deleted = job is None
    if mirror.job_deleted and current is not None:
        if not (folder / "report.json").exists():
            running.write_report()
        (folder / WHOLE).touch()
        return
    for each in jobs:
        mirror.update_job("ADDED", each)
    mirror.update_pods(cluster.request("list pods", lambda: list(cluster.client.list(Pod, labels=labels))))
    fetched = mirror.fetch({CAPTAIN, *hosts})
    with suppress(Refused):  # the user may lack this permission
        mirror.update_events(cluster.request("list events", lambda: list(cluster.client.list(Event))))
    mirror.save_pods()
    job_ended = job is None or finished(job)
    # The run ends a moment before its Job.
    run_ended = status_reader.read(run).state.ended is not None
    if job is not None and (job_ended or run_ended) and not run_folders.outcome_known(folder):
        running.write_report()
    try:
        if job_ended:
            _import_uploaded(run, hosts, until, has_ended=True)
    finally:
        if job is None and not run_folders.outcome_known(folder):
            (folder / "report.json").unlink(missing_ok=True)
            running.write_report()
    is_complete = job_ended and fetched and len(hosts) == len(mirror.hosts)
    if is_complete or (job is None and not _in_bucket(folder)):
        (folder / WHOLE).touch()


def _import_uploaded(run: run_folders.Run, hosts: set[str], until: float, has_ended: bool = False) -> None:
    """Import what the run has uploaded to its bucket, including output of deleted pods.

    If all hosts of a run that has ended have uploaded too much, that is not downloaded again with every command; a part
    of the hosts is."""
    folder, remaining = run.folder, until - time.monotonic()
    if not _in_bucket(folder) or remaining <= 0:
        return
    plan = read_plan(folder)
    is_all = len(hosts) == len(plan.hosts)
    if is_all and (folder / CUT).exists():
        raise archive_import.TooLarge((folder / CUT).read_text())
    source = snapshot_locations.open_source(run, min(remaining, snapshot_locations.PATIENCE_S))
    try:
        archive_import.import_hosts(source.archive, folder, [CAPTAIN, *sorted(hosts)], plan.limits.log, until)
    except archive_import.TooLarge as error:
        if is_all and has_ended:
            (folder / CUT).write_text(str(error))
        raise


def _in_bucket(folder: Path) -> bool:
    return is_bucket(snapshot_locations.location_of(run_folders.Run(folder.name, folder)))


@contextmanager
def followed(folder: Path, until: float = math.inf) -> Iterator[Running | None]:
    """The run, with its folder updated continuously; None: another process does that. `until`: a time of
    time.monotonic(), at which all requests end."""
    with try_lock(folder) as is_locked:
        if not is_locked:
            yield None
            return
        running = reopen(folder, until=until)
        running.mirror.output_incomplete = True  # earlier output may be missing
        running.mirror.start()
        try:
            yield running
        finally:
            running.mirror.stop()
            running.mirror.inbox.close()


def delete(folder: Path) -> None:
    """Delete everything of the run on the cluster; the caller deletes the local folder."""
    with closing(reopen(folder)) as running:
        cluster, run = running.cluster, folder.name
        if any(_is_replaced(folder, job) for job in _jobs(cluster, run)):
            return  # that run was deleted; the Job belongs to another one
        withdraw(cluster, run)
        running.kill_pods()
