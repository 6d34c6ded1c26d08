"""The checks of `paceline doctor --on kubernetes`: whether the user can run jobs in a namespace."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from lightkube import codecs
from lightkube.resources.authentication_v1 import SelfSubjectReview
from lightkube.resources.core_v1 import LimitRange, Namespace, Node, ResourceQuota
from lightkube.resources.storage_v1 import StorageClass
from lightkube.utils.quantity import parse_quantity

from paceline.backends.check_result import FAIL, OK, WARN, Check
from paceline.backends.kubernetes.api import permissions, raw_requests
from paceline.backends.kubernetes.api.cluster import Cluster, NoCredentials, Refused, Unreachable, connect
from paceline.backends.kubernetes.objects import pods
from paceline.view.text.wording import count, size

OLDEST_VERSION = 1, 31
CONNECT_S = 4.0  # the first result appears within 5 s, including the start of Python
_LEVEL = "pod-security.kubernetes.io/enforce"
_DEFAULT_CLASS = "storageclass.kubernetes.io/is-default-class"
_OTHER_NAMESPACE = "choose another with -n NAME, or set the context's namespace"
_PAGE_SIZE = 500  # objects in one response


def run_checks(context: str | None, namespace: str | None) -> Iterator[Check]:
    """Stops at a failure that makes the remaining checks pointless."""
    try:
        cluster = connect(context, namespace)
    except Unreachable as error:
        yield Check("kubeconfig", FAIL, str(error))
        return
    yield Check("context", OK, f"{cluster.context}, namespace {cluster.namespace}")
    user = ""
    try:
        yield _server(cluster)
        user = _user(cluster)
        yield Check("user", OK, user)
        for each in (_namespace, partial(_rights, user=user), _quota, _limits, _admission, _nodes, _storage):
            for check in each(cluster):
                yield check
                if check.name == "namespace":  # reported only if it does not exist
                    return
    except NoCredentials as error:
        yield Check("credentials", FAIL, str(error), "correct the user of this context in the kubeconfig, or log in")
    except Unreachable as error:
        yield Check("reach", FAIL, str(error))
    except Refused as error:
        remedy = "log in again: the cluster does not accept these credentials" if not user else ""
        yield Check("answer" if user else "credentials", FAIL, str(error), remedy)


def _server(cluster: Cluster) -> Check:
    with raw_requests.client(cluster, CONNECT_S) as client:
        response = cluster.request("read the server's version", lambda: client.get("/version"))
    try:
        info = response.json()
        version = int(info["major"]), int(re.sub(r"\D.*", "", info["minor"]))  # some clusters report "33+"
    except (ValueError, KeyError, TypeError):
        return Check("server", WARN, f"{cluster.server} does not report its version (HTTP {response.status_code})")
    is_supported = version >= OLDEST_VERSION
    remedy = "" if is_supported else f"Paceline needs Kubernetes {OLDEST_VERSION[0]}.{OLDEST_VERSION[1]} or newer"
    return Check("server", OK if is_supported else FAIL, f"{info.get('gitVersion')} at {cluster.server}", remedy)


def _user(cluster: Cluster) -> str:
    review = cluster.request("read your user name", lambda: cluster.client.create(SelfSubjectReview()))
    info = review.status.userInfo if review.status else None
    return str((info.username if info else None) or "unknown")


def _namespace(cluster: Cluster) -> Iterator[Check]:
    name = cluster.namespace
    try:
        namespace = cluster.request("read the namespace", partial(cluster.client.get, Namespace, name))
    except Refused as error:
        if error.reason == "NotFound":
            yield Check("namespace", FAIL, f"the namespace {name} does not exist", _OTHER_NAMESPACE)
        else:
            yield _not_checked("pod security", "read the namespace", "Paceline's pods pass the strictest level")
        return
    level = ((namespace.metadata.labels if namespace.metadata else None) or {}).get(_LEVEL)
    yield Check("pod security", OK, f"{level or 'no'} level is enforced; Paceline's pods pass the strictest")


def _rights(cluster: Cluster, user: str) -> Iterator[Check]:
    for right, missing in permissions.missing(cluster):
        if not missing:
            yield Check(right.resource, OK, f"permitted: {', '.join(right.verbs)}")
            continue
        effect = f"; without it, {right.without}" if right.without else ""
        finding = f"no permission to {', '.join(missing)} {right.resource} in {cluster.namespace}{effect}"
        yield Check(right.resource, WARN if right.without else FAIL, finding, _grant(cluster, user, right, missing))


def _grant(cluster: Cluster, user: str, right: permissions.Right, verbs: list[str]) -> str:
    name = f"paceline-{right.resource.replace('/', '-')}"
    target = f"-n {cluster.namespace} {name}"
    role = f"kubectl create role {target} --verb={','.join(verbs)} --resource={right.kubectl_name}"
    return f"ask an administrator for: {role}; kubectl create rolebinding {target} --role={name} --user={user}"


def _quota(cluster: Cluster) -> Iterator[Check]:
    try:
        quotas = cluster.request("list quotas", lambda: list(cluster.client.list(ResourceQuota)))
    except Refused:
        yield _not_checked("quota", "list resourcequotas")
        return
    if not quotas:
        yield Check("quota", OK, "none")
    for quota in quotas:
        hard = (quota.status.hard if quota.status else None) or {}
        used = (quota.status.used if quota.status else None) or {}
        name = quota.metadata.name if quota.metadata else ""
        exhausted = [each for each in hard if _amount(used.get(each, "0")) >= _amount(hard[each])]
        usage = ", ".join(f"{each} {used.get(each, '0')} of {hard[each]}" for each in exhausted or hard)
        remedy = "`paceline delete` ended runs, wait for others, or ask for a larger quota" if exhausted else ""
        finding = f"{name}: used up: {usage}" if exhausted else f"{name}: {usage or 'not counted yet'}"
        yield Check("quota", WARN if exhausted else OK, finding, remedy)


def _limits(cluster: Cluster) -> Iterator[Check]:
    """The default resources of containers, and the minimum and maximum that they can request."""
    try:
        ranges = cluster.request("list limit ranges", lambda: list(cluster.client.list(LimitRange)))
    except Refused:
        yield _not_checked("limits", "list limitranges")
        return
    limits = []
    for item in (item for each in ranges if each.spec for item in each.spec.limits if item.type == "Container"):
        for kind, values in (("at least", item.min), ("at most", item.max), ("by default", item.default)):
            limits += [f"{name} {kind} {value}" for name, value in (values or {}).items()]
    if limits:
        yield Check("limits", OK, f"each container: {', '.join(limits)}")


def _admission(cluster: Cluster) -> Iterator[Check]:
    """Whether the cluster would admit a captain's pod: a dry run, which creates nothing."""
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "paceline-doctor"}, "spec": _pod()}
    try:
        cluster.request("create a test pod", partial(cluster.client.create, codecs.from_dict(pod), dry_run=True))
    except Refused as error:
        message = error.message
        if error.reason == "NotFound":
            yield Check("namespace", FAIL, message, _OTHER_NAMESPACE)
        elif "cannot create resource" in message:
            yield Check("admission", OK, "not tested: no permission to create pods, which Paceline does not need")
        else:
            # Perhaps only this pod is rejected, or only at the moment.
            is_temporary = "exceeded quota" in message or "denied" in message
            remedy = "ask an administrator of the namespace: the captain of a run needs such a pod"
            yield Check("admission", WARN if is_temporary else FAIL, f"a captain's pod is refused: {message}", remedy)
        return
    yield Check("admission", OK, "a captain's pod would be admitted")


