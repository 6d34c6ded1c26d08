"""The torch examples read digits, also if a worker is killed."""

from __future__ import annotations

from typing import Any

import pytest

from support.example_runs import LIMIT_S, Begin, answers_when_tried_and_exported, kill_held, last

pytestmark = pytest.mark.timeout(900)

# Epochs of 40 steps. No epoch ends with a snapshot: one that is postponed on a busy machine would be taken after it.
OPTIONS = ("--epochs", 3, "--every", 9)
EXPORTED = """
import sys
from train import digits
from paceline.torch import load
print(*load(sys.argv[1])(input=digits()[1].tensors[0][:20]).argmax(dim=1).tolist())
"""


def test_it_reads_digits_and_is_tried_and_exported(example: Begin) -> None:
    run = example("torch-ddp", *OPTIONS, sets={"restart.warm": "false"})
    report = run.succeeds(LIMIT_S)
    assert report["restarts"] == []
    reads_digits(report)
    assert last(run).name == "step-120-g1"
    answers_when_tried_and_exported(run, "torch-ddp", EXPORTED)


@pytest.mark.long
def test_it_reads_digits_with_a_model_that_two_workers_share_although_one_is_killed(example: Begin) -> None:
    """test_torch_snapshots.py shows that a kill does not change a bit."""
    run = example("torch-fsdp", *OPTIONS, hold=("worker-0", 45))
    kill_held(run, "worker-0")
    report = run.succeeds(LIMIT_S)
    # On a busy machine the error of its peer may be detected before the kill: the cause does not matter here.
    assert len(report["restarts"]) == 1, run.story()
    reads_digits(report)
    assert last(run).name == "step-120-g2"


def reads_digits(report: dict[str, Any]) -> None:
    assert report["steps"] == 120
    assert report["metrics"]["worker-0"]["accuracy"] == report["metrics"]["worker-1"]["accuracy"] >= 0.90
