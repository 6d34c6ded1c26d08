"""examples/mnist-keras: plain Keras 3 with fit on two workers reads digits, and three kills change nothing of it."""

from __future__ import annotations

import re
import shutil
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "local"))

from runs import Run, Starter, causes, kill, starter

EXAMPLE = Path(__file__).parents[2] / "examples" / "mnist-keras"
LIMIT_S = 300.0
EPOCHS = 6
JOB = {
    "name": "mnist-keras",
    "framework": "tensorflow",
    "command": ["python", "train.py", "--epochs", str(EPOCHS)],
    "env": {"TF_CPP_MIN_LOG_LEVEL": "2"},
    "roles": {"worker": {"replicas": 2}},
    "snapshots": {"watch": "kept/"},
}

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starter]:
    with starter(tmp_path_factory.mktemp("mnist-keras")) as start:
        yield start


def begin(start: Starter, place: Path) -> Run:
    """In a copy, since what it keeps is kept in its folder."""
    shutil.copytree(EXAMPLE, place, ignore=shutil.ignore_patterns("kept"))
    return start({**JOB, "code": str(place)})


@pytest.fixture(scope="module")
def undisturbed(start: Starter, tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = begin(start, tmp_path_factory.mktemp("undisturbed") / "mnist-keras")
    run.succeeds(LIMIT_S)
    return run


def last(run: Run, task: str) -> str:
    return run.log(task).splitlines()[-1].split(" | ", 1)[1]


def weights(run: Run) -> bytes:
    """Of the model in the newest snapshot."""
    folder = run.folder / "snapshots" / run.folder.name / run.events("committed")[-1]["snapshot"]
    [model] = folder.rglob("model.keras")
    with zipfile.ZipFile(model) as archive:
        return archive.read("model.weights.h5")


def test_it_reads_digits_and_all_workers_say_the_same(undisturbed: Run) -> None:
    told = last(undisturbed, "worker-0")
    found = re.fullmatch(r"(\d+\.\d)% of 1000 held-out digits read correctly, loss \d\.\d{6}", told)
    assert found is not None, told
    assert float(found[1]) > 94
    assert last(undisturbed, "worker-1") == told
    assert "paceline" not in (EXAMPLE / "train.py").read_text()


def test_three_kills_change_no_bit_of_it(undisturbed: Run, start: Starter, tmp_path: Path) -> None:
    run = begin(start, tmp_path / "mnist-keras")
    victims = ["worker-1", "worker-0", "worker-1"]
    for generation, victim in enumerate(victims, 1):
        run.wait("committed", LIMIT_S, generation=generation)
        kill(run.task(victim))
        run.wait("generation-formed", LIMIT_S, generation=generation + 1)
    report = run.succeeds(LIMIT_S)
    assert causes(report) == [("signal", victim) for victim in victims]
    assert run.log("worker-0").count(f"Epoch 1/{EPOCHS}") == 1, "it begins anew"
    for task in ("worker-0", "worker-1"):
        assert last(run, task) == last(undisturbed, "worker-0")
    assert weights(run) == weights(undisturbed)
