"""Trains a residual network on CIFAR-10 with parameter servers: the chief deals out steps, free workers do them.

One program for all roles. Workers and parameter servers serve; the chief leads; an evaluator, where the job has one,
tests each snapshot beside the training (`--evaluate side-car`).
"""

import argparse
import json
import os
import tempfile

os.environ["GRPC_FAIL_FAST"] = "use_caller"  # before TensorFlow: a task that is lost is told at once, not waited for

import cifar
import keras
import numpy as np
import tensorflow as tf
from network import resnet

import paceline
from paceline.tensorflow import Snapshots

MOMENTUM, DECAY = 0.9, 1e-4  # the decay is that of kernels alone
TEST_BATCH = 250
ROUND = 50  # steps that are dealt out before the chief waits for all of them


def arguments() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--data", required=True, help="CIFAR-10's binary files: a folder, or s3://, gs://, az://")
    options.add_argument("--evaluate", choices=["inline", "side-car"], default="inline")
    options.add_argument("--depth", type=int, default=56, help="6n + 2 layers")
    options.add_argument("--epochs", type=int, default=182)
    options.add_argument("--batch", type=int, default=64, help="images of a step, which one worker does")
    options.add_argument("--rate", type=float, default=0.05)
    options.add_argument("--cuts", type=int, nargs="*", default=[91, 136], help="epochs after which it is cut by 10")
    options.add_argument("--every", type=int, default=400, help="steps between snapshots")
    options.add_argument(
        "--flip", action=argparse.BooleanOptionalAction, default=True, help="mirror half of the images"
    )
    return options


def main() -> None:
    given = arguments().parse_args()
    role = json.loads(os.environ["TF_CONFIG"])["task"]["type"]
    if role == "chief":
        lead(given)
    elif role == "evaluator":
        follow(given)
    else:
        serve()


def rate_of(given: argparse.Namespace, epoch: int) -> float:
    rate: float = given.rate * 0.1 ** sum(epoch >= cut for cut in given.cuts)
    return rate


def serve() -> None:
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    spec = resolver.cluster_spec()
    config = tf.compat.v1.ConfigProto()
    # Each of the others may wait here for a value: with fewer threads than there are, all would wait for each other.
    config.inter_op_parallelism_threads = max(os.cpu_count() or 1, 1 + sum(map(spec.num_tasks, spec.jobs)))
    server = tf.distribute.Server(spec, resolver.task_type, resolver.task_id, protocol="grpc", config=config)
    server.join()  # Paceline ends it when the chief is done


