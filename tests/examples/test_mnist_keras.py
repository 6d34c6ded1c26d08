"""examples/mnist-keras: plain Keras 3 with fit on two workers reads digits, and kills do not change its result."""

from __future__ import annotations

import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from support.example_runs import EXAMPLES, LIMIT_S, job
from support.runs import Run, Starter, causes, kill

EPOCHS = 6
FEWER = 3
VICTIM = "worker-0"

pytestmark = pytest.mark.timeout(600)


def last_line(run: Run, task: str) -> str:
    return run.log(task).splitlines()[-1].split(" | ", 1)[1]


def weights(run: Run) -> bytes:
    """Weights of the model in the newest snapshot."""
    folder = run.folder / "snapshots" / run.folder.name / run.events("committed")[-1]["snapshot"]
    [model] = folder.rglob("model.keras")
    with zipfile.ZipFile(model) as archive:
        return archive.read("model.weights.h5")


@pytest.fixture
def example(start: Starter, tmp_path: Path) -> Callable[..., Run]:
    """Starts runs in one copy of its folder, because the program writes its checkpoints there."""
    code = shutil.copytree(EXAMPLES / "mnist-keras", tmp_path / "code", ignore=shutil.ignore_patterns("kept"))
    fields = job("mnist-keras")

    def begin(epochs: int, *options: str) -> Run:
        command = [*fields["command"], "--epochs", str(epochs)]
        return start({**fields, "code": str(code), "command": command}, *options, home=tmp_path / "home")

    return begin


def test_it_reads_digits(example: Callable[..., Run]) -> None:
    run = example(EPOCHS, "--set", "restart.warm=false")
    assert run.succeeds(LIMIT_S)["restarts"] == []
    result = last_line(run, "worker-0")
    match = re.fullmatch(r"(\d+\.\d)% of 1000 held-out digits read correctly, loss \d\.\d{6}", result)
    assert match is not None, result
    assert float(match[1]) > 94
    assert last_line(run, "worker-1") == result
    assert "paceline" not in (EXAMPLES / "mnist-keras" / "train.py").read_text()


@pytest.mark.long
def test_a_kill_does_not_change_a_bit(example: Callable[..., Run], tmp_path: Path) -> None:
    whole, killed = example(FEWER, "--set", "restart.warm=false"), example(FEWER)
    killed.wait("committed", LIMIT_S)
    kill(killed.task(VICTIM))

    assert whole.succeeds(LIMIT_S)["restarts"] == []
    result = last_line(whole, "worker-0")
    report = killed.succeeds(LIMIT_S)
    assert causes(report) == [("signal", VICTIM)]
    assert killed.log("worker-0").count(f"Epoch 1/{FEWER}") == 1, "it started over"
    for task in ("worker-0", "worker-1"):
        assert last_line(killed, task) == result
    assert weights(killed) == weights(whole)
    checkpoints = sorted(path.name for path in (tmp_path / "code" / "kept").iterdir())
    assert checkpoints == sorted([whole.folder.name, killed.folder.name])
