"""A cluster for bench scripts: that of the tests, deleted at the end, and a user with one namespace."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import measure

sys.path.insert(0, str(measure.ROOT / "tests"))

from support.lab import simulated
from support.lab.cluster import Cluster

USER = "ada"
NODES = 20  # simulated, each for 110 pods
POD_START = 1.0  # seconds until a simulated pod runs; real ones take longer
DELETED_S = 120.0


@dataclass(frozen=True)
class BenchCluster:
    """Where a bench script runs jobs: a namespace that enforces `restricted`, and a folder on this machine."""

    cluster: Cluster
    namespace: str
    kubeconfig: Path
    folder: Path

    def environment(self, tasks: int = 1) -> dict[str, str]:
        more = {"KUBECONFIG": str(self.kubeconfig), "PACELINE_HOME": str(self.folder / "home")}
        return measure.environment(tasks, more)

    def kubectl(self, *arguments: str) -> list[str]:
        """A kubectl command of the user."""
        return [str(self.cluster.parts.program("kubectl")), f"--kubeconfig={self.kubeconfig}", *arguments]


@contextmanager
def bench_cluster(
    nodes: int, images: tuple[str, ...] = ("plain",), pod_start: float | None = None
) -> Iterator[BenchCluster]:
    """With `pod_start`, there are also simulated nodes, on which a pod runs after that many seconds."""
    with (
        measure.workspace() as folder,
        _ignoring_second_interrupt(),
        Cluster.start(nodes=nodes, images=images) as cluster,
    ):
        if pod_start is not None:
            cluster.simulate(NODES, pod_start)
        with cluster.namespace("bench", restricted=True) as namespace:
            try:
                yield BenchCluster(cluster, namespace, cluster.user(USER, namespace), folder)
            except measure.MeasurementFailed:
                measure.show_output(folder)
                measure.say(cluster.kubectl("get", "jobs,pods", f"--namespace={namespace}"))
                raise


@contextmanager
def _ignoring_second_interrupt() -> Iterator[None]:
    """A second Ctrl-C does not interrupt the cleanup that the first has started."""

    def interrupted(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def pod_settings() -> dict[str, Any]:
    """For a job file: pods run only on simulated nodes."""
    return {
        "image": "lab.local/python:1",
        "node_selector": simulated.SELECTOR,
        "tolerations": [simulated.TOLERATION],
    }


def write_loop(folder: Path, pods: int) -> Path:
    """A job with `pods` hosts; simulated nodes do not execute its program."""
    (folder / "work").mkdir(exist_ok=True)
    (folder / "work" / "train.py").write_text("print('training')\n")
    job = {
        "name": "bench", "framework": "none", "command": ["python3", "train.py"],
        "roles": {"worker": {"replicas": pods, "cpu": 1, "memory": "1Gi"}}, "kubernetes": pod_settings(),
    }  # fmt: skip
    path = folder / "work" / "job.yaml"
    path.write_text(json.dumps(job))
    return path


def submit(bench: BenchCluster, job: Path, *arguments: str) -> subprocess.Popen[bytes]:
    return measure.spawn(
        [*measure.PACELINE, "run", str(job), "--on", "kubernetes", *arguments], bench.folder, bench.environment()
    )


class Watch:
    """When pods of the namespace began to run, as reported by a watch."""

    def __init__(self, bench: BenchCluster) -> None:
        # As the administrator, because the requests of the user are counted.
        config = f"--kubeconfig={bench.cluster.kubeconfig()}"
        program = str(bench.cluster.parts.program("kubectl"))
        self._command = [program, config, f"--namespace={bench.namespace}", "get", "pods", "--watch", "--no-headers"]
        self._running: dict[str, float] = {}
        self._ended = False
        self._process = self._start()
        threading.Thread(target=self._read, daemon=True).start()

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    def _read(self) -> None:
        while not self._ended:
            for line in self._process.stdout or ():
                name, _, phase, *_ = line.split()
                if phase == "Running":
                    self._running.setdefault(name, measure.now())
            self._process.wait()
            # The API server drops slow watchers; a new watch begins with all pods.
            if not self._ended:
                self._process = self._start()

    def all_running(self, count: int, limit: float, submitting: subprocess.Popen[bytes]) -> float:
        """The time at which the last of `count` pods was running."""

        def last() -> float | None:
            if submitting.poll():
                raise measure.MeasurementFailed(f"the submission ended with {submitting.returncode}")
            times = list(self._running.values())
            return max(times) if len(times) >= count else None

        time_of_last: float = measure.wait_until(last, limit, f"{count} running pods")
        return time_of_last

    def __enter__(self) -> Watch:
        return self

    def end(self) -> None:
        self._ended = True
        self._process.kill()

    def __exit__(self, *_: object) -> None:
        self.end()


def clear(bench: BenchCluster, follower: subprocess.Popen[bytes] | None = None) -> None:
    """Kill the follower and delete all Jobs and pods: the next measurement begins in an empty namespace."""
    if follower is not None:
        follower.kill()
        follower.wait()
    in_namespace = (f"--namespace={bench.namespace}",)
    bench.cluster.kubectl("delete", "jobs", "--all", "--cascade=background", "--wait=false", *in_namespace)
    bench.cluster.kubectl("delete", "pods", "--all", "--force", "--grace-period=0", "--wait=false", *in_namespace)
    kinds = "pods,jobs,services,configmaps,secrets,networkpolicies"
    measure.wait_until(
        lambda: not _has_objects(bench.cluster.get(kinds, *in_namespace)["items"]), DELETED_S, "an empty namespace", 0.5
    )


def _has_objects(objects: Sequence[dict[str, Any]]) -> bool:
    """Whether there are objects other than those that the cluster creates in every namespace."""
    return any(each["metadata"]["name"] != "kube-root-ca.crt" for each in objects)


def peak_memory(pid: int) -> float:
    """Peak memory of one process since its start, in MB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1000
