"""Trains a transformer on pairs of texts, with any number of workers: `python train.py --data FOLDER` by hand."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile

import keras
import numpy as np
import prepare
import tensorflow as tf
from model import Transformer, WarmUp
from vocab import PAD

import paceline
from paceline.tensorflow import Snapshots

options = argparse.ArgumentParser(description=__doc__)
options.add_argument("--data", default=os.environ.get("PACELINE_DATA"), help="pairs, or what prepare.py made of them")
options.add_argument("--epochs", type=int, default=20)
options.add_argument("--snapshot-every", type=float, default=5, help="epochs; may be a part of one")
options.add_argument("--batch", type=int, default=64, help="pairs a step, of each replica")
options.add_argument("--depth", type=int, default=4, help="layers of the encoder, and of the decoder")
options.add_argument("--width", type=int, default=128, help="numbers that stand for a token")
options.add_argument("--inner", type=int, default=512, help="width inside of the dense layers")
options.add_argument("--heads", type=int, default=8, help="of attention")
options.add_argument("--dropout", type=float, default=0.1)
options.add_argument("--warm-up", type=int, default=4000, help="steps of 64 pairs until the rate is highest")
options.add_argument("--rate", type=float, default=1.0, help="factor of all learning rates")
options.add_argument("--seed", type=int, default=0)
prepare.arguments(options)
given = options.parse_args()
if not given.data:
    options.error("--data says where the pairs are; in a run, the job's ingest does")

# Before anything else of TensorFlow: it has to start as a member of the cluster. By hand, it is a cluster of one.
strategy = tf.distribute.MultiWorkerMirroredStrategy()
chief = not strategy.cluster_resolver.task_id
keras.utils.set_random_seed(given.seed)
tf.config.experimental.enable_op_determinism()  # the same bits, however threads take turns
batch = given.batch * strategy.num_replicas_in_sync

data = prepare.find(given.data, given)
with strategy.scope():
    model = Transformer(
        len(data.source), len(data.target), given.depth, given.width, given.inner, given.heads, given.dropout
    )
    rate = WarmUp(given.width, given.warm_up, 64, batch, given.rate)
    optimizer = keras.optimizers.Adam(rate, beta_2=0.98, epsilon=1e-9)
    optimizer.build(model.trainable_variables)
    # Loss, right tokens and tokens of this epoch, of all workers; saved, so that a resumed epoch is told as a whole.
    so_far = tf.Variable(tf.zeros([3]), trainable=False, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)


def padded(texts: prepare.Texts, chosen: list[int]) -> np.ndarray:
    """These texts as rows, as long as the longest of them. A share may be empty."""
    rows = [texts[index] for index in chosen]
    made = np.full([len(rows), max(map(len, rows), default=1)], PAD, np.int32)
    for row, text in zip(made, rows, strict=True):
        row[: len(text)] = text
    return made


def forward(source: tf.Tensor, target: tf.Tensor, training: bool) -> tuple[tf.Tensor, tf.Tensor]:
    """The sum of the losses of real tokens; and that with right and real tokens, of all workers together."""
    wanted = target[:, 1:]
    real = tf.cast(wanted != PAD, tf.float32)
    scores = model(source, target[:, :-1], training=training)
    loss = tf.reduce_sum(keras.ops.sparse_categorical_crossentropy(wanted, scores, from_logits=True) * real)
    right = tf.reduce_sum(tf.cast(tf.argmax(scores, axis=-1, output_type=tf.int32) == wanted, tf.float32) * real)
    sums = tf.stack([tf.stop_gradient(loss), right, tf.reduce_sum(real)])
    return loss, tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, sums)


def update(source: tf.Tensor, target: tf.Tensor) -> tf.Tensor:
    with tf.GradientTape() as tape:
        loss, sums = forward(source, target, training=True)
        # Gradients are added up over the replicas. Shares differ in tokens: it is the tokens of all that count.
        loss = loss / sums[2]
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    return sums


def local(sums: tf.Tensor) -> tf.Tensor:
    return strategy.experimental_local_results(sums)[0]  # the same in all replicas


NUMBERS = [tf.TensorSpec([None, None], tf.int32)] * 2  # of any size: what is traced once serves all batches


@tf.function(input_signature=NUMBERS)
def train_step(source: tf.Tensor, target: tf.Tensor) -> tf.Tensor:
    sums = local(strategy.run(update, (source, target)))
    so_far.assign_add(sums)
    return sums


@tf.function(input_signature=NUMBERS)
def test_step(source: tf.Tensor, target: tf.Tensor) -> tf.Tensor:
    return local(strategy.run(lambda source, target: forward(source, target, training=False)[1], (source, target)))


def means(sums: tf.Tensor) -> dict[str, float]:
    loss, right, real = (float(value) for value in sums)
    return {"loss": loss / real, "accuracy": right / real}


def told(numbers: dict[str, float], step: int, kind: str = "") -> None:
    numbers = {kind + name: value for name, value in numbers.items()}
    paceline.report(step=step, **numbers)
    for name, value in numbers.items():
        tf.summary.scalar(name, value, step=step)


curves = os.environ.get("PACELINE_TENSORBOARD_DIR") or tempfile.mkdtemp(prefix="translate-")
writer = tf.summary.create_file_writer(curves) if chief else tf.summary.create_noop_writer()
order = paceline.Shards(size=len(data.training[0]), batch=batch, seed=given.seed)
if order.world != strategy.num_replicas_in_sync:
    sys.exit("a task trains one replica, on one GPU: by hand, set CUDA_VISIBLE_DEVICES to one of them")
state = {"model": model, "optimizer": optimizer, "so_far": so_far}
settings = {"model": model.config(), "source": data.source.tokens, "target": data.target.tokens}
every = max(1, round(given.snapshot_every * len(order)))
if chief:
    print(f"{model.count_params():,} parameters, {len(order)} steps an epoch of {batch} pairs", flush=True)

with writer.as_default(), Snapshots(state, every, order, settings=settings) as snapshots:
    step = snapshots.restore()  # 0 where there is nothing to go on from
    while order.epoch < given.epochs:
        for chosen in order:
            numbers = means(train_step(*(padded(texts, chosen) for texts in data.training)))
            step += 1
            snapshots.step(step, **numbers)
            told(numbers, step)
        here = means(so_far)
        # An order of its own: each pair that was held out comes once, to one of the workers.
        held_out = paceline.Shards(size=len(data.validation[0]), batch=2 * batch)
        sums = sum(test_step(*(padded(texts, chosen) for texts in data.validation)) for chosen in held_out)
        there = means(sums)
        told(there, step, "validation_")
        if chief:
            print(
                f"epoch {order.epoch}: loss {here['loss']:.3f}, accuracy {here['accuracy']:.1%}; validation: "
                f"loss {there['loss']:.3f}, accuracy {there['accuracy']:.1%} of {int(sums[2])} tokens",
                flush=True,
            )
        so_far.assign(tf.zeros([3]))
        if order.epoch == given.epochs:
            snapshots.save(step, **there)
