"""All objects of a run, in the order of creation: a pure function of the plan, the run's id and the code."""

from __future__ import annotations

import gzip
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from paceline.agent.options import FAILED, METRICS_PATH, PAGE_PORT
from paceline.agent.pod import CANNOT
from paceline.backends.kubernetes.objects import names, pods
from paceline.backends.kubernetes.objects.config_maps import CHUNK, agent_parts, binary_content, in_base64, parts
from paceline.plan import CAPTAIN, TENSORBOARD, Plan, to_json

Object = dict[str, Any]

NO_LIMIT = 2**31 - 1  # limit of restarts: none, because the captain counts them
VISIT_S = 24 * 3600  # the longest a visit can take
BACKSTOP_S = 86400 + 120  # seconds after the captain should have ended the run, including up to a day in a queue


def render(
    plan: Plan,
    run: str,
    agent: bytes,
    code: Sequence[bytes] = (),
    certificates: Mapping[str, str] | None = None,
    suspended: bool = False,
    library: Sequence[bytes] = (),
) -> list[Object]:
    """The captain's Job comes first: it owns the others, once it has a uid. `agent`: its archive. `code`, `library`:
    parts of at most CHUNK bytes; the library is needed only with a bucket."""
    agents, codes, libraries = (
        {f"{run}-{suffix}": files for suffix, files in archive_parts.items()}
        for archive_parts in (agent_parts(agent), parts("code", code), parts("library", library))
    )
    objects = [
        _job(plan, run, run, CAPTAIN, 1, pods.captain(plan, run, list(agents), list(libraries)), suspended),
        _service(plan, run),
        _network_policy(plan, run),
        _secret(plan, run, certificates or {}),
        *(_config(plan, run, name, files) for name, files in agents.items()),
        {**_head("v1", "ConfigMap", f"{run}-plan", plan, run), **plan_content(plan)},
        *(_config(plan, run, name, files) for name, files in (codes | libraries).items()),
        *([_claim(plan)] if plan.snapshots.claim else []),
        *([_metrics_policy(plan, run)] if plan.metrics else []),
    ]
    if plan.tensorboard:
        objects += [_board_service(plan, run), *_page(plan, run), _board(plan, run, list(agents), suspended)]
    for pool in names.pools(plan):
        pod = pods.member(plan, run, pool, list(agents), list(codes))
        first = [host for host in plan.first_hosts if (host.role, host.group) == (pool.role, pool.number)]
        objects.append(_job(plan, run, names.job_of(run, pool), pool.role, len(first), pod, suspended))
    return objects


def _job(plan: Plan, run: str, name: str, role: str, count: int, pod: Object, suspended: bool) -> Object:
    spec: Object = {
        "completionMode": "Indexed",
        "completions": count,
        "parallelism": count,
        "backoffLimit": NO_LIMIT,
        "suspend": suspended,
        "template": {"metadata": pods.metadata(plan, run, role), "spec": pod},
    }
    if role == CAPTAIN and plan.metrics:
        scraped = {"scrape": "true", "port": str(names.METRICS_PORT), "path": METRICS_PATH}
        annotations = {f"prometheus.io/{name}": value for name, value in scraped.items()}
        spec["template"]["metadata"]["annotations"] |= annotations
    if role == CAPTAIN:
        failed = {"containerName": CAPTAIN, "operator": "In", "values": [FAILED, CANNOT]}
        spec["podFailurePolicy"] = {"rules": [{"action": "FailJob", "onExitCodes": failed}]}
        spec["ttlSecondsAfterFinished"] = math.ceil(plan.limits.keep_finished)
    if plan.limits.runtime is not None:
        whole = plan.limits.start + plan.limits.runtime + plan.limits.grace + plan.limits.commit
        whole += 0.0 if plan.ingest is None else plan.ingest.limit
        spec["activeDeadlineSeconds"] = math.ceil(whole) + BACKSTOP_S
    return {**_head("batch/v1", "Job", name, plan, run, role), "spec": spec}


