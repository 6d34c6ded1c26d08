"""TensorBoard beside a run on the cluster, without any storage that pods share for it; seen from this machine."""

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

pytestmark = pytest.mark.timeout(300, func_only=True)

# TensorFlow takes long to import, and the events it writes are these.
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
    time.sleep(0.1)
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
    """A browser on `paceline tensorboard`: one connection that is kept, for as long as it is."""

    def __init__(self, url: str) -> None:
        self._place = urlsplit(url)
        self._line: http.client.HTTPConnection | None = None

    def get(self, path: str, **query: str) -> Any:
        """None where it does not answer, or not with JSON."""
        assert self._place.hostname and self._place.port
        self._line = self._line or http.client.HTTPConnection(self._place.hostname, self._place.port, timeout=10)
        try:
            self._line.request("GET", f"{path}?{urlencode(query)}")
            answer = self._line.getresponse()
            body = answer.read()
            return json.loads(body) if answer.status == 200 else None
        except (OSError, http.client.HTTPException, ValueError):
            self._line.close()
            self._line = None
            return None

    def steps(self, task: str, tag: str = "loss") -> list[int]:
        found = self.get("/data/plugin/scalars/scalars", run=task, tag=tag)
        return [int(step) for _, step, _ in found or ()]


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
        assert process.wait(60) == 0
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
    said = [line.split() for line in run.said().splitlines() if " | last " in line]
    return {words[0]: int(words[-1]) for words in said}


def test_all_tasks_are_shown_while_it_runs_and_after_until_it_is_deleted(
    person: Person, start: Callable[..., Run]
) -> None:
    person.cluster.images("tensorflow")
    run = start(program=WRITING, **job("lab.local/tensorflow:1"))
    with tensorboard(person, run) as page:
        tags = {"worker-0": ["generation", "loss"], "worker-1": ["generation", "loss"]}
        eventually("the tags of all", lambda: _names(page.get("/data/plugin/scalars/tags")) == tags, more=run.said)
        pods = run.pods("tensorboard")
        assert len(pods) == 1
        # Another pod has nothing of what the first one had: members send it all again, and the local port leads there.
        first = pods[0]["metadata"]
        person.cluster.kubectl("delete", "pod", first["name"], "-n", person.namespace)
        before = run.wait("step", task="worker-1")["step"]
        eventually("the same from a new pod", lambda: max(page.steps("worker-1"), default=0) > before, more=run.said)
        assert first["uid"] not in [pod["metadata"]["uid"] for pod in run.pods("tensorboard")]
        assert page.steps("worker-1")[0] == 1
        person.finish()
        assert run.ends() == 0, run.said()
        last = last_steps(run)
        assert set(last) == {"worker-0", "worker-1"}
        for task, step in last.items():
            eventually(f"all steps of {task}", lambda task=task, step=step: step in page.steps(task))
    with tensorboard(person, run) as again:
        eventually("the tags of all", lambda: _names(again.get("/data/plugin/scalars/tags")) == tags)
    assert run.report()["status"] == "succeeded" and run.report()["restarts"] == []
    assert person.call("delete", "--yes", run.name).returncode == 0
    kinds = "deployments,replicasets,pods,services,jobs"
    selected = [kinds, "-n", person.namespace, "-l", f"paceline.dev/run={run.name}"]
    eventually("an empty namespace", lambda: not person.cluster.get(*selected)["items"])


def test_published_it_shows_one_line_after_a_lost_pod(person: Person, start: Callable[..., Run]) -> None:
    """A program that begins anew, in a pod that has nothing of what the one before it wrote; seen through a port of a
    node by somebody who was asked nothing."""
    person.cluster.images("tensorflow")
    asked = {"service": "NodePort", "ingress": {"host": "board.example.com", "class": "none", "tls": "board-tls"}}
    run = start(program=WRITING, **job("lab.local/tensorflow:1", asked))
    warned = "TensorBoard asks nobody who they are: whoever reaches its Ingress sees what this run writes"
    eventually("the words", lambda: "TensorBoard is at https://board.example.com/" in run.said(), more=run.said)
    assert warned in run.said()
    name = f"{run.name}-tensorboard-page"
    ingress = person.cluster.get("ingress", name, "-n", person.namespace)["spec"]
    assert (ingress["ingressClassName"], ingress["tls"][0]["secretName"]) == ("none", "board-tls")
    port = person.cluster.get("service", name, "-n", person.namespace)["spec"]["ports"][0]["nodePort"]
    run.all_step()
    with tensorboard(person, run) as page:
        eventually("steps of both", lambda: len(page.steps("worker-1")) > 5, more=run.said)
        lost = run.pods("worker")[1]["metadata"]["name"]
        person.cluster.kubectl("delete", "pod", lost, "-n", person.namespace, "--force", "--grace-period=0")
        run.wait("generation-formed", generation=2)
        eventually("both generations", lambda: page.steps("worker-1", "generation") == [1, 2], more=run.said)
        before = len(page.steps("worker-1"))
        eventually("more steps", lambda: len(page.steps("worker-1")) > before + 20, more=run.said)
        line = page.steps("worker-1")
        assert line == list(range(1, len(line) + 1))
        pod = run.pods("worker")[0]
        url = f"http://{pod['status']['hostIP']}:{port}/data/runs"
        read = f"import urllib.request; print(urllib.request.urlopen('{url}', timeout=10).read().decode())"
        from_node = ["exec", pod["metadata"]["name"], "-n", person.namespace, "--", "python3", "-c", read]
        assert sorted(json.loads(person.cluster.kubectl(*from_node))) == ["worker-0", "worker-1"]
    person.finish()
    assert run.ends() == 0, run.said()


def test_an_image_without_tensorboard_is_said_and_training_goes_on(person: Person, start: Callable[..., Run]) -> None:
    run = start(program=PLAIN, **job("lab.local/python:1"))
    why = "the image lab.local/python:1 has no tensorboard: set tensorboard.image to one that has"
    eventually("the warning", lambda: why in run.said(), more=run.said)
    shown = person.call("tensorboard", run.name)
    assert (shown.returncode, shown.stdout) == (1, "") and why in shown.stderr
    person.finish()
    assert run.ends() == 0, run.said()
    assert run.said().count(why) == 1


def test_a_companion_that_never_comes_does_not_hold_up_the_run(person: Person, start: Callable[..., Run]) -> None:
    run = start(program=PLAIN, **job("lab.local/python:1", {"image": "lab.local/nowhere:1"}, image_pull_policy="Never"))
    run.wait("step", task="worker-1")
    eventually("its pod", lambda: _waiting(run) == "ErrImageNeverPull")
    person.finish()
    assert run.ends() == 0, run.said()


def test_a_run_without_one_says_what_to_write(person: Person, start: Callable[..., Run]) -> None:
    run = start("--detach", program="pass", workers=1)
    assert run.ends() == 0, run.said()
    done = person.call("tensorboard", run.name)
    assert done.returncode == 1 and "tensorboard: true" in done.stderr


def _names(tags: dict[str, dict[str, Any]] | None) -> dict[str, list[str]]:
    return {run: sorted(found) for run, found in (tags or {}).items()}


def _waiting(run: Run) -> str:
    for pod in run.pods("tensorboard"):
        for container in pod["status"].get("containerStatuses", ()):
            return str(container["state"].get("waiting", {}).get("reason", ""))
    return ""
