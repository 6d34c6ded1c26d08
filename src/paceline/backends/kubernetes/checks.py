"""What `paceline doctor --on kubernetes` looks at: whether this person can run jobs in this namespace."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from lightkube import codecs
from lightkube.core.exceptions import ConfigError
from lightkube.resources.authentication_v1 import SelfSubjectReview
from lightkube.resources.core_v1 import LimitRange, Namespace, Node, ResourceQuota
from lightkube.resources.storage_v1 import StorageClass
from lightkube.utils.quantity import parse_quantity

from paceline.backends.check import FAIL, OK, WARN, Check
from paceline.backends.kubernetes import pods, raw, rights
from paceline.backends.kubernetes.cluster import Cluster, Refused, Unreachable, connect
from paceline.view.words import count, size

OLDEST = 1, 31
REACH_S = 4.0  # a person waits 5 s at most, with the start of Python
_LEVEL = "pod-security.kubernetes.io/enforce"
_DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"
_MANY = 500  # objects in one answer


def look(context: str | None, namespace: str | None) -> Iterator[Check]:
    """Stops at what makes the rest pointless."""
    try:
        cluster = connect(context, namespace)
    except Unreachable as error:
        yield Check("kubeconfig", FAIL, str(error))
        return
    yield Check("context", OK, f"{cluster.context}, namespace {cluster.namespace}")
    person = ""
    try:
        yield _reach(cluster)
        person = _person(cluster)
        yield Check("person", OK, person)
        for each in (_namespace, partial(_rights, person=person), _quota, _limits, _admission, _nodes, _storage):
            for check in each(cluster):
                yield check
                if check.name == "namespace":  # which is said only where there is none
                    return
    except Unreachable as error:
        yield Check("reach", FAIL, str(error))
    except FileNotFoundError as error:
        found = f"{error.filename}, which the kubeconfig names for credentials, is not there"
        yield Check("credentials", FAIL, found, "install it: the provider of the cluster says how")
    except ConfigError as error:
        yield Check("credentials", FAIL, str(error), "correct the user of this context in the kubeconfig")
    except Refused as error:
        remedy = "log in again: the cluster does not know these credentials" if not person else ""
        yield Check("answer" if person else "credentials", FAIL, str(error), remedy)


def _reach(cluster: Cluster) -> Check:
    with raw.client(cluster, REACH_S) as client:
        answer = cluster.ask("ask for the server's version", lambda: client.get("/version"))
    try:
        told = answer.json()
        version = int(told["major"]), int(re.sub(r"\D.*", "", told["minor"]))  # some clusters say "33+"
    except (ValueError, KeyError, TypeError):
        return Check("server", WARN, f"{cluster.server} does not tell its version (HTTP {answer.status_code})")
    fine = version >= OLDEST
    remedy = "" if fine else f"Paceline needs Kubernetes {OLDEST[0]}.{OLDEST[1]} or newer"
    return Check("server", OK if fine else FAIL, f"{told.get('gitVersion')} at {cluster.server}", remedy)


def _person(cluster: Cluster) -> str:
    review = cluster.ask("ask who you are", lambda: cluster.client.create(SelfSubjectReview()))
    info = review.status.userInfo if review.status else None
    return str((info.username if info else None) or "unknown")


def _namespace(cluster: Cluster) -> Iterator[Check]:
    name = cluster.namespace
    try:
        found = cluster.ask("read the namespace", partial(cluster.client.get, Namespace, name))
    except Refused as error:
        if error.reason == "NotFound":
            yield Check("namespace", FAIL, f"there is no namespace {name}", "say which with -n, or set the context's")
        else:
            yield _untold("pod security", "read the namespace", "pods of Paceline pass the strictest level")
        return
    level = ((found.metadata.labels if found.metadata else None) or {}).get(_LEVEL)
    yield Check("pod security", OK, f"{level or 'no'} level is enforced; pods of Paceline pass the strictest")


def _rights(cluster: Cluster, person: str) -> Iterator[Check]:
    for right, lacks in rights.missing(cluster):
        if not lacks:
            yield Check(right.resource, OK, f"you may {', '.join(right.verbs)}")
            continue
        lost = f"; without, {right.without}" if right.without else ""
        found = f"you may not {', '.join(lacks)} {right.resource} in {cluster.namespace}{lost}"
        yield Check(right.resource, WARN if right.without else FAIL, found, _grant(cluster, person, right, lacks))


def _grant(cluster: Cluster, person: str, right: rights.Right, verbs: list[str]) -> str:
    name = f"paceline-{right.resource.replace('/', '-')}"
    here = f"-n {cluster.namespace} {name}"
    role = f"kubectl create role {here} --verb={','.join(verbs)} --resource={right.as_kubectl_has_it}"
    return f"ask an administrator for: {role}; kubectl create rolebinding {here} --role={name} --user={person}"


def _quota(cluster: Cluster) -> Iterator[Check]:
    try:
        quotas = cluster.ask("list quotas", lambda: list(cluster.client.list(ResourceQuota)))
    except Refused:
        yield _untold("quota", "list resourcequotas")
        return
    if not quotas:
        yield Check("quota", OK, "none")
    for quota in quotas:
        hard = (quota.status.hard if quota.status else None) or {}
        used = (quota.status.used if quota.status else None) or {}
        name = quota.metadata.name if quota.metadata else ""
        spent = [each for each in hard if _amount(used.get(each, "0")) >= _amount(hard[each])]
        shown = ", ".join(f"{each} {used.get(each, '0')} of {hard[each]}" for each in spent or hard)
        remedy = "paceline delete runs that have ended, wait for others, or ask for a larger quota" if spent else ""
        what = f"{name}: nothing is left of {shown}" if spent else f"{name}: {shown or 'not counted yet'}"
        yield Check("quota", WARN if spent else OK, what, remedy)


def _limits(cluster: Cluster) -> Iterator[Check]:
    """What containers get that do not say what they need, and the most they may ask for."""
    try:
        ranges = cluster.ask("list limit ranges", lambda: list(cluster.client.list(LimitRange)))
    except Refused:
        yield _untold("limits", "list limitranges")
        return
    words = []
    for item in (item for each in ranges if each.spec for item in each.spec.limits if item.type == "Container"):
        for what, given in (("at least", item.min), ("at most", item.max), ("unless set", item.default)):
            words += [f"{name} {what} {value}" for name, value in (given or {}).items()]
    if words:
        yield Check("limits", OK, f"each container: {', '.join(words)}")


def _admission(cluster: Cluster) -> Iterator[Check]:
    """Whether a captain's pod would be let in, with all that stands before it: asked for, and not made."""
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "paceline-doctor"}, "spec": _pod()}
    try:
        cluster.ask("try a pod", partial(cluster.client.create, codecs.from_dict(pod), dry_run=True))
    except Refused as error:
        said = str(error).removeprefix("cannot try a pod: ").partition("; `paceline doctor")[0]
        if error.reason == "NotFound":
            yield Check("namespace", FAIL, said, "say which with -n, or set the context's")
        elif "cannot create resource" in said:
            yield Check("admission", OK, "not tried: you may not create pods yourself, and need not")
        else:
            passes = "exceeded quota" in said or "denied" in said  # that may be for this pod, or for now, alone
            remedy = "ask who looks after the namespace: the captain of a run needs such a pod"
            yield Check("admission", WARN if passes else FAIL, f"a captain's pod is refused: {said}", remedy)
        return
    yield Check("admission", OK, "a captain's pod would be let in")


