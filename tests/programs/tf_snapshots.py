"""A TensorFlow program that takes snapshots, alone or under MultiWorkerMirroredStrategy, and prints its final state."""

import argparse
import hashlib
import json
import os
import random
import threading
import time

import keras
import numpy as np
import tensorflow as tf

import paceline
from paceline.runtime import snapshot_folders
from paceline.tensorflow import Snapshots, indices

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=12)
parser.add_argument("--every", type=int, default=3)
parser.add_argument("--pace", type=float, default=0, help="seconds a step, at least")
parser.add_argument("--hold", action="store_true", help="the first worker writes nothing before the last step")
options = parser.parse_args()

strategy = tf.distribute.get_strategy()
rank = 0
if "TF_CONFIG" in os.environ:
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    rank = strategy.cluster_resolver.task_id
keras.utils.set_random_seed(1)
tf.config.experimental.enable_op_determinism()
np.random.seed(rank)  # each worker has its own seed
random.seed(rank)
images = np.random.default_rng(0).normal(size=(50, 4)).astype("float32")
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1)])
    dropout = keras.layers.Dropout(0.5)
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)
    generator = tf.random.Generator.from_seed(5)
    running_mean = tf.Variable(
        tf.zeros([4]),
        trainable=False,
        synchronization=tf.VariableSynchronization.ON_READ,
        aggregation=tf.VariableAggregation.MEAN,
    )


def update(batch: tf.Tensor, noise: tf.Tensor) -> None:
    running_mean.assign(0.9 * running_mean + 0.1 * tf.reduce_mean(batch, axis=0))
    with tf.GradientTape() as tape:
        predicted = model(dropout(batch + noise + generator.normal([4]), training=True))
        loss = tf.reduce_sum((predicted - tf.reduce_sum(batch, axis=1, keepdims=True)) ** 2)
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)


train_step = tf.function(lambda *values: strategy.run(update, values), reduce_retracing=True)

if options.hold and rank == 0:
    writing, gate = snapshot_folders.writing, threading.Event()

    def delayed_writing(*args: object, **kwargs: object) -> object:
        gate.wait()
        return writing(*args, **kwargs)

    snapshot_folders.writing = delayed_writing

order = paceline.Shards(size=len(images), batch=8, seed=2)
data = indices(order).map(lambda chosen: tf.gather(images, chosen)).prefetch(8)
if "TF_CONFIG" in os.environ:
    data = strategy.distribute_datasets_from_function(lambda _, data=data: data)
state = {"model": model, "optimizer": optimizer, "dropout": dropout, "generator": generator, "seen": running_mean}
positions, skipped = [], []
with Snapshots(state, every=options.every, order=order) as snapshots:
    step = begin = snapshots.restore()
    while step < options.steps:
        for batch in order.through(data):
            noise = np.random.normal() + random.random() + float(tf.random.normal([]))
            train_step(batch, tf.constant(noise, tf.float32))
            step += 1
            positions.append((order.epoch, order.position))
            snapshots.step(step, noise=noise)
            skipped.append(snapshots.skipped)
            paceline.report(step=step)
            print(f"step {step}", flush=True)
            time.sleep(options.pace)
            if step == options.steps:
                break
    if options.hold and rank == 0:
        gate.set()
local_mean = strategy.experimental_local_results(running_mean)[0]
values = [*model.variables, *optimizer.variables, *dropout.variables, local_mean]
weights = hashlib.sha256(b"".join(np.asarray(value).tobytes() for value in values)).hexdigest()
print(
    json.dumps(
        {
            "begin": begin,
            "ended": [weights, order.state(), random.random(), np.random.normal()],
            "seen": hashlib.sha256(np.asarray(local_mean).tobytes()).hexdigest(),
            "positions": positions,
            "skipped": skipped,
        }
    )
)
