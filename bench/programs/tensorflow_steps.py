"""A TensorFlow program for TF_CONFIG and MultiWorkerMirroredStrategy: small steps, each with a stamp."""

import argparse
import json
import os
import time

import stamps
import tensorflow as tf

import paceline

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=1)
parser.add_argument("--sleep", type=float, default=0.0, help="seconds between two steps")
args = parser.parse_args()

strategy = tf.distribute.MultiWorkerMirroredStrategy()
rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
with strategy.scope():
    weights = tf.Variable(tf.zeros([16, 1]))
    inputs = tf.constant(tf.random.stateless_normal([32, 16], seed=(7, rank)))


def update() -> None:
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((inputs @ weights - tf.reduce_sum(inputs, 1, keepdims=True)) ** 2)
    gradient = tape.gradient(loss, weights)
    total = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.MEAN, gradient)
    weights.assign_sub(0.05 * total)


@tf.function
def train_step() -> None:
    strategy.run(update)


before = stamps.last_step(rank)
for step in range(before + 1, before + args.steps + 1):
    train_step()
    stamps.stamp(rank, step)
    paceline.report(step=step)
    time.sleep(args.sleep)
