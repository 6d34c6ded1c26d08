"""The first process of a pod, as a cluster starts it: the pods of a Job differ only in index and address."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.agent import pod
from paceline.agent.options import FAILED
from paceline.storage.snapshots.repository import SnapshotRepository
from paceline.storage.stores.folder import FolderStore
from support.pods import Pods
from support.runs import end_started_since, eventually

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    before = set(psutil.Process().children())
    yield tmp_path
    end_started_since(before)


def test_a_run_succeeds_and_every_pod_reports_it(folder: Path) -> None:
    pods = Pods(folder)
    pods.all()
    assert pods.codes() == {"tiny-0000-0": 0, "tiny-0000-worker-0": 0, "tiny-0000-worker-1": 0}
    assert pods.last_words("tiny-0000-0") | {"started": 0, "ended": 0, "steps_per_s": 0} == {
        "status": "succeeded", "reason": "training succeeded", "cause": None, "generations": 1, "steps": 7,
        "steps_per_s": 0, "started": 0, "ended": 0,
    }  # fmt: skip
    assert pods.last_words("tiny-0000-worker-1")["status"] == "succeeded"


def test_pod_logs_contain_output_and_events(folder: Path) -> None:
    pods = Pods(folder)
    pods.all()
    pods.codes()
    kinds = [json.loads(line)["event"] for line in pods.stdout("tiny-0000-0")]
    assert (kinds[0], kinds[-1]) == ("run-started", "run-ended")
    lines = pods.stdout("tiny-0000-worker-1")
    assert len(lines) == 1
    assert re.fullmatch(r"worker-1 \d{4}-\d\d-\d\dT[\d:.]+Z g1 \| index 1 in work sent along", lines[0])


def test_a_failed_run_fails_only_the_captains_pod(folder: Path) -> None:
    pods = Pods(folder, "raise SystemExit(3)", restart={"limit": 0})
    pods.all()
    assert pods.codes() == {"tiny-0000-0": 64, "tiny-0000-worker-0": 0, "tiny-0000-worker-1": 0}
    last_words = pods.last_words("tiny-0000-0")
    assert (last_words["status"], last_words["cause"]) == ("failed", "program-error")


def test_a_pod_whose_code_cannot_be_unpacked_reports_why(folder: Path) -> None:
    pods = Pods(folder)
    (folder / "code" / "00").write_bytes(b"damaged")
    assert pods.start("tiny-0000-worker", 0).wait(150) == pod.CANNOT
    assert (folder / "tiny-0000-worker-0" / "last-words").read_text()
    assert pods.stdout("tiny-0000-worker-0")[-1].startswith("paceline: ")


def test_a_terminated_pod_ends_its_task_and_can_be_replaced(folder: Path) -> None:
    program = "import os, time\nwhile not os.path.exists('../../finish'): time.sleep(0.01)\n"
    pods = Pods(folder, program)
    pods.all()

    def started(generation: int) -> bool:
        events = map(json.loads, pods.stdout("tiny-0000-0"))
        return sum(e["event"] == "task-started" and e["generation"] == generation for e in events) == 2

    eventually("the first generation", lambda: started(1))
    terminated = pods.started["tiny-0000-worker-1"]
    terminated.terminate()
    assert terminated.wait(150) == 75
    (folder / "tiny-0000-worker-1").rename(folder / "before")
    pods.start("tiny-0000-worker", 1)
    eventually("the second generation", lambda: started(2))
    (folder / "finish").touch()
    assert pods.codes() == {"tiny-0000-0": 0, "tiny-0000-worker-0": 0, "tiny-0000-worker-1": 0}


SAVING = """
import os, time
saves, step = os.environ["PACELINE_SNAPSHOT_DIR"], 0
while not os.path.exists("../../finish"):
    is_due = step == 0 or step == 1 and os.path.exists("../../second")
    if os.environ["PACELINE_INDEX"] == "0" and os.environ["PACELINE_GENERATION"] == "1" and is_due:
        step += 1
        os.mkdir(f"{saves}/partial")
        open(f"{saves}/partial/state", "wb").write(bytes(1_500_000))
        os.rename(f"{saves}/partial", f"{saves}/step-{step}")
    time.sleep(0.01)
print("from", os.path.basename(os.environ["PACELINE_RESTORE"]), flush=True)
"""


def test_a_terminated_pod_sends_its_newest_snapshot_before_it_leaves(folder: Path) -> None:
    """Its folder is deleted with it, and the program does not ask whether to save."""
    snapshots = {"to": "claim://kept", "commit_every": "1h", "rate": "1Mi"}
    pods = Pods(folder, SAVING, snapshots=snapshots)
    pods.all()

    def events(kind: str) -> list[dict[str, Any]]:
        return [event for event in map(json.loads, pods.stdout("tiny-0000-0")) if event["event"] == kind]

    eventually("a snapshot", lambda: [each["step"] for each in events("saved")] == [1])
    (folder / "second").touch()  # if the agent found both at once, it would only send the newer one
    eventually("two snapshots", lambda: [each["step"] for each in events("saved")] == [1, 2])
    eventually("a commit", lambda: events("committed"))
    terminated = pods.started["tiny-0000-worker-0"]
    terminated.terminate()
    assert terminated.wait(150) == 75
    (folder / "tiny-0000-worker-0").rename(folder / "before")
    pods.start("tiny-0000-worker", 0)
    eventually("the second generation", lambda: len(events("generation-formed")) == 2)
    assert events("generation-formed")[-1]["restore"] == "step-2-g1"
    (folder / "finish").touch()
    assert set(pods.codes().values()) == {0}
    assert [each["step"] for each in events("committed")] == [1, 2]


# Each worker saves a part of each snapshot, when the group is requested to take one.
SAVING_PARTS = """
import json, os, time
import paceline
saves, rank, world = (os.environ["PACELINE_" + name] for name in ("SNAPSHOT_DIR", "RANK", "WORLD_SIZE"))
restore, step = os.environ["PACELINE_RESTORE"], 0
if restore:
    print("restored", *sorted(os.listdir(restore)), flush=True)
