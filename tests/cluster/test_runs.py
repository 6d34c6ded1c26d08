"""Runs on a real cluster, by a person with rights in one namespace alone, under the `restricted` Pod Security level."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lab.cluster import Cluster

pytestmark = pytest.mark.timeout(300)

SOURCE = Path(__file__).parents[2] / "src"
IMAGE = "lab.local/python:1"
Event = dict[str, Any]

# Reports steps until it is told to finish, by a file that all pods see.
TRAINING = """
import os, sys, time
import paceline
print("pid", os.getpid(), "user", os.getuid(), flush=True)
step = 0
while not os.path.exists("/shared/finish"):
    step += 1
    paceline.report(step=step, loss=1 / step)
    time.sleep(0.05)
print("done", flush=True)
"""


def eventually(what: str, check: Callable[[], Any], limit: float = 90.0, more: Callable[[], str] = str) -> Any:
    until = time.monotonic() + limit
    while not (answer := check()):
        assert time.monotonic() < until, f"not within {limit:g} s: {what}\n{more()}"
        time.sleep(0.1)
    return answer


class Person:
    """Somebody with a kubeconfig for one namespace, a folder with a program, and a home for runs."""

    def __init__(self, cluster: Cluster, namespace: str, folder: Path) -> None:
        self.cluster, self.namespace, self.folder = cluster, namespace, folder
        self.kubeconfig = cluster.user("ada", namespace)
        self.shared = cluster.shared_volume(namespace, "shared")
        self.home = folder / "home"
        (folder / "work").mkdir()
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PACELINE", "KUBE"))}
        self.env = {**kept, "KUBECONFIG": str(self.kubeconfig), "PACELINE_HOME": str(self.home)}
        self.env["PYTHONPATH"] = str(SOURCE)

    def job(self, program: str = TRAINING, workers: int = 3, **more: Any) -> Path:
        (self.folder / "work" / "train.py").write_text(program)
        settings = {"image": IMAGE, "image_pull_policy": "IfNotPresent", "placement": "spread"}
        settings["volumes"] = [{"mount": "/shared", "claim": "shared", "read_only": True}]
        fields = {"name": "loop", "framework": "none", "command": ["python3", "train.py"], "limits": {"grace": "5s"}}
        fields |= {"roles": {"worker": {"replicas": workers}}, "kubernetes": settings, **more}
        path = self.folder / "work" / "job.yaml"
        path.write_text(json.dumps(fields))
        return path

    def call(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "paceline.cli", *words]
        return subprocess.run(command, env=self.env, cwd=self.folder, capture_output=True, text=True, timeout=120)

    def finish(self) -> None:
        (self.shared / "finish").touch()


class Run:
    """`paceline run --on kubernetes` in the foreground."""

    def __init__(self, person: Person, job: Path, *words: str) -> None:
        self.person = person
        before = self._folders()
        self._said = person.folder / f"said-{len(before)}"
        with self._said.open("wb") as said:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "paceline.cli", "run", str(job), "--on", "kubernetes", *words],
                env=person.env, cwd=person.folder, stdin=subprocess.DEVNULL, stdout=said, stderr=said,
            )  # fmt: skip
        new = eventually("the run's folder", lambda: self._folders() - before or self.process.poll(), more=self.said)
        assert isinstance(new, set), self.said()
        self.folder: Path = new.pop()
        self.name = self.folder.name

    def _folders(self) -> set[Path]:
        runs = self.person.home / "runs"
        return set(runs.iterdir()) if runs.exists() else set()

    def said(self) -> str:
        return self._said.read_text(errors="replace")

    def events(self, kind: str, **fields: Any) -> list[Event]:
        path = self.folder / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("}")]
        return [e for e in found if e["event"] == kind and all(e.get(k) == v for k, v in fields.items())]

    def wait(self, kind: str, count: int = 1, **fields: Any) -> Event:
        def seen() -> Event | None:
            found = self.events(kind, **fields)
            return found[-1] if len(found) >= count else None

        return eventually(f"{kind} {fields}", seen, more=self.said)

    def ends(self) -> int:
        return self.process.wait(120)

    def report(self) -> dict[str, Any]:
        report: dict[str, Any] = json.loads((self.folder / "report.json").read_text())
        return report

    def pods(self, role: str) -> list[dict[str, Any]]:
        selector = f"paceline.dev/run={self.name},paceline.dev/role={role}"
        pods: list[dict[str, Any]] = self.person.cluster.get("pods", "-n", self.person.namespace, "-l", selector)[
            "items"
        ]
        return sorted(pods, key=lambda pod: str(pod["metadata"]["name"]))

    def clean_up(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()


@pytest.fixture
def person(cluster: Cluster, tmp_path: Path) -> Iterator[Person]:
    with cluster.namespace(f"team-{uuid.uuid4().hex[:6]}", restricted=True) as namespace:
        yield Person(cluster, namespace, tmp_path)


@pytest.fixture
def start(person: Person) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def begin(*words: str, **job: Any) -> Run:
        runs.append(Run(person, person.job(**job), *words))
        return runs[-1]

    yield begin
    for run in runs:
        run.clean_up()


def test_a_run_succeeds_on_all_nodes_and_leaves_nothing_once_deleted(person: Person, start: Callable[..., Run]) -> None:
    run = start()
    run.wait("generation-formed")
    eventually("steps of all", lambda: len({e["task"] for e in run.events("step")}) == 3, more=run.said)
    nodes = {pod["spec"]["nodeName"] for pod in run.pods("worker")}
    person.finish()
    assert run.ends() == 0, run.said()
    assert nodes == set(person.cluster.nodes)
    assert (run.report()["status"], run.report()["generations"], run.report()["restarts"]) == ("succeeded", 1, [])
    assert "worker-2 | done" in run.said() and "user 1000" in run.said()
    jobs = person.cluster.get("jobs", "-n", person.namespace)["items"]
    states = {job["metadata"]["name"]: job["status"]["conditions"][-1]["type"] for job in jobs}
    assert states == {run.name: "Complete", f"{run.name}-worker": "Complete"}
    assert person.call("delete", "--yes", run.name).returncode == 0
    kinds = "jobs,pods,services,configmaps,secrets,networkpolicies"
    selected = [kinds, "-n", person.namespace, "-l", f"paceline.dev/run={run.name}"]
    eventually("an empty namespace", lambda: not person.cluster.get(*selected)["items"])


def test_training_goes_on_while_the_captains_pod_is_replaced(person: Person, start: Callable[..., Run]) -> None:
    run = start()
    run.wait("step", task="worker-0")
    before = run.pods("captain")[0]["metadata"]["name"]
    person.cluster.kubectl("delete", "pod", before, "-n", person.namespace, "--grace-period=1")
    run.wait("captain-returned")
    person.finish()
    assert run.ends() == 0, run.said()
    assert [pod["metadata"]["name"] for pod in run.pods("captain")] != [before]
    assert (run.report()["generations"], run.report()["restarts"]) == (1, [])


def test_a_killed_task_restarts_in_place(person: Person, start: Callable[..., Run]) -> None:
    run = start()
    pid = run.wait("task-started", task="worker-1")["pid"]
    run.wait("step", task="worker-1")
    pods = run.pods("worker")
    person.cluster.kubectl(
        "exec", "-n", person.namespace, pods[1]["metadata"]["name"], "--", "/bin/sh", "-c", f"kill -9 {pid}"
    )
    run.wait("generation-formed", count=2)
    run.wait("step", task="worker-1", generation=2)
    person.finish()
    assert run.ends() == 0, run.said()
    assert [(each["cause"], each["task"]) for each in run.report()["restarts"]] == [("signal", "worker-1")]
    after = run.pods("worker")
    assert [pod["metadata"]["uid"] for pod in after] == [pod["metadata"]["uid"] for pod in pods]
    assert {pod["status"]["containerStatuses"][0]["restartCount"] for pod in after} == {0}


def test_a_deleted_pod_comes_back_and_joins_a_new_generation(person: Person, start: Callable[..., Run]) -> None:
    run = start()
    run.wait("step", task="worker-2")
    pods = run.pods("worker")
    person.cluster.kubectl("delete", "pod", pods[2]["metadata"]["name"], "-n", person.namespace, "--wait=false")
    run.wait("step", task="worker-2", generation=2)
    person.finish()
    assert run.ends() == 0, run.said()
    assert [each["cause"] for each in run.report()["restarts"]] == ["preempted"]


def test_ctrl_c_stops_the_run(person: Person, start: Callable[..., Run]) -> None:
    run = start()
    run.wait("step", task="worker-0")
    run.process.send_signal(signal.SIGINT)
    assert run.ends() == 130, run.said()
    assert run.report()["status"] == "stopped"
    jobs = person.cluster.get("jobs", "-n", person.namespace)["items"]
    assert {job["metadata"]["name"]: job["status"].get("active", 0) for job in jobs} == {
        run.name: 0,
        f"{run.name}-worker": 0,
    }


def test_a_failed_run_fails_the_captains_job(person: Person, start: Callable[..., Run]) -> None:
    run = start(program="raise ValueError('no such digit')")
    assert run.ends() == 1, run.said()
    report = run.report()
    assert (report["status"], report["cause"]) == ("failed", "program-error")
    assert "no such digit" in report["reason"]
    conditions = person.cluster.get("job", run.name, "-n", person.namespace)["status"]["conditions"]
    assert "Failed" in {condition["type"] for condition in conditions if condition["status"] == "True"}


def test_a_detached_run_is_shown_stopped_and_deleted_from_elsewhere(person: Person) -> None:
    run = person.call("run", str(person.job()), "--on", "kubernetes", "--detach").stdout.strip()

    def steps() -> bool:
        shown = person.call("status", run, "-o", "json")
        return (json.loads(shown.stdout)["steps"] or 0) > 0 if shown.returncode == 0 else False

    eventually("steps", steps)
    assert "worker-0 | pid" in person.call("logs", run).stdout
    stopped = person.call("stop", run)
    assert stopped.returncode == 0, stopped.stderr
    assert json.loads(person.call("status", run, "-o", "json").stdout)["status"] == "stopped"
    assert person.call("delete", "--yes", run).returncode == 0


def test_rendered_objects_pass_a_dry_run_and_run_by_kubectl_alone(person: Person) -> None:
    rendered = person.call("render", str(person.job()), "--run", "loop-0001", "--with-certificates")
    assert rendered.returncode == 0, rendered.stderr
    for mode in ("--dry-run=server", "--dry-run=none"):
        person.cluster.kubectl(
            "apply", "-n", person.namespace, mode, "-f", "-", kubeconfig=person.kubeconfig, input=rendered.stdout
        )
    person.finish()

    def complete() -> bool:
        status = person.cluster.get("job", "loop-0001", "-n", person.namespace)["status"]
        return any(each["type"] == "Complete" for each in status.get("conditions", ()))

    eventually("a complete Job", complete)


def test_why_a_pod_does_not_come_is_said(person: Person, start: Callable[..., Run]) -> None:
    run = start("--set", "roles.worker.gpus=1")
    eventually("the reason", lambda: "3 without enough nvidia.com/gpu free" in run.said(), more=run.said)
    run.process.send_signal(signal.SIGINT)
    assert run.ends() == 130, run.said()


def test_an_image_without_python_ends_the_run_with_that_reason(person: Person, start: Callable[..., Run]) -> None:
    person.cluster.images("busybox")
    run = start("--set", "kubernetes.image=lab.local/busybox:1")
    assert run.ends() == 1, run.said()
    assert "no Python 3.9 or newer in this image" in run.report()["reason"]
    assert "lab.local/busybox:1" in run.report()["reason"]


def test_what_the_cluster_refuses_is_said_in_one_line(person: Person, tmp_path: Path) -> None:
    job = str(person.job())
    refused = person.call("run", job, "--on", "kubernetes", "-n", "default")
    assert refused.returncode == 1
    assert refused.stderr.splitlines()[-1].startswith("error: cannot create the Job loop-")
    assert "Traceback" not in refused.stderr
    missing = person.call("run", job, "--on", "kubernetes", "--context", "nowhere")
    assert "there is no context 'nowhere'" in missing.stderr and missing.returncode == 1
