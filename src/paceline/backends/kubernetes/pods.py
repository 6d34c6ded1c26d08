"""The pods of a run: the person's image with our agent as its command, under the `restricted` Pod Security level."""

from __future__ import annotations

import json
import math
from typing import Any

from paceline.agent.pod import CANNOT, CANNOT_WORDS
from paceline.backends.kubernetes import names
from paceline.backends.kubernetes.config_maps import projected
from paceline.backends.kubernetes.names import HostGroup
from paceline.backends.kubernetes.patch import merge
from paceline.plan import CAPTAIN, CODE_IN_IMAGE, TENSORBOARD, Plan, in_claim

Object = dict[str, Any]

LEASE_S = 30.0  # a captain's pod that was deleted is back within it, so that training goes on
LOST_NODE_S = 30  # how long a pod stays on a node that is gone
ANY_SKEW = 2**31 - 1
TERMINATION_S = 10  # for the agent itself, on top of the grace of its tasks
CAPTAIN_NEEDS = {"cpu": "100m", "memory": "128Mi"}
CAPTAIN_MOST = {"cpu": "1", "memory": "1Gi"}  # 5,000 members take 164 MB; a quota may ask for both
BOARD_NEEDS = {"cpu": "100m", "memory": "256Mi"}
BOARD_MOST_MEMORY = "1Gi"
BOARD_TERMINATION_S = 5
AGENT_FOLDER, PLAN_FOLDER, TLS_FOLDER, CODE_FOLDER = (f"/paceline/{name}" for name in ("agent", "plan", "tls", "code"))
RUN_FOLDER, HOME = "/paceline/run", "/paceline/home"
AGENT = f"{RUN_FOLDER}/agent.pyz"  # joined from the parts in AGENT_FOLDER
LAST_WORDS = "/dev/termination-log"
CREDENTIALS = "/paceline/credentials"
SNAPSHOTS_FOLDER, ORIGIN_FOLDER = "/paceline/snapshots", "/paceline/origin"
LIBRARY_FOLDER = "/paceline/library"
DATA_FOLDER = "/paceline/data"
WORK = "/paceline/work"  # unless the job file says otherwise
VISIT = "visit"  # the container of a pod that has nothing but the claim
VISIT_IDLE_S = 30  # until it ends by itself

# An image may call it python or python3, and an old one may mean Python 2 by the first.
EXEC_PYTHON = (
    'for p in python3 python; do "$p" -c "import sys; sys.exit(sys.version_info < (3, 9))" 2>/dev/null && exec "$p"'
)
_NO_PYTHON = (
    f'w="{CANNOT_WORDS}there is no Python 3.9 or newer in this image: Paceline needs one on the PATH"; '
    f'echo "$w"; echo "$w" > {LAST_WORDS}; exit '
)
# Joined by Python, since a minimal image may have no `cat`, and without what lies in the working folder of the image. A
# container that starts again replaces the file.
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
# As long as another process is in the container: somebody who looks at the claim. A glob needs no process.
_VISIT = (
    f"left={VISIT_IDLE_S}; while [ $left -gt 0 ]; do sleep 1; set -- /proc/[0-9]*; "
    f"[ $# -gt 1 ] && left={VISIT_IDLE_S} || left=$((left - 1)); done"
)