def _pod() -> dict[str, Any]:
    from paceline.job import load_text
    from paceline.job.planning import make_plan

    text = "{name: doctor, framework: none, command: [python], code: image, kubernetes: {image: python}}"
    plan = make_plan(load_text(text, "job.yaml", Path.cwd(), cluster=True).job)
    return pods.captain(plan, "doctor", ["doctor-agent-00"], [])


def _nodes(cluster: Cluster) -> Iterator[Check]:
    try:
        nodes = cluster.request("list nodes", lambda: list(cluster.client.list(Node, chunk_size=_PAGE_SIZE)))
    except Refused:
        yield _not_checked("nodes", "list nodes", "a run reports it if no node fits a pod")
        return
    usable = [node for node in nodes if _accepts_pods(node)]
    if not usable:
        yield Check("nodes", WARN, f"none of {count(len(nodes), 'node')} accepts pods", "`kubectl get nodes` shows why")
        return
    resources = [(node.status.allocatable if node.status else None) or {} for node in usable]
    cores = max(_amount(each.get("cpu", "0")) for each in resources)
    memory = max(_amount(each.get("memory", "0")) for each in resources)
    total = f" of {len(nodes)}" if len(usable) < len(nodes) else ""
    yield Check(
        "nodes",
        OK,
        f"{len(usable)}{total} accept{'s' * (len(usable) == 1)} pods; "
        f"the largest: {float(cores):g} cores, {size(memory)}",
    )
    gpus = sorted({name for each in resources for name in each if name.endswith("/gpu")})
    for name in gpus:
        counts = Counter(int(_amount(each.get(name, "0"))) for each in resources)
        nodes_by_gpus = [f"{count(n, 'node')} with {gpu}" for gpu, n in sorted(counts.items(), reverse=True) if gpu]
        yield Check("gpus", OK, f"{name}: {', '.join(nodes_by_gpus) or 'none'}")
    if not gpus:
        yield Check("gpus", OK, "none: no node offers a resource such as nvidia.com/gpu")


def _accepts_pods(node: Any) -> bool:
    conditions = (node.status.conditions if node.status else None) or []
    ready = any(each.type == "Ready" and each.status == "True" for each in conditions)
    return ready and not (node.spec and node.spec.unschedulable)


def _storage(cluster: Cluster) -> Iterator[Check]:
    try:
        classes = cluster.request("list storage classes", lambda: list(cluster.client.list(StorageClass)))
    except Refused:
        yield _not_checked("storage", "list storageclasses", "a job file can use claims that already exist")
        return
    annotated = [(each.metadata.name, (each.metadata.annotations or {})) for each in classes if each.metadata]
    names = [
        f"{name} (default)" if annotations.get(_DEFAULT_CLASS) == "true" else str(name)
        for name, annotations in annotated
    ]
    yield Check(
        "storage", OK, f"classes: {', '.join(names)}" if names else "no storage classes: a claim must name its volume"
    )


def _not_checked(name: str, action: str, note: str = "") -> Check:
    """An optional permission is missing, so something could not be checked."""
    return Check(name, OK, f"not checked: no permission to {action}" + (f"; {note}" if note else ""))


def _amount(quantity: str) -> Any:
    return parse_quantity(quantity) or 0
