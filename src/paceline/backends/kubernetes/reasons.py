"""Why a pod does not run, in words: what the cluster says of pods and Jobs in, one line with the remedy out."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from paceline.agent.pod import CANNOT_WORDS

Object = dict[str, Any]


@dataclass(frozen=True)
class Reason:
    """Why something of a run does not come or has gone."""

    what: str  # worker-3, or a Job
    cause: str  # a word for each kind, stable: no-node, image, ...
    text: str
    final: bool = False  # waiting will not help

    def __str__(self) -> str:
        return f"{self.what}: {self.text}"


def of_pod(pod: Object, what: str) -> Reason | None:
    """None where the pod runs, or nothing is known yet."""
    status = pod.get("status") or {}
    if status.get("reason") == "Evicted":
        return Reason(what, "evicted", f"evicted: {_sentence(status.get('message'))}")
    if status.get("reason") in ("NodeLost", "Terminated", "NodeShutdown"):
        return Reason(what, "host-lost", f"its node is gone: {_sentence(status.get('message'))}")
    for condition in status.get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("reason") == "Unschedulable":
            return Reason(what, "no-node", _unschedulable(condition.get("message") or ""))
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
            return Reason(what, "preempted", f"has to go: {_sentence(condition.get('message'))}")
    for container in status.get("containerStatuses") or []:
        found = _of_container(container, what)
        if found is not None:
            return found
    return None


def _of_container(container: Object, what: str) -> Reason | None:
    state = container.get("state") or {}
    waiting = state.get("waiting")
    ended = state.get("terminated") or ((container.get("lastState") or {}).get("terminated") if waiting else None)
    image = container.get("image", "")
    if ended and ended.get("reason") == "OOMKilled":
        return Reason(what, "out-of-memory", "killed for want of memory: raise `memory` of its role")
    if ended and (ended.get("message") or "").startswith(CANNOT_WORDS):
        told = _sentence(ended["message"].removeprefix(CANNOT_WORDS))
        return Reason(what, "image", f"{told} (image {image})", final=True)
    if ended and ended.get("reason") in ("StartError", "ContainerCannotRun"):
        return Reason(what, "image", _cannot_start(ended.get("message") or "", image), final=True)
    if not waiting:
        return None
    why, message = waiting.get("reason") or "", waiting.get("message") or ""
    if why in ("ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName", "RegistryUnavailable"):
        told = _sentence(message) or why
        text = f"the image {image} cannot be had: {told}; is kubernetes.image right, or image_pull_secrets missing?"
        return Reason(what, "image", text, final=why == "InvalidImageName")
    if why == "CreateContainerConfigError":
        return Reason(what, "missing", f"{_sentence(message)}: create it in this namespace, or correct the job file")
    if why in ("RunContainerError", "CreateContainerError"):
        return Reason(what, "image", _cannot_start(message, image), final=True)
    return None


def of_job(event: Object, what: str) -> Reason | None:
    """A Job that cannot make its pods says so in an event."""
    if event.get("reason") != "FailedCreate":
        return None
    message = event.get("message") or ""
    if "exceeded quota" in message:
        return Reason(what, "quota", f"{_after(message, 'exceeded quota')}; it waits until the quota has room")
    if "violates PodSecurity" in message:
        return Reason(what, "admission", f"refused: {_after(message, 'violates PodSecurity')}", final=True)
    if "admission webhook" in message:
        return Reason(what, "admission", f"refused: {_after(message, 'admission webhook')}", final=True)
    if "serviceaccount" in message and "not found" in message:
        return Reason(what, "missing", f"{_sentence(message)}: create it, or correct kubernetes.service_account")
    return Reason(what, "refused", f"the cluster does not make its pod: {_sentence(message)}")


def of_mount(event: Object, what: str) -> Reason | None:
    """A pod that waits for a volume says so in an event, too."""
    if event.get("reason") not in ("FailedMount", "FailedAttachVolume"):
        return None
    message = event.get("message") or ""
    found = re.search(r'(secret|configmap|persistentvolumeclaim) "([^"]+)" not found', message, re.IGNORECASE)
    if found:
        kind = {"secret": "Secret", "configmap": "ConfigMap"}.get(found[1].lower(), "PersistentVolumeClaim")
        return Reason(what, "missing", f"there is no {kind} {found[2]} in this namespace: create it")
    return Reason(what, "volume", f"a volume cannot be mounted: {_sentence(message)}")


def _unschedulable(message: str) -> str:
    """0/3 nodes are available: 1 Insufficient cpu, 2 node(s) had untolerated taint(s). preemption: ..."""
    missing = re.search(r'persistentvolumeclaim "([^"]+)" not found', message)
    if missing:
        return f"there is no PersistentVolumeClaim {missing[1]} in this namespace: create it"
    found = re.match(r"0/(\d+) nodes are available: (.*?)\.(?: |$)", message)
    if not found:
        return f"no node takes it: {_sentence(message)}"
    nodes = int(found[1])
    parts = [_part(part) for part in found[2].split(", ")]
    return f"no node takes it (0 of {nodes}): {', '.join(parts)}"


def _part(text: str) -> str:
    """
    >>> _part("2 Insufficient nvidia.com/gpu")
    '2 without enough nvidia.com/gpu free'
    """
    found = re.fullmatch(r"(\d+) Insufficient (\S+)", text)
    if found:
        return f"{found[1]} without enough {found[2]} free"
    found = re.fullmatch(r"(\d+) node\(s\) (.*)", text)
    return f"{found[1]} {found[2]}" if found else text


def _cannot_start(message: str, image: str) -> str:
    if "exec format error" in message:
        return f"the image {image} is for another kind of processor (exec format error)"
    if "no such file" in message or "not found" in message:
        return f"the image {image} has no /bin/sh, with which Paceline starts its agent"
    return f"the container cannot be started: {_sentence(message)}"


def _after(message: str, word: str) -> str:
    return _sentence(message[message.index(word) :])


def _sentence(text: str | None) -> str:
    """One line, without a full stop."""
    return " ".join((text or "").split()).rstrip(".")[:500]


def worst(reasons: Iterable[Reason]) -> list[Reason]:
    """Those that will not pass by themselves first, and each text once."""
    seen: dict[tuple[str, str], Reason] = {}
    for reason in sorted(reasons, key=lambda each: not each.final):
        seen.setdefault((reason.cause, reason.text), reason)
    return list(seen.values())
