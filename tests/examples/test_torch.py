"""The torch examples read digits, and kills do not change a bit of what they have learned."""

from __future__ import annotations

from typing import Any

import pytest

from support.example_runs import LIMIT_S, Begin, answers_when_tried_and_exported, digest, kill_at, last, survived

KILLS = (("worker-0", 45),)
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
    reads_digits(run.succeeds(LIMIT_S))
    assert last(run).name == "step-120-g1"
    answers_when_tried_and_exported(run, "torch-ddp", EXPORTED)


@pytest.mark.long
def test_it_reads_digits_and_a_kill_does_not_change_a_bit_of_what_two_workers_share(example: Begin) -> None:
    """For a model that each worker has, see test_programs.py."""
    whole = example("torch-fsdp", *OPTIONS, sets={"restart.warm": "false"})
    killed = example("torch-fsdp", *OPTIONS)
    kill_at(killed, *KILLS, committed=True)
    report, again = whole.succeeds(LIMIT_S), killed.succeeds(LIMIT_S)
    reads_digits(report)
    assert survived(again, KILLS)
    assert again["metrics"] == report["metrics"]
    assert (last(whole).name, last(killed).name) == ("step-120-g1", "step-120-g2")
    assert digest(killed) == digest(whole)


def reads_digits(report: dict[str, Any]) -> None:
    assert (report["steps"], report["restarts"]) == (120, [])
    assert report["metrics"]["worker-0"]["accuracy"] == report["metrics"]["worker-1"]["accuracy"] >= 0.90
