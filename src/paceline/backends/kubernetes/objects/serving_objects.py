"""The objects that serve a run's model, which outlive the run: a pure function of plan, snapshot and code."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.agent.pod import CANNOT
from paceline.backends.kubernetes.objects import names, pods
from paceline.backends.kubernetes.objects.config_maps import agent_parts, binary_content, parts, projected
from paceline.backends.kubernetes.objects.run_objects import plan_content
from paceline.job.serve_section import is_tensorflow_serving
from paceline.plan import CAPTAIN, CODE_IN_IMAGE, Plan, split_claim

Object = dict[str, Any]

EXPORT, SERVER = "export", "server"  # the containers
MODELS = "/models"
MONITORING = f"{MODELS}/.monitoring"  # configures the metrics of TensorFlow Serving; not a valid model name
DRAIN_S = 5  # seconds between SIGTERM and the exit, until no new requests arrive
TERMINATION_S = 45  # includes DRAIN_S and the longest request
LOAD_S = 600  # seconds for a server to load its model
_DIGITS = 10  # characters of the digest in names


@dataclass(frozen=True)
class Model:
    """The model to serve."""

    name: str  # used in URLs
    snapshot: str
    location: str  # location of the run's snapshots: a bucket, or a folder in a claim
    pinned: bool = False  # serve only this snapshot, even if it no longer exists
    needs_one_node: bool = False  # whether it needs a claim that only one node at a time can mount


def render(
    plan: Plan, run: str, model: Model, agent: bytes, code: Sequence[bytes], library: Sequence[bytes]
) -> list[Object]:
    """The Deployment comes first: it owns the others, once it has a uid. ConfigMaps are named by their content, so that
    pods of the previous snapshot keep theirs for as long as they serve."""
    config_maps = {
        "agent": _configs(plan, run, agent_parts(agent)),
        "plan": [_config(plan, run, "plan", plan_content(plan))],
        "code": _configs(plan, run, parts("code", code)),
        "library": _configs(plan, run, parts("library", library)),
    }
    maps = {kind: [str(each["metadata"]["name"]) for each in rendered] for kind, rendered in config_maps.items()}
    return [
        _deployment(plan, run, model, maps),
        _service(plan, run),
        _network_policy(plan, run),
        *(each for rendered in config_maps.values() for each in rendered),
    ]


def url(plan: Plan, run: str, model: Model, namespace: str) -> str:
    """The URL within the cluster."""
    return f"http://{names.server(run)}.{namespace}:{names.REST_PORT}/v1/models/{model.name}:predict"


def claims_of(plan: Plan, location: str) -> set[str]:
    """The claims that its pods mount."""
    return {split_claim(location)[0], *(each.get("claim") or "" for each in plan.kubernetes["volumes"])} - {""}


def _configs(plan: Plan, run: str, archive_parts: Mapping[str, Mapping[str, bytes]]) -> list[Object]:
    return [_config(plan, run, suffix, binary_content(files)) for suffix, files in archive_parts.items()]


def _config(plan: Plan, run: str, suffix: str, content: Object) -> Object:
    return {**_head("v1", "ConfigMap", f"{names.server(run)}-{suffix}-{_digest(content)}", plan, run), **content}


def _digest(rendered: Object) -> str:
    return hashlib.sha256(json.dumps(rendered, sort_keys=True).encode()).hexdigest()[:_DIGITS]


def _deployment(plan: Plan, run: str, model: Model, maps: Mapping[str, Sequence[str]]) -> Object:
    settings = plan.kubernetes
    pod = _pod(plan, run, model, maps)
    labels = {**names.server_labels(run, plan.name), names.TEMPLATE_LABEL: _digest(pod)}
    metadata = {
        "labels": {**settings["labels"], "sidecar.istio.io/inject": "false", **labels},
        "annotations": {"linkerd.io/inject": "disabled", **settings["annotations"]},
    }
    spec = {
        "replicas": plan.serve["replicas"],
        "selector": {"matchLabels": _match_labels(run)},
        # New pods start before old ones end, so that no request fails during an update.
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": "25%"}},
        "progressDeadlineSeconds": math.ceil(plan.limits.start),
        "revisionHistoryLimit": 0,  # the ConfigMaps of earlier revisions are deleted
        "template": {"metadata": metadata, "spec": pod},
    }
    return {**_head("apps/v1", "Deployment", names.server(run), plan, run), "spec": spec}


def _pod(plan: Plan, run: str, model: Model, maps: Mapping[str, Sequence[str]]) -> Object:
    volumes = [
        {"name": "paceline-agent", **projected(maps["agent"])},
        {"name": "paceline-plan", **projected(maps["plan"])},
        *({"name": f"paceline-{name}", "emptyDir": {}} for name in ("run", "home", "tmp", "models")),
    ]
    export = _export(plan, run, model, maps, volumes)
    pod = {**pods.common_spec(plan, _server(plan, model), volumes, TERMINATION_S), "initContainers": [export]}
    return {**pod, **(_on_one_node(run, pod.get("affinity", {})) if model.needs_one_node else _spread(run))}


def _spread(run: str) -> Object:
    spread = {
        "maxSkew": 1, "whenUnsatisfiable": "ScheduleAnyway", "topologyKey": "kubernetes.io/hostname",
        "labelSelector": {"matchLabels": _match_labels(run)},
    }  # fmt: skip
    return {"topologySpreadConstraints": [spread]}


def _on_one_node(run: str, affinity: Object) -> Object:
    """All pods on one node; if possible on the node of the captain, which may have the claim mounted."""
    by_node = {"topologyKey": "kubernetes.io/hostname"}
    captain = {"labelSelector": {"matchLabels": {names.RUN_LABEL: run, names.ROLE_LABEL: CAPTAIN}}, **by_node}
    required, preferred = (
        f"{strength}DuringSchedulingIgnoredDuringExecution" for strength in ("required", "preferred")
    )
    pod_affinity = affinity.get("podAffinity") or {}
    added = {
        required: [*pod_affinity.get(required, []), {"labelSelector": {"matchLabels": _match_labels(run)}, **by_node}],
        preferred: [*pod_affinity.get(preferred, []), {"weight": 100, "podAffinityTerm": captain}],
    }
    return {"affinity": {**affinity, "podAffinity": {**pod_affinity, **added}}}


def _export(plan: Plan, run: str, model: Model, maps: Mapping[str, Sequence[str]], volumes: list[Object]) -> Object:
    """Exports the model, in the job's image and with the code, volumes and credentials of its tasks."""
    settings = plan.kubernetes
    in_image = plan.code == CODE_IN_IMAGE
    claim, path = split_claim(model.location)
    options = {
        "run": run, "snapshot": model.snapshot, "pinned": model.pinned,
        "plan": pods.PLAN_FOLDER, "folder": pods.RUN_FOLDER,
        "place": f"{pods.SNAPSHOTS_FOLDER}/{path}".rstrip("/") if claim else model.location,
        "code": pods.CODE_FOLDER if maps["code"] else "",
        "work": "" if in_image and settings["work"] == pods.WORK else settings["work"],
        "obstore": pods.LIBRARY_FOLDER if maps["library"] else "",
        "format": "saved_model" if is_tensorflow_serving(plan.serve["image"]) else "",
        "to": f"{MODELS}/{model.name}", "last_words": pods.TERMINATION_LOG,
        "monitoring": MONITORING if is_tensorflow_serving(plan.serve["image"]) else "",
    }  # fmt: skip
    container = pods.bare_container(plan, EXPORT, _resources(plan))
    container["command"] = pods.agent_command("export", CANNOT)
    added_volumes, mounts = pods.extra_volumes(settings["volumes"])
    pods.give_credentials(plan, container, options, added_volumes, mounts)
    if claim:
        added_volumes.append({"name": "paceline-snapshots", "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": "paceline-snapshots", "mountPath": pods.SNAPSHOTS_FOLDER, "readOnly": True})
    if not in_image:
        added_volumes.append({"name": "paceline-work", "emptyDir": {}})
        mounts.append({"name": "paceline-work", "mountPath": settings["work"]})
    for kind, folder in (("code", pods.CODE_FOLDER), ("library", pods.LIBRARY_FOLDER)):
        if maps[kind]:
            added_volumes.append({"name": f"paceline-{kind}", **projected(maps[kind])})
            mounts.append({"name": f"paceline-{kind}", "mountPath": folder, "readOnly": True})
    volumes += added_volumes
    container["volumeMounts"] = [
        {"name": "paceline-agent", "mountPath": pods.AGENT_FOLDER, "readOnly": True},
        {"name": "paceline-plan", "mountPath": pods.PLAN_FOLDER, "readOnly": True},
        {"name": "paceline-run", "mountPath": pods.RUN_FOLDER},
        {"name": "paceline-home", "mountPath": pods.HOME},
        {"name": "paceline-tmp", "mountPath": "/tmp"},
        {"name": "paceline-models", "mountPath": MODELS},
        *mounts,
    ]
    return container


