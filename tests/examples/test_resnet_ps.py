"""ResNet with parameter servers: the network is the paper's, and it learns."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from paceline.job import load, planning
from support.alone import alone
from support.example_runs import EXAMPLES, LIMIT_S, Begin, answers_when_tried_and_exported, done

SMALL = ("--depth", 8, "--epochs", 3, "--cuts", 2, "--every", 20, "--no-flip")  # a mirrored digit is not the same digit
MIN_ACCURACY = 0.8
EXPORTED = """
import pathlib, sys
import cifar
import tensorflow as tf
images, _ = cifar.testing(pathlib.Path(sys.argv[3]))
classify = tf.saved_model.load(sys.argv[1]).signatures["serving_default"]
print(*classify(images=tf.constant(images[:20]))["logits"].numpy().argmax(axis=1))
"""


def digits(folder: Path) -> Path:
    done("resnet-ps", "digits_as_cifar.py", folder)
    return folder


@pytest.mark.parametrize(("file", "evaluators"), [("job.yaml", 0), ("side-car.yaml", 1)])
def test_it_has_the_roles_of_the_predecessor(file: str, evaluators: int) -> None:
    job_plan = planning.make_plan(load(EXAMPLES / "resnet-ps" / file).job)
    roles = Counter(task.role for task in job_plan.tasks)
    assert roles == Counter(chief=1, ps=2, worker=5, evaluator=evaluators)


@alone
def test_the_network_is_that_of_the_paper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES / "resnet-ps")
    import network
    import train

    options = train.arguments().parse_args(["--data", "here"])
    assert (options.depth, options.batch, options.epochs) == (56, 64, 182)
    rates = [train.rate_of(options, epoch) for epoch in (0, 90, 91, 135, 136, 181)]
    assert rates == pytest.approx([0.05, 0.05, 0.005, 0.005, 0.0005, 0.0005])
    model = network.resnet(options.depth)
    weighted = [layer for layer in model.layers if type(layer).__name__ in ("Conv2D", "Dense")]
    shapes = [tuple(layer.kernel.shape) for layer in weighted]
    stages = [[(3, 3, before, after)] + [(3, 3, after, after)] * 17 for before, after in ((16, 16), (16, 32), (32, 64))]
    assert shapes == [(3, 3, 3, 16), *stages[0], *stages[1], *stages[2], (64, 10)]
    assert len(weighted) == 56
    outputs = [layer.output.shape[1:] for layer in weighted]
    assert outputs == [(32, 32, 16)] * 19 + [(16, 16, 32)] * 18 + [(8, 8, 64)] * 18 + [(10,)]
    assert sum(weights.numpy().size for weights in model.trainable_variables) == 853_018
    with pytest.raises(ValueError, match="depth 9: must be 6n"):
        network.resnet(9)


@alone
def test_the_files_are_those_of_cifar_and_each_test_image_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES / "resnet-ps")
    import cifar
    import numpy as np
    import train

    data = digits(tmp_path / "data")
    assert sorted(path.name for path in data.iterdir()) == [
        *(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin",
    ]  # fmt: skip
    images, labels = cifar.training(data)
    assert (images.shape, labels.shape) == ((4000, 32, 32, 3), (4000,))
    record = (data / "data_batch_1.bin").read_bytes()[: cifar.RECORD]
    assert record[0] == labels[0]
    assert images[0, 20, 10].tolist() == [record[1 + 1024 * color + 32 * 20 + 10] for color in range(3)]
    images, labels = cifar.testing(data)
    parts = train.parts(images[:901], labels[:901])
    assert np.array_equal(np.concatenate([part for part, _ in parts]), images[:901])
    assert np.array_equal(np.concatenate([part for _, part in parts]), labels[:901])

    (data / "test_batch.bin").write_bytes(bytes(3074))
    with pytest.raises(SystemExit, match="has 3074 bytes, which is not a whole number of 3073-byte records"):
        cifar.testing(data)


SERVERS = {"roles.worker.replicas": 2, "roles.ps.replicas": 1, "restart.warm": "false"}


@pytest.mark.timeout(900)
def test_it_learns_with_an_evaluator_and_is_tried_and_exported(example: Begin, tmp_path: Path) -> None:
    """test_kills.py and test_cluster_contract.py show what happens if tasks with parameter servers are killed."""
    data = digits(tmp_path / "data")
    sets = {**SERVERS, "roles.worker.replicas": 1, "roles.ps.replicas": 2}
    run = example("resnet-ps", "--data", data, *SMALL, sets=sets, file="side-car.yaml")
    report = run.succeeds(LIMIT_S)
    assert report["restarts"] == []
    devices = ", ".join(f"/job:ps/replica:0/task:{index}/device:CPU:0" for index in range(2))
    assert f"75,770 weights are stored on {devices}\n" in run.log("chief-0")
    evaluated = re.findall(r"\bstep (\d+): ", run.log("evaluator-0"))
    assert int(evaluated[-1]) == report["steps"]
    assert report["metrics"]["evaluator-0"]["accuracy"] >= MIN_ACCURACY
    board = EventAccumulator(str(run.folder / "tensorboard" / "evaluator-0")).Reload()
    assert board.Tensors("accuracy")[-1].step == report["steps"]
    answers_when_tried_and_exported(run, "resnet-ps", EXPORTED, "--data", data, least=12)
