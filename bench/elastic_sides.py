"""A training program that survives changes of its group, in pods with at most one on each node: an elastic run, or its
peer, an Indexed Job with `torchrun --nnodes=2:3` and c10d.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import clusters
import measure
from clusters import BenchCluster
from measure import Stamp

NODES, LEAST = 3, 2  # pods of a group
STEP_S = 0.1  # each step waits for so long
EVERY_S = 30  # between two snapshots, or checkpoints of the peer
GRACE_S = 20
LOST_NODE_S = 30  # how long a pod of a lost node is tolerated
IMAGE = "lab.local/torch-jax:1"
PORT = 29400
PROGRAM = "torch_state_steps.py"
RUN = "elastic"
PACELINE, TORCHRUN = "paceline", "torchrun"
VARIABLES = {"OMP_NUM_THREADS": "1", "BENCH_STAMPS": "/shared/stamps", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

Object = dict[str, Any]


class Side(Protocol):
    name: str
    stamps_file: Path

    def check(self) -> None:
        """Raise MeasurementFailed if it has ended."""

    def pods(self) -> list[Object]:
        """Those that train."""

    def spared_node(self) -> str:
        """The node whose loss it would not survive, or not measurably: that of the captain, or of the c10d store."""


class _Side:
    def __init__(self, bench: BenchCluster, shared: Path) -> None:
        self._bench, self.stamps_file = bench, shared / "stamps"

    def _pods(self, selector: str) -> list[Object]:
        pods: list[Object] = self._bench.cluster.get(
            "pods", f"--selector={selector}", f"--namespace={self._bench.namespace}"
        )["items"]
        return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"] and "nodeName" in pod["spec"]]


class ElasticRun(_Side):
    name = PACELINE

    def __init__(self, bench: BenchCluster, shared: Path, process: subprocess.Popen[bytes]) -> None:
        super().__init__(bench, shared)
        self._process = process

    def check(self) -> None:
        if self._process.poll() is not None:
            raise measure.MeasurementFailed(f"the run ended with {self._process.returncode}")

    def pods(self) -> list[Object]:
        return self._pods("paceline.dev/role=worker")

    def spared_node(self) -> str:
        return str(self._pods("paceline.dev/role=captain")[0]["spec"]["nodeName"])


class Torchrun(_Side):
    name = TORCHRUN

    def check(self) -> None:
        """A pod that fails is started again by its Job."""

    def pods(self) -> list[Object]:
        return self._pods(f"app={TORCHRUN}")

    def spared_node(self) -> str:
        label = "batch.kubernetes.io/job-completion-index"
        return str(next(pod["spec"]["nodeName"] for pod in self.pods() if pod["metadata"]["labels"][label] == "0"))


@contextmanager
def running(bench: BenchCluster, side: str, gib: float) -> Iterator[Side]:
    """The side, from its start; at the end all of its objects are deleted."""
    shared = bench.cluster.place.shared / bench.namespace / "shared"
    (shared / "stamps").unlink(missing_ok=True)
    process = None
    try:
        if side == PACELINE:
            process = _submit(bench, gib)
            yield ElasticRun(bench, shared, process)
        else:
            (shared / "checkpoint").unlink(missing_ok=True)
            bench.cluster.apply(*torchrun_objects(bench.namespace, gib))
            yield Torchrun(bench, shared)
    finally:
        bench.cluster.kubectl("delete", "service", "--all", f"--namespace={bench.namespace}")
        clusters.clear(bench, process)


def prepare(bench: BenchCluster, gib: float) -> None:
    """The volumes of both sides, and the program for the peer."""
    size = f"{int(8 * gib) + 2}Gi"
    shared = bench.cluster.shared_volume(bench.namespace, "shared", size)
    bench.cluster.shared_volume(bench.namespace, "snapshots", size)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(measure.SOURCE / "paceline", shared / "code" / "paceline", ignore=ignored)
    shutil.copytree(measure.PROGRAMS, shared / "code", ignore=ignored, dirs_exist_ok=True)


def _submit(bench: BenchCluster, gib: float) -> subprocess.Popen[bytes]:
    job = {
        "name": "bench", "framework": "torch", "code": str(measure.PROGRAMS),
        "command": ["python", *_program(gib, "--every", f"{EVERY_S}s")],
        "roles": {"worker": {"replicas": NODES, "min": LEAST}},
        # By default, a host joins two minutes after the last change, which is not what is measured.
        "elastic": {"every": "5s"},
        "snapshots": {"to": "claim://snapshots/bench", "keep": 2},
        "env": VARIABLES, "limits": {"grace": f"{GRACE_S}s"},
        "kubernetes": {
            "image": IMAGE, "image_pull_policy": "IfNotPresent",
            "volumes": [{"mount": "/shared", "claim": "shared"}],
            "pod": {"affinity": _one_per_node({"paceline.dev/role": "worker"})},
        },
    }  # fmt: skip
    path = bench.folder / "job.yaml"
    path.write_text(json.dumps(job))
    return clusters.submit(bench, path, "--run", RUN)


def _program(gib: float, *arguments: str) -> list[str]:
    return [PROGRAM, "--steps", "1000000", "--sleep", str(STEP_S), "--gib", str(gib), "--groups", *arguments]


def _one_per_node(labels: dict[str, str]) -> Object:
    term = {"labelSelector": {"matchLabels": labels}, "topologyKey": "kubernetes.io/hostname"}
    return {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}


def torchrun_objects(namespace: str, gib: float) -> list[Object]:
    """A Job as its users write it. Pod 0 has the c10d store; its host name has to be resolvable before it is ready."""
    every = str(round(EVERY_S / STEP_S))
    endpoint = f"{TORCHRUN}-0.{TORCHRUN}:{PORT}"
    command = [
        "exec", "python3", "-m", "torch.distributed.run", f"--nnodes={LEAST}:{NODES}", "--nproc-per-node=1",
        "--max-restarts=1000", "--rdzv-backend=c10d", "--rdzv-id=bench", f"--rdzv-endpoint={endpoint}",
        "--rdzv-conf=is_host=$(expr $JOB_COMPLETION_INDEX = 0)", "--local-addr=$POD_IP", f"/shared/code/{PROGRAM}",
        *_program(gib, "--every", every)[1:], "--checkpoint", "/shared/checkpoint",
    ]  # fmt: skip
    restricted = {
        "runAsNonRoot": True, "runAsUser": 1000, "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }  # fmt: skip
    env = [{"name": name, "value": value} for name, value in {**VARIABLES, "PYTHONPATH": "/shared/code"}.items()]
    container = {
        "name": TORCHRUN, "image": IMAGE, "imagePullPolicy": "IfNotPresent", "securityContext": restricted,
        "command": ["/bin/sh", "-c", " ".join(command)], "workingDir": "/tmp",
        "env": [*env, {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
        "volumeMounts": [{"name": "shared", "mountPath": "/shared"}, {"name": "tmp", "mountPath": "/tmp"}],
    }  # fmt: skip
    labels, metadata = {"app": TORCHRUN}, {"name": TORCHRUN, "namespace": namespace}
    pod = {
        "subdomain": TORCHRUN, "restartPolicy": "OnFailure", "terminationGracePeriodSeconds": GRACE_S,
        "affinity": _one_per_node(labels), "tolerations": _tolerations(), "containers": [container],
        "volumes": [
            {"name": "shared", "persistentVolumeClaim": {"claimName": "shared"}}, {"name": "tmp", "emptyDir": {}},
        ],
    }  # fmt: skip
    job = {
        "completionMode": "Indexed", "completions": NODES, "parallelism": NODES, "backoffLimit": 100_000,
        "template": {"metadata": {"labels": labels}, "spec": pod},
    }  # fmt: skip
    service = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": labels}
    return [
        {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": service},
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": job},
    ]


def _tolerations() -> list[Object]:
    return [
        {"key": f"node.kubernetes.io/{state}", "operator": "Exists", "effect": "NoExecute",
         "tolerationSeconds": LOST_NODE_S}
        for state in ("not-ready", "unreachable")
    ]  # fmt: skip


def stamps(side: Side) -> list[Stamp]:
    side.check()
    return measure.stamps(side.stamps_file)
