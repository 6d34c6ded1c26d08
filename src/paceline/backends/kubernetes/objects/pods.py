"""The pods of a run: the user's image with the agent as its command, within the `restricted` Pod Security level."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

from paceline.agent.captain.snapshots.restoring_tasks import restores
from paceline.agent.pod import CANNOT, CANNOT_WORDS
from paceline.backends.kubernetes.objects import names
from paceline.backends.kubernetes.objects.config_maps import projected
from paceline.backends.kubernetes.objects.names import HostPool
from paceline.backends.kubernetes.objects.pod_patch import merge, patch_for
from paceline.plan import CAPTAIN, CODE_IN_IMAGE, TENSORBOARD, Plan, split_claim

Object = dict[str, Any]

LEASE_S = 30.0  # seconds; a deleted captain's pod is replaced within this time, so that training continues
LOST_NODE_S = 30  # how long a pod stays on a lost node
ANY_SKEW = 2**31 - 1
TERMINATION_S = 10  # seconds for the agent itself, in addition to the grace period of its tasks
CAPTAIN_REQUESTS = {"cpu": "100m", "memory": "128Mi"}
CAPTAIN_DISK = "640Mi"  # series take up to 544 MiB, events to upload 64, other events 18
LOG_SHARE = 0.8  # of the log volume that logs may take: a pod is evicted if it exceeds the size of the volume
CAPTAIN_LIMITS = {"cpu": "1", "memory": "1Gi"}  # 5,000 members take 164 MB; a quota may require both fields
BOARD_REQUESTS = {"cpu": "100m", "memory": "256Mi"}
BOARD_MEMORY_LIMIT = "1Gi"
BOARD_TERMINATION_S = 5
AGENT_FOLDER, PLAN_FOLDER, TLS_FOLDER, CODE_FOLDER = (f"/paceline/{name}" for name in ("agent", "plan", "tls", "code"))
RUN_FOLDER, HOME = "/paceline/run", "/paceline/home"
AGENT = f"{RUN_FOLDER}/agent.pyz"  # joined from the parts in AGENT_FOLDER
TERMINATION_LOG = "/dev/termination-log"
CREDENTIALS = "/paceline/credentials"
SNAPSHOTS_FOLDER, ORIGIN_FOLDER = "/paceline/snapshots", "/paceline/origin"
MEMORY_FOLDER = "/paceline/memory"
LARGEST_PAGE = 64 * 1024  # bytes; a node's pages of memory have 4 to 64 KiB
LIBRARY_FOLDER = "/paceline/library"
DATA_FOLDER = "/paceline/data"
WORK = "/paceline/work"  # default; the job file can set another
VISIT = "visit"  # the container of a pod that only mounts the claim
VISIT_IDLE_S = 30  # until it ends on its own

# An image may have python or python3, and in an old image `python` may be Python 2.
EXEC_PYTHON = (
    'for p in python3 python; do "$p" -c "import sys; sys.exit(sys.version_info < (3, 9))" 2>/dev/null && exec "$p"'
)
_NO_PYTHON = (
    f'w="{CANNOT_WORDS}there is no Python 3.9 or newer in this image: Paceline needs one on the PATH"; '
    f'echo "$w"; echo "$w" > {TERMINATION_LOG}; exit '
)
# Joins the parts in Python, since a minimal image may have no `cat`, and ignores modules in the image's working folder.
# A restarted container replaces the file.
_JOIN = f"""import sys
sys.path = [place for place in sys.path if place]
import os
python, what, *parts = sys.argv[1:]
with open("{AGENT}.partial", "wb") as whole:
    for name in parts:
        with open(name, "rb") as part:
            whole.write(part.read())
