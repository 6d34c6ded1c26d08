"""Keras' fit with snapshots: with dropout, batch normalization and a learning rate that decays every epoch.

Runs several fits in order, each with a new model; each prints a line with its final state.
"""

import hashlib
import importlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import paceline
import paceline.keras

name, folder, fits = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
keras = tf.keras if name == "tf.keras" else importlib.import_module(name)
if name != "keras":
    keras.backend.experimental.enable_tf_random_generator()
if "TF_CONFIG" not in os.environ:
    two_devices = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], two_devices)
tf.config.experimental.enable_op_determinism()
inputs = np.random.default_rng(0).normal(size=(70, 4)).astype("float32")
targets = inputs.sum(axis=1, keepdims=True)
STRATEGIES = {
    "none": tf.distribute.get_strategy,
    "mirrored": lambda: tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]),
    "workers": tf.distribute.MultiWorkerMirroredStrategy,
}


def fit(
    strategy: str = "none",
    at_once: int = 1,
    kill_at: int = 0,
    leave_at: int = 0,
    hold_at: int = 0,
    order: bool = True,
    wrong: str = "",
    size: int = len(inputs),
    partial: bool = False,
) -> dict[str, Any]:
    """`wrong`: the mistake of the program. `*_at`: after this batch, when all snapshots so far are written."""
    keras.utils.set_random_seed(1)
    with STRATEGIES[strategy]().scope():
        model = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(16, activation="relu"),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.5),
                keras.layers.Dense(1),
            ]
        )
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"], steps_per_execution=at_once)
    if order:
        shards = paceline.Shards(size, batch=8, seed=3)
        snapshots = paceline.keras.Snapshots(every=4, order=shards, partial=partial)
        data = paceline.keras.batches(shards, lambda chosen: (tf.gather(inputs, chosen), tf.gather(targets, chosen)))
    else:
        snapshots = paceline.keras.Snapshots()
        data = tf.data.Dataset.from_tensor_slices((inputs, targets)).batch(8)
    if wrong == "data":
        data = data.prefetch(2)

    class Interruptions(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: object = None) -> None:
            steps_done = int(model.optimizer.iterations.numpy())
            snapshots._snapshots._background.wait()  # so that no snapshot is skipped
            if steps_done == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if steps_done == leave_at:
                paceline.tensorflow.should_save = lambda step: step == leave_at
                paceline.tensorflow.is_stopping = lambda: True
            if steps_done == hold_at and (os.environ["PACELINE_GENERATION"], os.environ["PACELINE_RANK"]) == ("1", "1"):
                signal.pause()

    decay = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9)
    error = ""
    try:
        model.fit(
            data,
            epochs=4,
            initial_epoch=0 if wrong == "epoch" else snapshots.initial_epoch,
            callbacks=[decay, Interruptions(), snapshots],
            verbose=0,
        )
    except ValueError as raised:
        error = str(raised)
    values = [value.numpy() for value in (*model.variables, *model.optimizer.variables)]
    return {
        "begin": snapshots.initial_epoch,
        "steps": int(model.optimizer.iterations.numpy()),
        "rate": float(model.optimizer.learning_rate.numpy()),
        "weights": hashlib.sha256(b"".join(value.tobytes() for value in values)).hexdigest(),
        "error": error,
    }


for title, options in fits.items():
    restore = options.pop("restore", "")
    if "PACELINE_RUN" not in os.environ:
        os.environ["PACELINE_SNAPSHOT_DIR"] = str(folder / title)
        os.environ["PACELINE_RESTORE"] = str(folder / restore) if restore else ""
    print(json.dumps(fit(**options)), flush=True)
