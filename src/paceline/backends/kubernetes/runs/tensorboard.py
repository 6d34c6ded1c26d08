"""TensorBoard of a run on a cluster: its pod, its address, and why it does not respond."""

from __future__ import annotations

from functools import partial
from typing import Any

import httpx2
from lightkube import ApiError
from lightkube.resources.apps_v1 import Deployment
from lightkube.resources.core_v1 import Pod, Service

from paceline.agent.options import PAGE_PORT
from paceline.agent.pod import CANNOT_WORDS
from paceline.agent.tensorboard.server import NOT_INSTALLED
from paceline.backends.kubernetes.api import owners, pending_reasons, pod_output
from paceline.backends.kubernetes.api.cluster import Cluster, Refused
from paceline.backends.kubernetes.objects import names
from paceline.backends.kubernetes.runs.submit import start_tensorboard
from paceline.plan import TENSORBOARD

LINES = 20


class NoTensorBoard(Exception):
    """There is no TensorBoard, and waiting does not help."""


def ensure_started(cluster: Cluster, run: str) -> None:
    """Start its pod, if an interrupted submission has not."""
    name = names.board(run)
    deployment = cluster.find(Deployment, name)
    if deployment is None:
        raise NoTensorBoard(
            f"no TensorBoard for {run} in {cluster.namespace}: TensorBoard is removed when the run is deleted or "
            "limits.keep_finished has passed"
        )
    if deployment.spec and deployment.spec.replicas == 0:
        start_tensorboard(cluster, name)


def pod(cluster: Cluster, run: str) -> str:
    """The name of the running pod. Refused: none runs, but it may be starting."""
    for each in _pods(cluster, run):
        if each.status and each.status.phase == "Running" and not each.metadata.deletionTimestamp:
            return str(each.metadata.name)
    raise Refused(f"no pod of {names.board(run)} is running", "NotFound")


def published(cluster: Cluster, run: str, section: Any) -> str:
    """Its published address, if known; empty: it is not published. `section`: `tensorboard` of the plan."""
    if not isinstance(section, dict) or not (section.get("service") or section.get("ingress")):
        return ""
    if ingress := section.get("ingress"):
        return f"TensorBoard is at {'https' if ingress.get('tls') else 'http'}://{ingress['host']}/"
    name = names.page(run)
    try:
        service = cluster.request(f"read the Service {name}", partial(cluster.client.get, Service, name))
    except Refused:
        return f"TensorBoard is published by the Service {name}"
    port = (service.spec.ports or [None])[0] if service.spec else None
    if section["service"] == "NodePort" and port is not None and port.nodePort:
        return f"TensorBoard is at port {port.nodePort} of every node: http://NODE:{port.nodePort}/"
    balancer = service.status.loadBalancer if service.status else None
    for each in (balancer.ingress or []) if balancer else []:
        if each.ip or each.hostname:
            return f"TensorBoard is at http://{each.hostname or each.ip}:{PAGE_PORT}/"
    if section["service"] == "LoadBalancer":
        return f"TensorBoard is at the address of the Service {name}, which the cluster has not assigned yet"
    return f"TensorBoard is at http://{name}.{cluster.namespace}:{PAGE_PORT}/ within the cluster"


def why(cluster: Cluster, run: str) -> str:
    """Why it does not respond, from the cluster and its own log. NoTensorBoard: it never will."""
    ensure_started(cluster, run)
    for each in _pods(cluster, run):
        reason = pending_reasons.of_pod(each.to_dict(), TENSORBOARD)
        if reason is not None and reason.final:
            raise NoTensorBoard(str(reason))
        if reason is not None:
            return str(reason)
        for line in reversed(_lines(cluster, each)):
            if line.startswith(CANNOT_WORDS):
                problem = line.removeprefix(CANNOT_WORDS)
                if problem.startswith(NOT_INSTALLED):
                    raise NoTensorBoard(problem)
                return problem
        return f"{TENSORBOARD}: {each.status.phase if each.status else 'Pending'}"
    return "its pod does not exist yet"


def _pods(cluster: Cluster, run: str) -> list[Any]:
    """Newest first. Others may create pods with the same labels: their page must not be shown in its place."""
    labels: dict[str, Any] = {names.RUN_LABEL: run, names.ROLE_LABEL: TENSORBOARD}
    pods = cluster.request("list pods", lambda: list(cluster.client.list(Pod, labels=labels)))
    deployment = cluster.find(Deployment, names.board(run)) if pods else None
    own = owners.pods_of_deployment(cluster, deployment, pods) if deployment else []
    return sorted(own, key=lambda each: str(each.metadata.creationTimestamp if each.metadata else ""), reverse=True)


def _lines(cluster: Cluster, pod: Any) -> list[str]:
    try:
        return pod_output.last_lines(cluster, str(pod.metadata.name), TENSORBOARD, LINES)
    except (ApiError, httpx2.HTTPError):
        return []