while not os.path.exists("../../finish"):
    step += 1
    paceline.report(step=step)
    if paceline.should_save():
        os.mkdir(f"{saves}/partial")
        open(f"{saves}/partial/part-{rank}", "w").close()
        json.dump({"parts": int(world)}, open(f"{saves}/partial/paceline.json", "w"))
        os.rename(f"{saves}/partial", f"{saves}/step-{step}")
    time.sleep(0.01)
"""


@pytest.mark.long
def test_a_terminated_pod_leaves_its_part_to_the_others_if_the_claim_fails(folder: Path) -> None:
    more: dict[str, Any] = {"worker": {"min": 1}, "limits": {"grace": "20s"}, "snapshots": {"to": "claim://kept"}}
    pods = Pods(folder, SAVING_PARTS, **more)
    pods.all()

    def events(kind: str) -> list[dict[str, Any]]:
        return [event for event in map(json.loads, pods.stdout("tiny-0000-0")) if event["event"] == kind]

    # A task asks whether to save after its first step.
    asking = {"worker-0", "worker-1"}
    eventually("later steps", lambda: {each["task"] for each in events("step") if each["step"] > 1} == asking)
    (folder / "claim").rename(folder / "hidden")
    (folder / "claim").write_text("not a folder")
    pods.started["tiny-0000-worker-1"].terminate()
    eventually("the second generation", lambda: len(events("generation-formed")) == 2)
    formed = events("generation-formed")[-1]
    assert (formed["tasks"], formed["absent"]) == (["worker-0"], ["worker-1"])
    [saved] = events("saved")
    assert formed["restore"] == saved["snapshot"] and events("committed") == []
    eventually(
        "its files", lambda: "restored paceline.json part-0 part-1" in "".join(pods.stdout("tiny-0000-worker-0"))
    )
    (folder / "claim").unlink()
    (folder / "hidden").rename(folder / "claim")
    assert pods.started.pop("tiny-0000-worker-1").wait(150) == 75
    (folder / "finish").touch()
    assert set(pods.codes().values()) == {0}


def test_a_run_whose_id_exists_at_its_location_starts_no_task_and_writes_nothing_there(folder: Path) -> None:
    store = FolderStore(str(folder / "claim"))
    SnapshotRepository(store, "tiny-0000", "of another Job").begin(1, None)
    before = store.names("")
    pods = Pods(folder, env={pod.TOKEN: "of this Job"}, snapshots={"to": "claim://kept"})
    pods.all()
    assert pods.codes() == {"tiny-0000-0": FAILED, "tiny-0000-worker-0": 0, "tiny-0000-worker-1": 0}
    events = [json.loads(line) for line in pods.stdout("tiny-0000-0")]
    assert "task-started" not in {event["event"] for event in events}
    assert events[-1]["reason"].startswith(
        "another run tiny-0000 already exists at claim://kept; choose another id (--run)"
    )
    assert store.names("") == before


def test_a_captain_that_lost_everything_but_its_snapshot_store_continues_there(folder: Path) -> None:
    SnapshotRepository(FolderStore(str(folder / "claim")), "tiny-0000", "of this Job").begin(1, None)
    pods = Pods(folder, env={pod.TOKEN: "of this Job"}, snapshots={"to": "claim://kept"})
    pods.overrides = {"lease": 6.0}  # it is waited for; a busy machine must not exceed it
    pods.all()
    assert set(pods.codes().values()) == {0}
    formed = [e for e in map(json.loads, pods.stdout("tiny-0000-0")) if e["event"] == "generation-formed"]
    assert [event["generation"] for event in formed] == [2]


COMPILING = """
import os, time
folder = os.environ["TORCHINDUCTOR_CACHE_DIR"]
path = os.path.join(folder, "module.so")
arrives_by = time.monotonic() + (30 if os.environ["PACELINE_GENERATION"] == "2" else 0)
while not os.path.exists(path) and time.monotonic() < arrives_by:  # in place of imports, which take a while
    time.sleep(0.01)
print("found" if os.path.exists(path) else "compiled", flush=True)
if not os.path.exists(path):
    os.makedirs(folder)
    open(path, "w").write("code " + os.environ["PACELINE_INDEX"])
while not os.path.exists("../../finish"):
    time.sleep(0.01)
"""


@pytest.mark.long
def test_a_pod_that_replaces_another_finds_what_was_compiled(folder: Path) -> None:
    pods = Pods(folder, COMPILING, framework="torch", snapshots={"to": "claim://kept"}, restart={"warm": False})
    pods.all()
    stored = folder / "claim" / "tiny-0000" / "compiled" / "worker-host-1"
    eventually("the copy in the store", stored.exists)
    lost = pods.started["tiny-0000-worker-1"]
    lost.terminate()
    assert lost.wait(150) == 75
    (folder / "tiny-0000-worker-1").rename(folder / "before")
    pods.start("tiny-0000-worker", 1)
    eventually("the second generation", lambda: "found" in " ".join(pods.stdout("tiny-0000-worker-1")))
    [copy] = (folder / "tiny-0000-worker-1").rglob("module.so")
    assert copy.read_text() == "code 1" and copy.parents[3].stat().st_mode & 0o077 == 0
    (folder / "finish").touch()
    assert set(pods.codes().values()) == {0}
