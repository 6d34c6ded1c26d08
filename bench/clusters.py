"""A cluster for bench scripts: the one of tests, gone at the end, and a person with one namespace of it."""

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
NODES = 20  # simulated; 110 pods fit on each
POD_START = 1.0  # seconds, of a simulated pod; real ones take longer
GONE_S = 120.0


@dataclass(frozen=True)
class Place:
    """Where runs of a bench script are: a namespace that enforces `restricted`, and a folder of this machine."""

    cluster: Cluster
    namespace: str
    kubeconfig: Path
    folder: Path

    def environment(self, tasks: int = 1) -> dict[str, str]:
        more = {"KUBECONFIG": str(self.kubeconfig), "PACELINE_HOME": str(self.folder / "home")}
        return measure.environment(tasks, more)

    def kubectl(self, *words: str) -> list[str]:
        """A command of the person's."""
        return [str(self.cluster.parts.program("kubectl")), f"--kubeconfig={self.kubeconfig}", *words]


@contextmanager
def place(nodes: int, images: tuple[str, ...] = ("plain",), pod_start: float | None = None) -> Iterator[Place]:
    """With `pod_start` there are simulated nodes as well, on which pods take so many seconds to run."""
    with measure.workspace() as folder, _asked_to_end_once(), Cluster.start(nodes=nodes, images=images) as cluster:
        if pod_start is not None:
            cluster.simulate(NODES, pod_start)
        with cluster.namespace("bench", restricted=True) as namespace:
            try:
                yield Place(cluster, namespace, cluster.user(USER, namespace), folder)
            except measure.TookTooLong:
                measure.show_output(folder)
                measure.say(cluster.kubectl("get", "jobs,pods", f"--namespace={namespace}"))
                raise


@contextmanager
def _asked_to_end_once() -> Iterator[None]:
    """A second Ctrl-C does not interrupt the clearing away that the first has begun."""

    def interrupted(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def pod_settings() -> dict[str, Any]:
    """For a job file: pods on simulated nodes, and nowhere else."""
    return {
        "image": "lab.local/python:1",
        "node_selector": simulated.SELECTOR,
        "tolerations": [simulated.TOLERATION],
    }


def write_loop(folder: Path, pods: int) -> Path:
    """A job of so many hosts, of which simulated nodes run nothing."""
    (folder / "work").mkdir(exist_ok=True)
    (folder / "work" / "train.py").write_text("print('training')\n")
    job = {
        "name": "bench", "framework": "none", "command": ["python3", "train.py"],
        "roles": {"worker": {"replicas": pods, "cpu": 1, "memory": "1Gi"}}, "kubernetes": pod_settings(),
    }  # fmt: skip
    path = folder / "work" / "job.yaml"
    path.write_text(json.dumps(job))
    return path


def submit(here: Place, job: Path, *words: str) -> subprocess.Popen[bytes]:
    return measure.spawn(
        [*measure.PACELINE, "run", str(job), "--on", "kubernetes", *words], here.folder, here.environment()
    )


class Watch:
    """When pods of the namespace began to run, as the cluster tells whoever watches them."""

    def __init__(self, here: Place) -> None:
        # As the administrator: what the person asks is counted.
        config = f"--kubeconfig={here.cluster.kubeconfig()}"
        program = str(here.cluster.parts.program("kubectl"))
        self._command = [program, config, f"--namespace={here.namespace}", "get", "pods", "--watch", "--no-headers"]
        self._running: dict[str, float] = {}
        self._over = False
        self._process = self._start()
        threading.Thread(target=self._read, daemon=True).start()

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    def _read(self) -> None:
        while not self._over:
            for line in self._process.stdout or ():
                name, _, phase, *_ = line.split()
                if phase == "Running":
                    self._running.setdefault(name, measure.now())
            self._process.wait()
            # The API server drops watchers that are too slow for it; the next one is told of all pods at first.
            if not self._over:
                self._process = self._start()

    def all_running(self, count: int, limit: float, submitting: subprocess.Popen[bytes]) -> float:
        """The time at which the last of so many was seen to run."""

        def last() -> float | None:
            if submitting.poll():
                raise measure.TookTooLong(f"could not submit: it ended with {submitting.returncode}")
            times = list(self._running.values())
            return max(times) if len(times) >= count else None

        found: float = measure.wait_until(last, limit, f"{count} running pods")
        return found

    def __enter__(self) -> Watch:
        return self

    def end(self) -> None:
        self._over = True
        self._process.kill()

    def __exit__(self, *_: object) -> None:
        self.end()


def clear(here: Place, follower: subprocess.Popen[bytes] | None = None) -> None:
    """End whoever follows, and all Jobs with their pods: the next measurement begins in an empty namespace."""
    if follower is not None:
        follower.kill()
        follower.wait()
    words = (f"--namespace={here.namespace}",)
    here.cluster.kubectl("delete", "jobs", "--all", "--cascade=background", "--wait=false", *words)
    here.cluster.kubectl("delete", "pods", "--all", "--force", "--grace-period=0", "--wait=false", *words)
    kinds = "pods,jobs,services,configmaps,secrets,networkpolicies"
    measure.wait_until(lambda: not _left(here.cluster.get(kinds, *words)["items"]), GONE_S, "an empty namespace", 0.5)


def _left(objects: Sequence[dict[str, Any]]) -> bool:
    """Whether something is there that the cluster has not put into every namespace."""
    return any(each["metadata"]["name"] != "kube-root-ca.crt" for each in objects)


def peak_memory(pid: int) -> float:
    """MB, of one process since its start."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1000
