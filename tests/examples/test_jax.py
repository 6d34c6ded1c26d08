"""The JAX example reads digits, and kills do not change a bit of what it has learned."""

from __future__ import annotations

import pytest

from support.example_runs import LIMIT_S, Begin, answers_when_tried_and_exported, digest, kill_at, last, survived

KILLS = (("worker-0", 45),)
# Epochs of 40 steps. No epoch ends with a snapshot: one that is postponed on a busy machine would be taken after it.
OPTIONS = ("--epochs", 3, "--every", 9)
EXPORTED = """
import sys
from train import digits
from paceline.jax import load
print(*load(sys.argv[1])({"inputs": digits()[1][0][:20]})["logits"].argmax(axis=1))
"""


@pytest.mark.long
def test_it_reads_digits_and_a_kill_does_not_change_a_bit(example: Begin) -> None:
    """Then it is tried and exported."""
    whole = example("jax-data-parallel", *OPTIONS, sets={"restart.warm": "false"})
    killed = example("jax-data-parallel", *OPTIONS)
    kill_at(killed, *KILLS, committed=True)
    report, again = whole.succeeds(LIMIT_S), killed.succeeds(LIMIT_S)
    assert (report["steps"], report["restarts"]) == (120, [])
    assert report["metrics"]["worker-0"] == report["metrics"]["worker-1"]
    assert report["metrics"]["worker-0"]["accuracy"] >= 0.90
    assert survived(again, KILLS)
    assert again["metrics"] == report["metrics"]
    assert last(killed).name == "step-120-g2"
    assert digest(killed) == digest(whole)
    answers_when_tried_and_exported(killed, "jax-data-parallel", EXPORTED)
