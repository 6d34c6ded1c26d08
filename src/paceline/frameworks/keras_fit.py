"""Makes `fit`, `evaluate` and `predict` of Keras 3 work on several workers, with the results of a single process.

Loaded by its file when a program imports Keras; it acts in steps of a model under MultiWorkerMirroredStrategy alone.
"""

import os
import sys
import tempfile
import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

MODULE = "keras"
TESTED = ((3, 15),)  # what is replaced below was read and tried in these versions
REFUSED = (
    "Keras 3 cannot fit, evaluate or predict with parameter servers: write `tensorflow: {keras: legacy}` into the job "
    "file and use tf.keras, or write the loop as examples/resnet-ps does"
)


def register(keras: "Any") -> None:
    """Called with keras once it is imported. Where that fails, Keras is as it was."""
    try:
        if keras.backend.backend() == "tensorflow" and keras.__version__.startswith("3."):
            _register(keras)
    except Exception as error:
        print(f"paceline: cannot patch Keras for several workers ({error!r})", file=sys.stderr)


def _register(keras: "Any") -> None:
    from keras.src.backend.tensorflow import trainer

    known = tuple(map(int, keras.__version__.split(".")[:2])) in TESTED
    if getattr(trainer, "_paceline", False):
        return
    trainer._paceline = True
    if known:
        _patch(keras.__version__)
        return
    texts = " and ".join(".".join(map(str, version)) for version in TESTED)
    words = (
        f"paceline: Keras {keras.__version__} is not patched for fit on several workers, which is tested with {texts}: "
        "pin one of these, or write `tensorflow: {keras: legacy}` and use tf.keras, or write the loop yourself"
    )
    begin = trainer.TFEpochIterator.__init__

    def warn(self: "Any", distribute_strategy: "Any" = None, *args: "Any", **kwargs: "Any") -> None:
        if _several(distribute_strategy):
            _say(words)
        begin(self, distribute_strategy, *args, **kwargs)

    trainer.TFEpochIterator.__init__ = warn


def _several(strategy: "Any") -> bool:
    """Whether models of this strategy are trained by several workers together."""
    import tensorflow as tf

    kind = tf.distribute.MultiWorkerMirroredStrategy
    return isinstance(strategy, kind) and bool(strategy.extended._in_multi_worker_mode())


def _first(strategy: "Any") -> bool:
    """Whether this is the worker whose files count."""
    return not _several(strategy) or bool(strategy.extended._is_chief)


_said: "set[str]" = set()


def _say(words: str) -> None:
    if words not in _said:
        _said.add(words)
        print(words, file=sys.stderr, flush=True)


class _Step(threading.local):
    rows: "Any" = None  # how many examples this replica has, within a step


_step = _Step()


def _patch(version: str) -> None:
    from keras.src import callbacks, losses, optimizers
    from keras.src.backend.tensorflow import trainer

    _data(trainer, version)
    _steps(trainer)
    _losses(losses.loss)
    _gradients(optimizers)
    _files(callbacks)


def _replace(owner: "Any", name: str, make: "Callable[[Any], Any]") -> None:
    """Puts `make(the original)` in the place of a function."""
    original = getattr(owner, name)
    new = make(original)
    new.__name__, new.__doc__ = original.__name__, original.__doc__
    setattr(owner, name, new)


# ---- data


def _data(trainer: "Any", version: str) -> None:
    import tensorflow as tf
    from keras.src import tree
    from keras.src.trainers.epoch_iterator import EpochIterator

    def begin(original: "Any") -> "Any":
        def __init__(self: "Any", distribute_strategy: "Any" = None, *args: "Any", **kwargs: "Any") -> None:
            if isinstance(distribute_strategy, tf.distribute.ParameterServerStrategy):
                raise NotImplementedError(REFUSED)
            if not _several(distribute_strategy):
                original(self, distribute_strategy, *args, **kwargs)
                return
            if _first(distribute_strategy):
                _say(f"paceline: Keras {version} is patched for fit on several workers (tensorflow.patch_keras)")
            EpochIterator.__init__(self, *args, **kwargs)
            self._distribute_strategy = distribute_strategy
            dataset = _shuffled(self) or self.data_adapter.get_tf_dataset()
            if not isinstance(dataset, tf.distribute.DistributedDataset):
                dataset = distribute_strategy.experimental_distribute_dataset(dataset)
            self._distributed_dataset = dataset

        return __init__

    def build(original: "Any") -> "Any":
        def _maybe_symbolic_build(self: "Any", iterator: "Any" = None, data_batch: "Any" = None) -> None:
            """By what the data looks like, of which nothing is taken: it may be of a generator that gives it once."""
            if iterator is None or not _several(self.distribute_strategy):
                original(self, iterator, data_batch)
                return
            local = tree.map_structure(_local, iterator._distributed_dataset.element_spec)
            with self.distribute_strategy.scope():
                self._symbolic_build(data_batch=local)

        return _maybe_symbolic_build

    def again(original: "Any") -> "Any":
        def _get_iterator(self: "Any") -> "Any":
            order = getattr(self, "_paceline_order", None)
            if order is not None:
                order.renew()
            return original(self)

        return _get_iterator

    _replace(trainer.TFEpochIterator, "__init__", begin)
    _replace(trainer.TFEpochIterator, "_get_iterator", again)
    _replace(trainer.TensorFlowTrainer, "_maybe_symbolic_build", build)


