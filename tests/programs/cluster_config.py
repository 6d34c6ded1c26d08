"""A TensorFlow program that uses only CLUSTER_CONFIG and POD_NAME: parameter servers, workers, no chief."""

import argparse
import json
import os
import time

import tensorflow as tf

tf1 = tf.compat.v1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20, help="steps of each worker")
    parser.add_argument("--sleep", type=float, default=0, help="seconds a step")
    options = parser.parse_args()
    role, _, index = os.environ["POD_NAME"].rpartition("-")
    cluster = tf.train.ClusterSpec(json.loads(os.environ["CLUSTER_CONFIG"]))
    # A worker only needs the parameter servers; it must not wait for another worker, or fail with it.
    config = tf1.ConfigProto(device_filters=["/job:ps", f"/job:worker/task:{index}"] if role == "worker" else None)
    server = tf.distribute.Server(cluster, job_name=role, task_index=int(index), config=config)
    if role == "ps":
        print(f"serving {role} {index}", flush=True)
        server.join()
    else:
        train(server.target, config, int(index), cluster.num_tasks("worker"), options)


def train(target: str, config: tf1.ConfigProto, index: int, workers: int, options: argparse.Namespace) -> None:
    with tf.Graph().as_default(), tf1.device(tf1.train.replica_device_setter(ps_tasks=1)):
        counts = tf1.get_variable("counts", initializer=tf.zeros([workers], tf.int64), use_resource=True)
        ready = tf1.is_variable_initialized(counts)
        count = tf1.scatter_add(counts, [index], tf.constant([1], tf.int64))
        with tf1.Session(target, config=config) as session:
            while not session.run(ready):
                if index == 0:
                    session.run(counts.initializer)
                else:
                    time.sleep(0.1)
            steps_done = int(session.run(counts)[index])  # more than 0 if this worker was restarted
            for step in range(steps_done + 1, options.steps + 1):
                session.run(count)
                print(f"step {step}", flush=True)
                time.sleep(options.sleep)
            while (total := int(session.run(counts).sum())) < workers * options.steps:
                time.sleep(0.1)
            print(f"counter {total}", flush=True)


if __name__ == "__main__":
    main()
