"""The torch examples read digits, and kills do not change a bit of what they have learned."""

from __future__ import annotations

import pytest

from support.example_runs import LIMIT_S, Begin, answers_when_tried_and_exported, digest, kill_at, last, survived

KILLS = (("worker-0", 45),)
# Epochs of 40 steps. No epoch ends with a snapshot: one that is postponed on a busy machine would be taken after it.
OPTIONS = ("--epochs", 3, "--every", 9)
SHORTER = ("--epochs", 2, "--every", 9)
EXPORTED = """
import sys
from train import digits
from paceline.torch import load
print(*load(sys.argv[1])(input=digits()[1].tensors[0][:20]).argmax(dim=1).tolist())
"""


@pytest.mark.parametrize("name", ["torch-ddp", "torch-fsdp"])
def test_it_reads_digits(example: Begin, name: str) -> None:
    run = example(name, *OPTIONS, sets={"restart.warm": "false"})
    report = run.succeeds(LIMIT_S)
    assert (report["steps"], report["restarts"]) == (120, [])
    assert report["metrics"]["worker-0"]["accuracy"] == report["metrics"]["worker-1"]["accuracy"] >= 0.90
    assert last(run).name == "step-120-g1"
    if name == "torch-ddp":
        answers_when_tried_and_exported(run, name, EXPORTED)


@pytest.mark.long
def test_a_kill_does_not_change_a_bit_of_what_two_workers_share(example: Begin) -> None:
    """For a model that each worker has, see test_programs.py."""
    whole = example("torch-fsdp", *SHORTER, sets={"restart.warm": "false"})
    killed = example("torch-fsdp", *SHORTER)
    kill_at(killed, *KILLS, committed=True)
    report, again = whole.succeeds(LIMIT_S), killed.succeeds(LIMIT_S)
    assert report["restarts"] == [] and survived(again, KILLS)
    assert again["metrics"] == report["metrics"]
    assert last(killed).name == "step-80-g2"
    assert digest(killed) == digest(whole)
