"""Explains why pods that serve a model are not ready, and reads their last output."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import httpx2
from lightkube import ApiError
from lightkube.resources.core_v1 import Event, Pod

from paceline.agent.pod import CANNOT, CANNOT_WORDS
from paceline.backends.kubernetes.api import owners, pending_reasons, pod_output
from paceline.backends.kubernetes.api.cluster import Cluster, Refused
from paceline.backends.kubernetes.api.pending_reasons import Advice, Reason
from paceline.backends.kubernetes.objects.serving_objects import EXPORT, SERVER

Object = dict[str, Any]

LINES = 20
OUTPUT_S = 5.0  # seconds in which a container that was just restarted may have no output yet
TRIES = 3  # restarts of a crashing container after which waiting does not help
_NOT_STARTED = ("StartError", "ContainerCannotRun")
_FOR_EXPORT = Advice(
    resources="`serve.cpu`, `serve.memory`, `serve.gpus`",
    more_memory="raise `serve.memory`",
    set_limits="set `serve.cpu` and `serve.memory`",
    replacement="another pod is created",
    image="kubernetes.image",
)
_FOR_SERVER = replace(_FOR_EXPORT, image="serve.image")


def why(cluster: Cluster, pods: list[Object], deployment: Object) -> tuple[Reason | None, Object | None]:
    """The most serious reason, and the pod that it concerns."""
    status = deployment.get("status") or {}
    is_observed = (status.get("observedGeneration") or 0) >= deployment["metadata"]["generation"]
    for each in (status.get("conditions") or []) if is_observed else []:
        if each.get("type") == "ReplicaFailure" and each.get("status") == "True":
            event = {"reason": "FailedCreate", "message": each.get("message")}
            return pending_reasons.of_job(event, deployment["metadata"]["name"], _FOR_EXPORT), None
    reasons = [(reason, pod) for pod in pods if (reason := of_pod(pod)) is not None]
    if not reasons and pods:
        return _of_events(cluster, pods[0]), pods[0]
    return min(reasons, key=lambda each: not each[0].final, default=(None, None))


def unready_pods(cluster: Cluster, deployment: Any, labels: dict[str, Any]) -> list[Object]:
    """Pods of the Deployment that are not ready and not being deleted. Others may create pods with the same labels."""
    listed = cluster.request("list pods", lambda: list(cluster.client.list(Pod, labels=labels)))
    pods = [pod.to_dict() for pod in owners.pods_of_deployment(cluster, deployment, listed)]
    return [pod for pod in pods if not _is_ready(pod) and not pod["metadata"].get("deletionTimestamp")]


def of_pod(pod: Object) -> Reason | None:
    """From the status of the pod and its containers."""
    what, status = str(pod["metadata"]["name"]), pod.get("status") or {}
    containers = [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]
    reason = next(filter(None, (_of_end(each, what) for each in containers)), None)
    if reason is not None:
        return reason
    waiting = [each["name"] for each in containers if (each.get("state") or {}).get("waiting")]
    advice = _FOR_SERVER if waiting == [SERVER] else _FOR_EXPORT
    return pending_reasons.of_pod({**pod, "status": {**status, "containerStatuses": containers}}, what, advice)


def _of_end(container: Object, what: str) -> Reason | None:
    """None: it has not failed, or `pending_reasons.of_pod` explains it."""
    name, states = container["name"], (container.get("state") or {}, container.get("lastState") or {})
    ended = states[0].get("terminated") or states[1].get("terminated") or {}
    code, message = ended.get("exitCode"), str(ended.get("message") or "")
    is_final = container.get("restartCount", 0) >= TRIES
    if not code or ended.get("reason") in _NOT_STARTED or "exec format error" in message:
        return None
    if ended.get("reason") == "OOMKilled":
        text = f"the {name} was killed: out of memory; raise serve.memory"
        return Reason(what, "out-of-memory", text, final=is_final)
    if name == EXPORT and message.startswith(CANNOT_WORDS):
        if code == CANNOT:
            return None
        return Reason(what, "export", message.removeprefix(CANNOT_WORDS).strip())  # the container is restarted
    last_line = next(filter(None, reversed([line.strip() for line in message.splitlines()])), "")
    text = f"the {name} ended with exit code {code}" + (f": {last_line}" if last_line else "")
    return Reason(what, name, text, final=is_final)


def _of_events(cluster: Cluster, pod: Object) -> Reason | None:
    """A volume that cannot be mounted is reported only in an event."""
    fields: dict[str, Any] = {"involvedObject.uid": pod["metadata"]["uid"]}
    try:
        events = cluster.request("list events", lambda: list(cluster.client.list(Event, fields=fields)))
    except Refused:  # the user may lack this permission
        return None
    reasons = [pending_reasons.of_mount(each.to_dict(), str(pod["metadata"]["name"])) for each in events]
    return next(filter(None, reasons), None)


def _is_ready(pod: Object) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or []
    return any(each.get("type") == "Ready" and each.get("status") == "True" for each in conditions)


def lines(cluster: Cluster, pod: Object | None) -> list[str]:
    """The last output of the container that keeps this pod from being ready."""
    if pod is None:
        return []
    status = pod.get("status") or {}
    exported = all(
        ((each.get("state") or {}).get("terminated") or {}).get("exitCode") == 0
        for each in status.get("initContainerStatuses") or []
    )
    container = SERVER if exported else EXPORT
    containers = [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]
    was_restarted = any(each["name"] == container and _runs_again(each) for each in containers)
    until = time.monotonic() + (OUTPUT_S if was_restarted else 0.0)
    while True:
        output = _log(cluster, pod, container, previous=True) if was_restarted else []
        output = output or _log(cluster, pod, container)
        if output or time.monotonic() >= until:
            return [f"{container}: {line}" for line in output]
        time.sleep(0.5)


def _runs_again(container: Object) -> bool:
    """Whether the output that explains why it ended is that of the container before."""
    return "terminated" in (container.get("lastState") or {}) and "terminated" not in (container.get("state") or {})


def _log(cluster: Cluster, pod: Object, container: str, previous: bool = False) -> list[str]:
    try:
        return pod_output.last_lines(cluster, pod["metadata"]["name"], container, LINES, previous)
    except (ApiError, httpx2.HTTPError):
        return []
