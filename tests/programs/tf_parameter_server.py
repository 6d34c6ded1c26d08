"""A TensorFlow program for TF_CONFIG and ParameterServerStrategy that does not use Paceline."""

import argparse
import json
import os
import time

import faults
import numpy as np
import tensorflow as tf

FEATURES = 8
TRUTH = np.arange(1, FEATURES + 1, dtype="float32").reshape(-1, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--round", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--sleep", type=float, default=0, help="seconds a round")
    parser.add_argument("--checkpoint-dir", required=True)
    faults.add_options(parser)
    options = parser.parse_args()

    # As in TensorFlow's guide: report a lost task immediately instead of waiting for it.
    os.environ["GRPC_FAIL_FAST"] = "use_caller"
    role = json.loads(os.environ["TF_CONFIG"])["task"]["type"]
    if role == "evaluator":
        evaluate(options)
        return
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if role in ("worker", "ps"):
        server = tf.distribute.Server(
            resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id, protocol="grpc"
        )
        print(f"serving {resolver.task_type} {resolver.task_id}", flush=True)
        server.join()
    else:
        coordinate(resolver, options)


def coordinate(resolver: tf.distribute.cluster_resolver.ClusterResolver, options: argparse.Namespace) -> None:
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        weights = tf.Variable(tf.zeros([FEATURES, 1]))
        counter = tf.Variable(0, dtype=tf.int64, aggregation=tf.VariableAggregation.SUM)
        generator = tf.random.Generator.from_seed(1)
    checkpoint = tf.train.Checkpoint(weights=weights, counter=counter)
    manager = tf.train.CheckpointManager(checkpoint, options.checkpoint_dir, max_to_keep=3)
    if manager.latest_checkpoint:
        checkpoint.restore(manager.latest_checkpoint)
    start = int(counter.numpy())
    print(f"start {start}", flush=True)

    @tf.function
    def train_step() -> None:
        def update() -> None:
            inputs = generator.normal([32, FEATURES])
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((inputs @ weights - inputs @ TRUTH) ** 2)
            weights.assign_sub(0.05 * tape.gradient(loss, weights))
            counter.assign_add(1)

        strategy.run(update)

    step = start
    while step < options.steps:
        faults.before_step(step + 1, options.fail_rank, options)
        size = min(options.round, options.steps - step)
        for _ in range(size):
            coordinator.schedule(train_step)
        coordinator.join()
        step += size
        manager.save(step)
        print(f"step {step}", flush=True)
        time.sleep(options.sleep)
    print(f"counter {int(counter.numpy())}")
    print(f"error {np.abs(weights.numpy() - TRUTH).max():.6f}", flush=True)


def evaluate(options: argparse.Namespace) -> None:
    weights = tf.Variable(tf.zeros([FEATURES, 1]))
    for path in tf.train.checkpoints_iterator(options.checkpoint_dir, min_interval_secs=0):
        tf.train.Checkpoint(weights=weights).restore(path).expect_partial()
        step = int(path.rpartition("-")[2])
        print(f"evaluated {step} error {np.abs(weights.numpy() - TRUTH).max():.6f}", flush=True)
        if step >= options.steps:
            break


if __name__ == "__main__":
    main()