def _pod() -> dict[str, Any]:
    from paceline import plan as plans
    from paceline.job import load_text

    text = "{name: doctor, framework: none, command: [python], code: image, kubernetes: {image: python}}"
    plan = plans.make(load_text(text, "job.yaml", Path.cwd(), cluster=True).job)
    return pods.captain(plan, "doctor", ["doctor-agent-00"], [])


def _nodes(cluster: Cluster) -> Iterator[Check]:
    try:
        nodes = cluster.ask("list nodes", lambda: list(cluster.client.list(Node, chunk_size=_MANY)))
    except Refused:
        yield _untold("nodes", "list nodes", "a run says it when no node takes a pod")
        return
    fit = [node for node in nodes if _takes_pods(node)]
    if not fit:
        yield Check("nodes", WARN, f"none of {count(len(nodes), 'node')} takes pods", "kubectl get nodes says why")
        return
    given = [(node.status.allocatable if node.status else None) or {} for node in fit]
    cores = max(_amount(each.get("cpu", "0")) for each in given)
    memory = max(_amount(each.get("memory", "0")) for each in given)
    all_of = f" of {len(nodes)}" if len(fit) < len(nodes) else ""
    yield Check(
        "nodes",
        OK,
        f"{len(fit)}{all_of} take{'s' * (len(fit) == 1)} pods; the largest: {float(cores):g} cores, {size(memory)}",
    )
    gpus = sorted({name for each in given for name in each if name.endswith("/gpu")})
    for name in gpus:
        counts = Counter(int(_amount(each.get(name, "0"))) for each in given)
        told = [f"{count(many, 'node')} with {gpu}" for gpu, many in sorted(counts.items(), reverse=True) if gpu]
        yield Check("gpus", OK, f"{name}: {', '.join(told) or 'none'}")
    if not gpus:
        yield Check("gpus", OK, "none: no node offers a resource such as nvidia.com/gpu")


def _takes_pods(node: Any) -> bool:
    conditions = (node.status.conditions if node.status else None) or []
    ready = any(each.type == "Ready" and each.status == "True" for each in conditions)
    return ready and not (node.spec and node.spec.unschedulable)


def _storage(cluster: Cluster) -> Iterator[Check]:
    try:
        classes = cluster.ask("list storage classes", lambda: list(cluster.client.list(StorageClass)))
    except Refused:
        yield _untold("storage", "list storageclasses", "claims that exist already can be named in the job file")
        return
    marked = [(each.metadata.name, (each.metadata.annotations or {})) for each in classes if each.metadata]
    names = [f"{name} (default)" if notes.get(_DEFAULT_CLASS) == "true" else str(name) for name, notes in marked]
    yield Check("storage", OK, f"classes: {', '.join(names)}" if names else "no classes: a claim must name its volume")


def _untold(name: str, what: str, more: str = "") -> Check:
    """A right that Paceline does not need; nothing is wrong."""
    return Check(name, OK, f"cannot be told: you may not {what}" + (f"; {more}" if more else ""))


def _amount(quantity: str) -> Any:
    return parse_quantity(quantity) or 0
