"""Why pods that are to serve a model are not ready, in words, and what they have written last."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx2
from lightkube import ApiError
from lightkube.resources.core_v1 import Event, Pod

from paceline.agent.pod import CANNOT, CANNOT_WORDS
from paceline.backends.kubernetes import reasons
from paceline.backends.kubernetes.cluster import Cluster, Refused
from paceline.backends.kubernetes.reasons import Reason
from paceline.backends.kubernetes.serving import EXPORT, SERVER

Object = dict[str, Any]

LINES = 20
TRIES = 3  # of a container that ends by itself
_NOT_STARTED = ("StartError", "ContainerCannotRun")
# What is said of the hosts of a run, and how it is said of these pods.
_WORDS = (
    ("`cpu`, `memory`, `gpus` of its role", "`serve.cpu`, `serve.memory`, `serve.gpus`"),
    ("give its role the `memory` that it uses", "raise `serve.memory`"),
    ("give its role `cpu` and `memory`", "set `serve.cpu` and `serve.memory`"),
    ("; its Job makes another pod", "; another pod comes"),
)


def why(cluster: Cluster, pods: list[Object], deployment: Object) -> tuple[Reason | None, Object | None]:
    """The worst that is known of these pods, and the pod in question."""
    status = deployment.get("status") or {}
    seen = (status.get("observedGeneration") or 0) >= deployment["metadata"]["generation"]
    for each in (status.get("conditions") or []) if seen else []:
        if each.get("type") == "ReplicaFailure" and each.get("status") == "True":
            event = {"reason": "FailedCreate", "message": each.get("message")}
            return _in_our_words(reasons.of_job(event, deployment["metadata"]["name"])), None
    found = [(reason, pod) for pod in pods if (reason := of_pod(pod)) is not None]
    if not found and pods:
        return _of_events(cluster, pods[0]), pods[0]
    return min(found, key=lambda each: not each[0].final, default=(None, None))


def listed(cluster: Cluster, labels: dict[str, Any]) -> list[Object]:
    """Those that are not ready, and are to be."""
    pods = [pod.to_dict() for pod in cluster.ask("list pods", lambda: list(cluster.client.list(Pod, labels=labels)))]
    return [pod for pod in pods if not _ready(pod) and not pod["metadata"].get("deletionTimestamp")]


def of_pod(pod: Object) -> Reason | None:
    """As far as its containers tell."""
    what, status = str(pod["metadata"]["name"]), pod.get("status") or {}
    containers = [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]
    found = next(filter(None, (_of_end(each, what) for each in containers)), None)
    if found is not None:
        return found
    found = _in_our_words(reasons.of_pod({**pod, "status": {**status, "containerStatuses": containers}}, what))
    waits = [each["name"] for each in containers if (each.get("state") or {}).get("waiting")]
    if found is None or waits != [SERVER]:
        return found
    return replace(found, text=found.text.replace("kubernetes.image ", "serve.image "))


def _of_end(container: Object, what: str) -> Reason | None:
    """None also where the words for it are those for any pod."""
    name, states = container["name"], (container.get("state") or {}, container.get("lastState") or {})
    ended = states[0].get("terminated") or states[1].get("terminated") or {}
    code, message = ended.get("exitCode"), str(ended.get("message") or "")
    often = container.get("restartCount", 0) >= TRIES
    if not code or ended.get("reason") in _NOT_STARTED or "exec format error" in message:
        return None
    if ended.get("reason") == "OOMKilled":
        text = f"{name} was killed for want of memory: raise serve.memory"
        return Reason(what, "out-of-memory", text, final=often)
    if name == EXPORT and message.startswith(CANNOT_WORDS):
        if code == CANNOT:
            return None
        return Reason(what, "export", message.removeprefix(CANNOT_WORDS).strip())  # it is tried again
    said = next(filter(None, reversed([line.strip() for line in message.splitlines()])), "")
    return Reason(what, name, f"the {name} ended with exit code {code}{': ' if said else ''}{said}", final=often)


def _of_events(cluster: Cluster, pod: Object) -> Reason | None:
    """A volume that cannot be mounted is said in an event alone."""
    fields: dict[str, Any] = {"involvedObject.uid": pod["metadata"]["uid"]}
    try:
        events = cluster.ask("list events", lambda: list(cluster.client.list(Event, fields=fields)))
    except Refused:  # a right that a person may lack
        return None
    found = [reasons.of_mount(each.to_dict(), str(pod["metadata"]["name"])) for each in events]
    return next(filter(None, found), None)


def _in_our_words(reason: Reason | None) -> Reason | None:
    if reason is None:
        return None
    text = reason.text
    for theirs, ours in _WORDS:
        text = text.replace(theirs, ours)
    return replace(reason, text=text)


def _ready(pod: Object) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or []
    return any(each.get("type") == "Ready" and each.get("status") == "True" for each in conditions)


def lines(cluster: Cluster, pod: Object | None) -> list[str]:
    """The last that the container has written that keeps this pod from being ready."""
    if pod is None:
        return []
    exported = all(
        ((each.get("state") or {}).get("terminated") or {}).get("exitCode") == 0
        for each in (pod.get("status") or {}).get("initContainerStatuses") or []
    )
    container = SERVER if exported else EXPORT
    try:
        written = cluster.client.log(pod["metadata"]["name"], container=container, tail_lines=LINES, newlines=False)
        return [f"{container}: {line}" for line in written]
    except (ApiError, httpx2.HTTPError):
        return []
