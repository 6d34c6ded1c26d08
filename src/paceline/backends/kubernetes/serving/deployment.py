"""Serves a run's model on a cluster: applies its objects, waits for its pods, and deletes them again."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightkube import ApiError, codecs
from lightkube.resources.apps_v1 import Deployment
from lightkube.resources.core_v1 import ConfigMap, Pod, Service

from paceline.backends.kubernetes.api import owners, raw_requests
from paceline.backends.kubernetes.api.cluster import Cluster, Unreachable
from paceline.backends.kubernetes.objects import names
from paceline.backends.kubernetes.objects.serving_objects import TERMINATION_S
from paceline.backends.kubernetes.serving import unready_reasons
from paceline.errors import PacelineError

Object = dict[str, Any]

POLL_S = 1.0
RESPONSE_S = 30.0
DELETION_S = TERMINATION_S + 60.0  # seconds for pods to end, and for the cluster to delete objects without an owner
# Names and owners only: the content is megabytes.
_METADATA = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"


class NotServed(PacelineError):
    """The model is not served as requested."""

    def __init__(self, what: str, lines: Sequence[str] = (), *, remedy: str = "") -> None:
        super().__init__(what, remedy=remedy)
        self.lines = lines  # the last output of the container that failed


@dataclass(frozen=True)
class Before:
    """What existed before an update."""

    served: bool  # some pods were available
    maps: frozenset[str]  # ConfigMaps, including those of an interrupted update


# ---- apply


def apply(cluster: Cluster, run: str, objects: Sequence[Object]) -> Before:
    """`objects` as rendered: the Deployment first, which owns the others."""
    deployment, others = objects[0], objects[1:]
    _check_name(cluster, run)
    before = owner = _find_deployment(cluster, run)
    if owner is None:  # without pods, until the objects that they need exist
        owner = _apply(cluster, {**deployment, "spec": {**deployment["spec"], "replicas": 0}})
    elif owner.metadata.deletionTimestamp:
        raise NotServed(f"{names.server(run)} is being deleted", remedy="try again in a minute")
    uid = str(owner.metadata.uid)
    maps = _config_maps(cluster, run)
    existing = {name for name, owners_of in maps.items() if uid in owners_of}
    for each in others:
        if each["kind"] != "ConfigMap" or each["metadata"]["name"] not in existing:
            _apply(cluster, {**each, "metadata": {**each["metadata"], "ownerReferences": [_owner(run, uid)]}})
    _apply(cluster, deployment)
    if before is not None and _template(before.to_dict()) == _template(deployment):
        _replace_failed_pods(cluster, before, _pod_labels(run, deployment))
    return Before(bool(before and before.status and before.status.availableReplicas), frozenset(maps))


def prune(cluster: Cluster, run: str, maps: Collection[str]) -> None:
    """Delete those of `maps` that only pods of an earlier snapshot needed. Newer ones may belong to another user's
    update, which is about to apply its Deployment."""
    live = _find_deployment(cluster, run)
    if live is not None:
        for name in _own_maps(cluster, run, live) & set(maps) - _mounted(live.to_dict()):
            cluster.delete(ConfigMap, name)


def _mounted(deployment: Object) -> set[str]:
    """The ConfigMaps that its pods need."""
    volumes = deployment["spec"]["template"]["spec"].get("volumes") or []
    sources = [source for each in volumes for source in (each.get("projected") or {}).get("sources") or []]
    return {source["configMap"]["name"] for source in sources if source.get("configMap")}


def _replace_failed_pods(cluster: Cluster, live: Any, labels: dict[str, Any]) -> None:
    """Replace the failed pods of the same update: their problem may be solved, and their back-off would be long. Pods
    without a node keep their position in the queue."""
    for pod in unready_reasons.unready_pods(cluster, live, labels):
        if unready_reasons.of_pod(pod) is not None and pod["spec"].get("nodeName"):
            cluster.delete(Pod, pod["metadata"]["name"])


def _pod_labels(run: str, deployment: Object) -> dict[str, Any]:
    """Select only the pods of this template: problems of earlier pods do not matter."""
    return {names.SERVES_LABEL: run, names.TEMPLATE_LABEL: _template(deployment)}


def _template(deployment: Object) -> str:
    labels = deployment["spec"]["template"]["metadata"].get("labels") or {}
    return str(labels.get(names.TEMPLATE_LABEL, ""))


def _check_name(cluster: Cluster, run: str) -> None:
    """Another run may have the name of this Deployment, and has a Service of that name."""
    service = cluster.find(Service, names.server(run))
    if service is not None:
        _check_owned(cluster, run, service, "Service")


def _apply(cluster: Cluster, each: Object) -> Any:
    action = f"apply the {each['kind']} {each['metadata']['name']}"
    return cluster.request(action, lambda: cluster.client.apply(codecs.from_dict(each), force=True))


def _owner(run: str, uid: str) -> Object:
    return {"apiVersion": "apps/v1", "kind": "Deployment", "name": names.server(run), "uid": uid, "controller": False}


def _find_deployment(cluster: Cluster, run: str) -> Any:
    """None: the run is not served."""
    live = cluster.find(Deployment, names.server(run))
    if live is not None:
        _check_owned(cluster, run, live, "Deployment")
    return live


def _check_owned(cluster: Cluster, run: str, existing: Any, kind: str) -> None:
    labels = (existing.metadata.labels if existing.metadata else None) or {}
    if labels.get(names.SERVES_LABEL) != run:
        namespace = f"namespace {cluster.namespace} (context {cluster.context})"
        raise NotServed(f"the {kind} {names.server(run)} in {namespace} does not belong to {run} and is not changed")


def _config_maps(cluster: Cluster, run: str) -> dict[str, list[str]]:
    """Name -> the uids of its owners."""
    path, selector = f"/api/v1/namespaces/{cluster.namespace}/configmaps", f"{names.SERVES_LABEL}={run}"

    def list_metadata() -> Any:
        with raw_requests.client(cluster, RESPONSE_S) as client:
            response = client.get(path, params={"labelSelector": selector}, headers={"Accept": _METADATA})
        if response.status_code >= 400:
            raise ApiError(response=response)
        return response.json()

    items = cluster.request("list configmaps", list_metadata).get("items") or []
    metadata = [each["metadata"] for each in items]
    return {each["name"]: [owner["uid"] for owner in each.get("ownerReferences") or []] for each in metadata}


def _own_maps(cluster: Cluster, run: str, deployment: Any) -> set[str]:
    """Without those that others have created with the same labels."""
    uid = str(deployment.metadata.uid)
    return {name for name, owners_of in _config_maps(cluster, run).items() if uid in owners_of}


# ---- wait


def wait(cluster: Cluster, run: str, deployment: Object, limit: float, notify: Callable[[str], None]) -> None:
    """Wait until all pods are updated and ready. `limit`: seconds without progress. `notify`: receives the reasons for
    waiting."""
    until, last, seen_counts = time.monotonic() + limit, "", set()
    while True:
        connection_error = ""
        try:
            current = _find_deployment(cluster, run)
            if current is None:
                raise NotServed(f"{names.server(run)} was deleted in the meantime")
            live = current.to_dict()
            if _template(live) != _template(deployment):
                raise NotServed("another update has replaced this one")
            if rolled_out(live):
                return
            counts = _counts(live)
            if counts not in seen_counts:
                seen_counts.add(counts)
                until = time.monotonic() + limit
            unready = unready_reasons.unready_pods(cluster, current, _pod_labels(run, deployment))
            reason, pod = unready_reasons.why(cluster, unready, live)
        except Unreachable as error:
            reason, pod, connection_error = None, None, str(error)
        why = connection_error or str(reason or "")
        is_late = time.monotonic() > until
        if is_late or (reason is not None and reason.final):
            why = f"no progress within {limit:g} s: {why or 'its pods are not ready'}" if is_late else why
            raise NotServed(why, unready_reasons.lines(cluster, pod))
        if why and why != last:
            last = why
            notify(last)
        time.sleep(POLL_S)


def rolled_out(deployment: Object) -> bool:
    replicas, status = deployment["spec"].get("replicas", 1), deployment.get("status") or {}
    is_observed = (status.get("observedGeneration") or 0) >= deployment["metadata"]["generation"]
    return bool(is_observed and _counts(deployment) == (replicas,) * 3)


def _counts(deployment: Object) -> tuple[int, ...]:
    status = deployment.get("status") or {}
    return tuple(status.get(name) or 0 for name in ("replicas", "updatedReplicas", "availableReplicas"))


# ---- address, and stop


def address(cluster: Cluster, run: str, path: str) -> str:
    """Its address from outside the cluster, if known; empty: it is reachable only within the cluster."""
    name = names.server(run)
    service = cluster.request(f"read the Service {name}", partial(cluster.client.get, Service, name))
    kind = service.spec.type if service.spec else ""
    ports = (service.spec.ports or []) if service.spec else []
    if kind == "NodePort":
        port = next((each.nodePort for each in ports if each.name == "rest"), None)
        return f"at port {port} of every node: http://NODE:{port}{path}"
    balancer = service.status.loadBalancer if service.status else None
    for each in (balancer.ingress or []) if balancer else []:
        if each.ip or each.hostname:
            return f"at http://{each.hostname or each.ip}:{names.REST_PORT}{path}"
    if kind == "LoadBalancer":
        return f"at the address of the Service {name}, which the cluster has not assigned yet"
    return ""


def stop(cluster: Cluster, run: str) -> None:
    """Delete the Deployment, and with it what it owns."""
    live = _find_deployment(cluster, run)
    # The ReplicaSets are deleted before their pods have ended.
    replica_sets = {owners.controller(pod) for pod in _own_pods(cluster, run, live)} if live is not None else set()
    if live is None or not cluster.delete(Deployment, names.server(run)):
        raise NotServed(f"{run} is not served in namespace {cluster.namespace} (context {cluster.context})")
    until = time.monotonic() + DELETION_S
    while True:
        has_pods = any(owners.controller(pod) in replica_sets for pod in _pods(cluster, run))
        if not has_pods and not _own_maps(cluster, run, live):
            return
        if time.monotonic() > until:
            raise NotServed(f"some objects of {names.server(run)} still exist; the cluster continues to delete them")
        time.sleep(POLL_S)


def _own_pods(cluster: Cluster, run: str, deployment: Any) -> list[Any]:
    return owners.pods_of_deployment(cluster, deployment, _pods(cluster, run))


def _pods(cluster: Cluster, run: str) -> list[Any]:
    """Of all that have the labels of its pods."""
    labels: dict[str, Any] = {names.SERVES_LABEL: run}
    return cluster.request("list pods", lambda: list(cluster.client.list(Pod, labels=labels)))
