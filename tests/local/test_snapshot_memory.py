"""Pods that save snapshots to memory: real processes, with a folder, or a small file system, in place of the volume."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.environment import without
from support.pods import Pods
from support.runs import end_started_since, eventually

pytestmark = pytest.mark.timeout(400)

# Each of two workers saves 4 MiB as its part of a step when a file requests that step.
SAVING = """
import os, time
from pathlib import Path
import paceline
from paceline.runtime.snapshot_folders import restored, save_snapshot
rank, shared = int(os.environ["PACELINE_RANK"]), Path("../..")
step = 0
if restored() is not None:
    [step] = {int((restored() / f"step-{each}").read_text()) for each in (0, 1)}
    sizes = {path.stat().st_size for path in restored().glob("state-*")}
    assert sizes == {4 << 20}, sizes
print("resumes from", step, os.path.realpath(restored() or ""), flush=True)
def write(folder):
    (folder / f"step-{rank}").write_text(str(step))
    (folder / f"state-{rank}").write_bytes(bytes([rank]) * (4 << 20))
while not (shared / "finish").exists():
    time.sleep(0.01)
    if (shared / f"save-{step + 10}").exists():
        step += 10
        save_snapshot(write, step, 2)
        paceline.report(step=step)
"""


class Run:
    def __init__(self, folder: Path, **job: Any) -> None:
        # What an ordinary folder may use is not a part of the memory of this machine: no spare would fit into the rest.
        self.folder, self.pods = folder, Pods(folder, SAVING, restart={"warm": False}, **job)
        self.pods.overrides = {"lease": 6.0}

    def events(self, kind: str) -> list[dict[str, Any]]:
        events = map(json.loads, self.pods.stdout("tiny-0000-0"))
        return [event for event in events if event["event"] == kind]

    def wait(self, kind: str, **fields: Any) -> None:
        def has_happened() -> bool:
            return any(fields.items() <= event.items() for event in self.events(kind))

        eventually(f"{kind} {fields}", has_happened, more=lambda: "\n".join(self.pods.stdout("tiny-0000-0")))

    def save(self, step: int) -> None:
        (self.folder / f"save-{step}").touch()
        self.wait("saved", step=step)

    def own(self, worker: int) -> Path:
        return self.folder / f"tiny-0000-worker-{worker}"

    def holds(self, **snapshots: list[str]) -> None:
        """Waits until both pods have only these: older ones are deleted soon after a commit."""
        eventually(f"they hold {snapshots}", lambda: [self._held(worker) for worker in (0, 1)] == 2 * [snapshots])

    def _held(self, worker: int) -> dict[str, list[str]]:
        """The snapshots that the pod has, in memory and on disk."""
        roots = {"memory": self.own(worker) / "memory", "disk": self.own(worker) / "run"}
        return {
            name: sorted(path.name for path in (root / "held" / f"worker-{worker}").glob("step-*"))
            for name, root in roots.items()
        }

    def resumed(self, worker: int) -> list[list[str]]:
        """The step, and the folder, that the worker has resumed from."""
        lines = self.pods.stdout(f"tiny-0000-worker-{worker}")
        return [line.split("resumes from ")[1].split() for line in lines if "resumes from" in line]

    def kill_task(self) -> None:
        """Kills worker-0."""
        [started] = [event for event in self.events("task-started") if event["task"] == "worker-0"][-1:]
        os.kill(started["pid"], signal.SIGKILL)

    def ends(self) -> None:
        (self.folder / "finish").touch()
        assert set(self.pods.codes().values()) == {0}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    before = set(psutil.Process().children())
    yield tmp_path
    end_started_since(before)


def test_tasks_and_containers_that_are_killed_resume_from_memory(folder: Path) -> None:
    """A folder in place of memory: it has room for everything."""
    run = Run(folder, snapshots={"memory": "1Gi"})
    run.pods.all()
    run.save(10)
    run.wait("committed", step=10)
    run.holds(memory=["step-10-g1"], disk=[])
    run.save(20)
    run.kill_task()
    run.wait("generation-formed", generation=2, restore="step-20-g1")
    eventually("both resume", lambda: [len(run.resumed(worker)) for worker in (0, 1)] == [2, 2])
    assert [run.resumed(worker)[-1][0] for worker in (0, 1)] == ["20", "20"]
    run.pods.started["tiny-0000-worker-0"].kill()
    run.pods.started.pop("tiny-0000-worker-0").wait()
    run.pods.start("tiny-0000-worker", 0)
    run.wait("generation-formed", generation=3, restore="step-20-g1")
    run.save(30)
    run.wait("committed", step=30)
    run.holds(memory=["step-30-g3"], disk=[])
    assert not [event for event in run.events("note") if "memory" in event["text"]]
    run.ends()


@pytest.mark.long  # needs root, to mount a file system
def test_a_full_memory_ends_no_task_and_loses_no_snapshot(folder: Path) -> None:
    """A real file system of 8 MiB, as a node mounts it: one snapshot fits, the next one does not."""
    run = Run(folder, snapshots={"memory": "8Mi", "commit_every": "1h"})
    mounts = [run.own(worker) / "memory" for worker in (0, 1)]
    try:
        for mount in mounts:
            mount.mkdir(parents=True)
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(mount)], check=True)
        run.pods.all()
        run.save(10)
        run.wait("committed", step=10)
        run.save(20)
        run.save(30)
        run.holds(memory=["step-10-g1"], disk=["step-30-g1"])
        notes = [event["text"] for event in run.events("note")]
        for task in ("worker-0", "worker-1"):
            text = f"snapshots.memory: no room for the snapshot of step 20 of {task}: written to disk"
            assert [note for note in notes if task in note and "memory" in note] == [text]
        run.kill_task()
        run.wait("generation-formed", generation=2, restore="step-30-g1")
        eventually("both resume", lambda: [len(run.resumed(worker)) for worker in (0, 1)] == [2, 2])
        run.save(40)
        assert not [event for event in run.events("warning") if "written" in event["text"]]
        assert len(run.events("restart")) == 1
        run.ends()
    finally:
        for mount in mounts:
            subprocess.run(["umount", "-l", str(mount)], check=False)


# A state of 4 MiB, which the helper saves twice.
HELPERS = {
    "torch": """
