"""Runs on a cluster that this machine knows by a folder: made, taken over, brought up to date, followed, deleted."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from lightkube.resources.batch_v1 import Job
from lightkube.resources.core_v1 import ConfigMap, Event, Pod

from paceline import plan as plans
from paceline.agent.journal import replace, stamp
from paceline.backends.kubernetes import names
from paceline.backends.kubernetes.cluster import Cluster, Refused, Unreachable, connect
from paceline.backends.kubernetes.inbox import held
from paceline.backends.kubernetes.mirror import Mirror, finished
from paceline.backends.kubernetes.prepare import Taken
from paceline.backends.kubernetes.running import WHOLE, Running
from paceline.backends.kubernetes.submit import withdraw
from paceline.plan import CAPTAIN, Plan
from paceline.storage.manifest import Damaged, Newer
from paceline.storage.store import StoreError
from paceline.view import kept, places, runs, state


def make_folder(plan: Plan, text: str, cluster: Cluster, run: str) -> Path:
    """Where this machine keeps what it knows of the run; before there is anything of it on the cluster."""
    folder = runs.runs_folder() / run
    try:
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.mkdir(mode=0o700)
        (folder / "logs").mkdir()
    except FileExistsError:
        raise Taken(runs.taken(folder)) from None
    (folder / "plan.json").write_text(plans.to_json(plan))
    if text:
        (folder / "job.yaml").write_text(text)
    words = {"run": run, "job": plan.name, "framework": plan.framework, "strategy": plan.strategy, "started": stamp()}
    where = {"on": "kubernetes", "context": cluster.context, "namespace": cluster.namespace, "submitted": False}
    replace(str(folder / "run.json"), {**words, **where})
    return folder


def mark_begun(folder: Path, uid: str) -> None:
    """`uid` of its captain's Job: another may have its name one day."""
    replace(str(folder / "run.json"), {**runs.info(folder), "uid": uid})


def mark_submitted(folder: Path) -> None:
    replace(str(folder / "run.json"), {**runs.info(folder), "submitted": True})


def adopt(cluster: Cluster, wanted: str) -> Path:
    """A folder for a run that somebody else, or another machine, has submitted."""
    folder = runs.runs_folder() / wanted
    if folder.is_dir():
        info = runs.info(folder)
        if (info.get("context"), info.get("namespace")) != (cluster.context, cluster.namespace):
            where = f"in {info['namespace']} of {info['context']}" if info.get("context") else "on this machine"
            raise runs.NoRun(f"{wanted} is a run {where} here: another of that name cannot be looked at beside it")
        if any(_replaced(folder, job) for job in _jobs(cluster, wanted)):
            raise runs.NoRun(
                f"{wanted} is an earlier run here, and another on the cluster: `paceline delete {wanted}` forgets the "
                "earlier one, and leaves that on the cluster alone"
            )
        return folder
    try:
        job = cluster.ask(f"read the Job {wanted}", partial(cluster.client.get, Job, wanted))
        found = cluster.ask(f"read the plan of {wanted}", partial(cluster.client.get, ConfigMap, f"{wanted}-plan"))
    except Refused as refused:
        if refused.reason == "NotFound":
            raise runs.NoRun(
                f"no run {wanted!r} in {cluster.namespace} of {cluster.context}; `paceline ls --on kubernetes` lists "
                f"those there are, and what is left of one that has no plan yet goes by: kubectl delete job {wanted}"
            ) from None
        raise
    text = (found.data or {}).get("plan.json")
    if text is None:
        text = gzip.decompress(base64.b64decode((found.binaryData or {})["plan.json.gz"])).decode()
    folder = make_folder(plans.from_data(json.loads(text)), "", cluster, wanted)
    mark_begun(folder, str(job.metadata.uid if job.metadata else ""))
    if _released(job):
        mark_submitted(folder)
    return folder


def _jobs(cluster: Cluster, run: str) -> list[Any]:
    """The captain's Job, if it is there."""
    fields: dict[str, Any] = {"metadata.name": run}
    return cluster.ask("list Jobs", lambda: list(cluster.client.list(Job, fields=fields)))


def goes_on(cluster: Cluster, folder: Path) -> bool:
    """Whether the cluster still has the captain's Job, and it has not finished."""
    jobs = [job for job in _jobs(cluster, folder.name) if not _replaced(folder, job)]
    return any(not finished(job) and not job.metadata.deletionTimestamp for job in jobs)


