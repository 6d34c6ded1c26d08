"""What a run shows in TensorBoard after three kills: one line a tag, each step once, by TensorBoard's own readers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from runs import PROGRAMS, Starter, job
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

pytestmark = pytest.mark.timeout(180)


def steps(folder: Path, tag: str) -> list[int]:
    read = EventAccumulator(str(folder), size_guidance={"tensors": 0, "scalars": 0}, purge_orphaned_data=False)
    read.Reload()
    tags = read.Tags()
    return [event.step for event in (read.Tensors(tag) if tag in tags["tensors"] else read.Scalars(tag))]


@pytest.mark.parametrize(("kind", "saves"), [("torch", True), ("tensorflow", False)])
def test_each_step_is_there_once_after_three_kills(kind: str, saves: bool, start: Starter, state: Path) -> None:
    """Of programs that go on from snapshots, and of one that begins anew each time; an evaluator that lives through
    it all and counts on its own keeps all that it wrote."""
    program = [sys.executable, str(PROGRAMS / "curves.py"), kind, str(state), *(["--saves"] if saves else [])]
    evaluator = {"evaluator": {"replicas": 1}} if kind == "tensorflow" else {}
    run = start(job(program, framework=kind, roles={"worker": {"replicas": 1}, **evaluator}))
    assert run.succeeds(120)["generations"] == 4, run.said()
    assert steps(run.folder / "tensorboard" / "train", "loss") == list(range(1, 61))
    assert steps(run.folder / "tensorboard" / "train", "epoch") == [1, 2, 3]
    if evaluator:
        assert steps(run.folder / "tensorboard" / "eval", "accuracy") == list(range(1000, 1021))
    left = [path.name for path in run.folder.glob(".*") if not path.name.endswith((".generation", ".json"))]
    assert not [name for name in left if "curves" in name]
