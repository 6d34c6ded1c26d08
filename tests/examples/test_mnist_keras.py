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

EPOCHS = 3
VICTIM = "worker-0"
RESULT = re.compile(r"\d+\.\d% of 1000 held-out digits read correctly, loss \d\.\d{6}$", re.MULTILINE)

pytestmark = pytest.mark.timeout(600)


def results(run: Run) -> list[str]:
    """What each worker prints at its end."""
    lines = [RESULT.findall(run.log(task)) for task in ("worker-0", "worker-1")]
    assert [len(each) for each in lines] == [1, 1], run.story()
    return [text for [text] in lines]


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

    def begin() -> Run:
        command = [*fields["command"], "--epochs", str(EPOCHS)]
        overridden = {"code": str(code), "command": command, "restart": {"warm": False}}
        return start({**fields, **overridden}, home=tmp_path / "home")

    return begin


@pytest.mark.long
def test_it_reads_digits_whether_killed_or_not(example: Callable[..., Run], tmp_path: Path) -> None:
    """A kill does not change a bit."""
    whole, killed = example(), example()
    killed.wait("committed", LIMIT_S)
    kill(killed.task(VICTIM))

    assert whole.succeeds(LIMIT_S)["restarts"] == []
    report = killed.succeeds(LIMIT_S)
    assert causes(report) == [("signal", VICTIM)]
    assert killed.log("worker-0").count(f"Epoch 1/{EPOCHS}") == 1, "it started over"
    assert len({*results(whole), *results(killed)}) == 1
    assert float(results(whole)[0].partition("%")[0]) > 92
    assert weights(killed) == weights(whole)
    checkpoints = sorted(path.name for path in (tmp_path / "code" / "kept").iterdir())
    assert checkpoints == sorted([whole.folder.name, killed.folder.name])


def test_it_does_not_use_paceline() -> None:
    assert "paceline" not in (EXAMPLES / "mnist-keras" / "train.py").read_text()
