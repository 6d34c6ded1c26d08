"""TensorBoard of a run on a cluster: its pod, and why it is not there."""

from __future__ import annotations

from functools import partial
from typing import Any

import httpx2
from lightkube import ApiError
from lightkube.resources.apps_v1 import Deployment
from lightkube.resources.core_v1 import Pod, Service

from paceline.agent.options import PAGE_PORT
from paceline.agent.pod import CANNOT_WORDS
from paceline.backends.kubernetes import names, reasons
from paceline.backends.kubernetes.cluster import Cluster, Refused
from paceline.backends.kubernetes.submit import show
from paceline.plan import TENSORBOARD

LINES = 20


class NoBoard(Exception):
    """There is none, and waiting does not help; the text says why."""


def wake(cluster: Cluster, run: str) -> None:
    """A submission that was cut short may have left it asleep."""
    name = names.board(run)
    found = cluster.find(Deployment, name)
    if found is None:
        raise NoBoard(
            f"there is no TensorBoard of {run} in {cluster.namespace}: it goes with the run, when that is deleted or "
            "limits.keep_finished has passed"
        )
    if found.spec and found.spec.replicas == 0:
        show(cluster, name)


def pod(cluster: Cluster, run: str) -> str:
    """The name of the one that runs; NoBoard is not raised here: it may be on its way."""
    for each in _pods(cluster, run):
        if each.status and each.status.phase == "Running" and not each.metadata.deletionTimestamp:
            return str(each.metadata.name)
    raise Refused(f"no pod of {names.board(run)} runs", "NotFound")


def published(cluster: Cluster, run: str, asked: Any) -> str:
    """Where people find it, as far as the cluster says; empty: it is not published. `asked`: as the plan has it."""
    if not isinstance(asked, dict) or not (asked.get("service") or asked.get("ingress")):
        return ""
    if ingress := asked.get("ingress"):
        return f"TensorBoard is at {'https' if ingress.get('tls') else 'http'}://{ingress['host']}/"
    name = names.page(run)
    try:
        found = cluster.ask(f"read the Service {name}", partial(cluster.client.get, Service, name))
    except Refused:
        return f"TensorBoard is published by the Service {name}"
    port = (found.spec.ports or [None])[0] if found.spec else None
    if asked["service"] == "NodePort" and port is not None and port.nodePort:
        return f"TensorBoard is at port {port.nodePort} of every node: http://NODE:{port.nodePort}/"
    balancer = found.status.loadBalancer if found.status else None
    for each in (balancer.ingress or []) if balancer else []:
        if each.ip or each.hostname:
            return f"TensorBoard is at http://{each.hostname or each.ip}:{PAGE_PORT}/"
    if asked["service"] == "LoadBalancer":
        return f"TensorBoard is at the address that the Service {name} is given; the cluster has given none yet"
    return f"TensorBoard is at http://{name}.{cluster.namespace}:{PAGE_PORT}/ within the cluster"


def why(cluster: Cluster, run: str) -> str:
    """Why it does not answer, as far as the cluster and its own words tell. NoBoard: it never will."""
    wake(cluster, run)
    for each in _pods(cluster, run):
        reason = reasons.of_pod(each.to_dict(), TENSORBOARD)
        if reason is not None and reason.final:
            raise NoBoard(str(reason))
        if reason is not None:
            return str(reason)
        for line in reversed(_lines(cluster, each)):
            if line.startswith(CANNOT_WORDS):
                said = line.removeprefix(CANNOT_WORDS)
                if "has no tensorboard" in said:
                    raise NoBoard(said)
                return said
        return f"{TENSORBOARD}: {each.status.phase if each.status else 'Pending'}"
    return "its pod is not there yet"


def _pods(cluster: Cluster, run: str) -> list[Any]:
    labels: dict[str, Any] = {names.RUN_LABEL: run, names.ROLE_LABEL: TENSORBOARD}
    found = cluster.ask("list pods", lambda: list(cluster.client.list(Pod, labels=labels)))
    return sorted(found, key=lambda each: str(each.metadata.creationTimestamp if each.metadata else ""), reverse=True)


def _lines(cluster: Cluster, pod: Any) -> list[str]:
    try:
        return list(cluster.client.log(pod.metadata.name, container=TENSORBOARD, tail_lines=LINES, newlines=False))
    except (ApiError, httpx2.HTTPError):
        return []
