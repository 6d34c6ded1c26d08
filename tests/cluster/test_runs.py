"""Runs on a real cluster, by a user with rights in one namespace only, under the `restricted` Pod Security level."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from support.people import Person, Run, eventually, webhook_of

pytestmark = pytest.mark.timeout(900, func_only=True)

SCRAPE = """
import sys, urllib.request
print(urllib.request.urlopen(f"http://{sys.argv[1]}:7736/metrics", timeout=60).read().decode())
"""


def conditions(person: Person, job: str) -> set[str]:
    entries = person.cluster.get("job", job, "-n", person.namespace)["status"].get("conditions", ())
    return {condition["type"] for condition in entries if condition["status"] == "True"}


def test_a_run_succeeds_on_all_nodes_and_leaves_nothing_once_deleted(person: Person, start: Callable[..., Run]) -> None:
    run = start(metrics=True)
    run.wait("generation-formed")
    eventually("steps of all tasks", lambda: len({e["task"] for e in run.events("step")}) == 3, more=run.said)
    assert "note: this cluster has no PodMonitor (no Prometheus Operator): " in run.said()
    [captain] = run.pods("captain")
    assert captain["metadata"]["annotations"]["prometheus.io/port"] == "7736"
    arguments = ["exec", run.pods("worker")[0]["metadata"]["name"], "-n", person.namespace, "--", "python3", "-c"]
    metrics = person.cluster.kubectl(*arguments, SCRAPE, captain["status"]["podIP"])
    assert f'paceline_task_up{{run="{run.name}",task="worker-2"}} 1' in metrics
    nodes = {pod["spec"]["nodeName"] for pod in run.pods("worker")}
    person.finish()
    assert run.ends() == 0, run.said()
    assert nodes == set(person.cluster.nodes)
    assert (run.report()["status"], run.report()["generations"], run.report()["restarts"]) == ("succeeded", 1, [])
    assert "worker-2 | done" in run.said() and "user 1000" in run.said()
    for name in (run.name, f"{run.name}-worker"):  # the status of the Job is slightly delayed
        eventually(f"the Job {name} is complete", lambda name=name: "Complete" in conditions(person, name))
    assert person.call("delete", "--yes", run.name).returncode == 0
    kinds = "jobs,pods,services,configmaps,secrets,networkpolicies"
    selected = [kinds, "-n", person.namespace, "-l", f"paceline.dev/run={run.name}"]
    eventually("an empty namespace", lambda: not person.cluster.get(*selected)["items"])


def test_training_continues_while_the_captains_pod_is_replaced(person: Person, start: Callable[..., Run]) -> None:
    run = start()
    run.all_step()
    before = run.pods("captain")[0]["metadata"]["name"]
    person.cluster.kubectl("delete", "pod", before, "-n", person.namespace, "--grace-period=1")
    assert run.wait("captain-returned")["adopted"]
    (after,) = (pod["metadata"]["name"] for pod in run.pods("captain"))
    find_record = ("exec", "-n", person.namespace, after, "--", "find", "/paceline", "-name", "00000001.json")
    eventually("the new pod has the record", lambda: person.cluster.kubectl(*find_record).strip(), more=run.said)
    last_step = run.events("step")[-1]["step"]
    eventually("more steps", lambda: run.events("step")[-1]["step"] > last_step, more=run.said)
    person.finish()
    assert run.ends() == 0, run.said()
    assert after != before
    assert (run.report()["generations"], run.report()["restarts"]) == (1, [])


def test_a_killed_task_restarts_in_place_and_webhooks_are_notified(person: Person, start: Callable[..., Run]) -> None:
    received = webhook_of(person)
    notify = [{"url_from": "HOOK_URL", "on": ["restart", "succeeded"]}]
    run = start("--set", "kubernetes.env_from=[{secret: hooks}]", notify=notify)
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
    bodies = [json.loads(line) for line in received.read_text().splitlines()]
    assert [(body["run"], body["event"]) for body in bodies] == [(run.name, "restart"), (run.name, "succeeded")]
    assert "secret-part" not in run.said()


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

    def active() -> dict[str, int]:
        jobs = person.cluster.get("jobs", "-n", person.namespace)["items"]
        return {job["metadata"]["name"]: job["status"].get("active", 0) for job in jobs}

    eventually(
        "both Jobs without active pods", lambda: active() == {run.name: 0, f"{run.name}-worker": 0}, more=run.said
    )


def test_a_failed_run_fails_the_captains_job(person: Person, start: Callable[..., Run]) -> None:
    run = start(program="raise ValueError('no such digit')")
    assert run.ends() == 1, run.said()
    report = run.report()
    assert (report["status"], report["cause"]) == ("failed", "program-error")
    assert "no such digit" in report["reason"]
    eventually("the captain's Job has failed", lambda: "Failed" in conditions(person, run.name))


def test_a_detached_run_is_shown_stopped_and_deleted_by_other_commands(person: Person) -> None:
    run = person.call("run", str(person.job()), "--on", "kubernetes", "--detach").stdout.strip()

    def steps() -> bool:
        result = person.call("status", run, "-o", "json")
        return (json.loads(result.stdout)["steps"] or 0) > 0 if result.returncode == 0 else False

    eventually("steps", steps)
    eventually("output of a worker", lambda: "worker-0 | pid" in person.call("logs", run).stdout)
    stacks = person.call("stacks", run, "-o", "json")
    assert stacks.returncode == 0, stacks.stderr
    for process in json.loads(stacks.stdout)["tasks"]:
        assert process["threads"][0]["frames"][-1]["function"] == "<module>", process
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
    eventually("a complete Job", lambda: "Complete" in conditions(person, "loop-0001"))


def test_the_reason_why_a_pod_does_not_start_is_reported(person: Person, start: Callable[..., Run]) -> None:
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


def test_a_refusal_by_the_cluster_is_reported_in_one_line(person: Person, tmp_path: Path) -> None:
    job = str(person.job())
    refused = person.call("run", job, "--on", "kubernetes", "-n", "default")
    assert refused.returncode == 1
    assert refused.stderr.splitlines()[-1].startswith("error: cannot create the Job loop-")
    assert "Traceback" not in refused.stderr
    missing = person.call("run", job, "--on", "kubernetes", "--context", "nowhere")
    assert "there is no context 'nowhere'" in missing.stderr and missing.returncode == 1