def _local(spec: "Any") -> "Any":
    spec = getattr(spec, "_value_specs", (spec,))[0]
    return spec if hasattr(spec, "dtype") else None  # what stands for None has none


class _Order:
    """The order of arrays that `fit` shuffles, the same on all workers: Keras' own differs between them, with a seed
    too, since iterators that are dropped draw from it; then some examples are seen by two workers, some by none."""

    def __init__(self, adapter: "Any", strategy: "Any") -> None:
        import numpy as np
        import tensorflow as tf
        from tensorflow.python.eager import context

        seed = context.global_seed()
        if seed is None:
            seed = int.from_bytes(os.urandom(4), "big") if _first(strategy) else 0
            seed = int(strategy.gather(tf.constant([seed], tf.int64), axis=0)[0])
        self.size, self.batch = adapter._num_samples, adapter._batch_size
        self.chance = np.random.default_rng(seed)

    def renew(self) -> None:
        self.rows = self.chance.permutation(self.size)

    def batches(self) -> "Any":
        rows = self.rows
        return (rows[at : at + self.batch] for at in range(0, self.size, self.batch))


def _shuffled(iterator: "Any") -> "Any":
    """None where there is nothing to shuffle."""
    import tensorflow as tf
    from keras.src import tree
    from keras.src.trainers.data_adapters import array_slicing
    from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

    adapter = iterator.data_adapter
    if not isinstance(adapter, ArrayDataAdapter) or adapter._shuffle is not True:
        return None
    inputs = array_slicing.convert_to_sliceable(adapter._inputs, target_backend="tensorflow")
    inputs = tree.lists_to_tuples(inputs)
    if not all(tf.is_tensor(value) for value in tree.flatten(inputs)):
        return None
    iterator._paceline_order = order = _Order(adapter, iterator._distribute_strategy)
    data = tf.data.Dataset.from_generator(order.batches, output_signature=tf.TensorSpec([None], tf.int64))
    data = data.map(lambda rows: tree.map_structure(lambda value: tf.gather(value, rows), inputs))
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    return data.with_options(options).prefetch(tf.data.AUTOTUNE)


# ---- steps: what they return is the same on all workers, and that of the whole batch


def _steps(trainer: "Any") -> None:
    import tensorflow as tf
    from keras.src import tree

    def whole(model: "Any", step_function: "Any") -> "Any":
        def step(data: "Any") -> "Any":
            leaves = [value for value in tree.flatten(data) if tf.is_tensor(value)]
            _step.rows = tf.shape(leaves[0])[0] if leaves and leaves[0].shape.rank else tf.constant(1)
            try:
                outputs = step_function(data)
            finally:
                _step.rows = None
            context = tf.distribute.get_replica_context()
            for results in (model.get_metrics_result, lambda: {metric.name: metric.result() for metric in model.metrics}):
                if isinstance(outputs, dict) and outputs.keys() == results().keys():  # as Keras does after an epoch
                    return context.merge_call(lambda _, results=results: results())
            placed = tree.map_structure(lambda value: tf.identity(tf.convert_to_tensor(value)), outputs)
            return context.merge_call(mean, args=(placed,))

        return step

    def mean(strategy: "Any", outputs: "Any") -> "Any":
        return tree.map_structure(lambda value: strategy.reduce("MEAN", value, axis=None), outputs)

    def make(original: "Any") -> "Any":
        def _make_function(self: "Any", step_function: "Any") -> "Any":
            if not _several(self.distribute_strategy):
                return original(self, step_function)
            function = original(self, whole(self, step_function))

            def one_by_one(iterator: "Any") -> "Any":
                """Also with steps_per_execution: TensorFlow has no collectives in functions of a loop in a graph."""
                at_once, outputs = self.steps_per_execution, None
                if at_once == 1 or not isinstance(iterator, tf.distribute.DistributedIterator):
                    return function(iterator)
                for _ in range(at_once):
                    try:
                        batch = next(iterator)
                    except (StopIteration, tf.errors.OutOfRangeError):
                        if outputs is None:
                            raise
                        break
                    outputs = function(iter([batch]))
                return outputs

            return one_by_one

        return _make_function

    def reduce(original: "Any") -> "Any":
        def reduce_per_replica(values: "Any", strategy: "Any", reduction: str) -> "Any":
            if reduction == "concat" or not _several(strategy):
                return original(values, strategy, reduction)
            return tree.map_structure(lambda value: strategy.experimental_local_results(value)[0], values)

        return reduce_per_replica

    _replace(trainer.TensorFlowTrainer, "_make_function", make)
    _replace(trainer, "reduce_per_replica", reduce)


