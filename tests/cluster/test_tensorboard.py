"""TensorBoard for a run on the cluster, without storage shared by pods; opened from this machine."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlencode, urlsplit

import pytest

from support.people import Person, Run, eventually

pytestmark = pytest.mark.timeout(900, func_only=True)

# Importing TensorFlow takes long, and the events it writes are the same.
WRITING = """
import os, sys, time, types
sys.modules["tensorboard.compat.notf"] = types.ModuleType("notf")
from tensorboard.summary import Writer
import paceline
task = os.environ["PACELINE_TASK"]
writer = Writer(os.path.join(os.environ["PACELINE_TENSORBOARD_DIR"], task))
writer.add_scalar("generation", 1, int(os.environ["PACELINE_GENERATION"]))
step = 0
while not os.path.exists("/shared/finish"):
    step += 1
    writer.add_scalar("loss", 1 / step, step)
    writer.flush()
    paceline.report(step=step)
    time.sleep(0.4)  # TensorBoard shows all of up to 1000 points, and the test may take minutes
writer.close()
print("last", step, flush=True)
"""

PLAIN = """
import os, time
import paceline
with open(os.path.join(os.environ["PACELINE_TENSORBOARD_DIR"], "events.out.tfevents.1"), "wb") as file:
    file.write(b"something")
step = 0
while not os.path.exists("/shared/finish"):
    step += 1
    paceline.report(step=step)
    time.sleep(0.1)
