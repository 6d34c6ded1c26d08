"""Trains a transformer on pairs of texts, with any number of workers: `python train.py --data FOLDER` outside a run."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile

import keras
import numpy as np
import prepare
import tensorflow as tf
from model import Adam, Transformer, WarmUp
from vocab import PAD

import paceline
from paceline.tensorflow import Snapshots

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--data", default=os.environ.get("PACELINE_DATA"), help="pairs, or the output of prepare.py")
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--snapshot-every", type=float, default=5, help="epochs; may be a fraction")
parser.add_argument("--batch", type=int, default=64, help="pairs per step and replica")
parser.add_argument("--depth", type=int, default=4, help="layers of the encoder, and of the decoder")
parser.add_argument("--width", type=int, default=128, help="numbers per token")
parser.add_argument("--inner", type=int, default=512, help="width inside the dense layers")
parser.add_argument("--heads", type=int, default=8, help="attention heads")
parser.add_argument("--dropout", type=float, default=0.1)
parser.add_argument("--warm-up", type=int, default=4000, help="steps of 64 pairs until the rate is highest")
parser.add_argument("--rate", type=float, default=1.0, help="factor for all learning rates")
parser.add_argument("--seed", type=int, default=0)
prepare.arguments(parser)
args = parser.parse_args()
if not args.data:
    parser.error("--data is required outside of a job with ingest")

# Before anything else of TensorFlow: the process must start as a member of the cluster (without TF_CONFIG, of one).
strategy = tf.distribute.MultiWorkerMirroredStrategy()
chief = not strategy.cluster_resolver.task_id
keras.utils.set_random_seed(args.seed)
tf.config.experimental.enable_op_determinism()  # the same bits, regardless of thread scheduling
# At every start, optimizing the graph takes about as long as running it 10 times, and makes it no faster.
tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
batch = args.batch * strategy.num_replicas_in_sync

data = prepare.find(args.data, args)
with strategy.scope():
    model = Transformer(
        len(data.source), len(data.target), args.depth, args.width, args.inner, args.heads, args.dropout
    )
    rate = WarmUp(args.width, args.warm_up, 64, batch, args.rate)
    optimizer = Adam(rate, beta_2=0.98, epsilon=1e-9)
    optimizer.build(model.trainable_variables)
    # Loss, correct tokens and tokens of this epoch, of all workers; saved, so that a resumed epoch is reported in full.
    so_far = tf.Variable(tf.zeros([3]), trainable=False, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)


def padded(texts: prepare.Texts, chosen: list[int]) -> np.ndarray:
    """The chosen texts as rows, padded to the longest of them. A share may be empty."""
    rows = [texts[index] for index in chosen]
    array = np.full([len(rows), max(map(len, rows), default=1)], PAD, np.int32)
    for row, text in zip(array, rows, strict=True):
        row[: len(text)] = text
    return array


def forward(source: tf.Tensor, target: tf.Tensor, training: bool) -> tuple[tf.Tensor, tf.Tensor]:
    """The sum of the losses of real tokens; and sums over all workers: losses, correct tokens, real tokens."""
    expected = target[:, 1:]
    real = tf.cast(expected != PAD, tf.float32)
    scores = model(source, target[:, :-1], training=training)
    loss = tf.reduce_sum(keras.ops.sparse_categorical_crossentropy(expected, scores, from_logits=True) * real)
    correct = tf.reduce_sum(tf.cast(tf.argmax(scores, axis=-1, output_type=tf.int32) == expected, tf.float32) * real)
    sums = tf.stack([tf.stop_gradient(loss), correct, tf.reduce_sum(real)])
    return loss, tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, sums)


def update(source: tf.Tensor, target: tf.Tensor) -> tf.Tensor:
    with tf.GradientTape() as tape:
        loss, sums = forward(source, target, training=True)
        # Gradients are summed over the replicas. Shares differ in tokens, so divide by the tokens of all replicas.
        loss = loss / sums[2]
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    return sums


def local(sums: tf.Tensor) -> tf.Tensor:
    return strategy.experimental_local_results(sums)[0]  # the same in all replicas


# Any size, so that each function is traced only once. Without AutoGraph, which would first convert the source of
# everything that they call: no `if` or `for` here depends on a tensor.
traced = tf.function(input_signature=[tf.TensorSpec([None, None], tf.int32)] * 2, autograph=False)


@traced
def train_step(source: tf.Tensor, target: tf.Tensor) -> tf.Tensor:
    sums = local(strategy.run(update, (source, target)))
    so_far.assign_add(sums)
    return sums


@traced
def test_step(source: tf.Tensor, target: tf.Tensor) -> tf.Tensor:
    return local(strategy.run(lambda source, target: forward(source, target, training=False)[1], (source, target)))


def means(sums: tf.Tensor) -> dict[str, float]:
    loss, correct, real = (float(value) for value in sums)
    return {"loss": loss / real, "accuracy": correct / real}


def report(numbers: dict[str, float], step: int, kind: str = "") -> None:
    numbers = {kind + name: value for name, value in numbers.items()}
    paceline.report(step=step, **numbers)
    for name, value in numbers.items():
        tf.summary.scalar(name, value, step=step)


curves = os.environ.get("PACELINE_TENSORBOARD_DIR") or tempfile.mkdtemp(prefix="translate-")
writer = tf.summary.create_file_writer(curves) if chief else tf.summary.create_noop_writer()
order = paceline.Shards(size=len(data.training[0]), batch=batch, seed=args.seed)
if order.world != strategy.num_replicas_in_sync:
    sys.exit("a task trains one replica, on one GPU; without Paceline, set CUDA_VISIBLE_DEVICES to one GPU")
state = {"model": model, "optimizer": optimizer, "so_far": so_far}
settings = {"model": model.config(), "source": data.source.tokens, "target": data.target.tokens}
every = max(1, round(args.snapshot_every * len(order)))
if chief:
    print(f"{model.count_params():,} parameters, {len(order)} steps per epoch, {batch} pairs per step", flush=True)

with writer.as_default(), Snapshots(state, every, order, settings=settings) as snapshots:
    step = snapshots.restore()  # 0 if there is nothing to restore
    while order.epoch < args.epochs:
        for chosen in order:
            numbers = means(train_step(*(padded(texts, chosen) for texts in data.training)))
            step += 1
            snapshots.step(step, **numbers)
            report(numbers, step)
        training = means(so_far)
        # A separate order: each held-out pair is evaluated once, by one of the workers.
        held_out = paceline.Shards(size=len(data.validation[0]), batch=2 * batch)
        sums = sum(test_step(*(padded(texts, chosen) for texts in data.validation)) for chosen in held_out)
        validation = means(sums)
        report(validation, step, "validation_")
        if chief:
            print(
                f"epoch {order.epoch}: loss {training['loss']:.3f}, accuracy {training['accuracy']:.1%}; validation: "
                f"loss {validation['loss']:.3f}, accuracy {validation['accuracy']:.1%} of {int(sums[2])} tokens",
                flush=True,
            )
        so_far.assign(tf.zeros([3]))
        if order.epoch == args.epochs:
            snapshots.save(step, **validation)
