"""The objects that serve a run's model, which outlive the run: a pure function of plan, snapshot and code."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.agent.pod import CANNOT
from paceline.backends.kubernetes import names, pods
from paceline.backends.kubernetes.config_maps import agent_parts, held, parts, projected
from paceline.backends.kubernetes.render import plan_held
from paceline.job.serving import is_tensorflow_serving
from paceline.plan import CAPTAIN, CODE_IN_IMAGE, Plan, in_claim

Object = dict[str, Any]

EXPORT, SERVER = "export", "server"  # the containers
MODELS = "/models"
MONITORING = f"{MODELS}/.monitoring"  # how TensorFlow Serving tells its counters; no model is called so
DRAIN_S = 5  # between the word to go and the end, until no new requests come
TERMINATION_S = 45  # for that, and for the longest request
LOAD_S = 600  # for a server to load its model
_DIGITS = 10  # of the digest in names


@dataclass(frozen=True)
class Model:
    """What is served."""

    name: str  # in paths
    snapshot: str
    place: str  # of the run's snapshots: a bucket, or a folder in a claim
    pinned: bool = False  # that snapshot, and no other where it is gone
    tied: bool = False  # a claim that it needs can be on one node at a time


def render(
    plan: Plan, run: str, model: Model, agent: bytes, code: Sequence[bytes], library: Sequence[bytes]
) -> list[Object]:
    """The Deployment first: it owns the others, once it has a uid. ConfigMaps are called after what they hold, so that
    pods of the snapshot before keep theirs for as long as they serve."""
    # Wherever the code lay: the same job makes no other pods.
    told = plan if plan.code == CODE_IN_IMAGE else replace(plan, code=plan.kubernetes["work"])
    made = {
        "agent": _configs(plan, run, agent_parts(agent)),
        "plan": [_config(plan, run, "plan", plan_held(told))],
        "code": _configs(plan, run, parts("code", code)),
        "library": _configs(plan, run, parts("library", library)),
    }
    maps = {what: [str(each["metadata"]["name"]) for each in found] for what, found in made.items()}
    return [
        _deployment(plan, run, model, maps),
        _service(plan, run),
        _network_policy(plan, run),
        *(each for found in made.values() for each in found),
    ]


def url(plan: Plan, run: str, model: Model, namespace: str) -> str:
    """Within the cluster."""
    return f"http://{names.server(run)}.{namespace}:{names.REST_PORT}/v1/models/{model.name}:predict"


def claims_of(plan: Plan, place: str) -> set[str]:
    """Those that its pods mount."""
    return {in_claim(place)[0], *(each.get("claim") or "" for each in plan.kubernetes["volumes"])} - {""}


def _configs(plan: Plan, run: str, cut: Mapping[str, Mapping[str, bytes]]) -> list[Object]:
    return [_config(plan, run, end, held(files)) for end, files in cut.items()]


def _config(plan: Plan, run: str, what: str, holds: Object) -> Object:
    return {**_head("v1", "ConfigMap", f"{names.server(run)}-{what}-{_digest(holds)}", plan, run), **holds}


def _digest(made: Object) -> str:
    return hashlib.sha256(json.dumps(made, sort_keys=True).encode()).hexdigest()[:_DIGITS]


def _deployment(plan: Plan, run: str, model: Model, maps: Mapping[str, Sequence[str]]) -> Object:
    settings = plan.kubernetes
    pod = _pod(plan, run, model, maps)
    ours = {**names.server_labels(run, plan.name), names.TEMPLATE_LABEL: _digest(pod)}
    metadata = {
        "labels": {**settings["labels"], "sidecar.istio.io/inject": "false", **ours},
        "annotations": {"linkerd.io/inject": "disabled", **settings["annotations"]},
    }
    spec = {
        "replicas": plan.serve["replicas"],
        "selector": {"matchLabels": _ours(run)},
        # Some more at a time, and none less: there is no request that nobody answers.
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": "25%"}},
        "progressDeadlineSeconds": math.ceil(plan.limits.start),
        "revisionHistoryLimit": 0,  # what an earlier one needs is deleted
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
    pod = {**pods.anywhere(plan, _server(plan, model), volumes, TERMINATION_S), "initContainers": [export]}
    return {**pod, **(_together(run, pod.get("affinity", {})) if model.tied else _apart(run))}


def _apart(run: str) -> Object:
    spread = {
        "maxSkew": 1, "whenUnsatisfiable": "ScheduleAnyway", "topologyKey": "kubernetes.io/hostname",
        "labelSelector": {"matchLabels": _ours(run)},
    }  # fmt: skip
    return {"topologySpreadConstraints": [spread]}


def _together(run: str, affinity: Object) -> Object:
    """On one node; if it can be, on that of the captain, which may have the claim."""
    by_node = {"topologyKey": "kubernetes.io/hostname"}
    captain = {"labelSelector": {"matchLabels": {names.RUN_LABEL: run, names.ROLE_LABEL: CAPTAIN}}, **by_node}
    required, preferred = (f"{how}DuringSchedulingIgnoredDuringExecution" for how in ("required", "preferred"))
    given = affinity.get("podAffinity") or {}
    own = {
        required: [*given.get(required, []), {"labelSelector": {"matchLabels": _ours(run)}, **by_node}],
        preferred: [*given.get(preferred, []), {"weight": 100, "podAffinityTerm": captain}],
    }
    return {"affinity": {**affinity, "podAffinity": {**given, **own}}}


def _export(plan: Plan, run: str, model: Model, maps: Mapping[str, Sequence[str]], volumes: list[Object]) -> Object:
    """Makes the model, in the image and with the code, volumes and credentials of the job's own tasks."""
    settings = plan.kubernetes
    in_image = plan.code == CODE_IN_IMAGE
    claim, path = in_claim(model.place)
    told = {
        "run": run, "snapshot": model.snapshot, "pinned": model.pinned,
        "plan": pods.PLAN_FOLDER, "folder": pods.RUN_FOLDER,
        "place": f"{pods.SNAPSHOTS_FOLDER}/{path}".rstrip("/") if claim else model.place,
        "code": pods.CODE_FOLDER if maps["code"] else "",
        "work": "" if in_image and settings["work"] == pods.WORK else settings["work"],
        "obstore": pods.LIBRARY_FOLDER if maps["library"] else "",
        "format": "saved_model" if is_tensorflow_serving(plan.serve["image"]) else "",
        "to": f"{MODELS}/{model.name}", "last_words": pods.LAST_WORDS,
        "monitoring": MONITORING if is_tensorflow_serving(plan.serve["image"]) else "",
    }  # fmt: skip
    container = pods.bare_container(plan, EXPORT, _resources(plan))
    container["command"] = pods.agent_command("export", CANNOT)
    more, mounts = pods.extra_volumes(settings["volumes"])
    pods.give_credentials(plan, container, told, more, mounts)
    if claim:
        more.append({"name": "paceline-snapshots", "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": "paceline-snapshots", "mountPath": pods.SNAPSHOTS_FOLDER, "readOnly": True})
    if not in_image:
        more.append({"name": "paceline-work", "emptyDir": {}})
        mounts.append({"name": "paceline-work", "mountPath": settings["work"]})
    for what, folder in (("code", pods.CODE_FOLDER), ("library", pods.LIBRARY_FOLDER)):
        if maps[what]:
            more.append({"name": f"paceline-{what}", **projected(maps[what])})
            mounts.append({"name": f"paceline-{what}", "mountPath": folder, "readOnly": True})
    volumes += more
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
            "--max_num_load_retries=0",  # of a model that cannot be loaded: there will be no other in this pod
        ]  # fmt: skip
        ready: Object = {"httpGet": {"path": f"/v1/models/{model.name}", "port": "rest"}}
        alive = listening
    else:
        container["command"] = [
            "python3", "-m", "paceline.serve", "--base", folder, "--name", model.name,
            "--host", "0.0.0.0", "--port", str(names.REST_PORT),
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
    spec = {"type": plan.serve["service"], "selector": _ours(run), "ports": _ports(plan)}
    return {**_head("v1", "Service", names.server(run), plan, run), "spec": spec}


def _network_policy(plan: Plan, run: str) -> Object:
    """Its ports are for everybody, and no others are."""
    ports = [{"port": each["port"]} for each in _ports(plan)]
    spec = {"podSelector": {"matchLabels": _ours(run)}, "policyTypes": ["Ingress"], "ingress": [{"ports": ports}]}
    return {**_head("networking.k8s.io/v1", "NetworkPolicy", names.server(run), plan, run), "spec": spec}


def _ports(plan: Plan) -> list[Object]:
    grpc = [{"name": "grpc", "port": names.GRPC_PORT}] if is_tensorflow_serving(plan.serve["image"]) else []
    return [{"name": "rest", "port": names.REST_PORT}, *grpc]


def _resources(plan: Plan) -> Object:
    """Of both containers: they run one after the other."""
    asked = plan.serve
    return pods.resources(plan.kubernetes, asked["cpu"], asked["memory"], asked["gpus"])


def _ours(run: str) -> dict[str, str]:
    return {names.SERVES_LABEL: run}


def _head(version: str, kind: str, name: str, plan: Plan, run: str) -> Object:
    metadata: Object = {"name": name, "labels": names.server_labels(run, plan.name)}
    if plan.kubernetes["namespace"]:
        metadata["namespace"] = plan.kubernetes["namespace"]
    return {"apiVersion": version, "kind": kind, "metadata": metadata}