"""


class Page:
    """A browser on `paceline tensorboard`: one connection, kept open as long as the server keeps it."""

    def __init__(self, url: str) -> None:
        self._address = urlsplit(url)
        self._connection: http.client.HTTPConnection | None = None

    def get(self, path: str, **query: str) -> Any:
        """None if there is no answer, or none in JSON."""
        assert self._address.hostname and self._address.port
        self._connection = self._connection or http.client.HTTPConnection(
            self._address.hostname, self._address.port, timeout=60
        )
        try:
            self._connection.request("GET", f"{path}?{urlencode(query)}")
            answer = self._connection.getresponse()
            body = answer.read()
            return json.loads(body) if answer.status == 200 else None
        except (OSError, http.client.HTTPException, ValueError):
            self._connection.close()
            self._connection = None
            return None

    def steps(self, task: str, tag: str = "loss") -> list[int]:
        points = self.get("/data/plugin/scalars/scalars", run=task, tag=tag)
        return [int(step) for _, step, _ in points or ()]


@contextmanager
def tensorboard(person: Person, run: Run) -> Iterator[Page]:
    command = [sys.executable, "-m", "paceline.cli", "tensorboard", run.name, "--port", "0"]
    errors = person.folder / "errors"
    with errors.open("w") as stderr:
        process = subprocess.Popen(
            command, env=person.env, cwd=person.folder, stdout=subprocess.PIPE, stderr=stderr, text=True
        )
    try:
        assert process.stdout is not None
        url = process.stdout.readline()
        assert url.startswith("http://127.0.0.1:"), errors.read_text()
        yield Page(url.strip())
        process.send_signal(signal.SIGINT)
        assert process.wait(180) == 0
        assert "Traceback" not in errors.read_text()
    finally:
        process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()


def job(image: str, tensorboard: Any = True, **more: Any) -> dict[str, Any]:
    settings = {"image": image, "image_pull_policy": "IfNotPresent", "placement": "spread", **more}
    settings["volumes"] = [{"mount": "/shared", "claim": "shared", "read_only": True}]
    return {"tensorboard": tensorboard, "kubernetes": settings, "workers": 2}


def last_steps(run: Run) -> dict[str, int]:
    last_lines = [line.split() for line in run.said().splitlines() if " | last " in line]
    return {fields[0]: int(fields[-1]) for fields in last_lines}


def test_all_tasks_are_shown_during_and_after_a_run_until_it_is_deleted(
    person: Person, start: Callable[..., Run]
) -> None:
    person.cluster.images("tensorflow")
    run = start(program=WRITING, **job("lab.local/tensorflow:1"))
    with tensorboard(person, run) as page:
        tags = {"worker-0": ["generation", "loss"], "worker-1": ["generation", "loss"]}
        eventually(
            "the tags of all tasks", lambda: _names(page.get("/data/plugin/scalars/tags")) == tags, more=run.said
        )
        pods = run.pods("tensorboard")
        assert len(pods) == 1
        # A new pod has no data of the first one: members send everything again, and the local port forwards to it.
        first = pods[0]["metadata"]
        person.cluster.kubectl("delete", "pod", first["name"], "-n", person.namespace)
        before = run.wait("step", task="worker-1")["step"]
        eventually("the same from a new pod", lambda: max(page.steps("worker-1"), default=0) > before, more=run.said)
        assert first["uid"] not in [pod["metadata"]["uid"] for pod in run.pods("tensorboard")]
        eventually("its first step", lambda: page.steps("worker-1")[:1] == [1], more=run.said)
        person.finish()
        assert run.ends() == 0, run.said()
        last = last_steps(run)
        assert set(last) == {"worker-0", "worker-1"}
        for task, step in last.items():
            eventually(f"all steps of {task}", lambda task=task, step=step: step in page.steps(task))
    with tensorboard(person, run) as again:
        eventually("the tags of all tasks", lambda: _names(again.get("/data/plugin/scalars/tags")) == tags)
    assert run.report()["status"] == "succeeded" and run.report()["restarts"] == []
    assert person.call("delete", "--yes", run.name).returncode == 0
    kinds = "deployments,replicasets,pods,services,jobs"
    selected = [kinds, "-n", person.namespace, "-l", f"paceline.dev/run={run.name}"]
    eventually("an empty namespace", lambda: not person.cluster.get(*selected)["items"])


def test_a_published_page_shows_one_curve_after_a_lost_pod(person: Person, start: Callable[..., Run]) -> None:
    """The program starts over, in a pod that has no files of the one before it. The page is read through a port of a
    node, without authentication."""
    person.cluster.images("tensorflow")
    settings = {"service": "NodePort", "ingress": {"host": "board.example.com", "class": "none", "tls": "board-tls"}}
    run = start(program=WRITING, **job("lab.local/tensorflow:1", settings))
    warning = "TensorBoard has no authentication: anyone who can reach its Ingress can see what this run writes"
    eventually("the address", lambda: "TensorBoard is at https://board.example.com/" in run.said(), more=run.said)
    assert warning in run.said()
    name = f"{run.name}-tensorboard-page"
    ingress = person.cluster.get("ingress", name, "-n", person.namespace)["spec"]
    assert (ingress["ingressClassName"], ingress["tls"][0]["secretName"]) == ("none", "board-tls")
    port = person.cluster.get("service", name, "-n", person.namespace)["spec"]["ports"][0]["nodePort"]
    run.all_step()
    with tensorboard(person, run) as page:
        eventually("steps of both", lambda: len(page.steps("worker-1")) > 5, more=run.said)
        lost_pod = run.pods("worker")[1]["metadata"]["name"]
        person.cluster.kubectl("delete", "pod", lost_pod, "-n", person.namespace, "--force", "--grace-period=0")
        run.wait("generation-formed", generation=2)
        eventually("both generations", lambda: page.steps("worker-1", "generation") == [1, 2], more=run.said)
        curve: list[int] = []

        def has_grown() -> bool:
            curve[:] = page.steps("worker-1")  # none if there is no answer
            return len(curve) > before + 20

        before = len(page.steps("worker-1"))
        eventually("more steps", has_grown, more=run.said)
        assert curve == list(range(1, len(curve) + 1))
        pod = run.pods("worker")[0]
        url = f"http://{pod['status']['hostIP']}:{port}/data/runs"
        read = f"import urllib.request; print(urllib.request.urlopen('{url}', timeout=60).read().decode())"
        from_node = ["exec", pod["metadata"]["name"], "-n", person.namespace, "--", "python3", "-c", read]
        assert sorted(json.loads(person.cluster.kubectl(*from_node))) == ["worker-0", "worker-1"]
    person.finish()
    assert run.ends() == 0, run.said()


def test_an_image_without_tensorboard_is_reported_and_training_continues(
    person: Person, start: Callable[..., Run]
) -> None:
    run = start(program=PLAIN, **job("lab.local/python:1"))
    remedy = "set tensorboard.image to an image that contains it"
    warning = f"TensorBoard is not installed in the image lab.local/python:1; {remedy}"
    eventually("the warning", lambda: warning in run.said(), more=run.said)
    result = person.call("tensorboard", run.name)
    assert (result.returncode, result.stdout) == (1, "") and warning in result.stderr
    person.finish()
    assert run.ends() == 0, run.said()
    assert run.said().count(warning) == 1


def test_a_tensorboard_that_never_starts_does_not_delay_the_run(person: Person, start: Callable[..., Run]) -> None:
    run = start(program=PLAIN, **job("lab.local/python:1", {"image": "lab.local/nowhere:1"}, image_pull_policy="Never"))
    run.wait("step", task="worker-1")
    eventually("its pod", lambda: _waiting_reason(run) == "ErrImageNeverPull")
    person.finish()
    assert run.ends() == 0, run.said()


def test_a_run_without_tensorboard_reports_how_to_enable_it(person: Person, start: Callable[..., Run]) -> None:
    run = start("--detach", program="pass", workers=1)
    assert run.ends() == 0, run.said()
    result = person.call("tensorboard", run.name)
    assert result.returncode == 1 and "tensorboard: true" in result.stderr


def _names(tags: dict[str, dict[str, Any]] | None) -> dict[str, list[str]]:
    return {run: sorted(of_run) for run, of_run in (tags or {}).items()}


def _waiting_reason(run: Run) -> str:
    for pod in run.pods("tensorboard"):
        for container in pod["status"].get("containerStatuses", ()):
            return str(container["state"].get("waiting", {}).get("reason", ""))
    return ""