def _server(plan: Plan, model: Model) -> Object:
    image, folder = plan.serve["image"], f"{MODELS}/{model.name}"
    container = {**pods.bare_container(plan, SERVER, _resources(plan)), "image": image}
    listening: Object = {"tcpSocket": {"port": "rest"}}
    if is_tensorflow_serving(image):
        container["command"] = [
            "tensorflow_model_server", f"--port={names.GRPC_PORT}", f"--rest_api_port={names.REST_PORT}",
            f"--model_name={model.name}", f"--model_base_path={folder}", f"--monitoring_config_file={MONITORING}",
            "--enable_batching=true",
            "--max_num_load_retries=0",  # a retry would load the same model
        ]  # fmt: skip
        ready: Object = {"httpGet": {"path": f"/v1/models/{model.name}", "port": "rest"}}
        alive = listening
    else:
        container["command"] = [
            "python3", "-m", "paceline.serve", "--base", folder, "--name", model.name,
            "--host", "", "--port", str(names.REST_PORT),  # all addresses, of IPv4 and IPv6
        ]  # fmt: skip
        ready, alive = ({"httpGet": {"path": path, "port": "rest"}} for path in ("/readyz", "/healthz"))
    return {
        **container,
        "env": [{"name": "HOME", "value": pods.HOME}, {"name": "USER", "value": "paceline"}],
        "ports": [{"name": each["name"], "containerPort": each["port"]} for each in _ports(plan)],
        "startupProbe": {**ready, "periodSeconds": 1, "timeoutSeconds": 5, "failureThreshold": LOAD_S},
        "readinessProbe": {**ready, "periodSeconds": 2, "timeoutSeconds": 5},
        "livenessProbe": {**alive, "periodSeconds": 10, "timeoutSeconds": 10, "failureThreshold": 6},
        "lifecycle": {"preStop": {"sleep": {"seconds": DRAIN_S}}},
        "volumeMounts": [
            {"name": "paceline-home", "mountPath": pods.HOME},
            {"name": "paceline-tmp", "mountPath": "/tmp"},
            {"name": "paceline-models", "mountPath": MODELS, "readOnly": True},
        ],
    }