def visit(plan: Plan, run: str, name: str, is_own: bool) -> Object:
    """A short-lived Job whose pod mounts the claim of a run that has ended. It does not belong to the run. If it is not
    deleted, it ends on its own. `is_own`: this user has submitted the run."""
    plan = plan if is_own else pods.for_visit_of_others(plan)
    metadata = pods.metadata(plan, run, pods.VISIT)
    for label in (names.RUN_LABEL, names.ROLE_LABEL):
        del metadata["labels"][label]
    spec: Object = {
        "backoffLimit": 0,
        "activeDeadlineSeconds": VISIT_S,
        "ttlSecondsAfterFinished": 0,
        "template": {"metadata": metadata, "spec": pods.visit(plan, is_own)},
    }
    head = _head("batch/v1", "Job", name, plan, run)
    return {**head, "metadata": {**head["metadata"], "labels": metadata["labels"]}, "spec": spec}


def _service(plan: Plan, run: str) -> Object:
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,  # hosts look each other up before they are ready
        "selector": {names.RUN_LABEL: run},
        "ports": [
            {"name": "captain", "port": names.CAPTAIN_PORT},
            {"name": "snapshots", "port": names.SNAPSHOTS_PORT},
        ],
    }
    return {**_head("v1", "Service", run, plan, run), "spec": spec}


def _board(plan: Plan, run: str, agent: list[str], suspended: bool) -> Object:
    match_labels = {names.RUN_LABEL: run, names.ROLE_LABEL: TENSORBOARD}
    template = {"metadata": pods.metadata(plan, run, TENSORBOARD), "spec": pods.board(plan, run, agent)}
    spec = {
        "replicas": 0 if suspended else 1,
        "strategy": {"type": "Recreate"},
        "selector": {"matchLabels": match_labels},
        "template": template,
    }
    return {**_head("apps/v1", "Deployment", names.board(run), plan, run, TENSORBOARD), "spec": spec}


def _claim(plan: Plan) -> Object:
    """For snapshots, which outlive the run: the claim is not owned by the run and does not have its labels."""
    requested = plan.snapshots.claim
    spec: Object = {
        "accessModes": [requested["access"]],
        "resources": {"requests": {"storage": str(requested["size"])}},
        **({"storageClassName": requested["storage_class"]} if requested["storage_class"] else {}),
    }
    metadata: Object = {"name": plan.snapshots.claimed[0], "labels": {"app.kubernetes.io/managed-by": "paceline"}}
    if plan.kubernetes["namespace"]:
        metadata["namespace"] = plan.kubernetes["namespace"]
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec}


def _board_service(plan: Plan, run: str) -> Object:
    """For members, which send the event files of tasks, and for `kubectl port-forward`."""
    spec = {
        "selector": {names.RUN_LABEL: run, names.ROLE_LABEL: TENSORBOARD},
        "ports": [{"name": "files", "port": names.FILES_PORT}, {"name": "page", "port": PAGE_PORT}],
    }
    return {**_head("v1", "Service", names.board(run), plan, run, TENSORBOARD), "spec": spec}


def _page(plan: Plan, run: str) -> list[Object]:
    """Publishes TensorBoard, if the job requests it: only its page, and without authentication."""
    service, ingress = plan.tensorboard["service"], plan.tensorboard["ingress"]
    if not service and not ingress:
        return []
    match_labels, name = {names.RUN_LABEL: run, names.ROLE_LABEL: TENSORBOARD}, names.page(run)
    ports = [{"name": "page", "port": PAGE_PORT}]
    selected = {"podSelector": {"matchLabels": match_labels}, "policyTypes": ["Ingress"]}
    objects = [
        {
            **_head("v1", "Service", name, plan, run, TENSORBOARD),
            "spec": {"type": service or "ClusterIP", "selector": match_labels, "ports": ports},
        },
        {
            **_head("networking.k8s.io/v1", "NetworkPolicy", name, plan, run, TENSORBOARD),
            "spec": {**selected, "ingress": [{"ports": [{"port": PAGE_PORT}]}]},
        },
    ]
    if ingress:
        backend = {"service": {"name": name, "port": {"name": "page"}}}
        paths = [{"path": "/", "pathType": "Prefix", "backend": backend}]
        spec: Object = {"rules": [{"host": ingress["host"], "http": {"paths": paths}}]}
        if ingress["class"]:
            spec["ingressClassName"] = ingress["class"]
        if ingress["tls"]:
            spec["tls"] = [{"hosts": [ingress["host"]], "secretName": ingress["tls"]}]
        objects.append({**_head("networking.k8s.io/v1", "Ingress", name, plan, run, TENSORBOARD), "spec": spec})
    return objects


