"""The output of runs on a cluster is kept at the location of their snapshots, and is read there after the pods end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.storage.stores.bucket import BucketStore
from support import recorded
from support.pods import Pods
from support.runs import end_started_since, eventually, kill
from support.stores.faults import Toxiproxy
from support.stores.servers import Store

pytestmark = pytest.mark.timeout(400)

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
def folder(tmp_path: Path) -> Iterator[Path]:
    before = set(psutil.Process().children())
    yield tmp_path
    end_started_since(before)


def call(folder: Path, store: Store | None, *arguments: str) -> str:
    """Calls paceline on a machine that has no record of the run."""
    (folder / "elsewhere").mkdir(exist_ok=True)
    result = recorded.call(folder / "elsewhere", *arguments, env=store.options if store else {})
    assert result.returncode == 0, result.stderr
    assert not list((folder / "elsewhere").iterdir())
    return result.stdout


def pod_log_lines(folder: Path, *pods: str) -> list[str]:
    """The lines of one task in the folders of its pods."""
    logs = [path for pod in pods for path in (folder / pod / "run" / "logs").glob("*.log")]
    return [line for path in logs for line in path.read_text().splitlines()]


def archived_lines(folder: Path, store: Store | None, location: str, task: str) -> list[str]:
    lines = map(json.loads, call(folder, store, "logs", location, "--task", task, "-o", "json").splitlines())
    return [f"{line['at']} g{line['generation']} | {line['text']}" for line in lines]


def events(pods: Pods, kind: str) -> list[dict[str, Any]]:
    return [event for event in map(json.loads, pods.stdout(f"{RUN}-0")) if event["event"] == kind]


def status_and_log_without_the_cluster(folder: Path, store: Store) -> tuple[str, list[str]]:
    """As seen by a machine that submitted the run and has not queried it since."""
    run_folder = folder / "home" / "runs" / RUN
    (run_folder / "logs").mkdir(parents=True)
    (run_folder / "plan.json").write_bytes((folder / "plan" / "plan.json").read_bytes())
    info = {"run": RUN, "on": "kubernetes", "context": "gone", "namespace": "gone", "submitted": True}
    (run_folder / "run.json").write_text(json.dumps(info))
    env = {**store.options, "KUBECONFIG": str(folder / "gone")}
    status = recorded.call(folder / "home", "status", RUN, "-o", "json", env=env)
    logs = recorded.call(folder / "home", "logs", RUN, "--task", "worker-0", env=env)
    assert (status.stderr, logs.stderr) == ("", "") and logs.stdout
    return json.loads(status.stdout)["status"], (run_folder / "logs" / "worker-0.log").read_text().splitlines()


def assert_archived(archived: list[str], printed: list[str]) -> None:
    """All events that the captain printed, in order, except resources, and some of the steps; the last step of a task
    may come later."""
    step, resources = '"event": "step"', '"event": "resources"'
    archived = [line.replace('{"schema_version": 1, ', "{") for line in archived]
    others = [line for line in printed if step not in line and resources not in line]
    assert [line for line in archived if step not in line] == others
    assert {line for line in archived if step in line} <= set(printed)


def test_everything_a_run_wrote_can_be_read_in_its_bucket(folder: Path, s3: Store) -> None:
    pods = Pods(folder, env=s3.options, snapshots={"to": s3.url})
    pods.all()
    assert set(pods.codes().values()) == {0}
    location = f"{s3.url}/{RUN}"
    for index in (0, 1):
        lines = archived_lines(folder, s3, location, f"worker-{index}")
        assert lines == pod_log_lines(folder, f"{RUN}-worker-{index}") and len(lines) == 1
    assert_archived(call(folder, s3, "events", location, "-o", "json").splitlines(), pods.stdout(f"{RUN}-0"))
    status = json.loads(call(folder, s3, "status", location, "-o", "json"))
    report = json.loads((folder / f"{RUN}-0" / "run" / "report.json").read_text())
    assert {**status, **report} == status | {"folder": report["folder"]}
    assert (status["status"], {task["task"]: task["state"] for task in status["tasks"]}) == (
        "succeeded", {"worker-0": "succeeded", "worker-1": "succeeded"},
    )  # fmt: skip
    assert call(folder, s3, "status", location).startswith(f"{RUN} succeeded after ")
    assert call(folder, s3, "snapshots", "ls", location, "-o", "name") == ""
    assert status_and_log_without_the_cluster(folder, s3) == ("succeeded", pod_log_lines(folder, f"{RUN}-worker-0"))
    follows = recorded.call(folder, "logs", "-f", location, env=s3.options)
    assert follows.returncode == 2 and "--follow requires a run id, not a location" in follows.stderr
    call(folder, s3, "delete", "--snapshots", location, "--yes")
    assert BucketStore(s3.url, **s3.config).names("") == []


def test_with_a_claim_members_archive_through_their_captain(folder: Path) -> None:
    pods = Pods(folder, snapshots={"to": "claim://kept"})
    pods.all()
    assert set(pods.codes().values()) == {0}
    location = str(folder / "claim" / RUN)
    assert archived_lines(folder, None, location, "worker-1") == pod_log_lines(folder, f"{RUN}-worker-1") != []
    assert_archived(call(folder, None, "events", location, "-o", "json").splitlines(), pods.stdout(f"{RUN}-0"))


def test_lost_pods_killed_agents_and_an_unreachable_store_lose_no_archived_line(
    folder: Path, s3: Store, toxiproxy: Toxiproxy
) -> None:
    link = toxiproxy.link(s3.port)
    store = BucketStore(s3.url, **s3.config)
    pods = Pods(folder, COUNTING, env=s3.through(link).options, snapshots={"to": s3.url})
    pods.overrides = {"lease": 6.0}  # a lost pod is noticed soon
    pods.all()
    location = f"{s3.url}/{RUN}"

    def archived_parts(host: str) -> list[str]:
        return store.names(f"{RUN}/logs/{host}/")

    eventually("training", lambda: events(pods, "step"))
    with link.down():
        upload_warnings = eventually(
            "a warning", lambda: [e for e in events(pods, "warning") if "cannot upload" in e["text"]]
        )
        steps = len(events(pods, "step"))
        eventually("training continues", lambda: len(events(pods, "step")) > steps + 2)
    assert s3.url in upload_warnings[0]["text"]
    eventually("the first pieces", lambda: all(map(archived_parts, ("captain", "worker-host-0", "worker-host-1"))))
    status = json.loads(call(folder, s3, "status", location, "-o", "json"))
    assert status["status"] == "running"

    agent = psutil.Process(pods.started[f"{RUN}-worker-0"].pid).children()[0]
    agent.kill()  # and it is restarted in its pod
    eventually("the second generation", lambda: [e for e in events(pods, "task-started") if e["generation"] >= 2])
    lost = psutil.Process(pods.started.pop(f"{RUN}-worker-1").pid)
    for process in (lost, *lost.children(recursive=True)):
        kill(process.pid)  # it may have ended with the first
    (folder / f"{RUN}-worker-1").rename(folder / "lost")
    pods.start(f"{RUN}-worker", 1)
    before = max(e["generation"] for e in events(pods, "generation-formed"))
    eventually("the next generation", lambda: any(e["generation"] > before for e in events(pods, "task-started")))
    (folder / "finish").touch()
    assert set(pods.codes().values()) == {0}

    assert archived_lines(folder, s3, location, "worker-0") == pod_log_lines(folder, f"{RUN}-worker-0")
    lines, after = archived_lines(folder, s3, location, "worker-1"), pod_log_lines(folder, f"{RUN}-worker-1")
    assert lines[-len(after) :] == after
    first = lines[: -len(after)]
    assert first == pod_log_lines(folder, "lost")[: len(first)] and first
    assert_archived(call(folder, s3, "events", location, "-o", "json").splitlines(), pods.stdout(f"{RUN}-0"))
    assert len([e for e in events(pods, "warning") if "cannot upload" in e["text"]]) == 1
