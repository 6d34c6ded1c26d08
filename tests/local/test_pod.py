"""The first process of a pod, as a cluster starts it: told alike by all pods of a Job, apart from index and address."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from runs import end_started_since, eventually

from paceline import plan as plans
from paceline.agent import pod
from paceline.agent.machine import free_port
from paceline.backends import certificates
from paceline.backends.kubernetes import render
from paceline.backends.kubernetes.archive import agent_archive
from paceline.backends.kubernetes.code import collect
from paceline.job import load_text

pytestmark = pytest.mark.timeout(120)

TRAINING = """
import os, sys
import paceline
import beside
print("index", os.environ["PACELINE_INDEX"], "in", os.path.basename(os.getcwd()), beside.WORD, flush=True)
assert not any(name.startswith("PACELINE_POD") for name in os.environ)
paceline.report(step=7)
"""


class Pods:
    """A captain's pod and those of two workers, on this machine, with folders in the place of volumes."""

    def __init__(self, place: Path, program: str = TRAINING, **job: Any) -> None:
        self.place = place
        source = place / "source"
        source.mkdir()
        (source / "train.py").write_text(program)
        (source / "beside.py").write_text("WORD = 'sent along'\n")
        fields = {"name": "tiny", "framework": "none", "command": ["python", "train.py"], **job}
        fields |= {"roles": {"worker": {"replicas": 2}}, "kubernetes": {"image": "any"}}
        plan = plans.make(load_text(json.dumps(fields), "job.yaml", source, cluster=True).job)
        objects = render.render(plan, "tiny-0000", b"", tuple(collect(source).chunks(100)))
        self.jobs = {each["metadata"]["name"]: each for each in objects if each["kind"] == "Job"}
        for name in ("plan", "code"):
            (place / name).mkdir()
        (place / "plan" / "plan.json").write_text(plans.to_json(plan))
        for number, part in enumerate(collect(source).chunks(100)):
            (place / "code" / f"{number:02}").write_bytes(part)
        certificates.make(place / "tls")
        (place / "agent.pyz").write_bytes(agent_archive())
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.captain = f"127.0.0.1:{probe.getsockname()[1]}"
        self.started: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, job: str, index: int) -> subprocess.Popen[bytes]:
        name = f"{job}-{index}"
        mine = self.place / name
        for folder in ("run", "work"):
            (mine / folder).mkdir(parents=True)
        env = self.jobs[job]["spec"]["template"]["spec"]["containers"][0]["env"]
        told = json.loads(next(each["value"] for each in env if each["name"] == pod.TOLD))
        told |= {name: str(self.place / name) for name in ("plan", "tls")}
        told |= {"captain": self.captain, "folder": str(mine / "run"), "last_words": str(mine / "last-words")}
        if told["role"] == "captain":
            told |= {"serve": free_port()}
        else:
            told |= {"work": str(mine / "work"), "code": str(self.place / "code")}
        given = {name: value for name, value in os.environ.items() if not name.startswith(("PACELINE", "PYTHON"))}
        given |= {pod.TOLD: json.dumps(told), pod.ADDRESS: "127.0.0.1", pod.INDEX: str(index)}
        given["TMPDIR"] = str(mine)
        given["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{given['PATH']}"
        with (mine / "stdout").open("wb") as stdout:
            process = subprocess.Popen(
                [sys.executable, str(self.place / "agent.pyz"), "pod"],
                env=given, cwd=mine, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stdout,
            )  # fmt: skip
        self.started[name] = process
        return process

    def all(self) -> None:
        self.start("tiny-0000", 0)
        for index in (0, 1):
            self.start("tiny-0000-worker", index)

    def codes(self) -> dict[str, int]:
        return {name: process.wait(60) for name, process in self.started.items()}

    def stdout(self, name: str) -> list[str]:
        return (self.place / name / "stdout").read_text().splitlines()

    def last_words(self, name: str) -> dict[str, Any]:
        words: dict[str, Any] = json.loads((self.place / name / "last-words").read_text())
        return words


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    before = set(psutil.Process().children())
    yield tmp_path
    end_started_since(before)


def test_a_run_succeeds_and_every_pod_says_so(place: Path) -> None:
    pods = Pods(place)
    pods.all()
    assert pods.codes() == {"tiny-0000-0": 0, "tiny-0000-worker-0": 0, "tiny-0000-worker-1": 0}
    assert pods.last_words("tiny-0000-0") | {"started": 0, "ended": 0, "steps_per_s": 0} == {
        "status": "succeeded", "reason": "training succeeded", "cause": None, "generations": 1, "steps": 7,
        "steps_per_s": 0, "started": 0, "ended": 0,
    }  # fmt: skip
    assert pods.last_words("tiny-0000-worker-1")["status"] == "succeeded"


def test_output_and_events_are_what_the_clusters_logs_hold(place: Path) -> None:
    pods = Pods(place)
    pods.all()
    pods.codes()
    kinds = [json.loads(line)["event"] for line in pods.stdout("tiny-0000-0")]
    assert (kinds[0], kinds[-1]) == ("run-started", "run-ended")
    lines = pods.stdout("tiny-0000-worker-1")
    assert len(lines) == 1
    assert re.fullmatch(r"worker-1 \d{4}-\d\d-\d\dT[\d:.]+Z g1 \| index 1 in work sent along", lines[0])


def test_a_run_that_fails_fails_the_captains_pod_alone(place: Path) -> None:
    pods = Pods(place, "raise SystemExit(3)", restart={"limit": 0})
    pods.all()
    assert pods.codes() == {"tiny-0000-0": 64, "tiny-0000-worker-0": 0, "tiny-0000-worker-1": 0}
    words = pods.last_words("tiny-0000-0")
    assert (words["status"], words["cause"]) == ("failed", "program-error")


def test_a_pod_whose_code_cannot_be_unpacked_says_why(place: Path) -> None:
    pods = Pods(place)
    (place / "code" / "00").write_bytes(b"damaged")
    assert pods.start("tiny-0000-worker", 0).wait(60) == pod.CANNOT
    assert (place / "tiny-0000-worker-0" / "last-words").read_text()
    assert pods.stdout("tiny-0000-worker-0")[-1].startswith("paceline: ")


def test_a_pod_that_has_to_go_ends_its_task_and_can_come_back(place: Path) -> None:
    program = "import os, time\nwhile not os.path.exists('../../finish'): time.sleep(0.01)\n"
    pods = Pods(place, program)
    pods.all()

    def started(generation: int) -> bool:
        events = map(json.loads, pods.stdout("tiny-0000-0"))
        return sum(e["event"] == "task-started" and e["generation"] == generation for e in events) == 2

    eventually("the first generation", lambda: started(1))
    gone = pods.started["tiny-0000-worker-1"]
    gone.terminate()
    assert gone.wait(60) == 75
    (place / "tiny-0000-worker-1").rename(place / "before")
    pods.start("tiny-0000-worker", 1)
    eventually("the second generation", lambda: started(2))
    (place / "finish").touch()
    assert pods.codes() == {"tiny-0000-0": 0, "tiny-0000-worker-0": 0, "tiny-0000-worker-1": 0}
