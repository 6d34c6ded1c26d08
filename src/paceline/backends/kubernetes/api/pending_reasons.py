"""Explains why a pod does not run: from the cluster's data on pods and Jobs to one line with a remedy."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from paceline.agent.options import NO_CAPTAIN
from paceline.agent.pod import CANNOT, CANNOT_WORDS
from paceline.storage.json_values import parse_json

Object = dict[str, Any]

LONGEST = 500  # characters of a message from the cluster
_PULLING = ("ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName", "RegistryUnavailable")
_KINDS = {"secret": "Secret", "configmap": "ConfigMap", "persistentvolumeclaim": "PersistentVolumeClaim"}
_NOT_FOUND = re.compile(r'\b(secret|configmap|persistentvolumeclaim) "([^"]+)" not found', re.IGNORECASE)
_PART = re.compile(r"-plan|-(agent|code|library)-[0-9]+")  # how the names of a run's ConfigMaps end
_ASK = "ask an administrator of the cluster"


@dataclass(frozen=True)
class Reason:
    """Why a pod or Job of a run is missing or was lost."""

    what: str  # worker-host-3, or a Job
    cause: str  # a stable code: no-node, image, ...
    text: str
    final: bool = False  # whether waiting does not help

    def __str__(self) -> str:
        return f"{self.what}: {self.text}"


class MissingClaim(Reason):
    """A PersistentVolumeClaim does not exist."""


@dataclass(frozen=True)
class Advice:
    """The parts of remedies that depend on the purpose of the pod."""

    resources: str  # the fields of the job file that request resources
    more_memory: str
    set_limits: str
    replacement: str  # how a lost pod is replaced
    image: str  # the field of the job file that names the image


FOR_HOST = Advice(
    resources="`cpu`, `memory`, `gpus` of its role",
    more_memory="raise `memory` of its role",
    set_limits="set `cpu` and `memory` of its role",
    replacement="its Job creates another pod",
    image="kubernetes.image",
)


# ---- pods


def of_pod(pod: Object, what: str, advice: Advice = FOR_HOST) -> Reason | None:
    """None: the pod runs, or nothing is known yet."""
    status = pod.get("status") or {}
    message = _sentence(status.get("message"))
    if status.get("reason") == "Evicted":
        return Reason(what, "evicted", f"evicted: {message}; {_evicted_remedy(message, advice)}")
    if status.get("reason") in ("NodeLost", "Terminated", "NodeShutdown"):
        return Reason(what, "host-lost", f"its node was lost: {message}; {advice.replacement}")
    for condition in status.get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("reason") == "Unschedulable":
            return _unschedulable(condition.get("message") or "", what, advice)
        if condition.get("type") == "PodScheduled" and condition.get("reason") == "SchedulingGated":
            return Reason(what, "gated", "waiting in a queue of the cluster (scheduling gate)")
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
            return Reason(what, "preempted", f"being removed from its node: {_sentence(condition.get('message'))}")
    for container in status.get("containerStatuses") or []:
        reason = _of_container(container, what, advice)
        if reason is not None:
            return reason
    if status.get("phase") == "Failed" and status.get("reason"):
        return Reason(what, "refused", f"its node rejected it ({status['reason']}): {message}")
    return None


def _of_container(container: Object, what: str, advice: Advice) -> Reason | None:
    state = container.get("state") or {}
    waiting = state.get("waiting")
    ended = state.get("terminated") or ((container.get("lastState") or {}).get("terminated") if waiting else None)
    image = container.get("image", "")
    reason = _of_end(ended, what, image, advice) if ended else None
    return reason or (_of_waiting(waiting, what, image, advice) if waiting else None)


def _of_end(ended: Object, what: str, image: str, advice: Advice) -> Reason | None:
    message, code = ended.get("message") or "", ended.get("exitCode")
    if ended.get("reason") == "OOMKilled":
        return Reason(what, "out-of-memory", f"killed: out of memory; {advice.more_memory}")
    if code in (0, CANNOT) and message.startswith(CANNOT_WORDS):
        return Reason(what, "image", f"{_sentence(message.removeprefix(CANNOT_WORDS))} (image {image})", final=True)
    if code == 0:
        return _of_termination_message(message, what)
    if ended.get("reason") in ("StartError", "ContainerCannotRun") or "exec format error" in message:
        return _cannot_start(message, what, image)
    return None


def _of_termination_message(message: str, what: str) -> Reason | None:
    """The reason that a member gives when it exits and must not be replaced."""
    try:
        report = parse_json(message)
    except ValueError:
        return None
    if isinstance(report, dict) and report.get("status") == "left":
        return Reason(what, "no-captain", _sentence(str(report.get("reason"))), final=True)
    return None


def of_line(line: str, what: str) -> Reason | None:
    """The reason in a line of output of an agent that cannot find its captain."""
    if line.startswith(CANNOT_WORDS + NO_CAPTAIN):
        return Reason(what, "no-captain", _sentence(line.removeprefix(CANNOT_WORDS)))
    return None


def _of_waiting(waiting: Object, what: str, image: str, advice: Advice) -> Reason | None:
    state, message = waiting.get("reason") or "", waiting.get("message") or ""
    if state in _PULLING:
        detail = _sentence(re.sub(r"^(Back-off pulling.*?: )?(ErrImagePull: )?|\b[\w.:\[\]]+->", "", message)) or state
        match = re.search(r"(failed to resolve (?:image|reference[^:]*)|failed to do request): (?P<cause>.*)", detail)
        detail = match["cause"] if match else detail
        text = f"the image {image} cannot be pulled: {detail}; check {advice.image} and image_pull_secrets"
        is_absent = bool(re.search(r"\S: not found$|manifest unknown|name unknown", detail))
        return Reason(what, "image", text, final=is_absent or state == "InvalidImageName")
    if state == "CreateContainerConfigError":
        if "runAsNonRoot" in message or "non-root" in message:
            text = f"the image {image} would run as root: set kubernetes.user to a number"
            return Reason(what, "image", text, final=True)
        return _missing(message, what) or Reason(what, "missing", f"{_sentence(message)}: correct the job file")
    if state in ("RunContainerError", "CreateContainerError"):
        return _cannot_start(message, what, image)
    return None


def _cannot_start(message: str, what: str, image: str) -> Reason:
    if "exec format error" in message:
        text = f"the image {image} is for another kind of processor (exec format error): use an image for these nodes"
        return Reason(what, "image", text, final=True)
    if '"/bin/sh"' in message:
        text = f"the image {image} has no /bin/sh, which Paceline needs to start its agent: use an image that has it"
        return Reason(what, "image", text, final=True)
    return Reason(what, "refused", f"the container cannot be started: {_sentence(message)}")


def of_mount(event: Object, what: str, run: str = "") -> Reason | None:
    """From the event of a pod that waits for a volume. `run`: the run that the pod belongs to, if any."""
    if event.get("reason") not in ("FailedMount", "FailedAttachVolume"):
        return None
    message = event.get("message") or ""
    if "failed to sync" in message:
        return None  # its node does not have the object yet, and retries
    return (
        _deleted(message, what, run)
        or _missing(message, what)
        or Reason(
            what, "volume", f"a volume cannot be mounted: {_sentence(message)}; check the volumes in the job file"
        )
    )


def _deleted(message: str, what: str, run: str) -> Reason | None:
    """An object that the submission of the run created, before any pod: the user cannot create it again."""
    submit_again = f"stop the run with `paceline stop {run}`, and submit it again"
    if run and (match := re.search(r'volume "paceline-tls".*references non-existent secret key: (\S+)', message)):
        text = f"the run's Secret {run} has no key {match[1]}: it is not the one that was submitted; {submit_again}"
        return Reason(what, "missing", text)
    match = _NOT_FOUND.search(message) if run else None
    if match is None:
        return None
    kind, name = _KINDS[match[1].lower()], match[2]
    part = name.removeprefix(run) if name.startswith(run) else None
    if (kind == "Secret" and part == "") or (kind == "ConfigMap" and part and _PART.fullmatch(part)):
        return Reason(what, "missing", f"the run's {kind} {name} was deleted: {submit_again}")
    return None


def _missing(message: str, what: str) -> Reason | None:
    match = _NOT_FOUND.search(message)
    if match:
        kind = _KINDS[match[1].lower()]
        text = f"there is no {kind} {match[2]} in this namespace: create it, or correct the job file"
        return (MissingClaim if kind == "PersistentVolumeClaim" else Reason)(what, "missing", text)
    match = re.search(r"find key (\S+) in (Secret|ConfigMap) [^/]+/(\S+)", message)
    if match:
        text = f"the {match[2]} {match[3]} has no key {match[1]}: add it, or correct the job file"
        return Reason(what, "missing", text)
    match = re.search(r'volume "([^"]+)".*references non-existent (?:secret|config) key: (\S+)', message)
    if match:
        source = "the Secret of `credentials`" if match[1] == "paceline-credentials" else f"the source of {match[1]}"
        return Reason(what, "missing", f"{source} has no key {match[2]}: add it, or correct the job file")
    return None


# ---- nodes


def _unschedulable(message: str, what: str, advice: Advice) -> Reason:
    """0/3 nodes are available: 1 Insufficient cpu, 2 node(s) had untolerated taint(s). preemption: ..."""
    missing = _missing(message, what)
    if missing:
        return missing
    if "unbound immediate PersistentVolumeClaims" in message:
        text = "a PersistentVolumeClaim that it mounts has no volume yet: check that its storage class creates volumes"
        return Reason(what, "volume", text)
    match = re.match(r"0/(\d+) nodes are available: (.*?)\.(?: |$)", message)
    if not match:
        return Reason(what, "no-node", f"no node fits: {_sentence(message)}")
    parts = match[2].split(", ")
    causes = ", ".join(map(_part, parts))
    remedies = "; ".join(dict.fromkeys(filter(None, (_part_remedy(part, advice) for part in parts))))
    return Reason(what, "no-node", f"no node fits (0 of {match[1]}): {causes}; {remedies or 'waiting for a node'}")


def _part(text: str) -> str:
    """
    >>> _part("2 Insufficient nvidia.com/gpu")
    '2 without enough nvidia.com/gpu free'
    """
    match = re.fullmatch(r"(\d+) Insufficient (\S+)", text)
    if match:
        return f"{match[1]} without enough {match[2]} free"
    match = re.fullmatch(r"(\d+) node\(s\) (.*)", text)
    return f"{match[1]} {match[2]}" if match else text


def _part_remedy(text: str, advice: Advice) -> str:
    if "Insufficient" in text or "Too many pods" in text:
        return f"wait for free resources, or request less ({advice.resources})"
    if "taint" in text:
        return "kubernetes.tolerations can allow tainted nodes"
    if "affinity/selector" in text:
        return "kubernetes.node_selector and affinity must match a node"
    if "volume node affinity" in text:
        return "its volume is on another node"
    return ""


def _evicted_remedy(message: str, advice: Advice) -> str:
    if "EmptyDir" in message or "local storage usage" in message:
        return "write less to the volume, or raise its size limit"
    if "memory" in message:
        return advice.more_memory
    return "write less to /tmp and the work folder, or mount a volume for it"


# ---- Jobs


def of_job(event: Object, what: str, advice: Advice = FOR_HOST) -> Reason | None:
    """From the event of a Job that cannot create its pods."""
    if event.get("reason") != "FailedCreate":
        return None
    message = re.sub(r'^Error creating: (pods "[^"]+" is forbidden: )?', "", event.get("message") or "")
    text = _sentence(message)
    if "exceeded quota" in message:
        return Reason(what, "quota", f"{text}; wait until the quota allows it, or request less")
    if "failed quota" in message:
        return Reason(what, "quota", f"{text}; {advice.set_limits}, or {_ASK}", final=True)
    if violates_policy(message):
        return Reason(what, "admission", f"refused: {text}; change the job file to comply", final=True)
    if "failed calling webhook" in message:
        return Reason(what, "admission", f"{text}; wait until that webhook responds, or {_ASK}")
    match = re.search(r'serviceaccount "([^"]+)" not found', message)
    if match:
        text = f"there is no ServiceAccount {match[1]}: create it, or correct kubernetes.service_account"
        return Reason(what, "missing", text)
    match = re.search(r"no PriorityClass with name (\S+) was found", message)
    if match:
        text = f"there is no PriorityClass {match[1]}: correct kubernetes.priority_class, or {_ASK}"
        return Reason(what, "missing", text)
    return Reason(what, "refused", f"the cluster cannot create its pod: {text}")


def violates_policy(message: str) -> bool:
    """Whether a policy of the cluster refused the request, not a missing permission."""
    rules = ("violates PodSecurity", "admission webhook", "ValidatingAdmissionPolicy")
    return any(rule in message for rule in rules) and "failed calling webhook" not in message


def remedy(reason: str, message: str, namespace: str) -> str:
    """What the user can do about a refused request; empty if unknown. `reason`: the API's reason."""
    if "exceeded quota" in message:
        return f"`kubectl describe quota -n {namespace}` shows what is in use"
    if "failed calling webhook" in message:
        return f"that webhook must respond first: {_ASK}"
    if violates_policy(message):
        return "change the job file to comply"
    if reason == "Forbidden":
        return f"`paceline doctor --on kubernetes` shows which permissions are missing in {namespace}"
    if reason == "NotFound" and f'namespaces "{namespace}" not found' in message:
        return "create it, or choose another namespace"
    if reason == "Unauthorized":
        return "the kubeconfig has no valid credentials: log in to the cluster again"
    return ""


# ---- summary


def worst(reasons: Iterable[Reason]) -> list[Reason]:
    """Final reasons first, and each text once."""
    distinct: dict[tuple[str, str], Reason] = {}
    for reason in sorted(reasons, key=lambda each: not each.final):
        distinct.setdefault((reason.cause, reason.text), reason)
    return list(distinct.values())


def _sentence(text: str | None) -> str:
    """One line, without a full stop."""
    return " ".join((text or "").split()).rstrip(".")[:LONGEST]
