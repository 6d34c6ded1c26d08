"""Keras' fit with snapshots: with dropout, batch normalization and a learning rate that falls every epoch."""

import argparse
import hashlib
import json
import os
import signal

import keras
import numpy as np
import tensorflow as tf

import paceline
import paceline.keras

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--kill-at", type=int, help="after this batch, with SIGKILL")
parser.add_argument("--leave-at", type=int, help="after this batch")
parser.add_argument("--at-once", type=int, default=1, help="steps_per_execution")
parser.add_argument("--no-order", action="store_true")
parser.add_argument("--wrong", choices=["epoch", "data"])
given = parser.parse_args()

keras.utils.set_random_seed(1)
tf.config.experimental.enable_op_determinism()
inputs = np.random.default_rng(0).normal(size=(70, 4)).astype("float32")
targets = inputs.sum(axis=1, keepdims=True)
model = keras.Sequential(
    [
        keras.Input((4,)),
        keras.layers.Dense(16, activation="relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.5),
        keras.layers.Dense(1),
    ]
)
model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"], steps_per_execution=given.at_once)

if given.no_order:
    snapshots = paceline.keras.Snapshots()
    data = tf.data.Dataset.from_tensor_slices((inputs, targets)).batch(8)
else:
    order = paceline.Shards(len(inputs), batch=8, seed=3)
    snapshots = paceline.keras.Snapshots(every=4, order=order)
    data = paceline.keras.batches(order, lambda chosen: (tf.gather(inputs, chosen), tf.gather(targets, chosen)))
if given.wrong == "data":
    data = data.prefetch(2)


class Fate(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        done = int(model.optimizer.iterations.numpy())
        if given.kill_at:
            snapshots._snapshots._background.wait()  # so that none is put off
        if done == given.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if done == given.leave_at:
            paceline.tensorflow.leaving = iter([True, *[False] * 1000]).__next__


falling = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9)
error = ""
try:
    model.fit(
        data,
        epochs=4,
        initial_epoch=0 if given.wrong == "epoch" else snapshots.initial_epoch,
        callbacks=[falling, Fate(), snapshots],
        verbose=0,
    )
except ValueError as wrong:
    error = str(wrong)
values = [*model.variables, *model.optimizer.variables]
print(
    json.dumps(
        {
            "begin": snapshots.initial_epoch,
            "steps": int(model.optimizer.iterations.numpy()),
            "rate": float(model.optimizer.learning_rate.numpy()),
            "weights": hashlib.sha256(b"".join(np.asarray(value).tobytes() for value in values)).hexdigest(),
            "error": error,
        }
    )
)
