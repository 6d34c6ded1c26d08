"""A TensorFlow program for TF_CONFIG and MultiWorkerMirroredStrategy that does not use Paceline."""

import argparse
import hashlib
import json
import os
import shutil
import tempfile
import time

import faults
import numpy as np
import tensorflow as tf

BATCH = 32
FEATURES = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--sleep", type=float, default=0, help="seconds a step")
    parser.add_argument("--checkpoint-dir")
    faults.add_options(parser)
    options = parser.parse_args()

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    task = json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {"type": "worker", "index": 0})
    rank = task["index"]
    with strategy.scope():
        weights = tf.Variable(tf.zeros([FEATURES, 1]))
        velocity = tf.Variable(tf.zeros([FEATURES, 1]))
        step = tf.Variable(0, dtype=tf.int64)

    truth = np.random.default_rng(7).normal(size=(FEATURES, 1)).astype("float32")

    def share(at: int, replica: int, replicas: int) -> np.ndarray:
        return np.random.default_rng(at).normal(size=(BATCH, FEATURES)).astype("float32")[replica::replicas]

    def update(inputs: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((inputs @ weights - inputs @ truth) ** 2) / BATCH
        gradient = tape.gradient(loss, weights)
        total = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, gradient)
        velocity.assign(0.8 * velocity - 0.05 * total)
        weights.assign_add(velocity)
        step.assign_add(1)

    @tf.function
    def train_step(inputs: tf.Tensor) -> None:
        strategy.run(update, args=(inputs,))

    checkpoint = tf.train.Checkpoint(weights=weights, velocity=velocity, step=step)
    manager = None
    if options.checkpoint_dir:
        # Every worker has to save, but only the chief's folder is kept.
        folder = options.checkpoint_dir if rank == 0 else tempfile.mkdtemp(prefix="not-the-chief-")
        manager = tf.train.CheckpointManager(checkpoint, folder, max_to_keep=2)
        checkpoint.restore(tf.train.latest_checkpoint(options.checkpoint_dir))

    print(f"start {int(step.numpy())}", flush=True)
    for at in range(int(step.numpy()), options.steps):
        faults.before_step(at + 1, rank, options)
        train_step(
            strategy.experimental_distribute_values_from_function(
                lambda replica, at=at: share(at, replica.replica_id_in_sync_group, replica.num_replicas_in_sync)
            )
        )
        print(f"step {at + 1}", flush=True)
        if manager:
            manager.save(at + 1)
        time.sleep(options.sleep)

    if manager and rank != 0:
        shutil.rmtree(manager.directory)
    print(f"replicas {strategy.num_replicas_in_sync}")
    print(f"error {np.abs(weights.numpy() - truth).max():.6f}")
    print(f"weights {hashlib.sha256(weights.numpy().tobytes()).hexdigest()}", flush=True)


if __name__ == "__main__":
    main()
