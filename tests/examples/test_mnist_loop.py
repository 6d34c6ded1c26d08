"""examples/mnist-loop: its accuracy, and that killed workers do not change its result."""

from __future__ import annotations

import re

import pytest

from support.example_runs import LIMIT_S, Begin, answers_when_tried_and_exported, digest, kill_at

KILL = "worker-0", 60
OPTIONS = ("--epochs", 3, "--batch", 99)  # neither a step nor the last step of an epoch is divisible by two workers
EXPORTED = """
import sys
import tensorflow as tf
from digits import images
[logits] = tf.saved_model.load(sys.argv[1]).signatures["serving_default"](images=tf.constant(images[:20])).values()
print(*logits.numpy().argmax(axis=1))
"""
TESTED = re.compile(r"epoch (\d+): (\d+) of 1000 held-out images read correctly")


@pytest.mark.long
def test_it_reads_digits_and_a_kill_does_not_change_a_bit(example: Begin) -> None:
    """Then it is tried and exported."""
    whole, killed = (example("mnist-loop", *OPTIONS, sets={"restart.warm": "false"}) for _ in range(2))
    kill_at(killed, KILL)
    assert whole.succeeds(LIMIT_S)["restarts"] == []
    results = TESTED.findall(whole.log("worker-0"))
    assert [int(epoch) for epoch, _ in results] == [1, 2, 3]
    assert int(results[-1][1]) >= 900, results
    assert not TESTED.findall(whole.log("worker-1"))
    # On a busy machine the error of its peer may be detected before the kill: the cause does not matter here.
    assert killed.succeeds(LIMIT_S)["restarts"], killed.story()
    assert TESTED.findall(killed.log("worker-0"))[-1] == results[-1]
    assert digest(killed) == digest(whole)
    answers_when_tried_and_exported(killed, "mnist-loop", EXPORTED)
