"""What users see of runs on a cluster: their own and those of other users, followed or not."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.page_server import EventSource, page_server
from support.people import Person, Run, eventually

pytestmark = pytest.mark.timeout(900, func_only=True)

# Prints a line for each step, so that a missing or repeated line is detected.
COUNTING = """
import os, time
import paceline
step = 0
while step < 50_000 and not os.path.exists("/shared/finish"):
    step += 1
    print("line", step, flush=True)
    paceline.report(step=step)
    time.sleep(0.01)
print("last line", step, flush=True)
"""


def run_detached(person: Person, *arguments: str, **job: Any) -> str:
    result = person.call("run", str(person.job(**job)), "--on", "kubernetes", "--detach", *arguments)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def status(person: Person, run: str, *arguments: str) -> dict[str, Any]:
    result = person.call("status", run, "-o", "json", *arguments)
    assert result.returncode == 0, result.stderr
    report: dict[str, Any] = json.loads(result.stdout)
    return report


def wait_for_steps(person: Person, run: str, *arguments: str) -> None:
    eventually("steps", lambda: (status(person, run, *arguments)["steps"] or 0) > 0)


def assert_complete(lines: list[str]) -> None:
    """Every line once, in order."""
    numbers = [int(line.split()[-1]) for line in lines if "| line" in line]
    assert numbers == list(range(1, len(numbers) + 1))
    assert numbers and lines[-1].endswith(f"last line {numbers[-1]}")


def test_every_reader_gets_each_line_of_output_once(person: Person, start: Callable[..., Run]) -> None:
    """For the command line that follows, for `status` and `logs` beside it, for `logs -f` after it was killed, and for
    the page in a browser, which shows the task and the end of the run, too."""
    run = start(program=COUNTING, workers=1)
    run.wait("step")
    wait_for_steps(person, run.name)
    assert "line 1\n" in person.call("logs", run.name).stdout
    run.process.kill()
    run.process.wait()
    wait_for_steps(person, run.name)
    with (person.folder / "followed").open("wb") as output:
        command = [sys.executable, "-m", "paceline.cli", "logs", "-f", run.name]
        follower = subprocess.Popen(command, env=person.env, cwd=person.folder, stdout=output)
    try:
        with page_server(person.home, env=person.env) as server, server.client() as client:
            eventually("lines", lambda: "| line" in (person.folder / "followed").read_text())
            wait_for_steps(person, run.name)
            page = EventSource(client, f"api/runs/{run.name}/stream?log=*&position=0")
            page.wait("lines", lambda data: data["lines"][0]["task"] == "worker-0")
            rows = client.get(f"api/runs/{run.name}/tasks").json()["tasks"]
            assert [(row["task"], row["state"]) for row in rows] == [("worker-0", "running")]
            person.finish()
            page.wait_for_all(
                ("lines", lambda data: any(line["text"].startswith("last line") for line in data["lines"])),
                ("status", lambda data: data["status"] == "succeeded"),
            )
            assert follower.wait(240) == 0
    finally:
        follower.kill()
        follower.wait()
    assert_complete((person.folder / "followed").read_text().splitlines())
    assert_complete(person.call("logs", run.name).stdout.splitlines())
    assert status(person, run.name)["status"] == "succeeded"


def test_output_of_a_run_that_nobody_followed_is_available_after_its_end(person: Person) -> None:
    run = run_detached(person, program=COUNTING.replace("50_000", "50"), workers=2)
    eventually("its end", lambda: status(person, run)["status"] == "succeeded")
    assert_complete(person.call("logs", run, "--task", "worker-1").stdout.splitlines())
    assert person.call("delete", "--yes", run).returncode == 0
    assert person.cluster.get("jobs", "-n", person.namespace)["items"] == []


def test_scripts_wait_for_a_run_even_if_the_one_that_follows_it_is_killed(person: Person) -> None:
    run = run_detached(person, program=COUNTING, workers=1)
    assert person.call("wait", run, "--for", "step=5", "--timeout", "4m").returncode == 0
    assert person.call("wait", run, "--timeout", "1s").returncode == 124
    command = [sys.executable, "-m", "paceline.cli", "wait", run, "--timeout", "4m"]
    waiting = [subprocess.Popen(command, env=person.env, cwd=person.folder) for _ in range(2)]
    try:
        wait_for_steps(person, run)
        waiting[0].kill()
        person.finish()
        assert waiting[1].wait(240) == 0
    finally:
        for process in waiting:
            process.kill()
            process.wait()
    assert status(person, run)["status"] == "succeeded"
    assert person.call("wait", run, "--for", "step=1000000").returncode == 3
    assert person.call("logs", run, "--grep", "last line", "--tail", "1").stdout.count("\n") == 1


def test_status_shows_pods_nodes_and_restarts(person: Person) -> None:
    run = run_detached(person)
    wait_for_steps(person, run)

    def running() -> dict[str, Any] | None:
        """The status, once the cluster reports all pods as running, which may be later than their first steps."""
        report = status(person, run)
        return report if all(pod["phase"] == "Running" for pod in report["pods"]) else None

    report = eventually("all pods run", running)
    pods = {pod["metadata"]["name"]: pod for pod in person.cluster.get("pods", "-n", person.namespace)["items"]}
    assert {pod["host"] for pod in report["pods"]} == {"captain", *(f"worker-host-{n}" for n in range(3))}
    for pod in report["pods"]:
        assert pod["node"] == pods[pod["pod"]]["spec"]["nodeName"]
        assert (pod["phase"], pod["restarts"], pod["reason"]) == ("Running", 0, "")
    output = person.call("status", run).stdout
    assert all(name in output for name in pods) and "NODE" in output
    assert person.call("stop", run).returncode == 0


def test_status_shows_why_pods_do_not_start_even_if_nobody_follows(person: Person) -> None:
    run = run_detached(person, "--set", "roles.worker.gpus=1")
    reason = "3 without enough nvidia.com/gpu free"
    eventually("the reason", lambda: any(reason in pod["reason"] for pod in status(person, run)["pods"]))
    assert reason in person.call("status", run).stdout
    assert person.call("stop", "--now", run).returncode == 0
    assert status(person, run)["status"] in ("failed", "stopped")


def test_a_run_of_another_user_is_listed_shown_stopped_and_deleted(person: Person, tmp_path: Path) -> None:
    run = run_detached(person)
    wait_for_steps(person, run)
    person.env["PACELINE_HOME"] = str(tmp_path / "elsewhere")
    on_cluster = ["--on", "kubernetes"]
    assert run not in person.call("ls").stdout
    unknown = person.call("status", run)
    assert unknown.returncode == 2 and "--on kubernetes" in unknown.stderr
    runs = json.loads(person.call("ls", *on_cluster, "-o", "json").stdout)
    assert [(each["run"], each["status"]) for each in runs] == [(run, "running")]
    wait_for_steps(person, run, *on_cluster)
    eventually("output of a worker", lambda: "worker-0 | pid" in person.call("logs", run, *on_cluster).stdout)
    assert person.call("stop", run, *on_cluster).returncode == 0
    eventually(
        "the end", lambda: json.loads(person.call("ls", *on_cluster, "-o", "json").stdout)[0]["status"] == "stopped"
    )
    assert person.call("delete", "--yes", run, *on_cluster).returncode == 0
    assert person.call("ls", *on_cluster, "-o", "name").stdout.strip() == ""
    missing = person.call("status", "loop-0000", *on_cluster)
    assert missing.returncode == 2 and "no run 'loop-0000' in" in missing.stderr


def test_a_run_continues_if_its_terminal_closes(person: Person, start: Callable[..., Run]) -> None:
    """It also runs in the namespace of the option, not in that of the job file."""
    run = start("-n", person.namespace, "--set", "kubernetes.namespace=default")
    run.wait("step")
    run.process.send_signal(signal.SIGHUP)
    assert run.ends() == 128 + signal.SIGHUP, run.said()
    before = status(person, run.name)["steps"]
    eventually("more steps", lambda: status(person, run.name)["steps"] > before)
    person.finish()
    eventually("its end", lambda: status(person, run.name)["status"] == "succeeded")


def test_a_run_on_an_unreachable_cluster_is_shown_in_its_last_known_state(person: Person, tmp_path: Path) -> None:
    kubeconfig = tmp_path / "kubeconfig"
    reachable = Path(person.env["KUBECONFIG"]).read_text()
    kubeconfig.write_text(reachable)
    person.env["KUBECONFIG"] = str(kubeconfig)
    run = run_detached(person)
    wait_for_steps(person, run)
    config = json.loads(reachable)
    config["clusters"][0]["cluster"]["server"] = "https://127.0.0.1:1"
    kubeconfig.write_text(json.dumps(config))
    for verb in ("status", "events", "logs"):
        result = person.call(verb, run)
        assert result.returncode == 0 and "in its last known state: cannot connect to the cluster" in result.stderr
    assert run in person.call("ls").stdout
    refused = person.call("delete", "--yes", "--force", run, "--force")
    assert refused.returncode == 1 and "it may still be running on the cluster" in refused.stderr
    kubeconfig.write_text(reachable)
    assert person.call("delete", "--yes", "--force", run, "--on", "kubernetes").returncode == 0


def test_a_run_whose_job_was_deleted_has_ended(person: Person) -> None:
    run = run_detached(person)
    wait_for_steps(person, run)
    person.cluster.kubectl("delete", "job", run, "-n", person.namespace)
    report = status(person, run)
    assert report["status"] == "failed" and "its Job no longer exists on the cluster" in report["reason"]
    assert "failed" in person.call("ls").stdout
    assert person.call("delete", "--yes", run).returncode == 0


def test_a_later_run_with_the_same_id_is_not_mistaken_for_the_local_one(person: Person, tmp_path: Path) -> None:
    """Nor is an event about the earlier one applied to the later one, which would end it."""
    first_env = dict(person.env)
    kubernetes = {"namespace": person.namespace, "image": "lab.local/python:1", "service_account": "nobody"}
    run = run_detached(person, "--run", "same", kubernetes=kubernetes)
    reason = "there is no ServiceAccount nobody: create it"
    eventually("the reason", lambda: reason in person.call("status", run).stdout)
    assert any(reason in each for each in status(person, run)["reasons"])
    person.cluster.kubectl("delete", "job", run, "-n", person.namespace)
    kinds = "jobs,pods,services,configmaps,secrets,networkpolicies"
    selected = [kinds, "-n", person.namespace, "-l", f"paceline.dev/run={run}"]
    eventually("the cluster deletes what belongs to it", lambda: not person.cluster.get(*selected)["items"])
    person.env["PACELINE_HOME"] = str(tmp_path / "elsewhere")
    run_detached(person, "--run", "same")
    wait_for_steps(person, run)
    second_env, person.env = person.env, first_env
    report = status(person, run)
    assert report["status"] == "failed" and "its Job no longer exists on the cluster" in report["reason"]
    assert "is not running" in person.call("stop", run).stderr
    assert person.call("delete", "--yes", run).returncode == 0
    person.env = second_env
    before = status(person, run)["steps"]
    eventually("more steps", lambda: status(person, run)["steps"] > before)
    assert person.call("delete", "--yes", "--force", run).returncode == 0