def captain(plan: Plan, run: str, agent: list[str], library: list[str]) -> Object:
    """`agent`, `library`: the names of the ConfigMaps that carry them."""
    container = bare_container(plan, CAPTAIN, {"requests": CAPTAIN_NEEDS, "limits": CAPTAIN_MOST})
    told = _told(plan, run, CAPTAIN, run, 0)
    volumes: list[Object] = []
    mounts: list[Object] = []
    place = _claimed(plan, volumes, mounts)
    told |= {"snapshots": place, "serve": names.SNAPSHOTS_PORT, "origin": _origin(plan, volumes, mounts)}
    told |= {"obstore": LIBRARY_FOLDER if plan.needs_bucket else ""}
    if plan.needs_bucket:
        volumes.append({"name": "paceline-library", **projected(library)})
        mounts.append({"name": "paceline-library", "mountPath": LIBRARY_FOLDER, "readOnly": True})
    if plan.snapshots.needs_bucket:
        give_credentials(plan, container, told, volumes, mounts)
    else:
        container["env"] = _env(told)
    uid = {"fieldPath": "metadata.labels['batch.kubernetes.io/controller-uid']"}
    container["env"].append({"name": "PACELINE_JOB_UID", "valueFrom": {"fieldRef": uid}})
    container["volumeMounts"] = _mounts(mounts)
    spec = _spec(plan, run, container, volumes, agent, "captain")
    return {**spec, "restartPolicy": "Never"}  # what a podFailurePolicy asks for


def _claimed(plan: Plan, volumes: list[Object], mounts: list[Object]) -> str:
    """Where the captain has the snapshots: in a claim; empty: as the plan says, or in the run's folder, which goes with
    its pod."""
    claim, path = plan.snapshots.claimed
    if not claim:
        return ""
    volumes.append({"name": "paceline-snapshots", "persistentVolumeClaim": {"claimName": claim}})
    mounts.append({"name": "paceline-snapshots", "mountPath": SNAPSHOTS_FOLDER})
    return f"{SNAPSHOTS_FOLDER}/{path}".rstrip("/")


def _origin(plan: Plan, volumes: list[Object], mounts: list[Object]) -> str:
    """Where the captain finds what the run starts from, in a claim; empty: as the plan says."""
    claim, path = in_claim(plan.snapshots.origin)
    if not claim:
        return ""
    if claim == plan.snapshots.claimed[0]:
        return f"{SNAPSHOTS_FOLDER}/{path}"
    volumes.append({"name": "paceline-origin", "persistentVolumeClaim": {"claimName": claim}})
    mounts.append({"name": "paceline-origin", "mountPath": ORIGIN_FOLDER, "readOnly": True})
    return f"{ORIGIN_FOLDER}/{path}"


def _data(plan: Plan, group: HostGroup, volumes: list[Object], mounts: list[Object]) -> str:
    """Where the data of the job is, in a claim; empty: as the plan says. Only who is to make it may write there."""
    claim, path = ("", "") if plan.ingest is None else plan.ingest.claimed
    if not claim or plan.ingest_task is None:
        return ""
    makes = plan.ingest_task.host in [host.name for host in group.hosts]
    volumes.append({"name": "paceline-data", "persistentVolumeClaim": {"claimName": claim}})
    mounts.append({"name": "paceline-data", "mountPath": DATA_FOLDER, **({} if makes else {"readOnly": True})})
    return f"{DATA_FOLDER}/{path}".rstrip("/")


def give_credentials(plan: Plan, container: Object, told: Object, volumes: list[Object], mounts: list[Object]) -> None:
    settings, credentials = plan.kubernetes, plan.credentials
    container["env"] = _env(told)
    container["envFrom"] = [_env_from(source) for source in settings["env_from"]]
    if credentials:
        place = {"name": "GOOGLE_APPLICATION_CREDENTIALS", "value": f"{CREDENTIALS}/{credentials['file']}"}
        container["env"].append(place)
        items = [{"key": credentials["file"], "path": credentials["file"]}]
        volumes.append(
            {"name": "paceline-credentials", "secret": {"secretName": credentials["secret"], "items": items}}
        )
        mounts.append({"name": "paceline-credentials", "mountPath": CREDENTIALS, "readOnly": True})