# ---- losses: the value of the whole batch, with the gradient of this worker's part of it


def _losses(loss: "Any") -> None:
    import tensorflow as tf

    def total(*values: "Any") -> "Any":
        numbers = tf.stack([tf.cast(value, tf.float32) for value in values])
        return tf.unstack(tf.distribute.get_replica_context().all_reduce("SUM", tf.stop_gradient(numbers)))

    def with_value(share: "Any", value: "Any") -> "Any":
        """Optimizers add the gradients of all shares; what is shown and recorded is the value."""
        return share + tf.stop_gradient(tf.cast(value, share.dtype) - share)

    def reduce(original: "Any") -> "Any":
        def reduce_weighted_values(
            values: "Any",
            sample_weight: "Any" = None,
            mask: "Any" = None,
            reduction: "Any" = "sum_over_batch_size",
            dtype: "Any" = None,
        ) -> "Any":
            if _step.rows is None or reduction in (None, "none"):
                return original(values, sample_weight, mask, reduction, dtype)
            summed = tf.reduce_sum(original(values, sample_weight, mask, "sum", dtype))
            if reduction == "sum":
                return with_value(summed, total(summed)[0])
            values = tf.convert_to_tensor(values)
            if values.shape.rank == 0 and sample_weight is None and mask is None:  # a mean of the program's own
                count = _step.rows
                summed = tf.math.multiply_no_nan(summed, tf.cast(count, summed.dtype))
            else:
                count = divisor(values, sample_weight, mask, reduction)
            whole, divided_by = total(summed, count)
            share = tf.math.divide_no_nan(summed, tf.cast(divided_by, summed.dtype))
            return with_value(share, tf.math.divide_no_nan(whole, divided_by))

        return reduce_weighted_values

    def divisor(values: "Any", sample_weight: "Any", mask: "Any", reduction: str) -> "Any":
        """What Keras divides by, as far as it is of this worker's examples."""
        if reduction == "mean_with_sample_weight" and not (sample_weight is None and mask is None):
            return tf.reduce_sum(loss.apply_mask(sample_weight, mask, "float32", reduction))
        size = tf.cast(tf.size(values if values.shape.rank else sample_weight), tf.float32)
        if mask is None:
            return size
        valid = tf.reduce_sum(tf.cast(mask, tf.float32))
        return valid * tf.math.divide_no_nan(size, tf.cast(tf.size(mask), tf.float32))

    def scale(original: "Any") -> "Any":
        def scale_loss_for_distribution(value: "Any") -> "Any":
            """Of losses that layers add."""
            if _step.rows is None:
                return original(value)
            replicas = tf.distribute.get_strategy().num_replicas_in_sync
            return with_value(value / replicas, total(value)[0] / replicas)

        return scale_loss_for_distribution

    def unscale(original: "Any") -> "Any":
        def unscale_loss_for_distribution(value: "Any") -> "Any":
            return original(value) if _step.rows is None else value

        return unscale_loss_for_distribution

    _replace(loss, "reduce_weighted_values", reduce)
    _replace(loss, "scale_loss_for_distribution", scale)
    _replace(loss, "unscale_loss_for_distribution", unscale)


# ---- gradients


