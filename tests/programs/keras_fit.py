"""Keras 3's fit, evaluate and predict in many ways, one after the other; writes each result to a JSON file.

It does not use Paceline. Run as a single process, it gives the results that several workers must reproduce.
"""

import csv
import json
import os
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

TASK = json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {"index": 0})
RANK = TASK["index"]
strategy = tf.distribute.MultiWorkerMirroredStrategy() if "TF_CONFIG" in os.environ else tf.distribute.get_strategy()
rng = np.random.default_rng(0)
X = rng.normal(size=(37, 4)).astype("float32")
Y = X.sum(axis=1, keepdims=True) ** 2
CLASSES = (np.arange(37) * 7 % 3).astype("int32")
WEIGHTS = rng.uniform(0, 3, size=37).astype("float32")
TOKENS = np.where(np.arange(5) < rng.integers(1, 6, size=(37, 1)), rng.integers(1, 9, size=(37, 5)), 0)


def data(*arrays: Any, batch: int = 8) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(arrays).batch(batch)


class Logs(keras.callbacks.Callback):
    """Records the logs that a callback receives after every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[dict[str, float]] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches.append({name: float(value) for name, value in logs.items()})


def small(outputs: int = 1, model: Any = keras.Model, **layer: Any) -> Any:
    keras.utils.set_random_seed(1)
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(6, activation="relu", **layer)(inputs)
    return model(inputs, keras.layers.Dense(outputs)(hidden))


def result(model: Any, history: Any = None, **more: Any) -> dict[str, Any]:
    weights = [float(number) for value in model.trainable_variables for number in value.numpy().ravel()]
    return {"weights": weights, "history": history.history if history else {}, **more}


def plain() -> dict[str, Any]:
    """5 batches, the last with 5 examples; the last validation batch has one example, so that one worker has none."""
    with strategy.scope():
        model = small()
        model.compile(keras.optimizers.SGD(0.01), "mse", metrics=["mae"])
    logs = Logs()
    history = model.fit(data(X, Y), epochs=2, validation_data=(X[:9], Y[:9]), batch_size=8, callbacks=[logs], verbose=0)
    return result(
        model,
        history,
        batches=logs.batches,
        evaluated=model.evaluate(X, Y, batch_size=8, verbose=0, return_dict=True),
        predicted=model.predict(X[:9], batch_size=4, verbose=0).ravel().tolist(),
    )


def classes() -> dict[str, Any]:
    """Arrays, three batches per execution, class weights, metrics of many kinds."""
    with strategy.scope():
        model = small(3)
        model.compile(
            "adam",
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2)],
            weighted_metrics=[keras.metrics.SparseCategoricalCrossentropy(from_logits=True)],
            steps_per_execution=3,
        )
    weights = {0: 1.0, 1: 5.0, 2: 0.2}
    history = model.fit(X, CLASSES, batch_size=8, epochs=3, shuffle=False, class_weight=weights, verbose=0)
    return result(model, history)


def sample_weights() -> dict[str, Any]:
    with strategy.scope():
        model = small()
        model.compile("sgd", "mse", weighted_metrics=["mae"])
    history = model.fit(X, Y, sample_weight=WEIGHTS, batch_size=8, shuffle=False, epochs=2, verbose=0)
    return result(model, history)


def weighted_mean() -> dict[str, Any]:
    with strategy.scope():
        model = small()
        model.compile("sgd", keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"))
    return result(model, model.fit(data(X, Y, WEIGHTS), epochs=2, verbose=0))


def own_mean() -> dict[str, Any]:
    """A loss function that averages on its own; 33 examples, so that one worker has none in the last batch."""
    with strategy.scope():
        model = small()
        model.compile("sgd", lambda y, predicted: tf.reduce_mean(tf.abs(y - predicted)), metrics=["mse"])
    return result(model, model.fit(data(X[:33], Y[:33]), epochs=2, verbose=0))


def masked() -> dict[str, Any]:
    """Sentences of different lengths: averages are over the tokens that are not masked."""
    with strategy.scope():
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Embedding(9, 3, mask_zero=True), keras.layers.GRU(4, return_sequences=True)]
        model = keras.Sequential([*layers, keras.layers.Dense(9)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"])
    return result(model, model.fit(data(TOKENS, TOKENS), epochs=2, verbose=0))


def two_outputs() -> dict[str, Any]:
    with strategy.scope():
        keras.utils.set_random_seed(1)
        inputs = keras.Input((4,))
        hidden = keras.layers.Dense(6, kernel_regularizer=keras.regularizers.L2(0.1))(inputs)
        model = keras.Model(inputs, {"a": keras.layers.Dense(1)(hidden), "b": keras.layers.Dense(3)(hidden)})
        losses = {"a": "mse", "b": keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")}
        model.compile(keras.optimizers.SGD(0.001), losses, loss_weights={"a": 0.3, "b": 0.2})
    return result(model, model.fit(data(X, {"a": Y, "b": CLASSES}), epochs=2, verbose=0))


def regularized() -> dict[str, Any]:
    """Losses that layers add; 33 examples, so that one worker has none in the last batch."""
    with strategy.scope():
        model = small(activity_regularizer=keras.regularizers.L2(0.1), kernel_regularizer=keras.regularizers.L2(0.1))
        model.compile("sgd", "mse")
    return result(model, model.fit(data(X[:33], Y[:33]), epochs=2, verbose=0))


def clipped() -> dict[str, Any]:
    with strategy.scope():
        model = small()
        model.compile(keras.optimizers.Adam(0.05, global_clipnorm=0.5), "mse")
    return result(model, model.fit(data(X, Y), epochs=2, verbose=0))


class OwnStep(keras.Model):
    """As in the guide of Keras."""

    def train_step(self, batch: Any) -> dict[str, Any]:
        x, y = batch
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=predicted)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, predicted)
        return {metric.name: metric.result() for metric in self.metrics}


class OwnNames(OwnStep):
    def train_step(self, batch: Any) -> dict[str, Any]:
        return {"mine": super().train_step(batch)["loss"], "rate": self.optimizer.learning_rate}


def own_step() -> dict[str, Any]:
    with strategy.scope():
        model, other = small(model=OwnStep), small(model=OwnNames)
        for each in (model, other):
            each.compile("sgd", "mse", metrics=["mae"])
    history = model.fit(data(X, Y), epochs=2, verbose=0)
    return result(model, history, other=other.fit(data(X[:32], Y[:32]), verbose=0).history)


def endless() -> dict[str, Any]:
    """Infinite data, then data of unknown length."""
    with strategy.scope():
        model = small()
        model.compile(keras.optimizers.SGD(0.01, momentum=0.9, use_ema=True), "mse", metrics=["mae"])
    first = model.fit(data(X, Y).repeat(), steps_per_epoch=3, epochs=3, verbose=0).history

    spec = (tf.TensorSpec([None, 4]), tf.TensorSpec([None, 1]))
    unknown = tf.data.Dataset.from_generator(lambda: data(X, Y).as_numpy_iterator(), output_signature=spec)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    return result(model, model.fit(unknown.with_options(options), epochs=2, verbose=0), first=first)


class Rows(keras.layers.Layer):
    """Prints the number of examples that this process has of each batch."""

    def call(self, inputs: Any) -> Any:
        print("rows", inputs.shape[0], flush=True)
        return inputs


def normalized() -> dict[str, Any]:
    """Batch normalization with the mean and variance of the whole batch (synchronized=True), run eagerly."""
    with strategy.scope():
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Dense(6), keras.layers.BatchNormalization(synchronized=True), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((4,)), Rows(), *layers])
        model.compile("sgd", "mse", run_eagerly=True)
    history = model.fit(data(X[:32], Y[:32]), epochs=2, verbose=0)
    return result(model, history, evaluated=model.evaluate(X, Y, verbose=0))


def noted() -> dict[str, Any]:
    """Running statistics of layers: they differ from those of a single process, but are the same on all workers. 33
    examples, so that one worker has none in the last batch."""
    with strategy.scope():
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Dense(6), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
        model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1)])
        model.compile("adam", "mse")
    history = model.fit(data(X[:33], Y[:33]), epochs=2, verbose=0)
    return result(model, history, noted=[value.numpy().tolist() for value in model.non_trainable_variables])


def half(policy: str) -> dict[str, Any]:
    """Half precision. The gradients of one worker overflow: all workers skip that step."""
    keras.mixed_precision.set_global_policy(policy)
    with strategy.scope():
        model = small()
        optimizer = keras.optimizers.SGD(0.01)
        if policy == "mixed_float16":
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=256)
        model.compile(optimizer, "mse")
    keras.mixed_precision.set_global_policy("float32")
    y = Y[:32].copy()
    y[9] = 10000 if policy == "mixed_float16" else 10
    history = model.fit(data(X[:32], y), epochs=3, verbose=0)
    scale = float(model.optimizer.dynamic_scale.numpy()) if policy == "mixed_float16" else 0.0
    return result(model, history, scale=scale, iterations=int(model.optimizer.iterations.numpy()))


class ExampleCounts(keras.metrics.Metric):
    """Counts how often each example was trained on."""

    def __init__(self) -> None:
        super().__init__(name="seen")
        self.counts = self.add_variable((37,), "zeros")

    def update_state(self, y: Any, *_: Any, **__: Any) -> None:
        self.counts.assign_add(tf.reduce_sum(tf.one_hot(tf.cast(y[:, 0], tf.int32), 37), axis=0))

    def result(self) -> Any:
        return tf.reduce_max(self.counts)

    def reset_state(self) -> None:
        """Does nothing, so that the counts cover all epochs."""


def shuffled(seed: Any) -> dict[str, Any]:
    """Arrays that fit shuffles on its own, for two epochs."""
    with strategy.scope():
        model, counts_metric = small(), ExampleCounts()
        model.compile(keras.optimizers.SGD(0.0), "mse", metrics=[counts_metric])
    tf.random.set_seed(seed)
    logs = Logs()
    model.fit(X, np.arange(37, dtype="float32")[:, None], batch_size=8, epochs=2, callbacks=[logs], verbose=0)
    losses = [batch["loss"] for batch in logs.batches]
    return {"seen": np.array(counts_metric.counts).tolist(), "alike": float(np.allclose(losses[:5], losses[5:]))}


def callbacks(folder: Path) -> dict[str, Any]:
    """The files of callbacks are those of a single process; an interrupted fit resumes."""
    backup, best, table = folder / "backup", folder / "best.keras", folder / "table.csv"

    def fit(epochs: int, stop: int = 0) -> Any:
        with strategy.scope():
            model = small()
            model.compile(keras.optimizers.Adam(0.1), "mse", metrics=["mae"])

        class Stop(keras.callbacks.Callback):
            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                if stop and epoch + 1 == stop:
                    raise KeyboardInterrupt

        all_callbacks = [
            keras.callbacks.ModelCheckpoint(str(best), monitor="val_loss", save_best_only=True),
            keras.callbacks.BackupAndRestore(str(backup)),
            keras.callbacks.EarlyStopping(monitor="val_mae", patience=2, restore_best_weights=True),
            keras.callbacks.ReduceLROnPlateau(monitor="loss", factor=0.5, patience=0, min_delta=2.0),
            keras.callbacks.CSVLogger(str(table), append=True),
            keras.callbacks.TensorBoard(str(folder / "board")),
            Stop(),
        ]
        try:
            history = model.fit(
                data(X, Y), validation_data=data(X[:9], Y[:9]), epochs=epochs, callbacks=all_callbacks, verbose=0
            )
        except KeyboardInterrupt:
            history = None
        return model, history

    fit(40, stop=3)
    interrupted = backup.exists()
    model, history = fit(40)
    saved = keras.saving.load_model(best) if RANK == 0 else None
    lines = list(csv.DictReader(table.open())) if RANK == 0 else []
    return result(
        model,
        history,
        interrupted=interrupted,
        best=[value.numpy().tolist() for value in saved.trainable_variables] if saved else [],
        lines=[int(line["epoch"]) for line in lines],
        boards=len(list((folder / "board").rglob("*.tfevents.*"))) if RANK == 0 else 0,
    )


CASES = {
    "plain": plain,
    "classes": classes,
    "sample weights": sample_weights,
    "weighted mean": weighted_mean,
    "own mean": own_mean,
    "masked": masked,
    "two outputs": two_outputs,
    "regularized": regularized,
    "clipped": clipped,
    "own step": own_step,
    "endless": endless,
    "normalized": normalized,
    "noted": noted,
    "float16": lambda: half("mixed_float16"),
    "bfloat16": lambda: half("mixed_bfloat16"),
    "shuffled": lambda: shuffled(None),
    "shuffled by a seed": lambda: shuffled(5),
    "callbacks": lambda: callbacks(Path(sys.argv[1]) / "files"),
}

if __name__ == "__main__":
    for name in sys.argv[2:] or CASES:
        print(name, flush=True)
        outcome = CASES[name]()
        path = Path(sys.argv[1], f"{name}-{RANK}.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(outcome))
        keras.backend.clear_session(free_memory=False)
