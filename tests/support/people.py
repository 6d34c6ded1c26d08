"""A user of the cluster, and the runs that they start on it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.environment import without
from support.lab.cluster import Cluster

SOURCE = Path(__file__).parents[2] / "src"
IMAGE = "lab.local/python:1"
# They only end what hangs: on two cores, with other tests beside it, a pod may take minutes to start.
LIMIT_S = 240.0
CALL_S = 300.0
Event = dict[str, Any]

# Reports steps until the file `finish` appears on the shared volume.
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


def eventually(
    description: str, check: Callable[[], Any], limit: float = LIMIT_S, more: Callable[[], str] = str
) -> Any:
    until = time.monotonic() + limit
    while not (answer := check()):
        assert time.monotonic() < until, f"not within {limit:g} s: {description}\n{more()}"
        time.sleep(0.1)
    return answer


def lines(folder: Path, task: str) -> list[str]:
    """The lines that the task has printed, from the folder of its run."""
    path = folder / "logs" / f"{task}.log"
    text = path.read_text(errors="replace") if path.exists() else ""
    rows = text.split("\n")[:-1]  # the last one may not be complete yet
    return [line.partition(" | ")[2] for line in rows]


class Person:
    """A user with a kubeconfig for one namespace, a folder with a program, and a home for runs."""

    def __init__(self, cluster: Cluster, namespace: str, folder: Path) -> None:
        self.cluster, self.namespace, self.folder = cluster, namespace, folder
        self.kubeconfig = cluster.user("ada", namespace)
        self.shared = cluster.shared_volume(namespace, "shared")
        self.home = folder / "home"
        inherited = without("PACELINE", "KUBE")
        self.env = {**inherited, "KUBECONFIG": str(self.kubeconfig), "PACELINE_HOME": str(self.home)}
        self.env["PYTHONPATH"] = str(SOURCE)

    def job(self, program: str = TRAINING, workers: int = 3, folder: str = "work", **more: Any) -> Path:
        """Writes a job file and its program; jobs in separate folders can be submitted concurrently."""
        work = self.folder / folder
        work.mkdir(exist_ok=True)
        (work / "train.py").write_text(program)
        settings = {"image": IMAGE, "image_pull_policy": "IfNotPresent", "placement": "spread"}
        settings["volumes"] = [{"mount": "/shared", "claim": "shared", "read_only": True}]
        fields = {"name": "loop", "framework": "none", "command": ["python3", "train.py"], "limits": {"grace": "5s"}}
        fields |= {"roles": {"worker": {"replicas": workers}}, "kubernetes": settings, **more}
        path = work / "job.yaml"
        path.write_text(json.dumps(fields))
        return path

    def call(self, *arguments: str, limit_s: float = CALL_S, **env: str) -> subprocess.CompletedProcess[str]:
        """`env`: other values of environment variables."""
        return subprocess.run(
            [sys.executable, "-m", "paceline.cli", *arguments], env={**self.env, **env}, cwd=self.folder,
            capture_output=True, text=True, timeout=limit_s,
        )  # fmt: skip

    def finish(self) -> None:
        (self.shared / "finish").touch()


class Run:
    """`paceline run --on kubernetes` in the foreground."""

    def __init__(self, person: Person, job: Path, *options: str) -> None:
        self.person = person
        before = self._folders()
        self._output = person.folder / f"said-{len(before)}"
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "paceline.cli", "run", str(job), "--on", "kubernetes", *options],
                env=person.env, cwd=person.folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            )  # fmt: skip
        new = eventually("the run's folder", lambda: self._folders() - before or self.process.poll(), more=self.said)
        assert isinstance(new, set), self.said()
        self.folder: Path = new.pop()
        self.name = self.folder.name

    def _folders(self) -> set[Path]:
        runs = self.person.home / "runs"
        return set(runs.iterdir()) if runs.exists() else set()

    def said(self) -> str:
        return self._output.read_text(errors="replace")

    def events(self, kind: str, **fields: Any) -> list[Event]:
        path = self.folder / "events.jsonl"
        text = path.read_text(errors="replace") if path.exists() else ""
        events = [json.loads(line) for line in text.split("\n")[:-1]]  # the last line may not be complete yet
        return [e for e in events if e["event"] == kind and all(e.get(k) == v for k, v in fields.items())]

    def wait(self, kind: str, count: int = 1, limit: float = LIMIT_S, **fields: Any) -> Event:
        def check() -> Event | None:
            events = self.events(kind, **fields)
            return events[-1] if len(events) >= count else None

        return eventually(f"{kind} {fields}", check, limit, more=self.said)

    def all_step(self) -> None:
        """Waits until every task has reported a step; before that, its process may not have started."""
        for task in self.wait("run-started")["tasks"]:
            self.wait("step", task=task)

    def ends(self, limit: float = CALL_S) -> int:
        return self.process.wait(limit)

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


def init_pid(pod: dict[str, Any]) -> int:
    """The PID, on this machine, of the first process of a pod's container."""
    uid = pod["metadata"]["uid"].replace("-", "_")
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            in_pod = uid in (folder / "cgroup").read_text().replace("-", "_")
            numbers = next(line for line in (folder / "status").read_text().splitlines() if line.startswith("NSpid"))
            command_line = (folder / "cmdline").read_text(errors="replace")
        except (OSError, StopIteration):
            continue
        if in_pod and numbers.split()[-1] == "1" and "agent.pyz" in command_line:
            return int(folder.name)
    raise AssertionError(f"no process of {pod['metadata']['name']} found")


