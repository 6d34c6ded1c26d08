"""A coordinator with parameter servers that takes snapshots of shared-out variables, by TF_CONFIG."""

import json
import os
import sys

import tensorflow as tf

from paceline.tensorflow import Snapshots

os.environ["GRPC_FAIL_FAST"] = "use_caller"
resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
if resolver.task_type != "chief":
    server = tf.distribute.Server(resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id)
    server.join()

halves = tf.distribute.experimental.partitioners.FixedShardsPartitioner(2)
strategy = tf.distribute.ParameterServerStrategy(resolver, variable_partitioner=halves)
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
with strategy.scope():
    weights = tf.Variable(tf.zeros([6, 2]))
    counter = tf.Variable(0, dtype=tf.int64, aggregation=tf.VariableAggregation.SUM)


def update() -> None:
    for number, part in enumerate(weights.variables):
        part.assign_add(tf.ones_like(part) * (number + 1.0))
    counter.assign_add(1)


train_step = tf.function(lambda: strategy.run(update), autograph=False)
with Snapshots({"weights": weights, "counter": counter}, every=2) as snapshots:
    begin = snapshots.restore()
    restored = tf.convert_to_tensor(weights)[:, 0].numpy().tolist()
    for step in range(begin + 1, int(sys.argv[1]) + 1):
        coordinator.schedule(train_step)
        coordinator.join()
        snapshots.step(step)
final = tf.convert_to_tensor(weights)[:, 0].numpy().tolist()
print(json.dumps({"begin": begin, "restored": restored, "final": final, "counter": int(counter.numpy())}))
