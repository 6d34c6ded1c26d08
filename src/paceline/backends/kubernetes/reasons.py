"""Why a pod does not run, in words: what the cluster says of pods and Jobs in, one line with the remedy out."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from paceline.agent.pod import CANNOT, CANNOT_WORDS

Object = dict[str, Any]

LONGEST = 500  # characters of what the cluster says
_PULLING = ("ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName", "RegistryUnavailable")
_KINDS = {"secret": "Secret", "configmap": "ConfigMap", "persistentvolumeclaim": "PersistentVolumeClaim"}
_ASK = "ask whoever runs the cluster"


@dataclass(frozen=True)
class Reason:
    """Why something of a run does not come or has gone."""

    what: str  # worker-host-3, or a Job
    cause: str  # a word for each kind, stable: no-node, image, ...
    text: str
    final: bool = False  # waiting will not help

    def __str__(self) -> str:
        return f"{self.what}: {self.text}"


# ---- pods


def of_pod(pod: Object, what: str) -> Reason | None:
    """None where the pod runs, or nothing is known yet."""
    status = pod.get("status") or {}
    message = _sentence(status.get("message"))
    if status.get("reason") == "Evicted":
        return Reason(what, "evicted", f"evicted: {message}; {_for_evicted(message)}")
    if status.get("reason") in ("NodeLost", "Terminated", "NodeShutdown"):
        return Reason(what, "host-lost", f"its node is gone: {message}; its Job makes another pod")
    for condition in status.get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("reason") == "Unschedulable":
            return _unschedulable(condition.get("message") or "", what)
        if condition.get("type") == "PodScheduled" and condition.get("reason") == "SchedulingGated":
            return Reason(what, "gated", "held by a scheduling gate: it waits for its turn in a queue of the cluster")
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
            return Reason(what, "preempted", f"has to go: {_sentence(condition.get('message'))}")
    for container in status.get("containerStatuses") or []:
        found = _of_container(container, what)
        if found is not None:
            return found
    if status.get("phase") == "Failed" and status.get("reason"):
        return Reason(what, "refused", f"its node did not take it ({status['reason']}): {message}")
    return None


def _of_container(container: Object, what: str) -> Reason | None:
    state = container.get("state") or {}
    waiting = state.get("waiting")
    ended = state.get("terminated") or ((container.get("lastState") or {}).get("terminated") if waiting else None)
    image = container.get("image", "")
    found = _of_end(ended, what, image) if ended else None
    return found or (_of_waiting(waiting, what, image) if waiting else None)


def _of_end(ended: Object, what: str, image: str) -> Reason | None:
    message, code = ended.get("message") or "", ended.get("exitCode")
    if ended.get("reason") == "OOMKilled":
        return Reason(what, "out-of-memory", "killed for want of memory: raise `memory` of its role")
    if code in (0, CANNOT) and message.startswith(CANNOT_WORDS):
        told = _sentence(message.removeprefix(CANNOT_WORDS))
        return Reason(what, "image", f"{told} (image {image})", final=True)
    if code == 0:
        return _of_last_words(message, what)
    if ended.get("reason") in ("StartError", "ContainerCannotRun") or "exec format error" in message:
        return _cannot_start(message, what, image)
    return None


def _of_last_words(message: str, what: str) -> Reason | None:
    """A member that has given up says why; it does not come back."""
    try:
        words = json.loads(message)
    except ValueError:
        return None
    if isinstance(words, dict) and words.get("status") == "left":
        return Reason(what, "no-captain", _sentence(str(words.get("reason"))), final=True)
    return None


def of_line(line: str, what: str) -> Reason | None:
    """What an agent that is not in touch with its captain writes to its output."""
    if line.startswith(CANNOT_WORDS) and "captain" in line:
        return Reason(what, "no-captain", _sentence(line.removeprefix(CANNOT_WORDS)))
    return None


def _of_waiting(waiting: Object, what: str, image: str) -> Reason | None:
    why, message = waiting.get("reason") or "", waiting.get("message") or ""
    if why in _PULLING:
        told = _sentence(re.sub(r"^(Back-off pulling.*?: )?(ErrImagePull: )?|\b[\w.:\[\]]+->", "", message)) or why
        found = re.search(r"(failed to resolve (?:image|reference[^:]*)|failed to do request): (?P<rest>.*)", told)
        told = found["rest"] if found else told
        text = f"the image {image} cannot be had: {told}; is kubernetes.image right, or image_pull_secrets missing?"
        absent = bool(re.search(r"\S: not found$|manifest unknown|name unknown", told))
        return Reason(what, "image", text, final=absent or why == "InvalidImageName")
    if why == "CreateContainerConfigError":
        if "runAsNonRoot" in message or "non-root" in message:
            told = f"the image {image} would run as root: set kubernetes.user to a number"
            return Reason(what, "image", told, final=True)
        return _missing(message, what) or Reason(what, "missing", f"{_sentence(message)}: correct the job file")
    if why in ("RunContainerError", "CreateContainerError"):
        return _cannot_start(message, what, image)
    return None


def _cannot_start(message: str, what: str, image: str) -> Reason:
    if "exec format error" in message:
        text = f"the image {image} is for another kind of processor (exec format error): name one for these nodes"
        return Reason(what, "image", text, final=True)
    if '"/bin/sh"' in message:
        text = f"the image {image} has no /bin/sh, with which Paceline starts its agent: name one that has"
        return Reason(what, "image", text, final=True)
    return Reason(what, "refused", f"the container cannot be started: {_sentence(message)}")


def of_mount(event: Object, what: str) -> Reason | None:
    """A pod that waits for a volume says so in an event."""
    if event.get("reason") not in ("FailedMount", "FailedAttachVolume"):
        return None
    message = event.get("message") or ""
    if "failed to sync" in message:
        return None  # its node has not heard of the object yet, and asks again
    return _missing(message, what) or Reason(
        what, "volume", f"a volume cannot be mounted: {_sentence(message)}; look at the volumes of the job file"
    )


def _missing(message: str, what: str) -> Reason | None:
    found = re.search(r'\b(secret|configmap|persistentvolumeclaim) "([^"]+)" not found', message, re.IGNORECASE)
    if found:
        kind = _KINDS[found[1].lower()]
        text = f"there is no {kind} {found[2]} in this namespace: create it, or correct the job file"
        return Reason(what, "missing", text)
    found = re.search(r"find key (\S+) in (Secret|ConfigMap) [^/]+/(\S+)", message)
    if found:
        text = f"the {found[2]} {found[3]} has no key {found[1]}: add it, or correct the job file"
        return Reason(what, "missing", text)
    found = re.search(r'volume "([^"]+)".*references non-existent (?:secret|config) key: (\S+)', message)
    if found:
        source = "the Secret of `credentials`" if found[1] == "paceline-credentials" else f"what {found[1]} mounts"
        return Reason(what, "missing", f"{source} has no key {found[2]}: add it, or correct the job file")
    return None


# ---- nodes


def _unschedulable(message: str, what: str) -> Reason:
    """0/3 nodes are available: 1 Insufficient cpu, 2 node(s) had untolerated taint(s). preemption: ..."""
    missing = _missing(message, what)
    if missing:
        return missing
    if "unbound immediate PersistentVolumeClaims" in message:
        text = "a PersistentVolumeClaim that it mounts has no volume yet: does its storage class make them?"
        return Reason(what, "volume", text)
    found = re.match(r"0/(\d+) nodes are available: (.*?)\.(?: |$)", message)
    if not found:
        return Reason(what, "no-node", f"no node takes it: {_sentence(message)}")
    parts = found[2].split(", ")
    said = ", ".join(map(_part, parts))
    remedies = "; ".join(dict.fromkeys(filter(None, map(_for_part, parts)))) or "it waits for a node"
    return Reason(what, "no-node", f"no node takes it (0 of {found[1]}): {said}; {remedies}")


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


def _for_part(text: str) -> str:
    if "Insufficient" in text or "Too many pods" in text:
        return "it waits for room, or ask for less (`cpu`, `memory`, `gpus` of its role)"
    if "taint" in text:
        return "kubernetes.tolerations can allow tainted nodes"
    if "affinity/selector" in text:
        return "kubernetes.node_selector and affinity have to fit a node"
    if "volume node affinity" in text:
        return "its volume is tied to another node"
    return ""


def _for_evicted(message: str) -> str:
    if "EmptyDir" in message or "local storage usage" in message:
        return "write less there, or allow more"
    if "memory" in message:
        return "give its role the `memory` that it uses"
    return "write less to /tmp and the work folder, or mount a volume for it"


# ---- Jobs


def of_job(event: Object, what: str) -> Reason | None:
    """A Job that cannot make its pods says so in an event."""
    if event.get("reason") != "FailedCreate":
        return None
    message = re.sub(r'^Error creating: (pods "[^"]+" is forbidden: )?', "", event.get("message") or "")
    told = _sentence(message)
    if "exceeded quota" in message:
        return Reason(what, "quota", f"{told}; it waits until the quota has room, or ask for less")
    if "failed quota" in message:
        return Reason(what, "quota", f"{told}; give its role `cpu` and `memory`, or {_ASK}", final=True)
    if refused(message):
        return Reason(what, "admission", f"refused: {told}; change the job file to what it allows", final=True)
    if "failed calling webhook" in message:
        return Reason(what, "admission", f"{told}; it waits until that webhook answers, or {_ASK}")
    found = re.search(r'serviceaccount "([^"]+)" not found', message)
    if found:
        text = f"there is no ServiceAccount {found[1]}: create it, or correct kubernetes.service_account"
        return Reason(what, "missing", text)
    found = re.search(r"no PriorityClass with name (\S+) was found", message)
    if found:
        text = f"there is no PriorityClass {found[1]}: correct kubernetes.priority_class, or {_ASK}"
        return Reason(what, "missing", text)
    return Reason(what, "refused", f"the cluster does not make its pod: {told}")


def refused(message: str) -> bool:
    """By a rule of the cluster, not for want of rights."""
    rules = ("violates PodSecurity", "admission webhook", "ValidatingAdmissionPolicy")
    return any(rule in message for rule in rules) and "failed calling webhook" not in message


def remedy(reason: str, message: str, namespace: str) -> str:
    """What to do about a request that the cluster has refused, to follow its message; `reason`: the API's word."""
    if "exceeded quota" in message:
        return f"; `kubectl describe quota -n {namespace}` shows what is in use"
    if "failed calling webhook" in message:
        return f"; that webhook has to answer first: {_ASK}"
    if refused(message):
        return "; change the job file to what it allows"
    if reason == "Forbidden":
        return f"; `paceline doctor --on kubernetes` shows which rights are missing in {namespace}"
    if reason == "NotFound" and f'namespaces "{namespace}" not found' in message:
        return "; create it, or name another with -n"
    if reason == "Unauthorized":
        return "; the kubeconfig has no valid credentials: log in to the cluster again"
    return ""


# ---- together


def worst(reasons: Iterable[Reason]) -> list[Reason]:
    """Those that will not pass by themselves first, and each text once."""
    seen: dict[tuple[str, str], Reason] = {}
    for reason in sorted(reasons, key=lambda each: not each.final):
        seen.setdefault((reason.cause, reason.text), reason)
    return list(seen.values())


def _sentence(text: str | None) -> str:
    """One line, without a full stop."""
    return " ".join((text or "").split()).rstrip(".")[:LONGEST]
