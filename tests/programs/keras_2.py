"""Code written for Keras 2, run under Keras 3: prints the error of each piece as JSON."""

import json
import tempfile

import numpy as np
import tensorflow as tf

inputs, targets = np.zeros((8, 4), "float32"), np.zeros(8, "float32")


def model(**options):
    network = tf.keras.Sequential([tf.keras.layers.Dense(1)])
    network.compile("sgd", "mse", **options)
    network.build((None, 4))
    return network


def custom_train_step():
    class Custom(tf.keras.Model):
        def call(self, batch):
            return batch

        def train_step(self, batch):
            self.optimizer.minimize(0.0, [])

    custom = Custom()
    custom.compile("sgd", "mse", run_eagerly=True)
    custom.fit(inputs, targets, verbose=0)


def imported_name():
    from tensorflow.keras.layers import CuDNNGRU  # noqa: F401


def imported_module():
    from tensorflow.keras.wrappers.scikit_learn import KerasClassifier  # noqa: F401


KERAS_2 = {
    "lr": lambda: tf.keras.optimizers.Adam(lr=0.1),
    "optimizer.lr": lambda: model().optimizer.lr,
    "minimize": custom_train_step,
    "legacy optimizer": lambda: tf.keras.optimizers.legacy.Adam(0.1),
    "experimental_run_tf_function": lambda: model(experimental_run_tf_function=False),
    "checkpoint of a model": lambda: tf.keras.callbacks.ModelCheckpoint("ckpt_{epoch}"),
    "checkpoint of weights": lambda: tf.keras.callbacks.ModelCheckpoint("ckpt_{epoch}", save_weights_only=True),
    "checkpoint period": lambda: tf.keras.callbacks.ModelCheckpoint("x.keras", period=5),
    "save": lambda: model().save("saved"),
    "save_format": lambda: model().save("saved", save_format="tf"),
    "save_weights": lambda: model().save_weights("saved"),
    "load_model": lambda: tf.keras.models.load_model("saved"),
    "tensor": lambda: tf.nn.relu(tf.keras.Input((4,))),
    "estimator": lambda: tf.keras.estimator.model_to_estimator,
    "experimental": lambda: tf.keras.mixed_precision.experimental.Policy("mixed_float16"),
    "fit_generator": lambda: model().fit_generator(None),
    "reset_states": lambda: tf.keras.metrics.Mean().reset_states(),
    "fit workers": lambda: model().fit(inputs, targets, workers=2),
    "weights": lambda: tf.keras.layers.Dense(1, weights=[inputs]),
    "reduction": lambda: tf.keras.losses.MeanSquaredError(reduction="auto"),
    "imported name": imported_name,
    "imported module": imported_module,
}
OTHERS = {
    "shapes": lambda: model().fit(inputs[:, :2], targets, verbose=0),
    "key": lambda: {}["lr"],
    "own object": lambda: inputs.lr,
    "own call": lambda: model(1),
    "missing file": lambda: tf.keras.models.load_model("missing.keras"),
    "tensors": lambda: tf.zeros((2, 3)) @ tf.zeros((2, 3)),
}


def error_of(piece):
    try:
        piece()
    except Exception as error:
        frames, trace = [], error.__traceback__.tb_next
        while trace is not None:
            frames.append((trace.tb_frame.f_code.co_filename, str(trace.tb_lineno)))
            trace = trace.tb_next
        return {"type": type(error).__name__, "text": str(error), "frames": frames}
    return None


with tempfile.TemporaryDirectory() as folder:
    tf.io.gfile.makedirs(f"{folder}/saved")
    import os

    os.chdir(folder)
    print(json.dumps([{name: error_of(piece) for name, piece in pieces.items()} for pieces in (KERAS_2, OTHERS)]))
    os.chdir("/")
