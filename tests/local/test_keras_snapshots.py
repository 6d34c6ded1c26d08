"""Keras' fit with snapshots: 9 batches per epoch, 4 epochs, killed at critical points."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.runs import PROGRAMS, Run, Starter, kill, starter
from support.tensorflows import LIMIT_S, start, steps

pytestmark = pytest.mark.xdist_group("keras_snapshots")

PROGRAM = "keras_snapshots.py"
# In one process, which is killed after batch 15, in the middle of the second epoch; then in another one.
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
    results: dict[str, Any]
    folder: Path

    def resumed(self, title: str, other: str = "whole") -> bool:
        """Whether that fit resumed, and ended with the result of the other one, which started from nothing."""
        begin = self.results[title]["begin"]
        return begin > 0 and self.results[title] == {**self.results[other], "begin": begin}

    def steps(self, title: str) -> list[int]:
        return steps(self.folder / title)


@pytest.fixture(scope="module")
def fits(tmp_path_factory: pytest.TempPathFactory) -> Fits:
    return all_fits("keras", tmp_path_factory.mktemp("fits"), BEFORE, AFTER)


def all_fits(keras_module: str, folder: Path, before: dict[str, Any], after: dict[str, Any]) -> Fits:
    results: dict[str, Any] = {}
    for titles, code in ((before, -9), (after, 0)):
        process = start(PROGRAM, keras_module, folder, json.dumps(titles), env={})
        try:
            out, err = process.communicate(timeout=LIMIT_S)
        finally:
            process.kill()
        assert process.returncode == code, err[-6000:]
        results.update(zip(titles, map(json.loads, out.splitlines()), strict=False))
    return Fits(results, folder)


def test_a_fit_killed_in_the_middle_of_an_epoch_resumes_bit_for_bit(fits: Fits) -> None:
    assert fits.steps("killed") == [4, 8, 9, 12]
    order = json.loads((fits.folder / "killed" / "step-12" / "state.json").read_text())["order"]
    assert (order["epoch"], order["position"]) == (1, 24)
    assert fits.results["resumed"]["begin"] == 1
    assert fits.resumed("resumed")
    assert fits.results["resumed"]["steps"] == 36
    assert fits.steps("resumed") == [16, 18, 20, 24, 27, 28, 32, 36]


@pytest.mark.long
def test_a_fit_of_tf_keras_that_was_killed_or_had_to_leave_resumes_bit_for_bit(tmp_path: Path) -> None:
    before = {title: BEFORE[title] for title in ("whole", "killed")}
    after = {title: AFTER[title] for title in ("resumed", "leaving", "left", "wrong data")}
    fits = all_fits("tf_keras", tmp_path, before, after)
    assert fits.steps("killed") == [4, 8, 9, 12]
    assert fits.resumed("resumed")
    assert fits.results["leaving"] == fits.results["whole"]
    assert fits.resumed("left")
    assert "does not match order" in fits.results["wrong data"]["error"]


def test_it_resumes_between_epochs_too(fits: Fits) -> None:
    assert fits.resumed("resumed between epochs")


def test_several_batches_at_once_make_no_difference(fits: Fits) -> None:
    assert fits.resumed("resumed, four at once")
    assert fits.steps("resumed, four at once")[-1] == 36


def test_it_resumes_with_several_replicas_too(fits: Fits) -> None:
    assert fits.resumed("resumed, mirrored", "mirrored")
    assert fits.results["mirrored"]["weights"] != fits.results["whole"]["weights"]


def test_a_snapshot_of_the_current_batch_is_taken_when_a_member_has_to_leave(fits: Fits) -> None:
    assert fits.results["leaving"] == fits.results["whole"]
    assert 14 in fits.steps("leaving")
    assert fits.resumed("left")


def test_without_an_order_snapshots_are_taken_between_epochs(fits: Fits) -> None:
    assert fits.steps("whole without an order") == [9, 18, 27, 36]
    assert fits.resumed("resumed without an order", "whole without an order")
    assert fits.results["resumed without an order"]["begin"] == 2


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("data", "the data of fit does not match order; pass paceline.keras.batches(order, ...) unchanged"),
        (
            "epoch",
            "fit starts with epoch 0, but the snapshot is of epoch 1; pass initial_epoch=snapshots.initial_epoch",
        ),
    ],
)
def test_a_fit_that_would_train_on_the_wrong_examples_is_an_error(fits: Fits, wrong: str, message: str) -> None:
    assert fits.results[f"wrong {wrong}"]["error"] == message


def test_a_snapshot_with_other_data_is_restored_partially_on_request(fits: Fits) -> None:
    assert "different: order/size (70 in the snapshot, 64 here)" in fits.results["other data"]["error"]
    assert fits.results["other data"]["steps"] == 0
    in_part = fits.results["other data, in part"]
    assert (in_part["begin"], in_part["steps"], in_part["error"]) == (0, 12 + 4 * 8, "")


# ---- a run of two workers


@pytest.fixture
def start_run(tmp_path: Path) -> Iterator[Starter]:
    with starter(tmp_path) as start_run:
        yield start_run


def two_workers(start_run: Starter, fit: dict[str, Any]) -> Run:
    return start_run(
        {
            "name": "fit",
            "framework": "tensorflow",
            "command": ["python", PROGRAM, "keras", ".", json.dumps({"": {"strategy": "workers", **fit}})],
            "code": str(PROGRAMS),
            "env": {"TF_CPP_MIN_LOG_LEVEL": "2"},
            "roles": {"worker": {"replicas": 2}},
            "restart": {"warm": False},
        }
    )


def results_after_kill(run: Run) -> list[Any]:
    """The results of its workers, after one of them was killed in the middle of the second epoch."""
    run.wait("committed", limit=LIMIT_S, step=12)
    kill(run.task("worker-1"))
    run.succeeds(limit=LIMIT_S)
    assert [event["restore"] for event in run.events("generation-formed")] == [None, "step-12-g1"]
    return worker_results(run)


def worker_results(run: Run) -> list[Any]:
    """What workers have printed last. TensorFlow may print an error behind it: the other worker has left first."""
    printed = [re.findall(r" \| (\{.*\})$", run.log(task), re.M) for task in ("worker-0", "worker-1")]
    return [json.loads(lines[-1]) for lines in printed]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_workers_with_keras_3_resume_in_the_middle_of_an_epoch(start_run: Starter) -> None:
    """Their losses are summed in another order than in one process, so they are compared with other workers. For
    workers with tf_keras, see test_keras_fit.py."""
    undisturbed = two_workers(start_run, {})
    undisturbed.succeeds(limit=LIMIT_S)
    first, second = worker_results(undisturbed)
    assert first == second and first["steps"] == 36
    assert results_after_kill(two_workers(start_run, {"hold_at": 15})) == [{**first, "begin": 1}] * 2
