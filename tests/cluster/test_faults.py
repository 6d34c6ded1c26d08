"""Faults of a cluster, after which training continues: each generation ends before the next one starts."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from support.lab.cluster import Cluster
from support.people import IMAGE, Person, Run, bucket_of, eventually, init_pid
from support.saving_on_a_cluster import TRAINING as SAVING
from support.saving_on_a_cluster import begun, restored

pytestmark = pytest.mark.timeout(900, func_only=True)

# Each attempt records when it was alive, in a file that outlives its pod and needs no network.
BEATS = """
import os, time
run, task, generation = (os.environ["PACELINE_" + name] for name in ("RUN", "TASK", "GENERATION"))
beats = open(f"/shared/{run}.{task}.{generation}.{os.getpid()}.beats", "w", buffering=1)
"""
BEAT = "    print(time.time(), file=beats)\n"
BEATING = f"""{BEATS}
import paceline
step = 0
while not os.path.exists("/shared/finish"):
    step += 1
    paceline.report(step=step)
{BEAT}
    time.sleep(0.05)
"""

# Saves only when its group is requested to save.
SAVING_ON_REQUEST = BEATS + SAVING.replace("step % 10 == 0", "paceline.should_save()")
SAVING_ON_REQUEST = SAVING_ON_REQUEST.replace("    step += 1\n", f"    step += 1\n{BEAT}")


def beating_job(captain_on: str = "", **more: Any) -> dict[str, Any]:
    """Fields of a job whose tasks write beats; the captain runs on node `captain_on`, as long as that node exists."""
    settings: dict[str, Any] = {"image": IMAGE, "image_pull_policy": "IfNotPresent", "placement": "spread"}
    settings["volumes"] = [{"mount": "/shared", "claim": "shared"}]
    if captain_on:
        expression = {"key": "kubernetes.io/hostname", "operator": "In", "values": [captain_on]}
        preferred = [{"weight": 100, "preference": {"matchExpressions": [expression]}}]
        settings["affinity"] = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}
        settings["pod"] = {"affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}}
    return {"program": BEATING, "kubernetes": settings, **more}


def saving_job(captain_on: str, others_on: str, **more: Any) -> dict[str, Any]:
    """Fields of a job with a chief, whose snapshots are stored in the bucket."""
    settings = beating_job(captain_on)["kubernetes"]
    expression = {"key": "kubernetes.io/hostname", "operator": "In", "values": [others_on]}
    preferred = [{"weight": 100, "preference": {"matchExpressions": [expression]}}]
    settings["pod"]["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"] = preferred
    del settings["placement"]
    settings["env_from"] = [{"secret": "store"}]
    roles = {"chief": {}, "worker": {"replicas": 1}}
    fields = {"framework": "tensorflow", "strategy": "multi-worker", "roles": roles}
    return {"program": SAVING, "kubernetes": settings, "snapshots": {"to": "s3://digits/training"}, **fields, **more}


def beats(person: Person, run: str) -> dict[int, tuple[float, float]]:
    """For each generation: when its first task began and its last one ended, as recorded by the tasks."""
    spans: dict[int, tuple[float, float]] = {}
    for path in person.shared.glob(f"{run}.*.beats"):
        times = [float(line) for line in path.read_text().splitlines()[:-1]]
        if times:
            generation = int(path.name.split(".")[2])
            first, last = spans.get(generation, (times[0], times[-1]))
            spans[generation] = min(first, times[0]), max(last, times[-1])
    return spans


def assert_no_overlap(person: Person, run: str, generations: int) -> None:
    spans = beats(person, run)
    assert sorted(spans) == list(range(1, generations + 1))
    for generation in range(1, generations):
        assert spans[generation][1] < spans[generation + 1][0], spans


def captain_node(run: Run) -> str:
    return str(run.pods("captain")[0]["spec"]["nodeName"])


def test_a_killed_container_starts_again_in_its_pod(person: Person, start: Callable[..., Run]) -> None:
    run = start(**beating_job())
    run.wait("step", task="worker-1")
    pod = run.pods("worker")[1]
    os.kill(init_pid(pod), signal.SIGKILL)
    run.wait("step", task="worker-1", generation=2)

    def restarts() -> int:
        """As counted by the cluster, which is slightly delayed."""
        current = run.pods("worker")[1]
        assert current["metadata"]["uid"] == pod["metadata"]["uid"]
        return int(current["status"]["containerStatuses"][0]["restartCount"])

    eventually("the container is counted as restarted", restarts)
    person.finish()
    assert run.ends() == 0, run.said()
    assert restarts() == 1
    assert [each["cause"] for each in run.report()["restarts"]] == ["host-lost"]
    assert_no_overlap(person, run.name, 2)


def test_runs_survive_the_loss_of_a_node(person: Person, breakable: Cluster, start: Callable[..., Run]) -> None:
    """The lost node runs a member; the captain of a run that is followed; the captain of a detached run; and a chief
    whose snapshots are in a bucket."""
    bucket_of(person, "n1")
    stored = start(**saving_job("n1", "n3", folder="stored", name="stored"))
    member = start(**beating_job("n1", folder="member"))
    followed = start(**beating_job("n3", folder="followed", name="followed"))
    detached = person.call(
        "run", str(person.job(**beating_job("n3", folder="detached", name="alone"))), "--on", "kubernetes", "--detach"
    )
    assert detached.returncode == 0, detached.stderr
    alone = detached.stdout.strip()
    for run in (member, followed):
        run.wait("step", task="worker-0")
    eventually("steps of the detached run", lambda: 1 in beats(person, alone))
    assert (captain_node(member), captain_node(followed)) == ("n1", "n3")
    saved = stored.wait("committed")["step"]
    assert (captain_node(stored), stored.pods("chief")[0]["spec"]["nodeName"]) == ("n1", "n3")
    breakable.power_off("n3")
    member.wait("step", limit=300, generation=2)
    followed.wait("step", limit=300, generation=2)
    # Generation 2, or a later one where a pod of the lost node was deleted while generation 2 started.
    eventually(
        "a snapshot committed after the loss",
        lambda: any(event["generation"] > 1 for event in stored.events("committed")),
        limit=300,
    )
    assert restored(stored) >= saved
    assert "is on a lost node (n3): deleting it" in followed.said()
    assert not [generation for generation in beats(person, alone) if generation > 1], (
        "its captain was replaced too early"
    )
    breakable.kubectl("delete", "node", "n3")  # as a cloud does with a lost machine
    eventually("a captain of the detached run", lambda: 2 in beats(person, alone), limit=300)
    person.finish()
    assert (member.ends(), followed.ends()) == (0, 0), member.said() + followed.said()
    assert stored.ends() == 0, stored.said()
    assert "host-lost" in {each["cause"] for each in member.report()["restarts"]}
    for name in (member.name, followed.name, alone):
        assert_no_overlap(person, name, 2)

    def succeeded() -> bool:
        return bool(json.loads(person.call("status", alone, "-o", "json").stdout)["status"] == "succeeded")

    eventually("the end of the detached run", succeeded)


def test_a_group_cut_in_two_ends_before_the_next_one_starts(
    person: Person, breakable: Cluster, start: Callable[..., Run]
) -> None:
    run = start(**beating_job("n1"))
    run.wait("step", task="worker-0")
    assert captain_node(run) == "n1"
    breakable.cut("n3")
    run.wait("step", limit=300, generation=2)
    breakable.heal("n3")
    breakable.wait_ready("n3")
    eventually("no superfluous pods", lambda: len(run.pods("worker")) == 3)
    person.finish()
    assert run.ends() == 0, run.said()
    assert_no_overlap(person, run.name, 2)


def test_an_elastic_group_continues_without_a_lost_host_and_a_new_pod_joins_it(
    person: Person, breakable: Cluster, start: Callable[..., Run]
) -> None:
    program = SAVING_ON_REQUEST.replace("len(parts) == world and ", "")
    roles, elastic = {"worker": {"replicas": 3, "min": 2}}, {"every": "5s", "wait": "60s"}
    fields = {"program": program, "roles": roles, "elastic": elastic, "snapshots": {"to": "claim://shared/kept"}}
    run = start(**beating_job("n1", **fields))
    run.all_step()
    assert captain_node(run) == "n1"
    breakable.cut("n3")
    run.wait("step", limit=300, generation=2)
    formed = run.events("generation-formed")[-1]
    assert len(formed["tasks"]) == 2 and len(formed["absent"]) == 1, run.said()
    for pod in run.pods("worker"):
        if pod["spec"].get("nodeName") == "n3":  # the command line may delete it, too, and then the next one is pending
            delete = ("delete", "pod", pod["metadata"]["name"], "-n", person.namespace, "--ignore-not-found")
            breakable.kubectl(*delete, "--force", "--grace-period=0")
    larger = run.wait("generation-formed", limit=300, generation=3)
    started = run.wait("task-started", generation=3, task=formed["absent"][0])
    run.wait("step", generation=3)
    breakable.heal("n3")
    breakable.wait_ready("n3")
    assert len(larger["tasks"]) == 3 and larger["restore"].endswith("-g2"), "from a snapshot that was taken for this"
    run.wait("committed", snapshot=larger["restore"])
    assert started["warm"] is True, "the new pod has learned from others what to import"
    person.finish()
    assert run.ends() == 0, run.said()
    assert [each["cause"] for each in run.report()["restarts"]] == ["host-lost"]
    assert_no_overlap(person, run.name, 3)


def test_a_run_gets_more_and_fewer_pods_on_request(person: Person, start: Callable[..., Run]) -> None:
    """Its bucket cannot be reached while it gets more for the first time, nor when one of them is deleted."""
    bucket_of(person)
    program = SAVING_ON_REQUEST.replace("len(parts) == world and ", "")
    roles, elastic = {"worker": {"replicas": 2, "min": 1, "max": 4}}, {"every": "1h", "wait": "60s"}
    fields = {"program": program, "roles": roles, "elastic": elastic, "snapshots": {"to": "s3://digits/training"}}
    job = beating_job(**fields, limits={"grace": "20s"})
    job["kubernetes"]["env_from"] = [{"secret": "store"}]
    run = start(**job)
    run.wait("step", task="worker-1")
    in_namespace = ("-n", person.namespace)
    person.cluster.kubectl("delete", "pod", "store", *in_namespace, "--force", "--grace-period=0")
    scale(run, 3, generation=2)
    person.cluster.kubectl("delete", "pod", run.pods("worker")[2]["metadata"]["name"], *in_namespace, "--wait=false")
    run.wait("step", generation=3)
    assert run.events("committed") == []
    smaller = run.events("generation-formed")[-1]
    assert smaller["absent"] == ["worker-2"] and smaller["restore"].endswith("-g2"), run.said()
    bucket_of(person)
    for generation, size in ((4, 1), (5, 3)):  # the pod of index 2 is there for a third time
        scale(run, size, generation)
    refused = person.call("scale", run.name, "worker=5")
    assert refused.returncode == 2 and "can have 1 to 4 hosts" in refused.stderr
    person.finish()
    assert run.ends() == 0, run.said()
    assert [each["cause"] for each in run.report()["restarts"]] == ["preempted"]
    assert_no_overlap(person, run.name, 5)


def scale(run: Run, size: int, generation: int) -> None:
    scaled = run.person.call("scale", run.name, f"worker={size}")
    assert scaled.returncode == 0 and f"{run.name}: worker has {size} host" in scaled.stderr, scaled.stderr
    run.wait("step", generation=generation)
    formed = run.events("generation-formed")[-1]
    assert formed["tasks"] == [f"worker-{index}" for index in range(size)] and "absent" not in formed, run.said()
    assert formed["restore"].endswith(f"-g{generation - 1}"), "from a snapshot that was taken for this"
    job = run.person.cluster.get("job", f"{run.name}-worker", "-n", run.person.namespace)["spec"]
    assert (job["completions"], job["parallelism"]) == (size, size)
    eventually(f"{size} pods run, others have exited with 0", partial(has_pods, run, size), more=run.said)


def has_pods(run: Run, count: int) -> bool:
    phases = [pod["status"]["phase"] for pod in run.pods("worker")]
    return phases.count("Running") == count and set(phases) <= {"Running", "Succeeded"}


def test_training_continues_while_the_api_server_is_down(
    person: Person, breakable: Cluster, start: Callable[..., Run]
) -> None:
    run = start(**beating_job())
    run.wait("step", task="worker-0")
    breakable.restart_api()
    run.wait("step", task="worker-0")
    breakable.stop_api()
    stopped_at = time.time()
    eventually("a minute of training", lambda: beats(person, run.name)[1][1] > stopped_at + 60)
    breakable.start_api()
    person.finish()
    assert run.ends() == 0, run.said()
    assert (run.report()["status"], run.report()["generations"]) == ("succeeded", 1)
    assert_no_overlap(person, run.name, 1)


@contextmanager
def drained(cluster: Cluster, node: str) -> Iterator[None]:
    cluster.kubectl("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=240s")
    try:
        yield
    finally:
        cluster.kubectl("uncordon", node)


def test_groups_save_and_leave_a_drained_node(person: Person, breakable: Cluster, start: Callable[..., Run]) -> None:
    """The captains are on another node, and their claim is a volume that every node can mount. One run gets another
    host on the other nodes; the other run, which is elastic, can have only one on each, and gets it back later."""
    fields = {"program": SAVING_ON_REQUEST, "limits": {"grace": "20s"}, "snapshots": {"to": "claim://shared/kept"}}
    run = start(**beating_job("n1", **fields))
    elastic = start("--run", "elastic", **elastic_job("elastic", **fields))
    for each in (run, elastic):
        each.all_step()
        assert captain_node(each) == "n1"
        assert each.events("saved") == []
    with drained(breakable, "n2"):
        for each in (run, elastic):
            each.wait("step", generation=2)
            assert "n2" not in {pod["spec"].get("nodeName") for pod in each.pods("worker") if not _is_terminating(pod)}
    [committed] = run.events("committed")
    assert [each["restore"] for each in run.events("generation-formed")] == [None, committed["snapshot"]]
    tasks = [f"worker-{number}" for number in range(3)]
    eventually("all tasks resume", lambda: {len(begun(run, task)) for task in tasks} == {2}, more=run.said)
    assert {tuple(begun(run, task)) for task in tasks} == {(0, committed["step"])}
    elastic.wait("step", generation=3)
    whole, smaller, larger = elastic.events("generation-formed")
    assert (whole["tasks"], len(smaller["tasks"]), larger["tasks"]) == (tasks, 2, tasks), elastic.said()
    assert smaller["restore"].endswith("-g1") and larger["restore"].endswith("-g2"), "from snapshots taken for this"
    person.finish()
    for each, generations in ((run, 2), (elastic, 3)):
        assert each.ends() == 0, each.said()
        assert {restart["cause"] for restart in each.report()["restarts"]} == {"preempted"}
        assert_no_overlap(person, each.name, generations)


def elastic_job(run: str, **more: Any) -> dict[str, Any]:
    """Fields of an elastic job that can have only one worker on each node."""
    program = more.pop("program").replace("len(parts) == world and ", "")
    roles, elastic = {"worker": {"replicas": 3, "min": 2}}, {"every": "5s", "wait": "60s"}
    fields = beating_job("n1", program=program, roles=roles, elastic=elastic, **more)
    labels = {"paceline.dev/run": run, "paceline.dev/role": "worker"}
    other_nodes = [{"labelSelector": {"matchLabels": labels}, "topologyKey": "kubernetes.io/hostname"}]
    affinity = fields["kubernetes"]["pod"]["affinity"]
    affinity["podAntiAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": other_nodes}
    return fields


def _is_terminating(pod: dict[str, Any]) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def test_a_run_that_gets_only_some_of_its_gpus_gives_way(
    person: Person, breakable: Cluster, start: Callable[..., Run]
) -> None:
    breakable.extended_resources("n1", {"nvidia.com/gpu": 2})
    roles = {"worker": {"replicas": 3, "gpus": 1}}
    greedy = start("--set", "limits.start=30s", folder="greedy", roles=roles, program="print('never')")
    eventually("its first two pods", lambda: sum(p["status"]["phase"] == "Running" for p in greedy.pods("worker")) == 2)
    roles = {"worker": {"replicas": 2, "gpus": 1}}
    modest = start("--set", "limits.start=5m", folder="modest", roles=roles, program="print('done')", name="modest")
    assert greedy.ends() == 1, greedy.said()
    assert modest.ends() == 0, modest.said()
    reason = greedy.report()["reason"]
    assert re.search(r"worker-[012] did not start within 30 s \(limits.start\).*nvidia.com/gpu", reason)
