"""The first process of a pod, as a cluster starts it: told alike by all pods of a Job, apart from index and address."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from paceline.agent import pod
from paceline.agent.options import FAILED
from paceline.storage.folder import Folder
from paceline.storage.snapshots import Snapshots
from support.pods import Pods
from support.runs import end_started_since, eventually

pytestmark = pytest.mark.timeout(120)


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


def test_a_run_that_finds_another_of_its_id_at_its_place_starts_no_task_and_writes_nothing_there(place: Path) -> None:
    there = Folder(str(place / "claim"))
    Snapshots(there, "tiny-0000", "of another Job").begin(1, None)
    before = there.names("")
    pods = Pods(place, env={pod.TOKEN: "of this Job"}, snapshots={"to": "claim://kept"})
    pods.all()
    assert pods.codes() == {"tiny-0000-0": FAILED, "tiny-0000-worker-0": 0, "tiny-0000-worker-1": 0}
    events = [json.loads(line) for line in pods.stdout("tiny-0000-0")]
    assert "task-started" not in {event["event"] for event in events}
    assert events[-1]["reason"].startswith("there is another run tiny-0000 at claim://kept: choose another id (--run)")
    assert there.names("") == before


def test_a_captain_that_lost_all_but_its_place_goes_on_there(place: Path) -> None:
    Snapshots(Folder(str(place / "claim")), "tiny-0000", "of this Job").begin(1, None)
    pods = Pods(place, env={pod.TOKEN: "of this Job"}, snapshots={"to": "claim://kept"})
    pods.told = {"lease": 3.0}
    pods.all()
    assert set(pods.codes().values()) == {0}
    formed = [e for e in map(json.loads, pods.stdout("tiny-0000-0")) if e["event"] == "generation-formed"]
    assert [event["generation"] for event in formed] == [2]