def member(plan: Plan, run: str, group: HostGroup, agent: list[str], code: list[str]) -> Object:
    """`agent`, `code`: the names of the ConfigMaps that carry them."""
    settings = plan.kubernetes
    host = group.hosts[0]
    container = bare_container(plan, group.role, resources(settings, host.cpu, host.memory, host.gpus))
    told = _told(plan, run, group.role, names.job_of(run, group), group.first)
    own_work = plan.code == CODE_IN_IMAGE  # its code, and the folder it lies in
    told |= {"work": "" if own_work and settings["work"] == WORK else settings["work"]}
    told |= {"code": CODE_FOLDER if code else ""}
    peer = f"peer://{names.captain_host(run)}:{names.SNAPSHOTS_PORT}"
    told |= {"snapshots": "" if plan.snapshots.in_bucket else peer, "obstore": peer if plan.needs_bucket else ""}
    volumes, mounts = extra_volumes(settings["volumes"])
    if data := _data(plan, group, volumes, mounts):
        told |= {"ingest": data}
    give_credentials(plan, container, told, volumes, mounts)
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
    spec = merge(spec, _placement(settings["placement"], run, group.role))
    patched: Object = merge(spec, settings["pod"])
    return patched


def board(plan: Plan, run: str, agent: list[str]) -> Object:
    """TensorBoard's pod; no patch of the person's, which is for the pods that train."""
    settings = plan.kubernetes
    memory = plan.tensorboard["memory"]
    most = str(memory or BOARD_MOST_MEMORY)
    needs = {**BOARD_NEEDS, **({"memory": most} if memory else {})}
    container = bare_container(plan, TENSORBOARD, {"requests": needs, "limits": {"cpu": "1", "memory": most}})
    container["image"] = plan.tensorboard["image"] or settings["image"]
    container["env"] = _env(_told(plan, run, TENSORBOARD, names.board(run), 0))
    container["volumeMounts"] = _mounts([])
    spec = _spec(plan, run, container, [], agent, TENSORBOARD)
    return {**spec, "terminationGracePeriodSeconds": BOARD_TERMINATION_S}


def visit(plan: Plan) -> Object:
    """For people who look at the claim when nothing of their run is left."""
    container = bare_container(plan, VISIT, {"requests": CAPTAIN_NEEDS, "limits": CAPTAIN_MOST})
    volumes: list[Object] = [{"name": "paceline-tmp", "emptyDir": {}}]
    mounts: list[Object] = [{"name": "paceline-tmp", "mountPath": "/tmp"}]
    _claimed(plan, volumes, mounts)
    container |= {"command": ["/bin/sh", "-c", _VISIT], "volumeMounts": mounts}
    return {**anywhere(plan, container, volumes, 0), "restartPolicy": "Never"}


def place(plan: Plan) -> str:
    """Where the captain's pod has the snapshots, unless they are in a bucket; one that visits has the claim there."""
    return _claimed(plan, [], []) or f"{RUN_FOLDER}/snapshots"


def metadata(plan: Plan, run: str, role: str) -> Object:
    """Labels of the person's own never replace ours; a service mesh keeps out, as it would outlive the tasks."""
    settings = plan.kubernetes
    return {
        "labels": {**settings["labels"], "sidecar.istio.io/inject": "false", **names.labels(run, plan.name, role)},
        "annotations": {"linkerd.io/inject": "disabled", **settings["annotations"]},
    }


def agent_command(what: str, without_python: int) -> list[str]:
    """`without_python`: the exit code in an image that has none."""
    join = f'{EXEC_PYTHON} -S -c "$1" "$p" {what} {AGENT_FOLDER}/agent-*; done'
    return ["/bin/sh", "-c", f"{join}; {_NO_PYTHON}{without_python}", "sh", _JOIN]


def _told(plan: Plan, run: str, role: str, job: str, first: int) -> Object:
    return {
        "run": run, "role": role, "job": job, "first": first, "captain": names.captain_address(run),
        "plan": PLAN_FOLDER, "tls": TLS_FOLDER, "folder": RUN_FOLDER,
        "last_words": LAST_WORDS, "lease": LEASE_S,
        "tensorboard": f"{names.board(run)}:{names.FILES_PORT}" if plan.tensorboard else "",
    }  # fmt: skip


