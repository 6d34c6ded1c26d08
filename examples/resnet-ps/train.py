"""Trains a residual network on CIFAR-10 with parameter servers: the chief schedules steps, idle workers run them.

One program for all roles. Workers and parameter servers run a server; the chief coordinates; an evaluator, if the job
has one, tests each snapshot during training (`--evaluate side-car`).
"""

import argparse
import json
import os
import tempfile

os.environ["GRPC_FAIL_FAST"] = "use_caller"  # before TensorFlow: reports a lost task immediately instead of waiting

import cifar
import keras
import numpy as np
import tensorflow as tf
from network import resnet

import paceline
from paceline.tensorflow import Snapshots

MOMENTUM, DECAY = 0.9, 1e-4  # only kernels decay
TEST_BATCH = 250
ROUND = 50  # steps that are scheduled before the chief waits for all of them


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="CIFAR-10's binary files: a folder, or s3://, gs://, az://")
    parser.add_argument("--evaluate", choices=["inline", "side-car"], default="inline")
    parser.add_argument("--depth", type=int, default=56, help="6n + 2 layers")
    parser.add_argument("--epochs", type=int, default=182)
    parser.add_argument("--batch", type=int, default=64, help="images of a step, which one worker runs")
    parser.add_argument("--rate", type=float, default=0.05)
    parser.add_argument(
        "--cuts", type=int, nargs="*", default=[91, 136], help="epochs after which the rate is divided by 10"
    )
    parser.add_argument("--every", type=int, default=400, help="steps between snapshots")
    parser.add_argument("--flip", action=argparse.BooleanOptionalAction, default=True, help="mirror half of the images")
    return parser


def main() -> None:
    args = arguments().parse_args()
    role = json.loads(os.environ["TF_CONFIG"])["task"]["type"]
    if role == "chief":
        lead(args)
    elif role == "evaluator":
        follow(args)
    else:
        serve()


def rate_of(args: argparse.Namespace, epoch: int) -> float:
    rate: float = args.rate * 0.1 ** sum(epoch >= cut for cut in args.cuts)
    return rate


def serve() -> None:
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    spec = resolver.cluster_spec()
    config = tf.compat.v1.ConfigProto()
    # Each other task may wait here for a value: with fewer threads than tasks, they would deadlock.
    config.inter_op_parallelism_threads = max(os.cpu_count() or 1, 1 + sum(map(spec.num_tasks, spec.jobs)))
    server = tf.distribute.Server(spec, resolver.task_type, resolver.task_id, protocol="grpc", config=config)
    server.join()  # Paceline ends it when the chief has finished


