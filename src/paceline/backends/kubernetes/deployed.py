"""A run's model on a cluster: its objects applied, its pods waited for, and all of it taken away again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import httpx2
from lightkube import ApiError, codecs
from lightkube.resources.apps_v1 import Deployment
from lightkube.resources.core_v1 import ConfigMap, Event, Pod, Service
from lightkube.types import CascadeType

from paceline.agent.pod import CANNOT_WORDS
from paceline.backends.kubernetes import names, raw, reasons
from paceline.backends.kubernetes.cluster import Cluster, Refused
from paceline.backends.kubernetes.reasons import Reason
from paceline.backends.kubernetes.serving import EXPORT, SERVER, TERMINATION_S

Object = dict[str, Any]

POLL_S = 1.0
ANSWER_S = 30.0
GONE_S = TERMINATION_S + 60.0  # for pods to end, and for the cluster to notice what nobody owns any more
LINES = 20
TRIES = 3  # of a server that ends by itself
# Names and owners alone: what they hold is megabytes.
_METADATA = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"


class NotServed(Exception):
    """The model is not served as it was asked for; the text says why."""

    def __init__(self, text: str, lines: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.lines = lines  # what the program in question has written last


# ---- there


def apply(cluster: Cluster, run: str, objects: Sequence[Object]) -> bool:
    """As rendered: the Deployment first, which owns the others. Whether something was there before."""
    deployment, others = objects[0], objects[1:]
    _check_name(cluster, run)
    before = owner = _found(cluster, run)
    if owner is None:  # without pods, until what they need is there
        owner = _apply(cluster, {**deployment, "spec": {**deployment["spec"], "replicas": 0}})
    elif owner.metadata.deletionTimestamp:
        raise NotServed(f"{names.server(run)} is being taken away: try again in a minute")
    uid = str(owner.metadata.uid)
    there = {name for name, owners in _config_maps(cluster, run).items() if uid in owners}
    for each in others:
        if each["kind"] != "ConfigMap" or each["metadata"]["name"] not in there:
            _apply(cluster, {**each, "metadata": {**each["metadata"], "ownerReferences": [_owner(run, uid)]}})
    _apply(cluster, deployment)
    return before is not None


def prune(cluster: Cluster, run: str, objects: Sequence[Object]) -> None:
    """What only pods of an earlier snapshot needed."""
    needed = {each["metadata"]["name"] for each in objects if each["kind"] == "ConfigMap"}
    for name in _config_maps(cluster, run).keys() - needed:
        _delete(cluster, ConfigMap, name)


def _check_name(cluster: Cluster, run: str) -> None:
    """A run may be called as this Deployment is, and has a Service of its name."""
    name = names.server(run)
    try:
        found = cluster.ask(f"read the Service {name}", partial(cluster.client.get, Service, name))
    except Refused as error:
        if error.reason == "NotFound":
            return
        raise
    labels = (found.metadata.labels if found.metadata else None) or {}
    if labels.get(names.SERVES_LABEL) != run:
        raise NotServed(f"there is a Service {name} in {cluster.namespace} that is not for {run}: what would serve it")


def _apply(cluster: Cluster, each: Object) -> Any:
    what = f"apply the {each['kind']} {each['metadata']['name']}"
    return cluster.ask(what, lambda: cluster.client.apply(codecs.from_dict(each), force=True))


def _owner(run: str, uid: str) -> Object:
    return {"apiVersion": "apps/v1", "kind": "Deployment", "name": names.server(run), "uid": uid, "controller": False}


def _found(cluster: Cluster, run: str) -> Any:
    name = names.server(run)
    try:
        return cluster.ask(f"read the Deployment {name}", partial(cluster.client.get, Deployment, name))
    except Refused as error:
        if error.reason == "NotFound":
            return None
        raise


def _config_maps(cluster: Cluster, run: str) -> dict[str, list[str]]:
    """Each with the uids of its owners."""
    path, selected = f"/api/v1/namespaces/{cluster.namespace}/configmaps", f"{names.SERVES_LABEL}={run}"

    def ask() -> Any:
        with raw.client(cluster, ANSWER_S) as client:
            answer = client.get(path, params={"labelSelector": selected}, headers={"Accept": _METADATA})
        if answer.status_code >= 400:
            raise ApiError(response=answer)
        return answer.json()

    found = [each["metadata"] for each in cluster.ask("list configmaps", ask).get("items") or []]
    return {each["name"]: [owner["uid"] for owner in each.get("ownerReferences") or []] for each in found}


# ---- until it serves


def wait(cluster: Cluster, run: str, deployment: Object, limit: float, said: Callable[[str], None]) -> None:
    """Until all pods are as it says, and ready. `said`: told what it waits for."""
    template = deployment["spec"]["template"]["metadata"]["labels"][names.TEMPLATE_LABEL]
    labels = {names.SERVES_LABEL: run, names.TEMPLATE_LABEL: template}  # what ails others is over
    until, last = time.monotonic() + limit, ""
    while True:
        found = _found(cluster, run)
        if found is None:
            raise NotServed(f"{names.server(run)} was deleted meanwhile")
        if rolled_out(found.to_dict()):
            return
        reason, pod = _why(cluster, labels, found.to_dict())
        late = time.monotonic() > until or _given_up(found.to_dict())
        if late or (reason is not None and reason.final):
            why = str(reason) if reason is not None else "its pods are not ready"
            raise NotServed(f"not within {limit:g} s: {why}" if late else why, _lines(cluster, pod))
        if reason is not None and str(reason) != last:
            last = str(reason)
            said(last)
        time.sleep(POLL_S)


def rolled_out(deployment: Object) -> bool:
    wanted, status = deployment["spec"].get("replicas", 1), deployment.get("status") or {}
    seen = (status.get("observedGeneration") or 0) >= deployment["metadata"]["generation"]
    counts = [status.get(name) or 0 for name in ("replicas", "updatedReplicas", "availableReplicas")]
    return bool(seen and counts == [wanted] * 3)


def _conditions(deployment: Object) -> list[Object]:
    """Of this generation."""
    status = deployment.get("status") or {}
    seen = (status.get("observedGeneration") or 0) >= deployment["metadata"]["generation"]
    return (status.get("conditions") or []) if seen else []


def _given_up(deployment: Object) -> bool:
    return any(each.get("reason") == "ProgressDeadlineExceeded" for each in _conditions(deployment))


def _why(cluster: Cluster, labels: dict[str, Any], deployment: Object) -> tuple[Reason | None, Object | None]:
    """The worst that is known of pods that are not ready, and the pod in question."""
    for each in _conditions(deployment):
        if each.get("type") == "ReplicaFailure" and each.get("status") == "True":
            event = {"reason": "FailedCreate", "message": each.get("message")}
            return reasons.of_job(event, deployment["metadata"]["name"]), None
    pods = [pod.to_dict() for pod in cluster.ask("list pods", lambda: list(cluster.client.list(Pod, labels=labels)))]
    waiting = [pod for pod in pods if not _ready(pod) and not pod["metadata"].get("deletionTimestamp")]
    found = [(reason, pod) for pod in waiting if (reason := of_pod(pod)) is not None]
    if not found and waiting:
        return _of_events(cluster, waiting[0]), waiting[0]
    return min(found, key=lambda each: not each[0].final, default=(None, None))


def of_pod(pod: Object) -> Reason | None:
    """Why it is not ready, as far as its containers tell."""
    what, status = str(pod["metadata"]["name"]), pod.get("status") or {}
    containers = [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]
    for each in containers:
        ended = (each.get("state") or {}).get("terminated") or (each.get("lastState") or {}).get("terminated")
        code = (ended or {}).get("exitCode")
        if ended is None or code == 0:
            continue
        if ended.get("reason") == "OOMKilled":
            return Reason(what, "out-of-memory", f"{each['name']} was killed for want of memory: raise serve.memory")
        message = str(ended.get("message") or "")
        if each["name"] == EXPORT and code == 1 and message.startswith(CANNOT_WORDS):
            return Reason(what, "export", message.removeprefix(CANNOT_WORDS).strip())  # it is tried again
        if each["name"] == SERVER and not (ended.get("reason") or "").startswith(("StartError", "ContainerCannotRun")):
            said = next(filter(None, reversed([line.strip() for line in message.splitlines()])), "")
            text = f"the server ended with exit code {code}{': ' if said else ''}{said}"
            return Reason(what, "server", text, final=each.get("restartCount", 0) >= TRIES)
    found = reasons.of_pod({**pod, "status": {**status, "containerStatuses": containers}}, what)
    waits = [each["name"] for each in containers if (each.get("state") or {}).get("waiting")]
    if found is None or waits != [SERVER]:
        return found
    return replace(found, text=found.text.replace("kubernetes.image ", "serve.image "))


def _of_events(cluster: Cluster, pod: Object) -> Reason | None:
    """A volume that cannot be mounted is said in an event alone."""
    fields: dict[str, Any] = {"involvedObject.uid": pod["metadata"]["uid"]}
    try:
        events = cluster.ask("list events", lambda: list(cluster.client.list(Event, fields=fields)))
    except Refused:  # a right that a person may lack
        return None
    found = [reasons.of_mount(each.to_dict(), str(pod["metadata"]["name"])) for each in events]
    return next(filter(None, found), None)


def _ready(pod: Object) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or []
    return any(each.get("type") == "Ready" and each.get("status") == "True" for each in conditions)


def _lines(cluster: Cluster, pod: Object | None) -> list[str]:
    """The last that the container has written that keeps this pod from being ready."""
    if pod is None:
        return []
    exported = all(
        ((each.get("state") or {}).get("terminated") or {}).get("exitCode") == 0
        for each in (pod.get("status") or {}).get("initContainerStatuses") or []
    )
    container = SERVER if exported else EXPORT
    try:
        lines = cluster.client.log(pod["metadata"]["name"], container=container, tail_lines=LINES, newlines=False)
        return [f"{container}: {line}" for line in lines]
    except (ApiError, httpx2.HTTPError):
        return []


# ---- where it is, and its end


def address(cluster: Cluster, run: str, path: str) -> str:
    """Where people find it from outside, as far as the cluster says; empty: within the cluster alone."""
    name = names.server(run)
    found = cluster.ask(f"read the Service {name}", partial(cluster.client.get, Service, name))
    kind = found.spec.type if found.spec else ""
    ports = (found.spec.ports or []) if found.spec else []
    if kind == "NodePort":
        port = next((each.nodePort for each in ports if each.name == "rest"), None)
        return f"at port {port} of every node: http://NODE:{port}{path}"
    balancer = found.status.loadBalancer if found.status else None
    for each in (balancer.ingress or []) if balancer else []:
        if each.ip or each.hostname:
            return f"at http://{each.hostname or each.ip}:{names.REST_PORT}{path}"
    if kind == "LoadBalancer":
        return f"at the address that the Service {name} is given; the cluster has given none yet"
    return ""


def stop(cluster: Cluster, run: str) -> None:
    """What the Deployment owns goes with it."""
    if not _delete(cluster, Deployment, names.server(run)):
        raise NotServed(f"nothing serves {run} in {cluster.namespace} of {cluster.context}")
    labels: dict[str, Any] = {names.SERVES_LABEL: run}
    until = time.monotonic() + GONE_S
    while True:
        pods = cluster.ask("list pods", lambda: list(cluster.client.list(Pod, labels=labels)))
        if not pods and not _config_maps(cluster, run):
            return
        if time.monotonic() > until:
            raise NotServed(f"something of {names.server(run)} is still there; the cluster goes on deleting it")
        time.sleep(POLL_S)


def _delete(cluster: Cluster, kind: Any, name: str) -> bool:
    """False: it is not there."""
    what = f"delete the {kind.__name__} {name}"
    try:
        cluster.ask(what, lambda: cluster.client.delete(kind, name, cascade=CascadeType.BACKGROUND))
    except Refused as error:
        if error.reason == "NotFound":
            return False
        raise
    return True