def _network_policy(plan: Plan, run: str) -> Object:
    """The ports of the frameworks have no authentication: only pods of the run can connect to them."""
    selector = {"podSelector": {"matchLabels": {names.RUN_LABEL: run}}}
    spec = {**selector, "policyTypes": ["Ingress"], "ingress": [{"from": [selector]}]}
    return {**_head("networking.k8s.io/v1", "NetworkPolicy", run, plan, run), "spec": spec}


def _metrics_policy(plan: Plan, run: str) -> Object:
    """Metrics have no authentication: only pods of this cluster, such as Prometheus in any namespace, can read them."""
    spec = {
        "podSelector": {"matchLabels": {names.RUN_LABEL: run, names.ROLE_LABEL: CAPTAIN}},
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"namespaceSelector": {}}], "ports": [{"port": names.METRICS_PORT}]}],
    }
    return {**_head("networking.k8s.io/v1", "NetworkPolicy", names.metrics(run), plan, run, CAPTAIN), "spec": spec}


def pod_monitor(plan: Plan, run: str) -> Object:
    """Tells the Prometheus Operator to read the metrics. Not every cluster knows this kind of object. It has the user's
    labels, too: a Prometheus may select PodMonitors by them."""
    spec = {
        "selector": {"matchLabels": {names.RUN_LABEL: run, names.ROLE_LABEL: CAPTAIN}},
        "podMetricsEndpoints": [{"port": "metrics", "path": METRICS_PATH}],
    }
    monitor = {**_head("monitoring.coreos.com/v1", "PodMonitor", names.metrics(run), plan, run, CAPTAIN), "spec": spec}
    monitor["metadata"]["labels"] = {**plan.kubernetes["labels"], **monitor["metadata"]["labels"]}
    return monitor


def _secret(plan: Plan, run: str, certificates: Mapping[str, str]) -> Object:
    """Immutable, as are the ConfigMaps: nothing updates them, and pods of the run must all get the same."""
    data = {name: in_base64(text.encode()) for name, text in sorted(certificates.items())}
    return {**_head("v1", "Secret", run, plan, run), "type": "Opaque", "immutable": True, "data": data}


def plan_content(plan: Plan) -> Object:
    """The fields of the ConfigMap with the plan: readable text, or compressed if that is too long. Its `code` is the
    folder in the pods: the one on this machine is of no use there, and others can read the ConfigMap."""
    text = to_json(plan if plan.code_in_image else replace(plan, code=plan.kubernetes["work"]))
    if len(text) > CHUNK:
        return binary_content({"plan.json.gz": gzip.compress(text.encode(), mtime=0)})
    return {"immutable": True, "data": {"plan.json": text}}


def _config(plan: Plan, run: str, name: str, files: Mapping[str, bytes]) -> Object:
    return {**_head("v1", "ConfigMap", name, plan, run), **binary_content(files)}


def _head(version: str, kind: str, name: str, plan: Plan, run: str, role: str = "") -> Object:
    metadata: Object = {"name": name, "labels": names.labels(run, plan.name, role)}
    if plan.kubernetes["namespace"]:
        metadata["namespace"] = plan.kubernetes["namespace"]
    return {"apiVersion": version, "kind": kind, "metadata": metadata}
