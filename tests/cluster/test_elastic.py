"""Programs that tolerate losses themselves, and elastic runs that compete for the same nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from support.people import IMAGE, Event, Person, Run, eventually, lines
from support.saving_on_a_cluster import TRAINING

pytestmark = pytest.mark.timeout(900, func_only=True)

PROGRAMS = Path(__file__).parents[1] / "programs"
AHEAD = 40  # steps until the end, so that all read the file before any is there
SLOT = "example.com/slot"  # a resource that no other test uses


def settings(**more: Any) -> dict[str, Any]:
    volumes = [{"mount": "/shared", "claim": "shared"}]
    return {"image": IMAGE, "image_pull_policy": "IfNotPresent", "placement": "spread", "volumes": volumes, **more}


def test_only_the_task_that_died_or_lost_its_pod_starts_again(person: Person, start: Callable[..., Run]) -> None:
    """The workers average their parameters, with connections to the addresses that they were given at their start."""
    program, command = (PROGRAMS / "averages.py").read_text(), ["python3", "train.py", "/shared"]
    run = start(program=program, command=command, restart={"scope": "task"}, kubernetes=settings())
    run.all_step()
    trains_with(run, "worker-0", 2)
    pod = run.pods("worker")[1]["metadata"]["name"]
    pid = run.events("task-started", task="worker-1")[-1]["pid"]
    person.cluster.kubectl("exec", "-n", person.namespace, pod, "--", "/bin/sh", "-c", f"kill -9 {pid}")
    comes_back(run, "worker-1", count=2)
    pod = run.pods("worker")[2]["metadata"]["name"]
    person.cluster.kubectl("delete", "pod", pod, "-n", person.namespace, "--grace-period=1", "--wait=false")
    comes_back(run, "worker-2", count=3)
    (person.shared / "partial").write_text(str(max(event["step"] for event in run.events("step")) + AHEAD))
    (person.shared / "partial").rename(person.shared / "finish")
    assert run.ends() == 0, run.said()
    assert run.report()["generations"] == 1
    assert [each["task"] for each in run.report()["restarts"]] == ["worker-1", "worker-2"]
    starts = [[line for line in lines(run.folder, f"worker-{n}") if "peers" in line] for n in range(3)]
    assert [len(each) for each in starts] == [1, 2, 2]
    assert len({line for each in starts for line in each}) == 1, "the same addresses for all"


def comes_back(run: Run, task: str, count: int) -> None:
    """Waits until the task, whose start is the one with this number, trains with all others."""
    formed = run.wait("generation-formed", count=count)
    assert (formed["tasks"], formed["generation"]) == ([task], 1), run.said()
    for each in (task, "worker-0"):
        trains_with(run, each, 2, after=formed)


def trains_with(run: Run, task: str, peers: int, after: Event | None = None) -> None:
    """Waits until the task has so many peers in a step, later than the event."""
    since = after["at"] if after else ""

    def check() -> bool:
        steps = [event for event in run.events("step", task=task) if event["at"] > since]
        return any(event["metrics"].get("peers") == peers for event in steps)

    eventually(f"{task} has {peers} peers", check, more=run.said)


@pytest.fixture
def slots(person: Person) -> Iterator[None]:
    """One node offers three of a resource that only hosts of elastic runs request."""
    node = person.cluster.nodes[0]
    person.cluster.extended_resources(node, {SLOT: 3})
    yield
    person.cluster.extended_resources(node, {SLOT: 0})


@pytest.mark.usefixtures("slots")
def test_two_elastic_runs_share_what_there_is(person: Person, start: Callable[..., Run]) -> None:
    first = start("--run", "first", **greedy_job("first"))
    trains_on(first, 3)
    second = start("--run", "second", **greedy_job("second"))
    eventually("pods that wait", lambda: [is_pending(pod) for pod in second.pods("worker")] == [True] * 3)
    released = person.call("scale", "first", "worker=1")
    assert released.returncode == 0, released.stderr
    formed = trains_on(second, 2)
    assert len(formed["absent"]) == 1, second.said()
    wanted = person.call("scale", "first", "worker=3", "--timeout", "1s")
    assert wanted.returncode == 124, wanted.stderr
    for run in (first, second):
        newest = run.events("step")[-1]
        eventually(f"{run.name} trains", partial(has_later_step, run, newest), more=run.said)
    assert len(first.events("generation-formed")[-1]["tasks"]) == 1
    (person.shared / "finish-second").touch()
    assert second.ends() == 0, second.said()
    trains_on(first, 3)
    (person.shared / "finish-first").touch()
    assert first.ends() == 0, first.said()
    assert first.report()["restarts"] == second.report()["restarts"] == []


def trains_on(run: Run, hosts: int) -> Event:
    """Waits for steps of a generation of so many hosts, and returns its event. Pods that start at the same time may be
    ready further apart than `elastic.wait`: then there is a smaller generation before."""

    def check() -> Event | None:
        formed = run.events("generation-formed")[-1:]
        return formed[0] if formed and len(formed[0]["tasks"]) == hosts else None

    formed: Event = eventually(f"{run.name} has {hosts} hosts", check, more=run.said)
    run.wait("step", generation=formed["generation"])
    return formed


def has_later_step(run: Run, event: Event) -> bool:
    """Each task counts its own steps."""
    return any(each["step"] > event["step"] for each in run.events("step", task=event["task"]))


def greedy_job(run: str) -> dict[str, Any]:
    """Fields of a job that uses one to three hosts."""
    program = TRAINING.replace("len(parts) == world and ", "").replace("/shared/finish", f"/shared/finish-{run}")
    return {
        "program": program.replace("step % 10 == 0", "paceline.should_save()"), "folder": run,
        "roles": {"worker": {"replicas": 3, "min": 1, "gpus": 1}}, "elastic": {"wait": "5s", "every": "2s"},
        "snapshots": {"to": "claim://shared/kept"}, "kubernetes": settings(gpu_resource=SLOT),
    }  # fmt: skip


def is_pending(pod: dict[str, Any]) -> bool:
    return bool(pod["status"]["phase"] == "Pending")
