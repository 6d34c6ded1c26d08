"""`paceline serve --on kubernetes`: a run's model in pods of a cluster, until it is told to stop."""

from __future__ import annotations

import re
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.chosen import refresh
from paceline.cli.reading import meant
from paceline.cli.say import fail, note, tell
from paceline.plan import CLAIM, CODE_IN_IMAGE

if TYPE_CHECKING:
    from paceline.backends.kubernetes.cluster import Cluster
    from paceline.plan import Plan
    from paceline.view.places import Source
    from paceline.view.runs import Run


def serve_on_kubernetes(
    run: str | None, snapshot: str | None, name: str, job: str, code: str, context: str | None, namespace: str | None
) -> int:
    from paceline.backends.kubernetes import claims, deployed, serving
    from paceline.backends.kubernetes.archive import agent_archive
    from paceline.backends.kubernetes.prepare import library_parts
    from paceline.view import places

    with closing(_source(run, context, namespace)) as source:
        _check_place(source)
        plan = _planned(source, job)
        cluster = _cluster(source, plan, context, namespace)
        id = meant(source, source.reader.known(), snapshot)
        run, place = source.run, source.place
        pinned = snapshot not in (None, "newest")
        if pinned and (source.alive or source.doubt()):
            note(f"pods that come later need {id}, too, and `snapshots.keep` of the run may have it deleted by then")
        stop = _stop_command(source, cluster)
    tied = claims.tied(cluster, serving.claims_of(plan, place))
    model = serving.Model(_name(name or plan.name), str(id), place, pinned, tied)
    plan = replace(plan, kubernetes={**plan.kubernetes, "namespace": cluster.namespace})
    plan, parts = _code(plan, code)
    books = library_parts() if places.is_bucket(place) or plan.needs_bucket else ()
    objects = serving.render(plan, run, model, agent_archive(), parts, books)
    before = deployed.apply(cluster, run, objects)
    tell(f"{id} of {run} is to be served by {plan.serve['replicas']} of {plan.serve['image']}; waiting for its pods")
    try:
        deployed.wait(cluster, run, objects[0], plan.limits.start, lambda why: tell(f"waiting: {why}"))
    except deployed.NotServed as error:
        for line in error.lines:
            tell(line)
        stays = "what was served before goes on; " if before.served else ""
        fail(f"{id} is not served: {error}; {stays}`{stop}` takes it away", 1)
    except KeyboardInterrupt:
        tell(f"the cluster goes on with it; `{stop}` takes it away")
        raise
    deployed.prune(cluster, run, before.maps)
    inside = serving.url(plan, run, model, cluster.namespace)
    print(inside, flush=True)
    outside = deployed.address(cluster, run, inside[inside.index("/v1/") :])
    tell(f"{id} is served within the cluster" + (f", and {outside}" if outside else ""))
    if outside:
        tell("note: whoever reaches it there is asked nothing")
    return 0


def stop_on_kubernetes(run: str | None, context: str | None, namespace: str | None) -> int:
    from paceline.backends.kubernetes import deployed
    from paceline.backends.kubernetes.cluster import connect
    from paceline.view import places

    if run is not None and places.is_place(run):
        run = run.rstrip("/").rpartition("/")[2]
    found = _known(run)  # it may have been forgotten here: what serves its model goes on
    there = _where(None if found is None else found.folder)
    called = run or "" if found is None else found.name
    cluster = connect(context or there[0], namespace or there[1])
    deployed.stop(cluster, called)
    tell(f"{called} is served no more in {cluster.namespace}")
    return 0


def _stop_command(source: Source, cluster: Cluster) -> str:
    there = _where(source.folder)
    context = "" if cluster.context == there[0] else f" --context {cluster.context}"
    namespace = "" if cluster.namespace == there[1] else f" -n {cluster.namespace}"
    return f"paceline serve {source.run} --on kubernetes{context}{namespace} --stop"


def _where(folder: Path | None) -> tuple[str | None, str | None]:
    """Context and namespace, as far as this machine knows them from the run: where it was, else where its job says."""
    from paceline.view import runs

    if folder is None:
        return None, None
    info, plan = runs.info(folder), (runs.read_object(folder / "plan.json") or {}).get("kubernetes") or {}
    return info.get("context") or plan.get("context"), info.get("namespace") or plan.get("namespace")


def _known(run: str | None) -> Run | None:
    """None: this machine does not know it."""
    from paceline.view import runs

    try:
        return runs.find(run, True)
    except runs.NoRun:
        if run is None or any(each.name.startswith(run) for each in (*runs.every(), *runs.remains())):
            raise  # there is none at all, or there are several that it could be
        return None


def _source(run: str | None, context: str | None, namespace: str | None) -> Source:
    from paceline.view import places, runs

    if run is not None and places.is_place(run):
        return places.at_place(run, note)
    found = _known(run)
    if found is None:
        from paceline.backends.kubernetes.cluster import connect
        from paceline.backends.kubernetes.known import adopt

        found = runs.Run(str(run), adopt(connect(context, namespace), str(run)))
    refresh(found.folder)
    return places.of_run(found, note)


def _planned(source: Source, job: str) -> Plan:
    from paceline.view import programs

    plan = programs.planned(source, "export", job)
    where = job or f"the job of {source.run}"
    if not plan.serve:
        raise programs.NoProgram(
            f"{where} says nothing of `serve`: write `serve: {{replicas: 2}}` into the job file"
            + ("" if job else ", and give that with --job FILE")
        )
    if not plan.kubernetes.get("image"):
        fail(f"kubernetes.image of {where} is not set: it is the image that export.command runs in")
    return plan


def _cluster(source: Source, plan: Plan, context: str | None, namespace: str | None) -> Cluster:
    """That of the run, where it was on one."""
    from paceline.backends.kubernetes.cluster import connect
    from paceline.view import runs

    info = {} if source.folder is None else runs.info(source.folder)
    there = info.get("context"), info.get("namespace")
    cluster = connect(
        context or there[0] or plan.kubernetes["context"], namespace or there[1] or plan.kubernetes["namespace"]
    )
    if source.place.startswith(CLAIM) and there != (cluster.context, cluster.namespace):
        fail(f"{source.place} is a claim in namespace {there[1]} of {there[0]}: it can be served there alone")
    return cluster


def _check_place(source: Source) -> None:
    from paceline.view import places

    if not places.is_bucket(source.place) and not source.place.startswith(CLAIM):
        where = "on this machine" if source.place.startswith("/") else "in its captain's pod"
        fail(
            f"the snapshots of {source.run} are {where}, where pods that serve it cannot read them: a run with "
            "`snapshots: {to: s3://bucket/path}` (or gs://, az://, claim://name/path) in its job file can be served"
        )


def _name(written: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][-A-Za-z0-9_.]*", written):
        fail(f"--name {written!r}: a model is called by letters, digits, -, _ and .")
    return written


def _code(plan: Plan, code: str) -> tuple[Plan, tuple[bytes, ...]]:
    """What is sent, and the plan that says so."""
    from paceline.backends.kubernetes.code import collect
    from paceline.backends.kubernetes.config_maps import CHUNK
    from paceline.view import programs

    if plan.code == CODE_IN_IMAGE and not code:
        return plan, ()
    folder: Path = programs.folder_of(plan, code)
    sent = collect(folder)
    for each in (*sent.notes, f"sending {folder}: {sent.describe()}"):
        note(each)
    return replace(plan, code=str(folder)), tuple(sent.chunks(CHUNK))