import torch
from paceline.torch import Snapshots
model = torch.nn.Linear(1024, 1024)
with Snapshots({"model": model}) as snapshots:
    snapshots.save(1)
    snapshots.save(2)
""",
    "tensorflow": """
import tensorflow as tf
from paceline.tensorflow import Snapshots
with Snapshots({"weights": tf.Variable(tf.zeros([1024, 1024]))}) as snapshots:
    snapshots.save(1)
    snapshots.save(2)
""",
    "jax": """
import jax
from paceline.jax import Snapshots
with Snapshots() as snapshots:
    snapshots.save(1, {"weights": jax.numpy.zeros([1024, 1024])})
    snapshots.save(2, {"weights": jax.numpy.zeros([1024, 1024])})
""",
}


@pytest.mark.long  # needs root, to mount a file system
@pytest.mark.parametrize(("size", "in_memory"), [("2m", []), ("6m", ["step-1"])])
@pytest.mark.parametrize("framework", HELPERS)
def test_a_helper_writes_what_does_not_fit_into_memory_to_disk(
    framework: str, size: str, in_memory: list[str], tmp_path: Path
) -> None:
    """Each framework raises an error of its own. The mount ends with the process."""
    disk, memory = tmp_path / "disk", tmp_path / "memory"
    disk.mkdir()
    memory.mkdir()
    folders = {"PACELINE_SNAPSHOT_DIR": str(disk), "PACELINE_SNAPSHOT_MEMORY_DIR": str(memory)}
    script = f'mount -t tmpfs -o size={size} none "{memory}"; "$@"; ls "{memory}"'
    result = subprocess.run(
        ["unshare", "-m", "sh", "-ec", script, "sh", sys.executable, "-c", HELPERS[framework]],
        env={**without("PACELINE"), **folders}, stdout=subprocess.PIPE, text=True, check=True, timeout=300,
    )  # fmt: skip
    assert result.stdout.split() == in_memory
    steps = [name for name in ("step-1", "step-2") if name not in in_memory]
    assert sorted(path.name for path in disk.iterdir()) == ["no-room", *steps]
    for step in steps:
        assert sum(path.stat().st_size for path in (disk / step).iterdir()) > 4 << 20
