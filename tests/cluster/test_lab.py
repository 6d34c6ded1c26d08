"""The cluster of the cluster tests is a real one, and leaves nothing behind; test_faults breaks and repairs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.lab import cgroups
from support.lab.cluster import Cluster, LabError
from support.lab.places import TESTS, Place

RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "runAsNonRoot": True,
    "runAsUser": 1000,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}
LOOK_UP = """
import os, socket, sys, time
until = time.monotonic() + 270
for index in range(3):
    while True:
        try:
            print(index, socket.gethostbyname(f"peers-{index}.peers"), flush=True)
            break
        except OSError:
            if time.monotonic() > until:
                sys.exit(f"no address for {index}")
            time.sleep(0.1)
following = (int(os.environ["JOB_COMPLETION_INDEX"]) + 1) % 3
with socket.create_server(("", 5000)) as server:
    server.settimeout(270)
    while True:
        try:
            socket.create_connection((f"peers-{following}.peers", 5000), 1).close()
            break
        except OSError:
            if time.monotonic() > until:
                sys.exit(f"cannot reach {following}")
            time.sleep(0.1)
    server.accept()[0].close()
"""


def eventually(description: str, check: Callable[[], Any], limit: float = 300.0) -> Any:
    until = time.monotonic() + limit
    while not (result := check()):
        assert time.monotonic() < until, f"not within {limit:g} s: {description}"
        time.sleep(0.1)
    return result


def spec(*command: str, image: str = "lab.local/python:1", **more: Any) -> dict[str, Any]:
    """A pod's spec that the `restricted` level admits."""
    container = {"name": "main", "image": image, "command": list(command), "securityContext": RESTRICTED}
    return {"restartPolicy": "Never", "terminationGracePeriodSeconds": 0, "containers": [container], **more}