os.replace("{AGENT}.partial", "{AGENT}")
os.execlp(python, python, "{AGENT}", what)
"""
# Runs as long as the container has another process, which reads the claim. A glob starts no process.
_VISIT = (
    f"left={VISIT_IDLE_S}; while [ $left -gt 0 ]; do sleep 1; set -- /proc/[0-9]*; "
    f"[ $# -gt 1 ] && left={VISIT_IDLE_S} || left=$((left - 1)); done"
)


def captain(plan: Plan, run: str, agent: list[str], library: list[str]) -> Object:
    """`agent`, `library`: the names of their ConfigMaps."""
    requests = {**CAPTAIN_REQUESTS, "ephemeral-storage": CAPTAIN_DISK}
    container = bare_container(plan, CAPTAIN, {"requests": requests, "limits": CAPTAIN_LIMITS})
    options = _pod_options(plan, run, CAPTAIN, run, 0)
    volumes: list[Object] = []
    mounts: list[Object] = []
    folder = _mount_claim(plan, volumes, mounts)
    options |= {"snapshots": folder, "serve": names.SNAPSHOTS_PORT, "origin": _origin(plan, volumes, mounts)}
    options |= {"obstore": LIBRARY_FOLDER if plan.needs_bucket else ""}
    if plan.metrics:
        options |= {"metrics": names.METRICS_PORT}
        container["ports"] = [{"name": "metrics", "containerPort": names.METRICS_PORT}]
    if plan.needs_bucket:
        volumes.append({"name": "paceline-library", **projected(library)})
        mounts.append({"name": "paceline-library", "mountPath": LIBRARY_FOLDER, "readOnly": True})
    if plan.snapshots.needs_bucket or plan.delivers:
        give_credentials(plan, container, options, volumes, mounts)
    else:
        container["env"] = _env(options)
    uid = {"fieldPath": "metadata.labels['batch.kubernetes.io/controller-uid']"}
    container["env"].append({"name": "PACELINE_JOB_UID", "valueFrom": {"fieldRef": uid}})
    container["volumeMounts"] = _mounts(mounts)
    spec = _spec(plan, run, container, volumes, agent, "captain")
    return {**spec, "restartPolicy": "Never"}  # required by podFailurePolicy


def _mount_claim(plan: Plan, volumes: list[Object], mounts: list[Object]) -> str:
    """The captain's folder for snapshots in a claim; empty: they are not in a claim, but where the plan says or in the
    run's folder, which is deleted with its pod."""
    claim, path = plan.snapshots.claimed
    if not claim:
        return ""
    volumes.append({"name": "paceline-snapshots", "persistentVolumeClaim": {"claimName": claim}})
    mounts.append({"name": "paceline-snapshots", "mountPath": SNAPSHOTS_FOLDER})
    return f"{SNAPSHOTS_FOLDER}/{path}".rstrip("/")


def _origin(plan: Plan, volumes: list[Object], mounts: list[Object]) -> str:
    """The captain's folder with the snapshot to start from, if that is in a claim; empty: as the plan says."""
    claim, path = split_claim(plan.snapshots.origin)
    if not claim:
        return ""
    if claim == plan.snapshots.claimed[0]:
        return f"{SNAPSHOTS_FOLDER}/{path}"
    volumes.append({"name": "paceline-origin", "persistentVolumeClaim": {"claimName": claim}})
    mounts.append({"name": "paceline-origin", "mountPath": ORIGIN_FOLDER, "readOnly": True})
    return f"{ORIGIN_FOLDER}/{path}"


def _data(plan: Plan, pool: HostPool, volumes: list[Object], mounts: list[Object]) -> str:
    """The folder with the job's data, if it is in a claim; empty: as the plan says. Only the ingesting pool can write
    there."""
    claim, path = ("", "") if plan.ingest is None else plan.ingest.claimed
    if not claim or plan.ingest_task is None:
        return ""
    ingests = plan.ingest_task.host in [host.name for host in pool.hosts]
    volumes.append({"name": "paceline-data", "persistentVolumeClaim": {"claimName": claim}})
    mounts.append({"name": "paceline-data", "mountPath": DATA_FOLDER, **({} if ingests else {"readOnly": True})})
    return f"{DATA_FOLDER}/{path}".rstrip("/")


