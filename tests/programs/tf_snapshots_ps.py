"""A coordinator with parameter servers that takes snapshots of sharded variables, set up by TF_CONFIG.

After each step, when all workers are idle, it prints a digest of all variables.
"""

import argparse
import hashlib
import os
import time

import tensorflow as tf

import paceline
from paceline.tensorflow import Snapshots

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=60)
parser.add_argument("--every", type=int, default=3)
parser.add_argument("--pace", type=float, default=0, help="seconds a step, at least")
options = parser.parse_args()

os.environ["GRPC_FAIL_FAST"] = "use_caller"
resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
if resolver.task_type != "chief":
    server = tf.distribute.Server(resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id)
    server.join()

halves = tf.distribute.experimental.partitioners.MinSizePartitioner(min_shard_bytes=24, max_shards=2)
strategy = tf.distribute.ParameterServerStrategy(resolver, variable_partitioner=halves)
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
with strategy.scope():
    weights = tf.Variable(tf.zeros([6, 2]))
    counter = tf.Variable(0, dtype=tf.int64, aggregation=tf.VariableAggregation.SUM)
    generator = tf.random.Generator.from_seed(5)


def update(chosen: tf.Tensor) -> None:
    for part in weights.variables:
        part.assign_add(generator.normal(part.shape) + tf.reduce_mean(tf.cast(chosen, tf.float32)) / 40)
    counter.assign_add(1)


train_step = tf.function(lambda chosen: strategy.run(update, (chosen,)), reduce_retracing=True, autograph=False)


def digest() -> str:
    values = [*weights.variables, counter, generator.state]
    return hashlib.sha256(b"".join(value.numpy().tobytes() for value in values)).hexdigest()


order = paceline.Shards(size=40, batch=8, seed=4)
state = {"weights": weights, "counter": counter, "generator": generator}
with Snapshots(state, every=options.every, order=order) as snapshots:
    step = snapshots.restore()
    print(f"restored {step} {digest()}", flush=True)
    while step < options.steps:
        for chosen in order:
            for share in (chosen[::2], chosen[1::2]):  # two at once, in any order
                coordinator.schedule(train_step, args=(tf.constant(share),))
            coordinator.join()
            step += 1
            print(f"step {step} {digest()}", flush=True)
            snapshots.step(step)
            paceline.report(step=step)
            time.sleep(options.pace)
            if step == options.steps:
                break
print(f"counter {int(counter.numpy())}", flush=True)
