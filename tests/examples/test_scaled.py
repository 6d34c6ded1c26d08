"""Examples learn the same although their number of workers changes. Then some of them are tried and exported.

test_kills.py shows that a killed worker does not change a bit.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support.example_runs import LIMIT_S, Begin, answers_when_tried_and_exported, reached

BEFORE, EPOCHS = 20, 4  # steps before the first change; epochs of 40 steps
TENSORFLOW_MODEL = """
import sys
import tensorflow as tf
from digits import images
[logits] = tf.saved_model.load(sys.argv[1]).signatures["serving_default"](images=tf.constant(images[:20])).values()
print(*logits.numpy().argmax(axis=1))
"""
JAX_MODEL = """
import sys
from train import digits
from paceline.jax import load
print(*load(sys.argv[1])({"inputs": digits()[1][0][:20]})["logits"].argmax(axis=1))
"""


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "sizes", "exported"),
    [("torch-ddp", (2, 1, 2), ""), ("mnist-loop", (1, 2), TENSORFLOW_MODEL), ("jax-data-parallel", (1, 2), JAX_MODEL)],
    ids=["torch-ddp", "mnist-loop", "jax-data-parallel"],
)
def test_the_result_is_that_of_a_fixed_number_of_workers(
    example: Begin, tmp_path: Path, name: str, sizes: tuple[int, ...], exported: str
) -> None:
    """Groups of TensorFlow and JAX that become smaller: tests/local/test_elastic.py."""
    # On a machine without an idle core, spares take long: a host that joins does not wait for its own. But a run that
    # starts with two hosts waits for both.
    wait = "2s" if sizes[0] == 1 else "15s"
    limits = {"roles.worker.min": 1, "roles.worker.max": max(sizes), "elastic.wait": wait}
    sets = {"roles.worker.replicas": sizes[0], **limits}
    run = example(name, "--epochs", EPOCHS, sets=sets, slow=(tmp_path / "go", BEFORE))
    reached(run, BEFORE)
    for generation, workers in enumerate(sizes[1:], start=2):
        scaled = run.call("scale", run.folder.name, f"worker={workers}", limit=LIMIT_S)
        assert scaled.returncode == 0, scaled.stderr
        formed = run.wait("generation-formed", LIMIT_S, generation=generation)
        assert len(formed["tasks"]) == workers and formed["restore"], run.story()
    (tmp_path / "go").touch()
    report = run.succeeds(LIMIT_S)
    assert report["restarts"] == [] and report["generations"] == len(sizes), run.story()
    assert f"epoch {EPOCHS}" in run.log("worker-0") and "epoch" not in run.log("worker-1")

    fixed = example(name, "--epochs", EPOCHS).succeeds(LIMIT_S)
    assert report["steps"] == fixed["steps"] == 40 * EPOCHS, "the global batch is the same"
    result, expected = report["metrics"]["worker-0"], fixed["metrics"]["worker-0"]
    assert result["accuracy"] >= 0.9
    assert result["accuracy"] == pytest.approx(expected["accuracy"], abs=0.02)
    assert result["loss"] == pytest.approx(expected["loss"], abs=0.1)
    if exported:
        answers_when_tried_and_exported(run, name, exported)