def _memory(plan: Plan, pool: HostPool, container: Object, volumes: list[Object], mounts: list[Object]) -> str:
    """The folder in memory that tasks may save snapshots to; empty: none. It counts as memory of the container. If that
    has no limit, none is added: the tasks would have to fit into what the folder leaves."""
    amount, tasks = plan.snapshots.memory, pool.hosts[0].tasks
    if amount is None or not any(restores(plan, task) for task in plan.tasks if task.name in tasks):
        return ""
    requests, limits = container["resources"].setdefault("requests", {}), container["resources"].get("limits", {})
    requests["memory"] = str(int(requests.get("memory", 0)) + amount)
    if "memory" in limits:
        limits["memory"] = requests["memory"]
    # The node rounds the size of the file system up to pages, but evicts a pod whose files exceed the limit.
    size = str(amount // LARGEST_PAGE * LARGEST_PAGE)
    volumes.append({"name": "paceline-memory", "emptyDir": {"medium": "Memory", "sizeLimit": size}})
    mounts.append({"name": "paceline-memory", "mountPath": MEMORY_FOLDER})
    return MEMORY_FOLDER


def _logs(plan: Plan, pool: HostPool, container: Object, volumes: list[Object], mounts: list[Object]) -> None:
    """A volume for the output of tasks, which is requested of the node's disk. There is no limit of the disk: other
    files, such as snapshots that are not committed yet, must not evict the pod."""
    ingests = plan.ingest_task is not None and plan.ingest_task.host in [host.name for host in pool.hosts]
    tasks = max(len(host.tasks) for host in pool.hosts) + ingests
    size = str(math.ceil(tasks * plan.limits.log / LOG_SHARE))
    container["resources"].setdefault("requests", {})["ephemeral-storage"] = size
    volumes.append({"name": "paceline-logs", "emptyDir": {"sizeLimit": size}})
    mounts.append({"name": "paceline-logs", "mountPath": f"{RUN_FOLDER}/logs"})


def give_credentials(
    plan: Plan, container: Object, options: Object, volumes: list[Object], mounts: list[Object]
) -> None:
    settings, credentials = plan.kubernetes, plan.credentials
    container["env"] = _env(options)
    container["envFrom"] = [_env_from(source) for source in settings["env_from"]]
    if credentials:
        variable = {"name": "GOOGLE_APPLICATION_CREDENTIALS", "value": f"{CREDENTIALS}/{credentials['file']}"}
        container["env"].append(variable)
        items = [{"key": credentials["file"], "path": credentials["file"]}]
        volumes.append(
            {"name": "paceline-credentials", "secret": {"secretName": credentials["secret"], "items": items}}
        )
        mounts.append({"name": "paceline-credentials", "mountPath": CREDENTIALS, "readOnly": True})


def member(plan: Plan, run: str, pool: HostPool, agent: list[str], code: list[str]) -> Object:
    """`agent`, `code`: the names of their ConfigMaps."""
    settings = plan.kubernetes
    host = pool.hosts[0]
    container = bare_container(plan, pool.role, resources(settings, host.cpu, host.memory, host.gpus))
    options = _pod_options(plan, run, pool.role, names.job_of(run, pool), pool.first)
    own_work = plan.code == CODE_IN_IMAGE  # the image has the code and the folder it is in
    options |= {"work": "" if own_work and settings["work"] == WORK else settings["work"]}
    options |= {"code": CODE_FOLDER if code else ""}
    peer = f"peer://{names.captain_host(run)}:{names.SNAPSHOTS_PORT}"
    options |= {"snapshots": "" if plan.snapshots.in_bucket else peer, "obstore": peer if plan.needs_bucket else ""}
    volumes, mounts = extra_volumes(settings["volumes"])
    if data := _data(plan, pool, volumes, mounts):
        options |= {"ingest": data}
    if memory := _memory(plan, pool, container, volumes, mounts):
        options |= {"memory": memory}
    _logs(plan, pool, container, volumes, mounts)
    give_credentials(plan, container, options, volumes, mounts)
    if not own_work:
        mounts.append({"name": "paceline-work", "mountPath": settings["work"]})
        volumes.append({"name": "paceline-work", "emptyDir": {}})
    if host.memory is not None:
        volumes.append({"name": "paceline-shm", "emptyDir": {"medium": "Memory", "sizeLimit": str(host.memory // 2)}})
    else:
        volumes.append({"name": "paceline-shm", "emptyDir": {"medium": "Memory"}})
    mounts.append({"name": "paceline-shm", "mountPath": "/dev/shm"})
    if code:
        volumes.append({"name": "paceline-code", **projected(code)})
        mounts.append({"name": "paceline-code", "mountPath": CODE_FOLDER, "readOnly": True})
    container["volumeMounts"] = _mounts(mounts)
    spec = {**_spec(plan, run, container, volumes, agent, "member"), "restartPolicy": "OnFailure"}
    spec = merge(spec, _placement(settings["placement"], run, pool.role))
    patched: Object = merge(spec, patch_for(settings["pod"], pool.role, [role.name for role in plan.roles]))
    return patched


def board(plan: Plan, run: str, agent: list[str]) -> Object:
    """TensorBoard's pod. The user's patch does not apply to it: that is for the pods that train."""
    settings = plan.kubernetes
    memory = plan.tensorboard["memory"]
    limit = str(memory or BOARD_MEMORY_LIMIT)
    requests = {**BOARD_REQUESTS, **({"memory": limit} if memory else {})}
    container = bare_container(plan, TENSORBOARD, {"requests": requests, "limits": {"cpu": "1", "memory": limit}})
    container["image"] = plan.tensorboard["image"] or settings["image"]
    container["env"] = _env(_pod_options(plan, run, TENSORBOARD, names.board(run), 0))
    container["volumeMounts"] = _mounts([])
    spec = _spec(plan, run, container, [], agent, TENSORBOARD)
    return {**spec, "terminationGracePeriodSeconds": BOARD_TERMINATION_S}


def visit(plan: Plan, is_own: bool) -> Object:
    """A pod that mounts the claim, to read it after the run has ended. `is_own`: this user has submitted the run."""
    container = bare_container(plan, VISIT, {"requests": CAPTAIN_REQUESTS, "limits": CAPTAIN_LIMITS})
    volumes: list[Object] = [{"name": "paceline-tmp", "emptyDir": {}}]
    mounts: list[Object] = [{"name": "paceline-tmp", "mountPath": "/tmp"}]
    _mount_claim(plan, volumes, mounts)
    container |= {"command": ["/bin/sh", "-c", _VISIT], "volumeMounts": mounts}
    spec = {**common_spec(plan, container, volumes, 0), "restartPolicy": "Never"}
    if not is_own:
        spec["securityContext"].pop("fsGroup", None)  # it would change the group of all files in the claim
    return spec


def for_visit_of_others(plan: Plan) -> Plan:
    """The plan of a run that another user submitted, reduced to what a pod needs to read its files: everything else
    would run with the rights of the user who reads them. Its fields may have any type."""
    theirs = plan.kubernetes
    image, user, policy = (theirs.get(name) for name in ("image", "user", "image_pull_policy"))
    secrets = theirs.get("image_pull_secrets")
    settings = {
        "image": image if isinstance(image, str) else "",
        "image_pull_policy": policy if policy in ("Always", "IfNotPresent", "Never") else None,
        "image_pull_secrets": [name for name in secrets if isinstance(name, str)] if isinstance(secrets, list) else [],
        "user": user if type(user) is int and 0 < user < 2**31 else "cluster",
    }
    unused: Object = dict.fromkeys(("namespace", "service_account", "priority_class"))
    unused |= {"labels": {}, "annotations": {}, "tolerations": [], "node_selector": {}, "affinity": {}}
    return replace(plan, kubernetes={**unused, **settings})


def snapshots_folder(plan: Plan) -> str:
    """The folder for snapshots in the captain's pod, unless they are in a bucket; also in a `visit` pod."""
    return _mount_claim(plan, [], []) or f"{RUN_FOLDER}/snapshots"


def metadata(plan: Plan, run: str, role: str) -> Object:
    """The user's labels never replace Paceline's. No sidecar of a service mesh: it would outlive the tasks."""
    settings = plan.kubernetes
    return {
        "labels": {**settings["labels"], "sidecar.istio.io/inject": "false", **names.labels(run, plan.name, role)},
        "annotations": {"linkerd.io/inject": "disabled", **settings["annotations"]},
    }


def agent_command(mode: str, without_python: int) -> list[str]:
    """`mode`: pod or export. `without_python`: the exit code if the image has no Python."""
    join = f'{EXEC_PYTHON} -S -c "$1" "$p" {mode} {AGENT_FOLDER}/agent-*; done'
    return ["/bin/sh", "-c", f"{join}; {_NO_PYTHON}{without_python}", "sh", _JOIN]


def _pod_options(plan: Plan, run: str, role: str, job: str, first: int) -> Object:
    return {
        "run": run, "role": role, "job": job, "first": first, "captain": names.captain_address(run),
        "plan": PLAN_FOLDER, "tls": TLS_FOLDER, "folder": RUN_FOLDER,
        "last_words": TERMINATION_LOG, "lease": LEASE_S,
        "tensorboard": f"{names.board(run)}:{names.FILES_PORT}" if plan.tensorboard else "",
    }  # fmt: skip


def _env(options: Object) -> list[Object]:
    return [
        {"name": "PACELINE_POD", "value": json.dumps(options, sort_keys=True)},
        {"name": "PACELINE_POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "PACELINE_POD_UID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}},
        {"name": "HOME", "value": HOME},
        {"name": "USER", "value": "paceline"},
    ]


def bare_container(plan: Plan, name: str, resources: Object) -> Object:
    settings = plan.kubernetes
    container: Object = {
        "name": name,
        "image": settings["image"],
        # This exit code fails the captain's Job. A member exits with 0: retrying would only occupy its resources.
        "command": agent_command("pod", CANNOT if name == CAPTAIN else 0),
        # With an image for another processor, or an agent that crashes, the log is the only termination message.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "resources": resources,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
    }
    if settings["image_pull_policy"]:
        container["imagePullPolicy"] = settings["image_pull_policy"]
    return container


def resources(settings: Object, cpu: float | None, memory: int | None, gpus: int | None) -> Object:
    """Requests equal limits: a host gets exactly what the job requests."""
    amounts: dict[str, str] = {}
    if cpu is not None:
        amounts["cpu"] = f"{round(1000 * cpu)}m"
    if memory is not None:
        amounts["memory"] = str(memory)
    if gpus:
        amounts[settings["gpu_resource"]] = str(gpus)
    return {"requests": amounts, "limits": dict(amounts)} if amounts else {}


def _mounts(more: list[Object]) -> list[Object]:
    return [
        {"name": "paceline-agent", "mountPath": AGENT_FOLDER, "readOnly": True},
        {"name": "paceline-plan", "mountPath": PLAN_FOLDER, "readOnly": True},
        {"name": "paceline-tls", "mountPath": TLS_FOLDER, "readOnly": True},
        {"name": "paceline-run", "mountPath": RUN_FOLDER},
        {"name": "paceline-home", "mountPath": HOME},
        {"name": "paceline-tmp", "mountPath": "/tmp"},
        *more,
    ]


def _spec(plan: Plan, run: str, container: Object, volumes: list[Object], agent: list[str], certificate: str) -> Object:
    files = [{"key": name, "path": name} for name in ("ca.pem", f"{certificate}.pem", f"{certificate}.key")]
    # The image's own user may be in any group; no other user is in the pod.
    readable = 0o444 if plan.kubernetes["user"] == "cluster" else 0o440
    volumes = [
        {"name": "paceline-agent", **projected(agent)},
        {"name": "paceline-plan", "configMap": {"name": f"{run}-plan"}},
        {"name": "paceline-tls", "secret": {"secretName": run, "items": files, "defaultMode": readable}},
        *({"name": f"paceline-{name}", "emptyDir": {}} for name in ("run", "home", "tmp")),
        *volumes,
    ]
    termination = math.ceil(plan.limits.grace) + TERMINATION_S
    return {"subdomain": run, **common_spec(plan, container, volumes, termination)}


def common_spec(plan: Plan, container: Object, volumes: list[Object], termination: int) -> Object:
    """The fields that all pods have in common."""
    settings = plan.kubernetes
    spec: Object = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": termination,
        "securityContext": _user(settings["user"]),
        "tolerations": [
            *(
                {"key": f"node.kubernetes.io/{state}", "operator": "Exists", "effect": "NoExecute",
                 "tolerationSeconds": LOST_NODE_S}
                for state in ("not-ready", "unreachable")
            ),
            *map(_toleration, settings["tolerations"]),
        ],
        "containers": [container],
        "volumes": volumes,
    }  # fmt: skip
    if settings["node_selector"]:
        spec["nodeSelector"] = settings["node_selector"]
    if settings["affinity"]:
        spec["affinity"] = settings["affinity"]
    if settings["priority_class"]:
        spec["priorityClassName"] = settings["priority_class"]
    if settings["service_account"]:
        spec["serviceAccountName"] = settings["service_account"]
    if settings["image_pull_secrets"]:
        spec["imagePullSecrets"] = [{"name": name} for name in settings["image_pull_secrets"]]
    return spec


def _user(user: int | str) -> Object:
    context: Object = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    if user != "cluster":
        context |= {"runAsUser": user, "runAsGroup": user, "fsGroup": user}
    return context


def _toleration(toleration: Object) -> Object:
    kubernetes_names = {"seconds": "tolerationSeconds"}
    return {kubernetes_names.get(name, name): value for name, value in toleration.items() if value is not None}


def _env_from(source: Object) -> Object:
    prefix: Object = {"prefix": source["prefix"]} if source.get("prefix") else {}
    if source.get("secret"):
        return {**prefix, "secretRef": {"name": source["secret"]}}
    return {**prefix, "configMapRef": {"name": source["config_map"]}}


def extra_volumes(requested: list[Object]) -> tuple[list[Object], list[Object]]:
    volumes, mounts = [], []
    for number, each in enumerate(requested):
        name = each.get("name") or f"volume-{number}"
        if each.get("claim"):
            source: Object = {"persistentVolumeClaim": {"claimName": each["claim"]}}
        elif each.get("secret"):
            source = {"secret": {"secretName": each["secret"]}}
        elif each.get("config_map"):
            source = {"configMap": {"name": each["config_map"]}}
        else:
            source = {"emptyDir": {"sizeLimit": str(each["empty"])}}
        volumes.append({"name": name, **source})
        mounts.append({"name": name, "mountPath": each["mount"], **({"readOnly": True} if each["read_only"] else {})})
    return volumes, mounts


def _placement(placement: str | None, run: str, role: str) -> Object:
    by_node = {
        "topologyKey": "kubernetes.io/hostname",
        "labelSelector": {"matchLabels": {names.RUN_LABEL: run, names.ROLE_LABEL: role}},
    }
    if placement == "spread":
        return {"topologySpreadConstraints": [{"maxSkew": 1, "whenUnsatisfiable": "ScheduleAnyway", **by_node}]}
    if placement == "pack":
        preferred = [{"weight": 100, "podAffinityTerm": by_node}]
        # Without a constraint in the pod, the scheduler spreads the pods of a Service, which outweighs the affinity.
        any_skew = {"maxSkew": ANY_SKEW, "whenUnsatisfiable": "ScheduleAnyway", **by_node}
        return {
            "affinity": {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}},
            "topologySpreadConstraints": [any_skew],
        }
    return {}