def _env(told: Object) -> list[Object]:
    return [
        {"name": "PACELINE_POD", "value": json.dumps(told, sort_keys=True)},
        {"name": "PACELINE_POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "PACELINE_POD_UID", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}},
        {"name": "HOME", "value": HOME},
        {"name": "USER", "value": "paceline"},
    ]


def bare_container(plan: Plan, name: str, resources: Object) -> Object:
    settings = plan.kubernetes
    made: Object = {
        "name": name,
        "image": settings["image"],
        # The captain's Job fails by it; a member leaves for good, since trying again would only hold its resources.
        "command": agent_command("pod", CANNOT if name == CAPTAIN else 0),
        # An image for another processor, or an agent that crashes, has no last words but what it wrote.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "resources": resources,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
    }
    if settings["image_pull_policy"]:
        made["imagePullPolicy"] = settings["image_pull_policy"]
    return made


def resources(settings: Object, cpu: float | None, memory: int | None, gpus: int | None) -> Object:
    """What the job asks for is what a host gets: no more, so that the cluster can place it, and no less."""
    asked: dict[str, str] = {}
    if cpu is not None:
        asked["cpu"] = f"{round(1000 * cpu)}m"
    if memory is not None:
        asked["memory"] = str(memory)
    if gpus:
        asked[settings["gpu_resource"]] = str(gpus)
    return {"requests": asked, "limits": dict(asked)} if asked else {}


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
    # A user of the image's own may be in any group; nobody else is in the pod.
    readable = 0o444 if plan.kubernetes["user"] == "cluster" else 0o440
    volumes = [
        {"name": "paceline-agent", **projected(agent)},
        {"name": "paceline-plan", "configMap": {"name": f"{run}-plan"}},
        {"name": "paceline-tls", "secret": {"secretName": run, "items": files, "defaultMode": readable}},
        *({"name": f"paceline-{name}", "emptyDir": {}} for name in ("run", "home", "tmp")),
        *volumes,
    ]
    termination = math.ceil(plan.limits.grace) + TERMINATION_S
    return {"subdomain": run, **anywhere(plan, container, volumes, termination)}


def anywhere(plan: Plan, container: Object, volumes: list[Object], termination: int) -> Object:
    """What all pods have in common."""
    settings = plan.kubernetes
    spec: Object = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": termination,
        "securityContext": _user(settings["user"]),
        "tolerations": [
            *(
                {"key": f"node.kubernetes.io/{why}", "operator": "Exists", "effect": "NoExecute",
                 "tolerationSeconds": LOST_NODE_S}
                for why in ("not-ready", "unreachable")
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
    made: Object = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    if user != "cluster":
        made |= {"runAsUser": user, "runAsGroup": user, "fsGroup": user}
    return made


def _toleration(given: Object) -> Object:
    names_there = {"seconds": "tolerationSeconds"}
    return {names_there.get(name, name): value for name, value in given.items() if value is not None}


def _env_from(source: Object) -> Object:
    made: Object = {"prefix": source["prefix"]} if source.get("prefix") else {}
    if source.get("secret"):
        return {**made, "secretRef": {"name": source["secret"]}}
    return {**made, "configMapRef": {"name": source["config_map"]}}


def extra_volumes(given: list[Object]) -> tuple[list[Object], list[Object]]:
    volumes, mounts = [], []
    for number, each in enumerate(given):
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
        # Without any of its own, the scheduler spreads the pods of a Service, and that outweighs the affinity.
        any_skew = {"maxSkew": ANY_SKEW, "whenUnsatisfiable": "ScheduleAnyway", **by_node}
        return {
            "affinity": {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}},
            "topologySpreadConstraints": [any_skew],
        }
    return {}
