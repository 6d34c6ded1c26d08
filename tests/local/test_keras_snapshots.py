"""Keras' fit with snapshots: 9 batches an epoch, 4 epochs, killed where it hurts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tensorflows import run, steps

PROGRAM = "keras_snapshots.py"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run(PROGRAM, folder=tmp_path_factory.mktemp("undisturbed"))


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The snapshots of a fit that was killed after batch 15, in the middle of its second epoch."""
    folder = tmp_path_factory.mktemp("killed")
    run(PROGRAM, "--kill-at", 15, folder=folder, code=-9)
    return folder


def test_a_fit_killed_in_the_middle_of_an_epoch_resumes_bit_for_bit(
    undisturbed: Any, killed: Path, tmp_path: Path
) -> None:
    assert steps(killed) == [4, 8, 9, 12]
    where = json.loads((killed / "step-12" / "state.json").read_text())["order"]
    assert (where["epoch"], where["position"]) == (1, 24)
    resumed = run(PROGRAM, folder=tmp_path, restore=killed / "step-12")
    assert resumed == {**undisturbed, "begin": 1}
    assert (resumed["steps"], steps(tmp_path)[-1]) == (36, 36)


def test_it_resumes_between_epochs_too(undisturbed: Any, killed: Path, tmp_path: Path) -> None:
    assert run(PROGRAM, folder=tmp_path, restore=killed / "step-9") == {**undisturbed, "begin": 1}


def test_several_batches_at_once_make_no_difference(undisturbed: Any, killed: Path, tmp_path: Path) -> None:
    resumed = run(PROGRAM, "--at-once", 4, folder=tmp_path, restore=killed / "step-12")
    assert resumed == {**undisturbed, "begin": 1}
    assert steps(tmp_path)[-1] == 36


def test_when_somebody_has_to_go_a_snapshot_of_that_batch_is_taken(undisturbed: Any, tmp_path: Path) -> None:
    assert run(PROGRAM, "--leave-at", 14, folder=tmp_path) == undisturbed
    assert 14 in steps(tmp_path)
    assert run(PROGRAM, folder=tmp_path, restore=tmp_path / "step-14") == {**undisturbed, "begin": 1}


def test_without_an_order_snapshots_are_taken_between_epochs(tmp_path: Path) -> None:
    whole = run(PROGRAM, "--no-order", folder=tmp_path / "whole")
    assert steps(tmp_path / "whole") == [9, 18, 27, 36]
    resumed = run(PROGRAM, "--no-order", folder=tmp_path / "more", restore=tmp_path / "whole" / "step-18")
    assert resumed == {**whole, "begin": 2}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("data", "give fit the data of paceline.keras.batches(order, ...), as it is"),
        (
            "epoch",
            "fit begins with epoch 0, and the snapshot is of epoch 1: give it initial_epoch=snapshots.initial_epoch",
        ),
    ],
)
def test_what_would_train_on_the_wrong_examples_is_an_error(
    wrong: str, said: str, killed: Path, tmp_path: Path
) -> None:
    assert run(PROGRAM, "--wrong", wrong, folder=tmp_path, restore=killed / "step-12")["error"] == said
