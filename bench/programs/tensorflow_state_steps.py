"""A TensorFlow program with a large state, for TF_CONFIG and MultiWorkerMirroredStrategy. It saves every --every steps:
under Paceline with its helper, otherwise with tf.train.Checkpoint. Each step has a stamp.
"""

import argparse
import json
import os
import time
from pathlib import Path

import stamps
import tensorflow as tf

from paceline.tensorflow import Snapshots

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=1)
parser.add_argument("--sleep", type=float, default=0.0, help="seconds between two steps")
parser.add_argument("--gib", type=float, default=1.0, help="all variables together")
parser.add_argument("--every", type=int, default=40)
parser.add_argument("--checkpoint", default="", help="a folder for tf.train.Checkpoint; default: snapshots of Paceline")
args = parser.parse_args()

strategy = tf.distribute.MultiWorkerMirroredStrategy()
rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
tensors = 48  # as many as 16 parameters, each with the two averages of Adam
with strategy.scope():
    large = [tf.Variable(tf.zeros([int(args.gib * 2**30 / 4 / tensors)])) for _ in range(tensors)]


def update() -> None:
    gradient = tf.fill([1024], 1e-3)
    total = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, gradient)
    large[0].assign_add(tf.fill(tf.shape(large[0]), total[0]))  # one tensor: a short step, as that of a small state


@tf.function
def train_step() -> None:
    strategy.run(update)


counter = tf.Variable(0, dtype=tf.int64)
checkpoint = tf.train.Checkpoint(large=large, counter=counter)
snapshots, newest = None, Path(args.checkpoint, "newest")
if args.checkpoint:
    Path(args.checkpoint).mkdir(exist_ok=True)
    if newest.exists():
        checkpoint.read(newest.read_text()).assert_consumed()
    before = int(counter)
else:
    snapshots = Snapshots(checkpoint, every=args.every)
    before = snapshots.restore()

for step in range(before + 1, before + args.steps + 1):
    train_step()
    stamps.stamp(rank, step)
    if snapshots is not None:
        snapshots.step(step)
    elif step % args.every == 0 and rank == 0:
        counter.assign(step)
        path = checkpoint.write(f"{args.checkpoint}/step-{step % (2 * args.every)}")
        newest.with_suffix(".partial").write_text(path)
        newest.with_suffix(".partial").rename(newest)
    time.sleep(args.sleep)