def lead(given: argparse.Namespace) -> None:
    folder = paceline.fetch(given.data)  # the chief reads, and deals out: workers need no data
    images, labels = cifar.training(folder)
    strategy = tf.distribute.ParameterServerStrategy(tf.distribute.cluster_resolver.TFConfigClusterResolver())
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        model = resnet(given.depth)
        velocities = [beside(strategy, weights) for weights in model.trainable_variables]
    places = sorted({weights.value.device for weights in model.variables})
    print(f"{model.count_params():,} numbers are on {', '.join(places)}", flush=True)

    @tf.function
    def train_step(images: tf.Tensor, labels: tf.Tensor, rate: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        def update() -> tf.Tensor:
            with tf.GradientTape() as tape:
                logits = model(augmented(images, seed, given.flip), training=True)
                loss = keras.ops.mean(keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True))
            gradients = tape.gradient(loss, [weights.value for weights in model.trainable_variables])
            for weights, gradient, velocity in zip(model.trainable_variables, gradients, velocities, strict=True):
                if len(weights.shape) > 1:
                    gradient += DECAY * weights.value
                # Done by the parameter server that has them: a gradient is sent, and nothing comes back.
                tf.raw_ops.ResourceApplyMomentum(
                    var=weights.value.handle, accum=velocity.handle, lr=rate, grad=gradient, momentum=MOMENTUM
                )
            return loss

        return strategy.run(update)

    @tf.function
    def test_step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        return strategy.run(lambda: right(model, images, labels))

    def test() -> float:
        """Each image once, by whichever worker is free."""
        counts = [coordinator.schedule(test_step, args=part) for part in parts(*cifar.testing(folder))]
        coordinator.join()
        return sum(int(count.fetch()) for count in counts) / len(cifar.testing(folder)[1])

    order = paceline.Shards(size=len(images), batch=given.batch)
    state = {"model": model, "velocities": velocities}
    kept = os.environ.get("PACELINE_TENSORBOARD_DIR") or tempfile.mkdtemp(prefix="resnet-ps-")  # by hand, there is none
    curves = tf.summary.create_file_writer(f"{kept}/train")
    losses: list[tf.distribute.coordinator.RemoteValue] = []
    settings = {"depth": given.depth}  # `read.py` makes the network of it again
    with Snapshots(state, every=given.every, order=order, settings=settings) as snapshots, curves.as_default():
        step = snapshots.restore()

        def settle() -> None:
            """Waits for all that was dealt out: only then may a snapshot be taken."""
            coordinator.join()
            if losses:
                loss = float(np.mean([value.fetch() for value in losses]))
                losses.clear()
                tf.summary.scalar("loss", loss, step=step)
                paceline.report(step=step, loss=loss)
            snapshots.step(step)

        while order.epoch < given.epochs:
            rate = rate_of(given, order.epoch)
            for chosen in order:
                step += 1
                dealt = (images[chosen], labels[chosen], np.float32(rate), np.array([order.epoch, step], np.int32))
                losses.append(coordinator.schedule(train_step, args=dealt))
                if step % ROUND == 0:
                    settle()
            settle()
            if given.evaluate == "inline":
                accuracy = test()
                tf.summary.scalar("accuracy", accuracy, step=step)
                paceline.report(step=step, accuracy=accuracy)
                print(f"epoch {order.epoch} of {given.epochs}: {accuracy:.1%} of the test images", flush=True)
        if step % given.every:
            snapshots.save(step)


def beside(strategy: tf.distribute.Strategy, weights: keras.Variable) -> tf.Variable:
    """The velocity of these weights, on the same parameter server."""
    with strategy.extended.colocate_vars_with(weights.value):
        return tf.Variable(tf.zeros(weights.shape), trainable=False)


def follow(given: argparse.Namespace) -> None:
    """No part of the cluster: it can come, go and be late, and training does not notice."""
    images, labels = cifar.testing(paceline.fetch(given.data))
    model = resnet(given.depth)
    test_step = tf.function(lambda images, labels: right(model, images, labels))
    for snapshot in paceline.snapshots.follow():
        tf.train.Checkpoint(model=model).read(str(snapshot.path / "ckpt")).expect_partial()
        accuracy = sum(int(test_step(*part)) for part in parts(images, labels)) / len(labels)
        snapshot.report(accuracy=accuracy)
        print(f"step {snapshot.step}: {accuracy:.1%} of the test images", flush=True)


def augmented(images: tf.Tensor, seed: tf.Tensor, flip: bool) -> tf.Tensor:
    """Each image moved by up to 4 points, and half of them mirrored: by the seed alone, whichever worker does it."""
    count = tf.shape(images)[0]
    padded = tf.pad(images, [[0, 0], [4, 4], [4, 4], [0, 0]])
    moved = tf.random.stateless_uniform([2, count, 1], seed, maxval=9, dtype=tf.int32) + tf.range(32)
    images = tf.gather(tf.gather(padded, moved[0], axis=1, batch_dims=1), moved[1], axis=2, batch_dims=1)
    if flip:
        coin = tf.random.stateless_uniform([count, 1, 1, 1], seed + 1) < 0.5
        images = tf.where(coin, images[:, :, ::-1], images)
    return tf.image.per_image_standardization(images)


def right(model: keras.Model, images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    logits = model(tf.image.per_image_standardization(images), training=False)
    return tf.reduce_sum(tf.cast(tf.argmax(logits, axis=1) == labels, tf.int32))


def parts(images: np.ndarray, labels: np.ndarray) -> list[cifar.Examples]:
    starts = range(0, len(labels), TEST_BATCH)
    return [(images[start : start + TEST_BATCH], labels[start : start + TEST_BATCH]) for start in starts]


if __name__ == "__main__":
    main()
