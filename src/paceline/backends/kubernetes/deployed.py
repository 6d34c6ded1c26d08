"""A run's model on a cluster: its objects applied, its pods waited for, and all of it taken away again."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightkube import ApiError, codecs
from lightkube.resources.apps_v1 import Deployment
from lightkube.resources.core_v1 import ConfigMap, Pod, Service

from paceline.backends.kubernetes import names, raw, unready
from paceline.backends.kubernetes.cluster import Cluster, Unreachable
from paceline.backends.kubernetes.serving import TERMINATION_S

Object = dict[str, Any]

POLL_S = 1.0
ANSWER_S = 30.0
GONE_S = TERMINATION_S + 60.0  # for pods to end, and for the cluster to notice what nobody owns any more
# Names and owners alone: what they hold is megabytes.
_METADATA = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"


class NotServed(Exception):
    """The model is not served as it was asked for; the text says why."""

    def __init__(self, text: str, lines: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.lines = lines  # what the program in question has written last


@dataclass(frozen=True)
class Before:
    """What was there."""

    served: bool  # pods that answered
    maps: frozenset[str]  # ConfigMaps, also those of an attempt that was cut short


# ---- there


def apply(cluster: Cluster, run: str, objects: Sequence[Object]) -> Before:
    """As rendered: the Deployment first, which owns the others."""
    deployment, others = objects[0], objects[1:]
    _check_name(cluster, run)
    before = owner = _found(cluster, run)
    if owner is None:  # without pods, until what they need is there
        owner = _apply(cluster, {**deployment, "spec": {**deployment["spec"], "replicas": 0}})
    elif owner.metadata.deletionTimestamp:
        raise NotServed(f"{names.server(run)} is being taken away: try again in a minute")
    uid = str(owner.metadata.uid)
    maps = _config_maps(cluster, run)
    there = {name for name, owners in maps.items() if uid in owners}
    for each in others:
        if each["kind"] != "ConfigMap" or each["metadata"]["name"] not in there:
            _apply(cluster, {**each, "metadata": {**each["metadata"], "ownerReferences": [_owner(run, uid)]}})
    _apply(cluster, deployment)
    if before is not None and _template(before.to_dict()) == _template(deployment):
        _try_again(cluster, _its_pods(run, deployment))
    return Before(bool(before and before.status and before.status.availableReplicas), frozenset(maps))


def prune(cluster: Cluster, run: str, maps: Collection[str]) -> None:
    """Of these, what only pods of an earlier snapshot needed. Those that came since are perhaps somebody else's, whose
    Deployment is about to follow."""
    found = _found(cluster, run)
    if found is not None:
        for name in _config_maps(cluster, run).keys() & set(maps) - _mounted(found.to_dict()):
            cluster.delete(ConfigMap, name)


def _mounted(deployment: Object) -> set[str]:
    """The ConfigMaps that its pods need."""
    volumes = deployment["spec"]["template"]["spec"].get("volumes") or []
    sources = [source for each in volumes for source in (each.get("projected") or {}).get("sources") or []]
    return {source["configMap"]["name"] for source in sources if source.get("configMap")}


def _try_again(cluster: Cluster, labels: dict[str, Any]) -> None:
    """Other pods for those that failed when the same was asked for before: what ailed them may be over, and they would
    wait long until they try again. Those without a node keep their place in the queue."""
    for pod in unready.listed(cluster, labels):
        if unready.of_pod(pod) is not None and pod["spec"].get("nodeName"):
            cluster.delete(Pod, pod["metadata"]["name"])


def _its_pods(run: str, deployment: Object) -> dict[str, Any]:
    """Labels: of those of this template alone, as what ails others is over."""
    return {names.SERVES_LABEL: run, names.TEMPLATE_LABEL: _template(deployment)}


def _template(deployment: Object) -> str:
    labels = deployment["spec"]["template"]["metadata"].get("labels") or {}
    return str(labels.get(names.TEMPLATE_LABEL, ""))


def _check_name(cluster: Cluster, run: str) -> None:
    """A run may be called as this Deployment is, and has a Service of its name."""
    found = cluster.find(Service, names.server(run))
    if found is not None:
        _check_owned(cluster, run, found, "Service")


def _apply(cluster: Cluster, each: Object) -> Any:
    what = f"apply the {each['kind']} {each['metadata']['name']}"
    return cluster.ask(what, lambda: cluster.client.apply(codecs.from_dict(each), force=True))


def _owner(run: str, uid: str) -> Object:
    return {"apiVersion": "apps/v1", "kind": "Deployment", "name": names.server(run), "uid": uid, "controller": False}


def _found(cluster: Cluster, run: str) -> Any:
    """None: nothing serves it."""
    found = cluster.find(Deployment, names.server(run))
    if found is not None:
        _check_owned(cluster, run, found, "Deployment")
    return found


def _check_owned(cluster: Cluster, run: str, found: Any, kind: str) -> None:
    labels = (found.metadata.labels if found.metadata else None) or {}
    if labels.get(names.SERVES_LABEL) != run:
        where = f"{cluster.namespace} of {cluster.context}"
        raise NotServed(f"there is a {kind} {names.server(run)} in {where} that is not for {run}: it is left alone")


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
    """Until all pods are as it says, and ready; `limit`: for each of them. `said`: told what it waits for."""
    until, last, standings = time.monotonic() + limit, "", set()
    while True:
        away = ""
        try:
            found = _found(cluster, run)
            if found is None:
                raise NotServed(f"{names.server(run)} was deleted meanwhile")
            now = found.to_dict()
            if _template(now) != _template(deployment):
                raise NotServed("somebody has it serve something else meanwhile")
            if rolled_out(now):
                return
            standing = _counts(now)
            if standing not in standings:
                standings.add(standing)
                until = time.monotonic() + limit
            reason, pod = unready.why(cluster, unready.listed(cluster, _its_pods(run, deployment)), now)
        except Unreachable as error:
            reason, pod, away = None, None, str(error)
        why = away or str(reason or "")
        late = time.monotonic() > until
        if late or (reason is not None and reason.final):
            why = f"no progress within {limit:g} s: {why or 'its pods are not ready'}" if late else why
            raise NotServed(why, unready.lines(cluster, pod))
        if why and why != last:
            last = why
            said(last)
        time.sleep(POLL_S)


def rolled_out(deployment: Object) -> bool:
    wanted, status = deployment["spec"].get("replicas", 1), deployment.get("status") or {}
    seen = (status.get("observedGeneration") or 0) >= deployment["metadata"]["generation"]
    return bool(seen and _counts(deployment) == (wanted,) * 3)


def _counts(deployment: Object) -> tuple[int, ...]:
    status = deployment.get("status") or {}
    return tuple(status.get(name) or 0 for name in ("replicas", "updatedReplicas", "availableReplicas"))


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
    if _found(cluster, run) is None or not cluster.delete(Deployment, names.server(run)):
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