def pod(namespace: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": namespace}, "spec": spec}


def succeeds(cluster: Cluster, namespace: str, name: str) -> str:
    """Wait until the pod succeeds; return its log."""

    def phase() -> str:
        return str(cluster.get(f"pod/{name}", f"--namespace={namespace}")["status"]["phase"])

    eventually(f"{name} ends", lambda: phase() in ("Succeeded", "Failed"))
    log = cluster.kubectl("logs", name, f"--namespace={namespace}")
    assert phase() == "Succeeded", log
    return log


# ---- a real cluster


def test_three_nodes_are_ready(cluster: Cluster) -> None:
    nodes = cluster.get("nodes")["items"]
    assert {node["status"]["nodeInfo"]["kubeletVersion"] for node in nodes} == {"v1.36.4"}
    assert cluster.ready() == {"n1": True, "n2": True, "n3": True}


def test_pods_of_an_indexed_job_find_and_reach_each_other_by_name(cluster: Cluster, namespace: str) -> None:
    labels = {"app": "peers"}
    apart = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": labels}}
    affinity = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}}
    template = spec("python3", "-c", LOOK_UP, subdomain="peers", affinity=affinity)
    job = {
        "completions": 3,
        "parallelism": 3,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": {"metadata": {"labels": labels}, "spec": template},
    }
    metadata = {"name": "peers", "namespace": namespace}
    service = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": labels}
    cluster.apply(
        {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": service},
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": job},
    )
    cluster.kubectl("wait", "--for=condition=complete", "job/peers", f"--namespace={namespace}", "--timeout=300s")
    pods = cluster.get("pods", f"--namespace={namespace}")["items"]
    assert {pod["spec"]["nodeName"] for pod in pods} == {"n1", "n2", "n3"}
    addresses = {pod["status"]["podIP"] for pod in pods}
    for item in pods:
        log = cluster.kubectl("logs", item["metadata"]["name"], f"--namespace={namespace}")
        assert {line.split()[1] for line in log.splitlines()} == addresses


def test_a_restricted_namespace_refuses_a_pod_that_may_be_root(cluster: Cluster, namespace: str) -> None:
    careless = spec("true")
    del careless["containers"][0]["securityContext"]
    with pytest.raises(LabError, match='violates PodSecurity "restricted:latest"'):
        cluster.apply(pod(namespace, "careless", careless))


def test_a_user_of_one_namespace_has_it_and_nothing_else(cluster: Cluster, namespace: str) -> None:
    kubeconfig = cluster.user("ada", namespace)

    def job(namespace_of_job: str) -> dict[str, Any]:
        metadata = {"name": "mine", "namespace": namespace_of_job}
        return {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": metadata,
            "spec": {"template": {"spec": spec("true")}},
        }

    cluster.apply(job(namespace), kubeconfig=kubeconfig)
    cluster.kubectl("wait", "--for=condition=complete", "job/mine", "--timeout=300s", kubeconfig=kubeconfig)
    for forbidden in (
        lambda: cluster.apply(job("default"), kubeconfig=kubeconfig),
        lambda: cluster.get("nodes", kubeconfig=kubeconfig),
        lambda: cluster.get("pods", "--namespace=kube-system", kubeconfig=kubeconfig),
        lambda: cluster.get("namespaces", kubeconfig=kubeconfig),
    ):
        with pytest.raises(LabError, match='User "ada" cannot'):
            forbidden()


def test_requests_are_recorded_for_each_user(cluster: Cluster, namespace: str) -> None:
    kubeconfig = cluster.user("counted", namespace)
    cluster.get("jobs", kubeconfig=kubeconfig)
    cluster.get("jobs", f"--namespace={namespace}")
    paths = [each["requestURI"].split("?")[0] for each in cluster.requests("counted")]
    assert [path for path in paths if path.endswith("/jobs")] == [f"/apis/batch/v1/namespaces/{namespace}/jobs"]


# ---- images and resources


@pytest.mark.parametrize(
    ("name", "image", "program"),
    [
        ("plain", "python", ["python3", "-c", "import ssl, sqlite3, json"]),
        ("busybox", "busybox", ["sh", "-c", "! which python python3"]),
        ("python-only", "python-only", ["sh", "-c", "python -c 'import ssl' && ! python3 -V && ! python3.11 -V"]),
    ],
)
def test_images_are_available_on_request(
    cluster: Cluster, namespace: str, name: str, image: str, program: list[str]
) -> None:
    cluster.images(name)
    cluster.apply(pod(namespace, name, spec(*program, image=f"lab.local/{image}:1")))
    succeeds(cluster, namespace, name)


def unschedulable(cluster: Cluster, namespace: str, name: str) -> str:
    """The reason why the scheduler finds no node for the pod."""

    def reason() -> str:
        conditions = cluster.get(f"pod/{name}", f"--namespace={namespace}")["status"].get("conditions", ())
        return next((each.get("message", "") for each in conditions if each["type"] == "PodScheduled"), "")

    return str(eventually(f"{name} is unschedulable", reason))


def test_the_capacity_of_a_node_can_be_reduced_and_restored(breakable: Cluster, namespace: str) -> None:
    pod_spec = spec("true", nodeSelector={"kubernetes.io/hostname": "n3"})
    pod_spec["containers"][0]["resources"] = {"requests": {"cpu": "500m"}}
    with breakable.reserved("n3", {"cpu": f"{(os.cpu_count() or 1) * 1000 - 100}m"}):
        breakable.apply(pod(namespace, "wants", pod_spec))
        assert "1 Insufficient cpu" in unschedulable(breakable, namespace, "wants")
    succeeds(breakable, namespace, "wants")


def test_a_quota_is_enforced(cluster: Cluster, namespace: str) -> None:
    cluster.quota(namespace, {"pods": "0"})
    with pytest.raises(LabError, match="exceeded quota"):
        cluster.apply(pod(namespace, "one", spec("true")))


# ---- cleaning up

OWNER = """
import sys
from support.lab.cluster import Cluster
cluster = Cluster.start(nodes=1, images=())
print(cluster.name, flush=True)
sys.stdin.read()
cluster.leave()
"""


@pytest.fixture
def owner() -> Iterator[subprocess.Popen[str]]:
    """A separate process with its own cluster."""
    env = {**os.environ, "PYTHONPATH": str(TESTS)}
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", OWNER], env=env, stdin=pipe, stdout=pipe, text=True) as process:
        yield process
        process.kill()


@pytest.mark.xdist_group("more-clusters")
@pytest.mark.parametrize("ending", ["it leaves", "SIGKILL", "its keeper gets SIGKILL"])
def test_nothing_remains_of_a_cluster_when_its_owner_ends(
    owner: subprocess.Popen[str], ending: str, cluster: Cluster
) -> None:
    """Another cluster beside it is not affected."""
    assert owner.stdin and owner.stdout
    name = owner.stdout.readline().strip()
    assert traces(name) == {"processes", "cgroups", "folder", "namespaces"}
    if ending == "it leaves":
        owner.stdin.close()
        assert owner.wait(300) == 0
        assert traces(name) == set(), "the last process that leaves waits for the cleanup"
    elif ending == "its keeper gets SIGKILL":
        (keeper,) = [process for process in psutil.process_iter() if runs(process, "support.lab.keeper", name)]
        keeper.kill()
        eventually("no process remains", lambda: not traces(name) & {"processes", "namespaces"})
        # What only a keeper cleans up is cleaned up by the next process that starts a cluster.
        with Cluster.start(nodes=1, images=()) as next_cluster:
            assert traces(name) == set()
            assert len({name, next_cluster.name, cluster.name}) == 3
            assert next_cluster.ready() == {"n1": True}
            assert cluster.ready() == {"n1": True, "n2": True, "n3": True}
        assert traces(next_cluster.name) == set()
    else:
        owner.send_signal(signal.Signals[ending])
        eventually("nothing remains", lambda: not traces(name))
    assert cluster.ready() == {"n1": True, "n2": True, "n3": True}


def runs(process: psutil.Process, *parts: str) -> bool:
    try:
        command_line = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return all(part in command_line for part in parts)


def traces(name: str) -> set[str]:
    """What remains of this cluster."""
    cluster_place = Place(name)
    remaining = set()
    members = [
        process
        for process in psutil.process_iter()
        if runs(process, f'"name": "{name}"') or is_in_folder(process, cluster_place)
    ]
    if members:
        remaining.add("processes")
    if {namespaces(process.pid) for process in members} - {namespaces(os.getpid()), ()}:
        remaining.add("namespaces")
    if any(cgroups.ROOT.glob(f"*{cgroups.name(name)}")):
        remaining.add("cgroups")
    if cluster_place.folder.exists() or cluster_place.alive.exists():
        remaining.add("folder")
    if str(cluster_place.folder) in Path("/proc/self/mountinfo").read_text():
        remaining.add("mounts")
    links = json.loads(subprocess.check_output(["ip", "-json", "address"]))
    if any(link["ifname"].startswith(("lab0", "to-n", "cni0")) for link in links):
        remaining.add("addresses")
    if Path("/run/netns").exists() and any(path.name in ("n1", "n2", "n3") for path in Path("/run/netns").iterdir()):
        remaining.add("names of network namespaces")
    return remaining


def is_in_folder(process: psutil.Process, cluster_place: Place) -> bool:
    return runs(process, f"{cluster_place.folder}/")


def namespaces(pid: int) -> tuple[str, ...]:
    try:
        return tuple(str(Path(f"/proc/{pid}/ns/{kind}").readlink()) for kind in ("net", "mnt", "pid"))
    except OSError:
        return ()
