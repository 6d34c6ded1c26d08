"""Keras' fit with snapshots: 9 batches an epoch, 4 epochs, killed where it hurts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.runs import PROGRAMS, Run, Starter, kill, starter
from support.tensorflows import LIMIT_S, start, steps

PROGRAM = "keras_snapshots.py"
# In one process, of which nothing is left after batch 15, in the middle of the second epoch; then in another one.
BEFORE = {"whole": {}, "mirrored": {"strategy": "mirrored"}, "killed": {"kill_at": 15}}
AFTER = {
    "resumed": {"restore": "killed/step-12"},
    "resumed between epochs": {"restore": "killed/step-9"},
    "resumed, four at once": {"restore": "killed/step-12", "at_once": 4},
    "resumed, mirrored": {"restore": "mirrored/step-12", "strategy": "mirrored"},
    "leaving": {"leave_at": 14},
    "left": {"restore": "leaving/step-14"},
    "whole without an order": {"order": False},
    "resumed without an order": {"order": False, "restore": "whole without an order/step-18"},
    "wrong data": {"wrong": "data", "restore": "killed/step-12"},
    "wrong epoch": {"wrong": "epoch", "restore": "killed/step-12"},
    "other data": {"size": 64, "restore": "killed/step-12"},
    "other data, in part": {"size": 64, "restore": "killed/step-12", "partial": True},
}


@dataclass
class Fits:
    ended: dict[str, Any]
    folder: Path

    def resumed(self, title: str, other: str = "whole") -> bool:
        """Whether that fit went on, and ended with what the other, which had nothing to go on from, ended with."""
        begin = self.ended[title]["begin"]
        return begin > 0 and self.ended[title] == {**self.ended[other], "begin": begin}

    def steps(self, title: str) -> list[int]:
        return steps(self.folder / title)


@pytest.fixture(scope="module", params=["keras", pytest.param("tf_keras", marks=pytest.mark.long)])
def fits(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Fits:
    folder = tmp_path_factory.mktemp(request.param)
    ended: dict[str, Any] = {}
    for titles, code in ((BEFORE, -9), (AFTER, 0)):
        process = start(PROGRAM, request.param, folder, json.dumps(titles), env={})
        try:
            out, err = process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()
        assert process.returncode == code, err[-6000:]
        ended.update(zip(titles, map(json.loads, out.splitlines()), strict=False))
    return Fits(ended, folder)


def test_a_fit_killed_in_the_middle_of_an_epoch_resumes_bit_for_bit(fits: Fits) -> None:
    assert fits.steps("killed") == [4, 8, 9, 12]
    where = json.loads((fits.folder / "killed" / "step-12" / "state.json").read_text())["order"]
    assert (where["epoch"], where["position"]) == (1, 24)
    assert fits.ended["resumed"]["begin"] == 1
    assert fits.resumed("resumed")
    assert fits.ended["resumed"]["steps"] == 36
    assert fits.steps("resumed") == [16, 18, 20, 24, 27, 28, 32, 36]


def test_it_resumes_between_epochs_too(fits: Fits) -> None:
    assert fits.resumed("resumed between epochs")


def test_several_batches_at_once_make_no_difference(fits: Fits) -> None:
    assert fits.resumed("resumed, four at once")
    assert fits.steps("resumed, four at once")[-1] == 36


def test_so_it_is_with_several_replicas(fits: Fits) -> None:
    assert fits.resumed("resumed, mirrored", "mirrored")
    assert fits.ended["mirrored"]["weights"] != fits.ended["whole"]["weights"]


def test_when_somebody_has_to_go_a_snapshot_of_that_batch_is_taken(fits: Fits) -> None:
    assert fits.ended["leaving"] == fits.ended["whole"]
    assert 14 in fits.steps("leaving")
    assert fits.resumed("left")


def test_without_an_order_snapshots_are_taken_between_epochs(fits: Fits) -> None:
    assert fits.steps("whole without an order") == [9, 18, 27, 36]
    assert fits.resumed("resumed without an order", "whole without an order")
    assert fits.ended["resumed without an order"]["begin"] == 2


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
def test_what_would_train_on_the_wrong_examples_is_an_error(fits: Fits, wrong: str, said: str) -> None:
    assert fits.ended[f"wrong {wrong}"]["error"] == said


def test_of_a_snapshot_with_other_data_the_rest_is_restored_on_request(fits: Fits) -> None:
    assert "different: order/size (70 in the snapshot, 64 here)" in fits.ended["other data"]["error"]
    assert fits.ended["other data"]["steps"] == 0
    in_part = fits.ended["other data, in part"]
    assert (in_part["begin"], in_part["steps"], in_part["error"]) == (0, 12 + 4 * 8, "")


# ---- a run of two workers


@pytest.fixture
def run_of(tmp_path: Path) -> Iterator[Starter]:
    with starter(tmp_path) as run_of:
        yield run_of


def two_workers(run_of: Starter, fit: dict[str, Any], words: str, **more: Any) -> Run:
    return run_of(
        {
            "name": "fit",
            "framework": "tensorflow",
            "command": ["python", PROGRAM, words, ".", json.dumps({"": {"strategy": "workers", **fit}})],
            "code": str(PROGRAMS),
            "env": {"TF_CPP_MIN_LOG_LEVEL": "2"},
            "roles": {"worker": {"replicas": 2}},
            "restart": {"warm": False},
            **more,
        }
    )


def killed(run: Run) -> list[Any]:
    """What its workers ended with, after one of them was killed in the middle of the second epoch."""
    run.wait("committed", limit=90, step=12)
    kill(run.task("worker-1"))
    run.succeeds(limit=90)
    assert [event["restore"] for event in run.events("generation-formed")] == [None, "step-12-g1"]
    return said(run)


def said(run: Run) -> list[Any]:
    return [json.loads(run.log(task).splitlines()[-1].split(" | ", 1)[1]) for task in ("worker-0", "worker-1")]


@pytest.mark.long
@pytest.mark.parametrize("fits", ["tf_keras"], indirect=True)
def test_workers_of_which_one_is_killed_go_on_in_the_middle_of_an_epoch(fits: Fits, run_of: Starter) -> None:
    """And end with what one process with as many replicas ends with, undisturbed."""
    run = two_workers(run_of, {"hold_at": 15}, "tf.keras", tensorflow={"keras": "legacy"})
    assert killed(run) == [{**fits.ended["mirrored"], "begin": 1}] * 2


@pytest.mark.long
def test_so_do_those_of_keras_3(run_of: Starter) -> None:
    """Their losses are added up in another order than in one process, so that they are compared with workers."""
    undisturbed = two_workers(run_of, {}, "keras")
    undisturbed.succeeds(limit=90)
    first, second = said(undisturbed)
    assert first == second and first["steps"] == 36
    assert killed(two_workers(run_of, {"hold_at": 15}, "keras")) == [{**first, "begin": 1}] * 2
