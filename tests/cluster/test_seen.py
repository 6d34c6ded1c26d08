"""What people see of runs on a cluster: their own and those of others, followed or not."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.people import Person, Run, eventually

pytestmark = pytest.mark.timeout(300, func_only=True)

# Says a line for each step, so that a line which is missing or comes twice is seen.
COUNTING = """
import os, time
import paceline
step = 0
while step < 5000 and not os.path.exists("/shared/finish"):
    step += 1
    print("line", step, flush=True)
    paceline.report(step=step)
    time.sleep(0.01)
print("last line", step, flush=True)
"""


def detached(person: Person, *words: str, **job: Any) -> str:
    answer = person.call("run", str(person.job(**job)), "--on", "kubernetes", "--detach", *words)
    assert answer.returncode == 0, answer.stderr
    return answer.stdout.strip()


def status(person: Person, run: str, *words: str) -> dict[str, Any]:
    shown = person.call("status", run, "-o", "json", *words)
    assert shown.returncode == 0, shown.stderr
    told: dict[str, Any] = json.loads(shown.stdout)
    return told


def trains(person: Person, run: str, *words: str) -> None:
    eventually("steps", lambda: (status(person, run, *words)["steps"] or 0) > 0)


def assert_counted(lines: list[str]) -> None:
    """Every line once, in order."""
    numbers = [int(line.split()[-1]) for line in lines if "| line" in line]
    assert numbers == list(range(1, len(numbers) + 1))
    assert numbers and lines[-1].endswith(f"last line {numbers[-1]}")


def test_output_comes_once_whoever_reads_it(person: Person, start: Callable[..., Run]) -> None:
    """The command line that follows, `status` and `logs` beside it, and one that follows after it was killed."""
    run = start(program=COUNTING, workers=1)
    run.wait("step")
    trains(person, run.name)
    assert "line 1\n" in person.call("logs", run.name).stdout
    run.process.kill()
    run.process.wait()
    trains(person, run.name)
    with (person.folder / "followed").open("wb") as said:
        command = [sys.executable, "-m", "paceline.cli", "logs", "-f", run.name]
        follower = subprocess.Popen(command, env=person.env, cwd=person.folder, stdout=said)
    try:
        eventually("lines", lambda: "| line" in (person.folder / "followed").read_text())
        trains(person, run.name)
        person.finish()
        assert follower.wait(90) == 0
    finally:
        follower.kill()
        follower.wait()
    assert_counted((person.folder / "followed").read_text().splitlines())
    assert_counted(person.call("logs", run.name).stdout.splitlines())
    assert status(person, run.name)["status"] == "succeeded"


def test_output_of_a_run_that_nobody_followed_is_there_after_its_end(person: Person) -> None:
    run = detached(person, program=COUNTING.replace("5000", "50"), workers=2)
    eventually("its end", lambda: status(person, run)["status"] == "succeeded")
    assert_counted(person.call("logs", run, "--task", "worker-1").stdout.splitlines())
    assert person.call("delete", "--yes", run).returncode == 0
    assert person.cluster.get("jobs", "-n", person.namespace)["items"] == []


def test_status_tells_pods_nodes_and_restarts(person: Person) -> None:
    run = detached(person)
    trains(person, run)

    def running() -> dict[str, Any] | None:
        """Once the cluster says so, which may be later than a pod's own word."""
        told = status(person, run)
        return told if all(pod["phase"] == "Running" for pod in told["pods"]) else None

    told = eventually("all pods run", running)
    pods = {pod["metadata"]["name"]: pod for pod in person.cluster.get("pods", "-n", person.namespace)["items"]}
    assert {pod["host"] for pod in told["pods"]} == {"captain", *(f"worker-host-{n}" for n in range(3))}
    for pod in told["pods"]:
        assert pod["node"] == pods[pod["pod"]]["spec"]["nodeName"]
        assert (pod["phase"], pod["restarts"], pod["reason"]) == ("Running", 0, "")
    shown = person.call("status", run).stdout
    assert all(name in shown for name in pods) and "NODE" in shown
    assert person.call("stop", run).returncode == 0


def test_status_says_why_pods_do_not_come_though_nobody_follows(person: Person) -> None:
    run = detached(person, "--set", "roles.worker.gpus=1")
    reason = "3 without enough nvidia.com/gpu free"
    eventually("the reason", lambda: any(reason in pod["reason"] for pod in status(person, run)["pods"]))
    assert reason in person.call("status", run).stdout
    assert person.call("stop", "--now", run).returncode == 0
    assert status(person, run)["status"] in ("failed", "stopped")