def _service(plan: Plan, run: str) -> Object:
    spec = {"type": plan.serve["service"], "selector": _match_labels(run), "ports": _ports(plan)}
    return {**_head("v1", "Service", names.server(run), plan, run), "spec": spec}


def _network_policy(plan: Plan, run: str) -> Object:
    """The ports of the model are open to everyone, all others are closed."""
    ports = [{"port": each["port"]} for each in _ports(plan)]
    spec = {
        "podSelector": {"matchLabels": _match_labels(run)},
        "policyTypes": ["Ingress"],
        "ingress": [{"ports": ports}],
    }
    return {**_head("networking.k8s.io/v1", "NetworkPolicy", names.server(run), plan, run), "spec": spec}


def _ports(plan: Plan) -> list[Object]:
    grpc = [{"name": "grpc", "port": names.GRPC_PORT}] if is_tensorflow_serving(plan.serve["image"]) else []
    return [{"name": "rest", "port": names.REST_PORT}, *grpc]


def _resources(plan: Plan) -> Object:
    """The same for both containers: they run one after the other."""
    serve = plan.serve
    return pods.resources(plan.kubernetes, serve["cpu"], serve["memory"], serve["gpus"])


def _match_labels(run: str) -> dict[str, str]:
    return {names.SERVES_LABEL: run}


def _head(version: str, kind: str, name: str, plan: Plan, run: str) -> Object:
    metadata: Object = {"name": name, "labels": names.server_labels(run, plan.name)}
    if plan.kubernetes["namespace"]:
        metadata["namespace"] = plan.kubernetes["namespace"]
    return {"apiVersion": version, "kind": kind, "metadata": metadata}
