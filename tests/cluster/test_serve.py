"""A run's model served by pods: from a bucket, with a newer snapshot loaded under load, until it is stopped.

With Paceline's own server: a cluster without a registry has no image of TensorFlow Serving. The command that starts
TensorFlow Serving is in tests/unit/rendered/tensorflow-serving.yaml.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from support.people import Person, Run, eventually

pytestmark = pytest.mark.timeout(1200, func_only=True)

# Saves a snapshot, and another one when it is told to. The model multiplies its input by the saved weight.
PROGRAM = """
import os, sys, time, pathlib
if sys.argv[1] == "train":
    import paceline
    saves = pathlib.Path(os.environ["PACELINE_SNAPSHOT_DIR"])
    for step in (5, 10):
        while step == 10 and not os.path.exists("/shared/second"):
            time.sleep(0.05)
        partial = saves / f"{step}.partial"
        partial.mkdir()
        (partial / "weight").write_text(str(step))
        partial.rename(saves / f"step-{step}")
        paceline.report(step=step)
    while not os.path.exists("/shared/finish"):
        time.sleep(0.05)
    sys.exit()
import jax.numpy
import paceline.jax
weight = float(pathlib.Path(os.environ["PACELINE_RESTORE"], "weight").read_text())
paceline.jax.export(lambda weight, given: given * weight, jax.numpy.float32(weight), jax.numpy.ones((1, 2)))
"""
# Sends requests continuously, over new connections and over one kept open, until it is told to stop.
LOAD = """
import http.client, json, os, sys, threading, time
host, path = sys.argv[1], sys.argv[2]
answers, failed, lock = [], [], threading.Lock()
def send_requests(keep):
    connection = None
    while not os.path.exists("/shared/enough"):
        try:
            connection = connection or http.client.HTTPConnection(host, 8501, timeout=60)
            connection.request("POST", path, json.dumps({"instances": [[1.0, 2.0]]}))
            answer = connection.getresponse()
            body = answer.read()
            with lock:
                if answer.status == 200:
                    answers.append(json.loads(body)["predictions"][0])
                else:
                    failed.append([answer.status, body.decode()])
            if not keep or answer.getheader("connection") == "close":
                connection.close()
                connection = None
        except Exception as error:
            connection = None
            with lock:
                failed.append(repr(error))
        time.sleep(0.02)
threads = [threading.Thread(target=send_requests, args=(number == 0,)) for number in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(json.dumps({"first": answers[0], "last": answers[-1], "count": len(answers), "failed": failed}))
"""
FIRST, SECOND = [5.0, 10.0], [10.0, 20.0]
KINDS = "deployments,replicasets,pods,services,configmaps,networkpolicies"


def serve(person: Person, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paceline.cli", "serve", *arguments, "--on", "kubernetes"]
    return subprocess.run(command, env=person.env, cwd=person.folder, capture_output=True, text=True, timeout=400)


def job(person: Person) -> dict[str, Any]:
    settings = json.loads(person.job(PROGRAM).read_text())["kubernetes"]
    kubernetes = {**settings, "image": "lab.local/torch-jax:1", "env_from": [{"secret": "store"}]}
    program = ["python3", "train.py"]
    return {
        "program": PROGRAM, "workers": 1, "command": [*program, "train"], "export": {"command": [*program, "export"]},
        "serve": {"replicas": 2, "image": "lab.local/serve:1", "memory": "1Gi"}, "kubernetes": kubernetes,
        "snapshots": {"to": "s3://digits/training"},
    }  # fmt: skip


def serving_objects(person: Person, run: Run) -> list[str]:
    items = person.cluster.get(KINDS, "-n", person.namespace, "-l", f"paceline.dev/serves={run.name}")["items"]
    return [f"{each['kind']} {each['metadata']['name']}" for each in items]


def count_pods(person: Person, run: Run) -> int:
    return sum(each.startswith("Pod ") for each in serving_objects(person, run))


def test_pods_serve_a_run_load_a_newer_snapshot_under_load_and_outlive_it(
    person: Person, start: Callable[..., Run], bucket: dict[str, str], outside: dict[str, str]
) -> None:
    person.cluster.images("torch-jax", "serve")
    run = start(**job(person))
    run.wait("committed", step=5)
    person.env = {**person.env, **outside}

    served = serve(person, run.name)
    assert served.returncode == 0, served.stderr
    url = f"http://{run.name}-serve.{person.namespace}:8501/v1/models/loop:predict"
    assert served.stdout == f"{url}\n" and "step-5-g1 is served inside the cluster" in served.stderr
    created = serving_objects(person, run)
    assert count_pods(person, run) == 2, created

    host, _, path = url.removeprefix("http://").partition("/")
    arguments = ["exec", run.pods("worker")[0]["metadata"]["name"], "-n", person.namespace, "--", "python3", "-c", LOAD]
    with ThreadPoolExecutor(1) as pool:
        load = pool.submit(person.cluster.kubectl, *arguments, host.partition(":")[0], f"/{path}")
        try:
            (person.shared / "second").touch()
            run.wait("committed", step=10)
            updated = serve(person, run.name)
            assert updated.returncode == 0, updated.stderr
            assert "step-10-g1 is served" in updated.stderr
            again = serve(person, run.name)  # nothing has changed, so nothing is updated
            assert again.returncode == 0 and "waiting: " not in again.stderr
            # Connections that are kept open are answered by the earlier pods until these have ended.
            eventually("the earlier pods have ended", lambda: count_pods(person, run) == 2)
        finally:
            (person.shared / "enough").touch()
        result = json.loads(load.result(180))
    assert result["failed"] == [] and result["count"] > 100, result
    assert (result["first"], result["last"]) == (FIRST, SECOND)
    maps = [each for each in serving_objects(person, run) if each.startswith("ConfigMap")]
    assert sorted(maps) == sorted(each for each in created if each.startswith("ConfigMap"))

    # A failed export is reported, and the pods continue to serve; also when the run is deleted.
    (person.folder / "work" / "train.py").write_text("print('half way')\nraise SystemExit(3)\n")
    failed = serve(person, run.name, "--snapshot", "5")
    assert failed.returncode == 1 and "the job's export ended with exit code 3" in failed.stderr, failed.stderr
    assert "export: half way\n" in failed.stderr and "the previous model is still served" in failed.stderr
    person.finish()
    assert run.ends() == 0, run.said()
    assert person.call("delete", "--yes", run.name).returncode == 0

    def ready() -> int:
        """On a busy machine, a pod may miss a probe."""
        status = person.cluster.get("deployment", f"{run.name}-serve", "-n", person.namespace)["status"]
        return int(status.get("readyReplicas", 0))

    eventually("two pods serve", lambda: ready() == 2)

    stopped = serve(person, run.name, "--stop", "-n", person.namespace)
    assert stopped.returncode == 0, stopped.stderr
    eventually("nothing remains", lambda: not serving_objects(person, run))
    missing = serve(person, run.name, "--stop", "-n", person.namespace)
    assert missing.returncode == 1 and f"{run.name} is not served in namespace {person.namespace}" in missing.stderr
