"""examples/mnist-keras: plain Keras 3 with fit on two workers reads digits, although one is killed."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from support.example_runs import EXAMPLES, LIMIT_S, held, job, kill_held
from support.runs import Run, Starter

EPOCHS = 3
VICTIM = "worker-0"
RESULT = re.compile(r"\d+\.\d% of 1000 held-out digits read correctly, loss \d\.\d{6}$", re.MULTILINE)

pytestmark = pytest.mark.timeout(600)


def results(run: Run) -> list[str]:
    """What each worker prints at its end."""
    lines = [RESULT.findall(run.log(task)) for task in ("worker-0", "worker-1")]
    assert [len(each) for each in lines] == [1, 1], run.story()
    return [text for [text] in lines]


@pytest.fixture
def example(start: Starter, tmp_path: Path) -> Callable[..., Run]:
    """Starts runs in one copy of its folder, because the program writes its checkpoints there."""
    code = shutil.copytree(EXAMPLES / "mnist-keras", tmp_path / "code", ignore=shutil.ignore_patterns("kept"))
    fields = job("mnist-keras")

    def begin() -> Run:
        command = held([*fields["command"], "--epochs", str(EPOCHS)], VICTIM, f"Epoch 2/{EPOCHS}")
        overridden = {"code": str(code), "command": command, "restart": {"warm": False}}
        return start({**fields, **overridden}, home=tmp_path / "home")

    return begin


@pytest.mark.long
def test_it_reads_digits_although_a_worker_is_killed(example: Callable[..., Run], tmp_path: Path) -> None:
    """test_keras_snapshots.py and test_watched.py show that a kill does not change a bit."""
    run = example()
    kill_held(run, VICTIM)
    # Which of the two errors comes first is not certain: the other worker may notice before the agent does.
    assert len(run.succeeds(LIMIT_S)["restarts"]) == 1, run.story()
    assert run.log("worker-0").count(f"Epoch 1/{EPOCHS}") == 1, "it started over"
    first, second = results(run)
    assert first == second
    assert float(first.partition("%")[0]) > 92
    assert [path.name for path in (tmp_path / "code" / "kept").iterdir()] == [run.folder.name]


def test_it_does_not_use_paceline() -> None:
    assert "paceline" not in (EXAMPLES / "mnist-keras" / "train.py").read_text()