def bucket_of(person: Person, node: str = "") -> dict[str, str]:
    """Starts an S3 server in a pod of the namespace, reachable by all pods. Creates a Secret with its settings and
    returns them. If its pod has been deleted, the server is started again.

    `node`: the node of that pod.
    """
    from support.stores import parts

    if not (person.shared / "versitygw").exists():
        shutil.copy(parts.versitygw(), person.shared / "versitygw")
    (person.shared / "objects" / "digits").mkdir(parents=True, exist_ok=True, mode=0o777)
    (person.shared / "objects").chmod(0o777)
    (person.shared / "objects" / "digits").chmod(0o777)
    keys = {"ROOT_ACCESS_KEY": "digits", "ROOT_SECRET_KEY": "a secret of the digits"}
    command = ["/shared/versitygw", "--port", ":7070", "posix", "--sidecar", "/tmp", "/shared/objects"]
    credentials = {
        "AWS_ACCESS_KEY_ID": keys["ROOT_ACCESS_KEY"], "AWS_SECRET_ACCESS_KEY": keys["ROOT_SECRET_KEY"],
        "AWS_ENDPOINT_URL": "http://store:7070", "AWS_REGION": "us-east-1",
    }  # fmt: skip
    _serve(person, "store", command, keys, credentials, {"nodeName": node} if node else {})
    return credentials


# Appends the body of each request to a file.
_RECEIVER = """
import http.server

class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        with open("/shared/received/bodies", "ab") as file:
            file.write(self.rfile.read(int(self.headers["Content-Length"])) + b"\\n")
        self.send_response(204)
        self.end_headers()

http.server.HTTPServer(("", 7070), Handler).serve_forever()
"""


def webhook_of(person: Person) -> Path:
    """Starts a receiver of notifications in a pod of the namespace, and creates the Secret `hooks`, whose HOOK_URL is
    its address. Returns the file to which it appends what it receives."""
    folder = person.shared / "received"
    folder.mkdir()
    folder.chmod(0o777)
    _serve(person, "hooks", ["python3", "-c", _RECEIVER], {}, {"HOOK_URL": "http://hooks:7070/secret-part"}, {})
    return folder / "bodies"


def _serve(
    person: Person,
    name: str,
    command: list[str],
    env: dict[str, str],
    secret: dict[str, str],
    placement: dict[str, str],
) -> None:
    """Starts a server in a pod, with a Service and a Secret of the same name."""
    restricted = {
        "runAsNonRoot": True, "runAsUser": 1000, "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }  # fmt: skip
    container = {
        "name": name, "image": IMAGE, "securityContext": restricted, "command": command,
        "env": [{"name": variable, "value": value} for variable, value in env.items()],
        "volumeMounts": [{"name": "shared", "mountPath": "/shared"}, {"name": "tmp", "mountPath": "/tmp"}],
    }  # fmt: skip
    volumes = [{"name": "shared", "persistentVolumeClaim": {"claimName": "shared"}}, {"name": "tmp", "emptyDir": {}}]
    metadata = {"name": name, "namespace": person.namespace, "labels": {"app": name}}
    service = {"selector": {"app": name}, "ports": [{"port": 7070}]}
    person.cluster.apply(
        {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": service},
        {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": secret},
        {"apiVersion": "v1", "kind": "Pod", "metadata": metadata,
         "spec": {"containers": [container], "volumes": volumes, "terminationGracePeriodSeconds": 0, **placement}},
    )  # fmt: skip

    def is_running() -> bool:
        return bool(person.cluster.get("pod", name, "-n", person.namespace)["status"].get("phase") == "Running")

    eventually(f"the pod {name}", is_running)