def test_a_run_of_somebody_else_is_listed_shown_stopped_and_deleted(person: Person, tmp_path: Path) -> None:
    run = detached(person)
    trains(person, run)
    person.env["PACELINE_HOME"] = str(tmp_path / "elsewhere")
    there = ["--on", "kubernetes"]
    assert run not in person.call("ls").stdout
    unknown = person.call("status", run)
    assert unknown.returncode == 2 and "--on kubernetes" in unknown.stderr
    listed = json.loads(person.call("ls", *there, "-o", "json").stdout)
    assert [(each["run"], each["status"]) for each in listed] == [(run, "running")]
    trains(person, run, *there)
    eventually("the words of a worker", lambda: "worker-0 | pid" in person.call("logs", run, *there).stdout)
    assert person.call("stop", run, *there).returncode == 0
    eventually("the end", lambda: json.loads(person.call("ls", *there, "-o", "json").stdout)[0]["status"] == "stopped")
    assert person.call("delete", "--yes", run, *there).returncode == 0
    assert person.call("ls", *there, "-o", "name").stdout.strip() == ""
    missing = person.call("status", "loop-0000", *there)
    assert missing.returncode == 2 and "no run 'loop-0000' in" in missing.stderr


def test_a_run_goes_on_where_its_terminal_closes(person: Person, start: Callable[..., Run]) -> None:
    """And it is in the namespace that was asked for, whatever the job file says."""
    run = start("-n", person.namespace, "--set", "kubernetes.namespace=default")
    run.wait("step")
    run.process.send_signal(signal.SIGHUP)
    assert run.ends() == 128 + signal.SIGHUP, run.said()
    before = status(person, run.name)["steps"]
    eventually("more steps", lambda: status(person, run.name)["steps"] > before)
    person.finish()
    eventually("its end", lambda: status(person, run.name)["status"] == "succeeded")


def test_a_run_on_a_cluster_that_is_away_is_shown_as_it_was_last_seen(person: Person, tmp_path: Path) -> None:
    run = detached(person)
    trains(person, run)
    reachable = person.env["KUBECONFIG"]
    config = json.loads(Path(reachable).read_text())
    config["clusters"][0]["cluster"]["server"] = "https://127.0.0.1:1"
    (tmp_path / "away").write_text(json.dumps(config))
    person.env["KUBECONFIG"] = str(tmp_path / "away")
    for verb in ("status", "events", "logs"):
        shown = person.call(verb, run)
        assert shown.returncode == 0 and "is shown as it was last seen: no cluster answers" in shown.stderr
    assert run in person.call("ls").stdout
    kept = person.call("delete", "--yes", "--force", run, "--force")
    assert kept.returncode == 1 and "on the cluster it may still run" in kept.stderr
    person.env["KUBECONFIG"] = reachable
    assert person.call("delete", "--yes", "--force", run, "--on", "kubernetes").returncode == 0


def test_a_run_whose_job_somebody_deleted_has_ended(person: Person) -> None:
    run = detached(person)
    trains(person, run)
    person.cluster.kubectl("delete", "job", run, "-n", person.namespace)
    told = status(person, run)
    assert told["status"] == "failed" and "its Job is gone from the cluster" in told["reason"]
    assert "failed" in person.call("ls").stdout
    assert person.call("delete", "--yes", run).returncode == 0


def test_a_later_run_with_the_same_id_is_not_taken_for_the_one_known_here(person: Person, tmp_path: Path) -> None:
    """An event about the earlier one is none about the later one either: that would end it."""
    ours = dict(person.env)
    kubernetes = {"namespace": person.namespace, "image": "lab.local/python:1", "service_account": "nobody"}
    run = detached(person, "--run", "same", kubernetes=kubernetes)
    reason = "there is no ServiceAccount nobody: create it"
    eventually("the reason", lambda: reason in person.call("status", run).stdout)
    assert any(reason in each for each in status(person, run)["reasons"])
    person.cluster.kubectl("delete", "job", run, "-n", person.namespace)
    person.env["PACELINE_HOME"] = str(tmp_path / "elsewhere")
    detached(person, "--run", "same")
    trains(person, run)
    theirs, person.env = person.env, ours
    told = status(person, run)
    assert told["status"] == "failed" and "its Job is gone from the cluster" in told["reason"]
    assert "does not run" in person.call("stop", run).stderr
    assert person.call("delete", "--yes", run).returncode == 0
    person.env = theirs
    before = status(person, run)["steps"]
    eventually("more steps", lambda: status(person, run)["steps"] > before)
    assert person.call("delete", "--yes", "--force", run).returncode == 0
