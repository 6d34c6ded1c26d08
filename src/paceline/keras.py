"""Snapshots for Keras' `model.fit`, which goes on in the middle of an epoch, with the next batch.

    order = paceline.Shards(size=len(images), batch=100)
    data = batches(order, lambda chosen: (tf.gather(images, chosen), tf.gather(labels, chosen)))
    snapshots = Snapshots(every=100, order=order)
    model.fit(data, epochs=5, initial_epoch=snapshots.initial_epoch, callbacks=[snapshots])

For Keras 3 on TensorFlow and for tf_keras, whichever the model is made with; also under MirroredStrategy, and under
MultiWorkerMirroredStrategy (Keras 3 where Paceline patches it), where every worker has the callback and the first one
writes. A resumed fit ends with the same weights, bit for bit, as one never disturbed, where
- the data comes from `batches`, and `load` has no randomness of its own but what it makes of the indices,
- the program begins with `keras.utils.set_random_seed` and `tf.config.experimental.enable_op_determinism`,
- randomness in the model is that of Keras' layers, or of a `keras.random.SeedGenerator`,
- with tf_keras, `tf_keras.backend.experimental.enable_tf_random_generator()` comes before the model: without it, how
  far its layers are with their random numbers cannot be had back, and they begin again with the first,
- `Snapshots` is the last of the callbacks, and no other one keeps a state of its own from epoch to epoch, as
  `EarlyStopping` does: such a state begins anew.
Metrics of the epoch that was resumed are those of its rest.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Callable

import tensorflow as tf

from paceline import tensorflow
from paceline.runtime import contract
from paceline.runtime.misfits import Misfits, SnapshotMismatch, SnapshotRefused
from paceline.runtime.shards import Shards
from paceline.tensorflow.state import kept

_CALLS, _AHEAD = 4, 2  # of `load` at once; batches that wait for training
__all__ = ["SnapshotMismatch", "SnapshotRefused", "Snapshots", "batches"]


def batches(order: Shards, load: Callable[[Any], Any]) -> tf.data.Dataset:
    """What `model.fit` trains on: `load` makes inputs and targets of a vector of indices. Reads ahead.

    Give it to `fit` as it is: Keras must see how long a whole epoch is, also when the first one is but the rest of one.
    It has whole batches in every worker: `fit` shares each of them out itself, after it was loaded.
    """
    data = tf.data.Dataset.from_generator(lambda: _whole(order), output_signature=tf.TensorSpec([None], tf.int64))
    data = data.map(load, num_parallel_calls=_CALLS, deterministic=True)
    options = tf.data.Options()
    options.autotune.enabled = False  # as for tensorflow.indices
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    data = data.prefetch(_AHEAD).with_options(options)
    steps = tf.constant(_steps(order), tf.int64)
    data.cardinality = lambda: steps
    return data


class _Callback:
    """What both Keras ask of a callback. Neither is imported: which one a program uses, its model tells, and not its
    imports, since TensorFlow itself imports Keras 3."""

    _supports_tf_logs = True  # tf_keras need not wait for the numbers of every batch

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
    """Takes a snapshot every so many batches and at the end of each epoch; `fit` goes on from the newest one.

    Without `order` it is not known which batches of an epoch were trained on, so there are snapshots only between
    epochs.
    """

    def __init__(self, every: int | None = None, order: Shards | None = None, partial: bool = False) -> None:
        """`partial`: of a snapshot that does not fit, what does is restored, as by `paceline.tensorflow.Snapshots`.
        Where that leaves out the order, `fit` begins with epoch 0."""
        if every is not None and order is None:
            raise ValueError("every=... needs order=...: without it, snapshots are taken at the end of epochs only")
        self.initial_epoch = 0  # for `fit`
        self._every, self._partial = every, partial
        self._position = _Position(order)
        folder = contract.restored()
        where = kept(folder)["order"] if folder is not None else None
        if where is not None and Misfits().order(where, self._position):
            self.initial_epoch = int(where["epoch"])
        self._snapshots: tensorflow.Snapshots | None = None
        self._resuming = folder is not None
        self._step = 0
        self._begin = 0  # the first batch of the next epoch
        self._batch = -1

    @property
    def skipped(self) -> int:
        """Not taken at their batch, since the last one was still being written."""
        return 0 if self._snapshots is None else self._snapshots.skipped

    def on_train_begin(self, logs: Any = None) -> None:
        order = self._position.order
        if order is not None:
            self._check(order)
        if self._snapshots is None:
            if not self.model.built:
                raise ValueError("build the model before fit: call model.build(...), or begin it with keras.Input")
            _build(self.model)
            checkpoint = tf.train.Checkpoint(model=self.model)  # its optimizer too
            self._snapshots = tensorflow.Snapshots(checkpoint, every=self._every, order=self._position)
            self._step = self._snapshots.restore(self._partial)
        if order is not None and hasattr(self.model, "_training_state"):  # in tf_keras, which asks it where to begin
            self._begin = _steps(order) - len(order)
            self.model._training_state = SimpleNamespace(maybe_load_initial_counters_from_ckpt=self._beginning)

    def _check(self, order: Shards) -> None:
        if isinstance(self.model.distribute_strategy, tf.distribute.experimental.ParameterServerStrategy):
            raise ValueError("with parameter servers, batches are not trained on by order: leave order out")
        if self.params.get("steps") != _steps(order):
            raise ValueError("give fit the data of paceline.keras.batches(order, ...), as it is")

    def _beginning(self, steps: int, epoch: int, mode: Any) -> tuple[int, int]:
        self.model._training_state = None
        return epoch, self._begin

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._begin, self._batch = 0, self._begin - 1
        if not self._resuming or self._snapshots is None:
            return
        self._resuming = False
        if epoch != self.initial_epoch:
            raise ValueError(
                f"fit begins with epoch {epoch}, and the snapshot is of epoch {self.initial_epoch}: "
                "give it initial_epoch=snapshots.initial_epoch"
            )
        if self._position.inside():
            # Other callbacks have begun this epoch a second time: the learning rate may have gone down twice.
            self._snapshots.restore(self._partial)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        done, self._batch = batch - self._batch, batch
        order = self._position.order
        if self._snapshots is None:
            return
        if order is None:
            self._step += done
            return
        self._step += min(done, len(order))  # the last ones of an epoch may be fewer than are run at once
        order.position = min(order.size, order.position + done * order.batch)
        if self._position.inside():
            self._snapshots.step(self._step, **_metrics(logs))
        elif batch + 1 < _steps(order):
            # The rest of an epoch is trained. Keras 3 would find that out by one more step, which fails for want of
            # data, but counts, and draws random numbers.
            warnings.filterwarnings("ignore", message="Your input ran out of data")
            raise StopIteration

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self._snapshots is None or not self._position.end(epoch):
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
    """Where fit is: in an epoch, by `order`; without one, between epochs."""

    def __init__(self, order: Shards | None) -> None:
        self.order = order
        self._epoch = 0

    def inside(self) -> bool:
        return self.order is not None and 0 < self.order.position < self.order.size

    def end(self, epoch: int) -> bool:
        """Whether that epoch was trained to its end."""
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


def _whole(order: Shards) -> Iterator[list[int]]:
    """The batches of all tasks together: `fit` shares each of them out itself."""
    whole = Shards(order.size, order.batch, order.seed, rank=0, world=1)
    whole.load(order.state())
    return whole.ahead()


def _build(model: Any) -> None:
    """Makes the variables of the optimizer, which else come with the first batch."""
    if getattr(model.optimizer, "built", False):
        return
    with model.distribute_strategy.scope():
        build = getattr(model.optimizer, "build", None) or model.optimizer._create_all_weights  # tf_keras' legacy ones
        build(model.trainable_variables)


def _metrics(logs: Any) -> dict[str, Any]:
    return dict(logs or {})
