"""Snapshots for Keras' `model.fit`, which resumes in the middle of an epoch, with the next batch.

    order = paceline.Shards(size=len(images), batch=100)
    data = batches(order, lambda chosen: (tf.gather(images, chosen), tf.gather(labels, chosen)))
    snapshots = Snapshots(every=100, order=order)
    model.fit(data, epochs=5, initial_epoch=snapshots.initial_epoch, callbacks=[snapshots])

For Keras 3 on TensorFlow and for tf_keras, depending on the model; also under MirroredStrategy, and under
MultiWorkerMirroredStrategy (Keras 3 if Paceline patches it), where every worker has the callback and the first one
writes. A resumed fit ends with the same weights, bit for bit, as an uninterrupted one, if
- the data comes from `batches`, and any randomness in `load` depends only on the indices,
- the program starts with `keras.utils.set_random_seed` and `tf.config.experimental.enable_op_determinism`,
- randomness in the model comes from Keras' layers, or from a `keras.random.SeedGenerator`,
- with tf_keras, `tf_keras.backend.experimental.enable_tf_random_generator()` is called before the model is built:
  without it, the random state of its layers cannot be restored, and they start with the first number again,
- `Snapshots` is the last callback, and no other callback keeps its own state across epochs, as `EarlyStopping` does:
  such state is not restored.
Metrics of a resumed epoch cover only the rest of that epoch.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Callable

import tensorflow as tf

from paceline import tensorflow
from paceline.runtime import snapshot_folders
from paceline.runtime.save_schedule import Every
from paceline.runtime.shards import Shards
from paceline.runtime.snapshot_mismatches import Mismatches, SnapshotMismatch, SnapshotRefused
from paceline.tensorflow.state import read_metadata

_PARALLEL_LOADS, _PREFETCHED = 4, 2  # concurrent calls of `load`; batches that wait for training
__all__ = ["SnapshotMismatch", "SnapshotRefused", "Snapshots", "batches"]


def batches(order: Shards, load: Callable[[Any], Any]) -> tf.data.Dataset:
    """The data for `model.fit`: `load` turns a vector of indices into inputs and targets. Reads ahead.

    Pass it to `fit` unchanged: Keras must see the length of a whole epoch, even if it resumes in the middle of one.
    Every worker loads whole batches: `fit` distributes each of them after it was loaded.
    """
    data = tf.data.Dataset.from_generator(
        lambda: _whole_batches(order), output_signature=tf.TensorSpec([None], tf.int64)
    )
    data = data.map(load, num_parallel_calls=_PARALLEL_LOADS, deterministic=True)
    options = tf.data.Options()
    options.autotune.enabled = False  # as for tensorflow.indices
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    data = data.prefetch(_PREFETCHED).with_options(options)
    steps = tf.constant(_steps(order), tf.int64)
    data.cardinality = lambda: steps
    return data


class _Callback:
    """The callback interface of Keras 3 and tf_keras. Neither is imported: the model determines which one a program
    uses; its imports do not, because TensorFlow itself imports Keras 3."""

    _supports_tf_logs = True  # so that tf_keras does not wait for the metrics of every batch

    def set_params(self, params: Any) -> None:
        self.params = params

    def set_model(self, model: Any) -> None:
        self.model = model

    def _implements_train_batch_hooks(self) -> bool:
        return True

    def _nothing(self, *_: Any, **__: Any) -> None:
        pass

    on_batch_begin = on_batch_end = on_train_batch_begin = _nothing
    on_test_begin = on_test_end = on_test_batch_begin = on_test_batch_end = _nothing
    on_predict_begin = on_predict_end = on_predict_batch_begin = on_predict_batch_end = _nothing
    _implements_test_batch_hooks = _implements_predict_batch_hooks = _nothing


class Snapshots(_Callback):
    """Takes a snapshot every `every` batches and at the end of each epoch; `fit` resumes from the newest one.

    Without `order` Paceline cannot know which batches of an epoch were trained on, so snapshots are taken only between
    epochs.
    """

    def __init__(self, every: Every = None, order: Shards | None = None, partial: bool = False) -> None:
        """`every`: batches between snapshots, or a duration such as "30s"; None: only at the end of epochs.

        `partial`: if the snapshot does not fit, restore what does, as in `paceline.tensorflow.Snapshots`. If the order
        does not fit, `fit` starts with epoch 0."""
        if every is not None and order is None:
            raise ValueError("every=... requires order=...; without it, snapshots are taken only at the end of epochs")
        self.initial_epoch = 0  # for `fit`
        self._every, self._partial = every, partial
        self._position = _Position(order)
        folder = snapshot_folders.restored()
        saved_order = read_metadata(folder)["order"] if folder is not None else None
        if saved_order is not None and Mismatches().order(saved_order, self._position):
            self.initial_epoch = int(saved_order["epoch"])
        self._snapshots: tensorflow.Snapshots | None = None
        self._resuming = folder is not None
        self._step = 0
        self._first_batch = 0  # the first batch of the next epoch
        self._batch = -1

    @property
    def skipped(self) -> int:
        """Snapshots that were not taken when due, because the last one was still being written."""
        return 0 if self._snapshots is None else self._snapshots.skipped

    def on_train_begin(self, logs: Any = None) -> None:
        order = self._position.order
        if order is not None:
            self._check(order)
        if self._snapshots is None:
            if not self.model.built:
                raise ValueError(
                    "the model is not built; call model.build(...) before fit, or start it with keras.Input"
                )
            _build_optimizer(self.model)
            checkpoint = tf.train.Checkpoint(model=self.model)  # its optimizer too
            self._snapshots = tensorflow.Snapshots(checkpoint, every=self._every, order=self._position)
            self._step = self._snapshots.restore(self._partial)
        # tf_keras queries this attribute for the first batch.
        if order is not None and hasattr(self.model, "_training_state"):
            self._first_batch = _steps(order) - len(order)
            self.model._training_state = SimpleNamespace(maybe_load_initial_counters_from_ckpt=self._initial_counters)

    def _check(self, order: Shards) -> None:
        if isinstance(self.model.distribute_strategy, tf.distribute.experimental.ParameterServerStrategy):
            raise ValueError("with parameter servers, batches are not trained in order; omit order=...")
        if self.params.get("steps") != _steps(order):
            raise ValueError("the data of fit does not match order; pass paceline.keras.batches(order, ...) unchanged")

    def _initial_counters(self, steps: int, epoch: int, mode: Any) -> tuple[int, int]:
        self.model._training_state = None
        return epoch, self._first_batch

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._first_batch, self._batch = 0, self._first_batch - 1
        if not self._resuming or self._snapshots is None:
            return
        self._resuming = False
        if epoch != self.initial_epoch:
            raise ValueError(
                f"fit starts with epoch {epoch}, but the snapshot is of epoch {self.initial_epoch}; "
                "pass initial_epoch=snapshots.initial_epoch"
            )
        if self._position.is_inside_epoch():
            # Other callbacks have started this epoch a second time: the learning rate may have been lowered twice.
            self._snapshots.restore(self._partial)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        completed, self._batch = batch - self._batch, batch
        order = self._position.order
        if self._snapshots is None:
            return
        if order is None:
            self._step += completed
            return
        self._step += min(completed, len(order))  # the last execution of an epoch may have fewer steps than the others
        order.position = min(order.size, order.position + completed * order.batch)
        if self._position.is_inside_epoch():
            self._snapshots.step(self._step, **_metrics(logs))
        elif batch + 1 < _steps(order):
            # The rest of a resumed epoch is complete. Keras 3 would notice only by running one more step, which fails
            # because there is no data, but counts as a step and draws random numbers.
            warnings.filterwarnings("ignore", message="Your input ran out of data")
            raise StopIteration

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._snapshots is None or not self._position.end_epoch(epoch):
            return
        if self._position.order is None:
            self._snapshots.save(self._step, **_metrics(logs))
        else:
            self._snapshots.due = True
            self._snapshots.step(self._step, **_metrics(logs))

    def on_train_end(self, logs: Any = None) -> None:
        if self._snapshots is not None:
            self._snapshots.close()


class _Position:
    """The position of fit: within an epoch, by `order`; without one, between epochs."""

    def __init__(self, order: Shards | None) -> None:
        self.order = order
        self._epoch = 0

    def is_inside_epoch(self) -> bool:
        return self.order is not None and 0 < self.order.position < self.order.size

    def end_epoch(self, epoch: int) -> bool:
        """Moves to the next epoch. Returns False if the epoch was not trained to its end."""
        if self.order is None:
            self._epoch = epoch + 1
        elif self.order.position < self.order.size:
            return False
        else:
            self.order.epoch, self.order.position = self.order.epoch + 1, 0
        return True

    def state(self) -> dict[str, int]:
        return {"epoch": self._epoch} if self.order is None else self.order.state()

    def load(self, state: dict[str, Any]) -> None:
        if self.order is None:
            self._epoch = int(state["epoch"])
        else:
            self.order.load(state)


def _steps(order: Shards) -> int:
    return -(-order.size // order.batch)


def _whole_batches(order: Shards) -> Iterator[list[int]]:
    """The batches of all tasks together: `fit` distributes each of them itself."""
    whole = Shards(order.size, order.batch, order.seed, rank=0, world=1)
    whole.load(order.state())
    return whole.ahead()


def _build_optimizer(model: Any) -> None:
    """Creates the variables of the optimizer, which would otherwise be created with the first batch."""
    if getattr(model.optimizer, "built", False):
        return
    with model.distribute_strategy.scope():
        build = (
            getattr(model.optimizer, "build", None) or model.optimizer._create_all_weights
        )  # legacy optimizers of tf_keras
        build(model.trainable_variables)


def _metrics(logs: Any) -> dict[str, Any]:
    return dict(logs or {})
