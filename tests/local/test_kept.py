"""What runs on a cluster write is at the place for their snapshots when their pods are gone, and is read there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.storage.objects import Objects
from support import recorded
from support.pods import Pods
from support.runs import end_started_since, eventually, kill
from support.stores.faults import Toxiproxy
from support.stores.servers import Store

pytestmark = pytest.mark.timeout(180)

RUN = "tiny-0000"
# Counts until it is told to finish.
COUNTING = """
import os, time
import paceline
print("start", flush=True)
count = 0
while not os.path.exists("../../finish"):
    count += 1
    print("line", count, flush=True)
    paceline.report(step=count)
    time.sleep(0.05)
"""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    before = set(psutil.Process().children())
    yield tmp_path
    end_started_since(before)


def call(place: Path, store: Store | None, *words: str) -> str:
    """On a machine that knows nothing of the run."""
    (place / "elsewhere").mkdir(exist_ok=True)
    done = recorded.call(place / "elsewhere", *words, env=store.options if store else {})
    assert done.returncode == 0, done.stderr
    assert not list((place / "elsewhere").iterdir())
    return done.stdout


def written(place: Path, *pods: str) -> list[str]:
    """The lines of one task, as they are in the folders of its pods."""
    logs = [path for pod in pods for path in (place / pod / "run" / "logs").glob("*.log")]
    return [line for path in logs for line in path.read_text().splitlines()]


def shown(place: Path, store: Store | None, where: str, task: str) -> list[str]:
    lines = map(json.loads, call(place, store, "logs", where, "--task", task, "-o", "json").splitlines())
    return [f"{line['at']} g{line['generation']} | {line['text']}" for line in lines]


def events(pods: Pods, kind: str) -> list[dict[str, Any]]:
    return [event for event in map(json.loads, pods.stdout(f"{RUN}-0")) if event["event"] == kind]


def known_here_without_its_cluster(place: Path, store: Store) -> tuple[str, list[str]]:
    """What a machine shows of it that has submitted the run and never looked at it again."""
    folder = place / "home" / "runs" / RUN
    (folder / "logs").mkdir(parents=True)
    (folder / "plan.json").write_bytes((place / "plan" / "plan.json").read_bytes())
    there = {"run": RUN, "on": "kubernetes", "context": "gone", "namespace": "gone", "submitted": True}
    (folder / "run.json").write_text(json.dumps(there))
    env = {**store.options, "KUBECONFIG": str(place / "gone")}
    status = recorded.call(place / "home", "status", RUN, "-o", "json", env=env)
    logs = recorded.call(place / "home", "logs", RUN, "--task", "worker-0", env=env)
    assert (status.stderr, logs.stderr) == ("", "") and logs.stdout
    return json.loads(status.stdout)["status"], (folder / "logs" / "worker-0.log").read_text().splitlines()


def test_all_that_a_run_wrote_is_read_at_its_bucket(place: Path, s3: Store) -> None:
    pods = Pods(place, env=s3.options, snapshots={"to": s3.url})
    pods.all()
    assert set(pods.codes().values()) == {0}
    where = f"{s3.url}/{RUN}"
    for index in (0, 1):
        lines = shown(place, s3, where, f"worker-{index}")
        assert lines == written(place, f"{RUN}-worker-{index}") and len(lines) == 1
    assert call(place, s3, "events", where, "-o", "json").splitlines() == pods.stdout(f"{RUN}-0")
    status = json.loads(call(place, s3, "status", where, "-o", "json"))
    report = json.loads((place / f"{RUN}-0" / "run" / "report.json").read_text())
    assert {**status, **report} == status | {"folder": report["folder"]}
    assert (status["status"], {task["task"]: task["state"] for task in status["tasks"]}) == (
        "succeeded", {"worker-0": "succeeded", "worker-1": "succeeded"},
    )  # fmt: skip
    assert call(place, s3, "status", where).startswith(f"{RUN} succeeded after ")
    assert call(place, s3, "snapshots", "ls", where, "-o", "name") == ""
    assert known_here_without_its_cluster(place, s3) == ("succeeded", written(place, f"{RUN}-worker-0"))
    follows = recorded.call(place, "logs", "-f", where, env=s3.options)
    assert follows.returncode == 2 and "follow a run by its id" in follows.stderr
    call(place, s3, "delete", "--snapshots", where, "--yes")
    assert Objects(s3.url, **s3.config).names("") == []


def test_in_a_claim_members_keep_through_their_captain(place: Path) -> None:
    pods = Pods(place, snapshots={"to": "claim://kept"})
    pods.all()
    assert set(pods.codes().values()) == {0}
    where = str(place / "claim" / RUN)
    assert shown(place, None, where, "worker-1") == written(place, f"{RUN}-worker-1") != []
    assert call(place, None, "events", where, "-o", "json").splitlines() == pods.stdout(f"{RUN}-0")


def test_lost_pods_killed_agents_and_a_place_that_was_away_cost_no_line_that_was_kept(
    place: Path, s3: Store, toxiproxy: Toxiproxy
) -> None:
    link = toxiproxy.link(s3.port)
    store = Objects(s3.url, **s3.config)
    pods = Pods(place, COUNTING, env=s3.through(link).options, snapshots={"to": s3.url})
    pods.told = {"lease": 3.0}  # a lost pod is given up soon
    pods.all()
    where = f"{s3.url}/{RUN}"

    def kept(host: str) -> list[str]:
        return store.names(f"{RUN}/logs/{host}/")

    eventually("training", lambda: events(pods, "step"))
    with link.down():
        said = eventually("a warning", lambda: [e for e in events(pods, "warning") if "is not kept at" in e["text"]])
        steps = len(events(pods, "step"))
        eventually("training goes on", lambda: len(events(pods, "step")) > steps + 2)
    assert s3.url in said[0]["text"]
    eventually("the first pieces", lambda: all(map(kept, ("captain", "worker-host-0", "worker-host-1"))))
    status = json.loads(call(place, s3, "status", where, "-o", "json"))
    assert status["status"] == "running"

    agent = psutil.Process(pods.started[f"{RUN}-worker-0"].pid).children()[0]
    agent.kill()  # and started again, in its pod
    eventually("the second generation", lambda: [e for e in events(pods, "task-started") if e["generation"] >= 2])
    lost = psutil.Process(pods.started.pop(f"{RUN}-worker-1").pid)
    for process in (lost, *lost.children(recursive=True)):
        kill(process.pid)  # it may have gone with the first
    (place / f"{RUN}-worker-1").rename(place / "lost")
    pods.start(f"{RUN}-worker", 1)
    before = max(e["generation"] for e in events(pods, "generation-formed"))
    eventually("the next generation", lambda: any(e["generation"] > before for e in events(pods, "task-started")))
    (place / "finish").touch()
    assert set(pods.codes().values()) == {0}

    assert shown(place, s3, where, "worker-0") == written(place, f"{RUN}-worker-0")
    lines, after = shown(place, s3, where, "worker-1"), written(place, f"{RUN}-worker-1")
    assert lines[-len(after) :] == after
    first = lines[: -len(after)]
    assert first == written(place, "lost")[: len(first)] and first
    assert call(place, s3, "events", where, "-o", "json").splitlines() == pods.stdout(f"{RUN}-0")
    assert len([e for e in events(pods, "warning") if "is not kept at" in e["text"]]) == 1