def _released(job: Any) -> bool:
    return not (job.spec and job.spec.suspend)


def _replaced(folder: Path, job: Any) -> bool:
    """Whether this is the Job of a later run with the same id."""
    uid = str(job.metadata.uid)
    return str(runs.info(folder).get("uid") or uid) != uid


def reopen(folder: Path, cluster: Cluster | None = None) -> Running:
    info = runs.info(folder)
    cluster = cluster or connect(info["context"], info["namespace"])
    plan = plans.from_data(json.loads((folder / "plan.json").read_text()))
    return Running(cluster, folder.name, folder, Mirror(cluster, folder.name, folder, plan))


def refresh(folder: Path, hosts: set[str] | None = None) -> None:
    """Fetch what the cluster knows by now, once: events, and the output of these hosts; and what is at the bucket of
    the run, once that is over, or where the cluster is away."""
    with held(folder) as ours:
        if not ours or (folder / WHOLE).exists():
            return  # another process does it all the time, or there is nothing more to have
        try:
            _refresh(folder, hosts or set())
        except Unreachable:
            with suppress(StoreError, Damaged, Newer):
                _bring_kept(folder, hosts or set())
            if not runs.outcome_known(folder):
                raise


def _refresh(folder: Path, hosts: set[str]) -> None:
    running = reopen(folder)
    cluster, run, mirror = running.cluster, folder.name, running.mirror
    labels: dict[str, Any] = {names.RUN_LABEL: run}
    jobs: list[Any] = cluster.ask("list Jobs", lambda: list(cluster.client.list(Job, labels=labels)))
    named = next((each for each in jobs if each.metadata.name == run), None)
    job = None if named is None or _replaced(folder, named) else named
    if job is not None and not runs.info(folder).get("uid"):
        mark_begun(folder, job.metadata.uid)
    if not runs.info(folder).get("submitted"):
        if job is None or not _released(job):
            return
        mark_submitted(folder)
    mirror.gone = job is None
    if mirror.gone and named is not None:
        if not (folder / "report.json").exists():
            running.keep_outcome()
        (folder / WHOLE).touch()
        return
    for each in jobs:
        mirror.see_job("ADDED", each)
    mirror.see(cluster.ask("list pods", lambda: list(cluster.client.list(Pod, labels=labels))))
    fetched = mirror.fetch({CAPTAIN, *hosts})
    with suppress(Refused):  # a right that a person may lack
        mirror.hear_events(cluster.ask("list events", lambda: list(cluster.client.list(Event))))
    mirror.keep()
    over = job is None or finished(job)
    told = state.read(runs.Run(run, folder)).state.ended is not None  # its Job may be a moment behind
    if job is not None and (over or told) and not runs.outcome_known(folder):
        running.keep_outcome()
    try:
        if over:
            _bring_kept(folder, hosts)
    finally:
        if job is None and not runs.outcome_known(folder):
            (folder / "report.json").unlink(missing_ok=True)
            running.keep_outcome()
    complete = over and fetched and len(hosts) == len(mirror.hosts)
    if complete or (job is None and not _in_bucket(folder)):
        (folder / WHOLE).touch()


def _bring_kept(folder: Path, hosts: set[str]) -> None:
    """What the run has kept at its bucket, also of pods that are gone."""
    if _in_bucket(folder):
        source = places.of_run(runs.Run(folder.name, folder))
        kept.bring(source.kept, folder, [CAPTAIN, *sorted(hosts)])


def _in_bucket(folder: Path) -> bool:
    return places.is_bucket(places.place_of(runs.Run(folder.name, folder)))


@contextmanager
def followed(folder: Path) -> Iterator[Running | None]:
    """The run, with its folder brought up to date all the time; None where another process does that already."""
    with held(folder) as ours:
        running = reopen(folder) if ours else None
        if running:
            running.mirror.unheard = True  # what was there before
            running.mirror.start()
        yield running


def delete(folder: Path) -> None:
    """Everything of the run on the cluster; its folder here is left to the caller."""
    running = reopen(folder)
    cluster, run = running.cluster, folder.name
    if any(_replaced(folder, job) for job in _jobs(cluster, run)):
        return  # that run is gone, and this one is somebody else's
    withdraw(cluster, run)
    running.kill_pods()