def lead(args: argparse.Namespace) -> None:
    folder = paceline.fetch(args.data)  # the chief reads and distributes the data: workers need none
    images, labels = cifar.training(folder)
    strategy = tf.distribute.ParameterServerStrategy(tf.distribute.cluster_resolver.TFConfigClusterResolver())
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        model = resnet(args.depth)
        velocities = [colocated_velocity(strategy, weights) for weights in model.trainable_variables]
    devices = sorted({weights.value.device for weights in model.variables})
    print(f"{model.count_params():,} weights are stored on {', '.join(devices)}", flush=True)

    @tf.function
    def train_step(images: tf.Tensor, labels: tf.Tensor, rate: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        def update() -> tf.Tensor:
            with tf.GradientTape() as tape:
                logits = model(augmented(images, seed, args.flip), training=True)
                loss = keras.ops.mean(keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True))
            gradients = tape.gradient(loss, [weights.value for weights in model.trainable_variables])
            for weights, gradient, velocity in zip(model.trainable_variables, gradients, velocities, strict=True):
                if len(weights.shape) > 1:
                    gradient += DECAY * weights.value
                # Runs on the parameter server that stores them: only a gradient is sent, and nothing comes back.
                tf.raw_ops.ResourceApplyMomentum(
                    var=weights.value.handle, accum=velocity.handle, lr=rate, grad=gradient, momentum=MOMENTUM
                )
            return loss

        return strategy.run(update)

    @tf.function
    def test_step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        return strategy.run(lambda: count_correct(model, images, labels))

    def test() -> float:
        """Each image once, by any idle worker."""
        counts = [coordinator.schedule(test_step, args=part) for part in parts(*cifar.testing(folder))]
        coordinator.join()
        return sum(int(count.fetch()) for count in counts) / len(cifar.testing(folder)[1])

    order = paceline.Shards(size=len(images), batch=args.batch)
    state = {"model": model, "velocities": velocities}
    board = os.environ.get("PACELINE_TENSORBOARD_DIR") or tempfile.mkdtemp(prefix="resnet-ps-")
    curves = tf.summary.create_file_writer(f"{board}/train")
    losses: list[tf.distribute.coordinator.RemoteValue] = []
    settings = {"depth": args.depth}  # from which `read.py` rebuilds the network
    with Snapshots(state, every=args.every, order=order, settings=settings) as snapshots, curves.as_default():
        step = snapshots.restore()

        def finish_round() -> None:
            """Waits for all scheduled steps: only then may a snapshot be taken."""
            coordinator.join()
            if losses:
                loss = float(np.mean([value.fetch() for value in losses]))
                losses.clear()
                tf.summary.scalar("loss", loss, step=step)
                paceline.report(step=step, loss=loss)
            snapshots.step(step)

        while order.epoch < args.epochs:
            rate = rate_of(args, order.epoch)
            for chosen in order:
                step += 1
                arguments_of_step = (
                    images[chosen],
                    labels[chosen],
                    np.float32(rate),
                    np.array([order.epoch, step], np.int32),
                )
                losses.append(coordinator.schedule(train_step, args=arguments_of_step))
                if step % ROUND == 0:
                    finish_round()
            finish_round()
            if args.evaluate == "inline":
                accuracy = test()
                tf.summary.scalar("accuracy", accuracy, step=step)
                paceline.report(step=step, accuracy=accuracy)
                print(f"epoch {order.epoch} of {args.epochs}: test accuracy {accuracy:.1%}", flush=True)
        if step % args.every:
            snapshots.save(step)


def colocated_velocity(strategy: tf.distribute.Strategy, weights: keras.Variable) -> tf.Variable:
    """The velocity of these weights, on the same parameter server."""
    with strategy.extended.colocate_vars_with(weights.value):
        return tf.Variable(tf.zeros(weights.shape), trainable=False)


def follow(args: argparse.Namespace) -> None:
    """Not part of the cluster: it may restart or be slow without affecting training."""
    images, labels = cifar.testing(paceline.fetch(args.data))
    model = resnet(args.depth)
    test_step = tf.function(lambda images, labels: count_correct(model, images, labels))
    for snapshot in paceline.snapshots.follow():
        tf.train.Checkpoint(model=model).read(str(snapshot.path / "ckpt")).expect_partial()
        accuracy = sum(int(test_step(*part)) for part in parts(images, labels)) / len(labels)
        snapshot.report(accuracy=accuracy)
        print(f"step {snapshot.step}: test accuracy {accuracy:.1%}", flush=True)


def augmented(images: tf.Tensor, seed: tf.Tensor, flip: bool) -> tf.Tensor:
    """Each image shifted by up to 4 pixels, and half of them mirrored. Depends only on the seed, not on the worker."""
    count = tf.shape(images)[0]
    padded = tf.pad(images, [[0, 0], [4, 4], [4, 4], [0, 0]])
    shifted = tf.random.stateless_uniform([2, count, 1], seed, maxval=9, dtype=tf.int32) + tf.range(32)
    images = tf.gather(tf.gather(padded, shifted[0], axis=1, batch_dims=1), shifted[1], axis=2, batch_dims=1)
    if flip:
        is_mirrored = tf.random.stateless_uniform([count, 1, 1, 1], seed + 1) < 0.5
        images = tf.where(is_mirrored, images[:, :, ::-1], images)
    return tf.image.per_image_standardization(images)


def count_correct(model: keras.Model, images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    logits = model(tf.image.per_image_standardization(images), training=False)
    return tf.reduce_sum(tf.cast(tf.argmax(logits, axis=1) == labels, tf.int32))


def parts(images: np.ndarray, labels: np.ndarray) -> list[cifar.Examples]:
    starts = range(0, len(labels), TEST_BATCH)
    return [(images[start : start + TEST_BATCH], labels[start : start + TEST_BATCH]) for start in starts]


if __name__ == "__main__":
    main()