def _gradients(optimizers: "Any") -> None:
    import tensorflow as tf
    from keras.src.optimizers import base_optimizer, loss_scale_optimizer

    def clip(original: "Any") -> "Any":
        def _clip_gradients(self: "Any", grads: "Any") -> "Any":
            """Keras clips what each worker has, and adds that: here, the sum is clipped."""
            context = tf.distribute.get_replica_context()
            clips = self.clipnorm or self.global_clipnorm or self.clipvalue
            if not clips or context is None or not _several(context.strategy) or not _fits(self):
                return original(self, grads)
            replicas = context.num_replicas_in_sync
            summed = iter(context.all_reduce("SUM", [grad for grad in grads if grad is not None]))
            clipped = original(self, [None if grad is None else next(summed) for grad in grads])
            return [None if grad is None else tf.math.scalar_mul(1 / replicas, grad) for grad in clipped]

        return _clip_gradients

    def spoilt(grad: "Any", wrong: "Any") -> "Any":
        if isinstance(grad, tf.IndexedSlices):
            return tf.IndexedSlices(spoilt(grad.values, wrong), grad.indices, grad.dense_shape)
        return tf.where(wrong, tf.constant(float("nan"), grad.dtype), grad)

    def apply(original: "Any") -> "Any":
        def apply_(self: "Any", grads: "Any", trainable_variables: "Any" = None) -> "Any":
            """A worker whose gradients overflow skips the step: then all must, or the others wait for it."""
            if _step.rows is None:
                return original(self, grads, trainable_variables)
            _fitting.add(id(self.inner_optimizer))
            wrong = 1.0 - tf.cast(self.check_finite(grads), tf.float32)
            wrong = tf.distribute.get_replica_context().all_reduce("SUM", wrong) > 0
            grads = [None if grad is None else spoilt(grad, wrong) for grad in grads]
            return original(self, grads, trainable_variables)

        return apply_

    _replace(base_optimizer.BaseOptimizer, "_clip_gradients", clip)
    _replace(loss_scale_optimizer.LossScaleOptimizer, "apply", apply)


_fitting: "set[int]" = set()  # optimizers inside others, which are applied by another thread than the step's


def _fits(optimizer: "Any") -> bool:
    return _step.rows is not None or id(optimizer) in _fitting


# ---- files: the first worker's count


def _files(callbacks: "Any") -> None:
    import tensorflow as tf
    from keras.src.callbacks.callback_list import CallbackList

    def first(callback: "Any") -> bool:
        return _first(callback.model.distribute_strategy)

    def checkpoint(original: "Any") -> "Any":
        def _get_file_path(self: "Any", epoch: int, batch: "Any", logs: "Any") -> "Any":
            """Every worker saves, since that may need the others; of all but the first, nothing is kept."""
            path = original(self, epoch, batch, logs)
            if first(self):
                return path
            self._paceline = tempfile.TemporaryDirectory(prefix="paceline-")
            return os.path.join(self._paceline.name, os.path.basename(path))

        return _get_file_path

    def backup(original: "Any") -> "Any":
        def _save_model(self: "Any") -> None:
            if first(self):
                original(self)
                return
            with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
                self.model.save_weights(os.path.join(folder, "latest.weights.h5"), overwrite=True)

        return _save_model

    def load(original: "Any") -> "Any":
        def _load_model(self: "Any") -> None:
            """A worker that is not the first leaves the folder alone, and so its end is remembered here."""
            if first(self) or self.backup_dir not in _ended:
                original(self)

        return _load_model

    def end(original: "Any") -> "Any":
        def on_train_end(self: "Any", logs: "Any" = None) -> None:
            if first(self):
                original(self, logs)
            elif self.delete_checkpoint:
                _ended.add(self.backup_dir)

        return on_train_end

    def log(original: "Any") -> "Any":
        def on_train_begin(self: "Any", logs: "Any" = None) -> None:
            if not first(self):
                self.filename = os.devnull
            original(self, logs)

        return on_train_begin

    def board(original: "Any") -> "Any":
        def set_model(self: "Any", model: "Any") -> None:
            if not _first(model.distribute_strategy):
                self._paceline = tempfile.TemporaryDirectory(prefix="paceline-")
                self.log_dir = self._paceline.name
            original(self, model)

        return set_model

    def begin(original: "Any") -> "Any":
        def on_train_begin(self: "Any", logs: "Any" = None) -> None:
            """Where BackupAndRestore has found something on some workers only, all go on as the first one does."""
            original(self, logs)
            model = self._model
            strategy = None if model is None else model.distribute_strategy
            if not _several(strategy):
                return
            epoch = -1 if model._initial_epoch is None else model._initial_epoch
            epochs = strategy.gather(tf.constant([epoch]), axis=0).numpy()
            if len(set(epochs)) == 1:
                return
            for variable in [*model.variables, *model.optimizer.variables]:
                variable.assign(strategy.gather(tf.convert_to_tensor(variable)[None], axis=0)[0])
            model._initial_epoch = None if epochs[0] < 0 else int(epochs[0])

        return on_train_begin

    _replace(callbacks.ModelCheckpoint, "_get_file_path", checkpoint)
    _replace(callbacks.BackupAndRestore, "_save_model", backup)
    _replace(callbacks.BackupAndRestore, "_load_model", load)
    _replace(callbacks.BackupAndRestore, "on_train_end", end)
    _replace(callbacks.CSVLogger, "on_train_begin", log)
    _replace(callbacks.TensorBoard, "set_model", board)
    _replace(CallbackList, "on_train_begin", begin)


_ended: "set[str]" = set()
