"""A custom training loop on MNIST: any number of workers, each image once per epoch, resumed bit for bit."""

import argparse
import os
import sys
import tempfile

import keras
import numpy as np
import tensorflow as tf
from digits import HELD_OUT, images, labels, network

import paceline
from paceline.tensorflow import Snapshots

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--batch", type=int, default=100, help="images per step, of all workers together")
parser.add_argument("--every", type=int, default=25, help="steps between snapshots, besides one per epoch")
parser.add_argument("--rate", type=float, default=2e-3)
args = parser.parse_args()

# Before anything else of TensorFlow: the process must start as a member of the cluster (without TF_CONFIG, of one).
strategy = tf.distribute.MultiWorkerMirroredStrategy()
chief = not strategy.cluster_resolver.task_id
keras.utils.set_random_seed(0)
tf.config.experimental.enable_op_determinism()  # the same bits, regardless of thread scheduling

with strategy.scope():
    model = network()
    optimizer = keras.optimizers.Adam(args.rate)
    optimizer.build(model.trainable_variables)


def pick(chosen: list[int], first: int) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels, counted from `first`. A share may be empty."""
    indices = first + np.array(chosen, int)
    return images[indices], labels[indices]


def update(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    # The last share of an epoch may be smaller, and differ between workers: so the images are counted.
    count = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tf.cast(len(y), tf.float32))
    with tf.GradientTape() as tape:
        losses = keras.ops.sparse_categorical_crossentropy(y, model(x, training=True), from_logits=True)
        # Gradients are summed over the workers: divided by the images of all of them, the sum is a mean.
        loss = tf.reduce_sum(losses) / count
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    return loss


def evaluate(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    correct = tf.argmax(model(x, training=False), axis=1, output_type=tf.int32) == y
    return tf.stack([tf.math.count_nonzero(correct, dtype=tf.int32), len(y)])


SHARE = [tf.TensorSpec([None, 28, 28, 1]), tf.TensorSpec([None], tf.int32)]  # any size, so that it is traced only once


@tf.function(input_signature=SHARE)
def train_step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    return strategy.reduce("sum", strategy.run(update, (x, y)), axis=None)


@tf.function(input_signature=SHARE)
def test_step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    return strategy.reduce("sum", strategy.run(evaluate, (x, y)), axis=None)


curves = os.environ.get("PACELINE_TENSORBOARD_DIR") or tempfile.mkdtemp(prefix="mnist-loop-")
writer = tf.summary.create_file_writer(curves) if chief else tf.summary.create_noop_writer()
order = paceline.Shards(size=len(images) - HELD_OUT, batch=args.batch)
if order.world != strategy.num_replicas_in_sync:
    sys.exit("a task trains one replica, on one GPU; without Paceline, set CUDA_VISIBLE_DEVICES to one GPU")
with writer.as_default(), Snapshots({"model": model, "optimizer": optimizer}, args.every, order) as snapshots:
    step = snapshots.restore()  # 0 if there is nothing to restore
    while order.epoch < args.epochs:
        for chosen in order:  # this worker's share of a step
            loss = float(train_step(*pick(chosen, first=HELD_OUT)))
            step += 1
            snapshots.step(step, loss=loss)
            tf.summary.scalar("loss", loss, step=step)
        # A separate order: each held-out image is tested once, by one of the workers.
        tests = paceline.Shards(size=HELD_OUT, batch=args.batch)
        correct, tested = sum(test_step(*pick(chosen, first=0)).numpy() for chosen in tests)
        accuracy = float(correct / tested)
        snapshots.save(step, accuracy=accuracy)
        paceline.report(step=step, accuracy=accuracy)
        tf.summary.scalar("accuracy", accuracy, step=step)
        if chief:
            print(f"epoch {order.epoch}: {correct} of {tested} held-out images read correctly", flush=True)
