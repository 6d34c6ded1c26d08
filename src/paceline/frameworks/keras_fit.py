"""Makes `fit`, `evaluate` and `predict` of Keras 3 work on several workers, with the results of a single process.

Loaded from its file when a program imports Keras. It affects only models under MultiWorkerMirroredStrategy.
"""

import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable

MODULE = "keras"
TESTED = ((3, 15),)  # versions of Keras for which the replacements below were tested
NO_PARAMETER_SERVERS = (
    "Keras 3 cannot fit, evaluate or predict with parameter servers; write `tensorflow: {keras: legacy}` in the job "
    "file and use tf.keras, or write your own training loop as in examples/resnet-ps"
)


def register(keras: "Any") -> None:
    """Called with keras after it is imported. If patching fails, a warning is printed."""
    try:
        if keras.backend.backend() == "tensorflow" and keras.__version__.startswith("3."):
            _register(keras)
    except Exception as error:
        print(f"paceline: cannot patch Keras for several workers ({error!r})", file=sys.stderr)


def _register(keras: "Any") -> None:
    from keras.src.backend.tensorflow import trainer

    is_tested = tuple(map(int, keras.__version__.split(".")[:2])) in TESTED
    if getattr(trainer, "_paceline", False):
        return
    trainer._paceline = True
    if is_tested:
        _patch(keras.__version__)
        return
    tested = ", ".join(".".join(map(str, version)) for version in TESTED)
    warning = (
        f"paceline: Keras {keras.__version__} is not patched for several workers (tested versions: {tested}); pin a "
        "tested version, write `tensorflow: {keras: legacy}` and use tf.keras, or write your own training loop"
    )
    original = trainer.TFEpochIterator.__init__

    def warn(self: "Any", distribute_strategy: "Any" = None, *args: "Any", **kwargs: "Any") -> None:
        if is_multi_worker(distribute_strategy):
            _print_once(warning)
        original(self, distribute_strategy, *args, **kwargs)

    trainer.TFEpochIterator.__init__ = warn


def is_multi_worker(strategy: "Any") -> bool:
    """Whether several workers train a model together with this strategy."""
    import tensorflow as tf

    kind = tf.distribute.MultiWorkerMirroredStrategy
    return isinstance(strategy, kind) and bool(strategy.extended._in_multi_worker_mode())


def is_first_worker(strategy: "Any") -> bool:
    """Whether this is the worker that keeps files."""
    return not is_multi_worker(strategy) or bool(strategy.extended._is_chief)


_printed: "set[str]" = set()


def _print_once(message: str) -> None:
    if message not in _printed:
        _printed.add(message)
        print(message, file=sys.stderr, flush=True)


class Step(threading.local):
    rows: "Any" = None  # the number of examples of this replica, during a step


step = Step()


def _patch(version: str) -> None:
    from keras.src.backend.tensorflow import trainer

    _data(trainer, version)
    _steps(trainer)
    for name in ("keras_losses.py", "keras_files.py"):
        _load_neighbor(name).patch(SimpleNamespace(**globals()))


def _load_neighbor(name: str) -> "Any":
    """Load another module of this folder, which may not be importable as part of a package."""
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location("paceline " + name, Path(__file__).with_name(name))
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def replace(owner: "Any", name: str, make: "Callable[[Any], Any]") -> None:
    """Replace a function by `make(original)`."""
    original = getattr(owner, name)
    new = make(original)
    new.__name__, new.__doc__ = original.__name__, original.__doc__
    setattr(owner, name, new)


# ---- data


def _data(trainer: "Any", version: str) -> None:
    import tensorflow as tf
    from keras.src import tree
    from keras.src.trainers.epoch_iterator import EpochIterator

    def initialize(original: "Any") -> "Any":
        def __init__(self: "Any", distribute_strategy: "Any" = None, *args: "Any", **kwargs: "Any") -> None:
            if isinstance(distribute_strategy, tf.distribute.ParameterServerStrategy):
                raise NotImplementedError(NO_PARAMETER_SERVERS)
            if not is_multi_worker(distribute_strategy):
                original(self, distribute_strategy, *args, **kwargs)
                return
            if is_first_worker(distribute_strategy):
                _print_once(f"paceline: Keras {version} is patched for several workers (tensorflow.patch_keras)")
            EpochIterator.__init__(self, *args, **kwargs)
            self._distribute_strategy = distribute_strategy
            dataset = _shuffled(self) or self.data_adapter.get_tf_dataset()
            if not isinstance(dataset, tf.distribute.DistributedDataset):
                dataset = _distributed(dataset, distribute_strategy)
            self._distributed_dataset = dataset

        return __init__

    def build(original: "Any") -> "Any":
        def _maybe_symbolic_build(self: "Any", iterator: "Any" = None, data_batch: "Any" = None) -> None:
            """Build from the element spec, without reading data: a generator may yield it only once."""
            if iterator is None or not is_multi_worker(self.distribute_strategy):
                original(self, iterator, data_batch)
                return
            local = tree.map_structure(_local, iterator._distributed_dataset.element_spec)
            with self.distribute_strategy.scope():
                self._symbolic_build(data_batch=local)

        return _maybe_symbolic_build

    def get_iterator(original: "Any") -> "Any":
        def _get_iterator(self: "Any") -> "Any":
            order = getattr(self, "_paceline_order", None)
            if order is not None:
                order.shuffle()
            return original(self)

        return _get_iterator

    replace(trainer.TFEpochIterator, "__init__", initialize)
    replace(trainer.TFEpochIterator, "_get_iterator", get_iterator)
    replace(trainer.TensorFlowTrainer, "_maybe_symbolic_build", build)


def _distributed(dataset: "Any", strategy: "Any") -> "Any":
    """Divides each batch among the workers: evenly, or by the `share` of their hosts; see runtime/task_share.py."""
    import tensorflow as tf

    specs = [spec for spec in tf.nest.flatten(dataset.element_spec) if hasattr(spec, "dtype")]
    has_rows = all(isinstance(spec, tf.TensorSpec) and spec.shape.rank != 0 for spec in specs)
    policy = dataset.options().experimental_distribute.auto_shard_policy
    is_divided = policy == tf.data.experimental.AutoShardPolicy.OFF  # by the program: each worker has its own batches
    if "PACELINE_SHARE" not in os.environ or not has_rows or is_divided:
        return strategy.experimental_distribute_dataset(dataset)
    own, offset, total = (int(os.environ[f"PACELINE_SHARE{name}"]) for name in ("", "_OFFSET", "_TOTAL"))

    def part(*batch: "Any") -> "Any":
        first = next(value for value in tf.nest.flatten(batch) if value is not None)
        rows = tf.shape(first, tf.int64)[0]
        begin, end = -(-rows * offset // total), -(-rows * (offset + own) // total)
        batch = tf.nest.map_structure(lambda value: value if value is None else value[begin:end], batch)
        return batch if isinstance(dataset.element_spec, tuple) else batch[0]

    data = dataset.map(tf.autograph.experimental.do_not_convert(part))
    return strategy.distribute_datasets_from_function(lambda _: data)


def _local(spec: "Any") -> "Any":
    spec = getattr(spec, "_value_specs", (spec,))[0]
    return spec if hasattr(spec, "dtype") else None  # the spec of None has no dtype


class ShuffleOrder:
    """The order in which `fit` shuffles arrays, the same on all workers.

    Keras' own order differs between workers, even with a seed, since discarded iterators draw from the generator. Two
    workers would then train on some examples, and no worker on others. With a seed, the order depends only on the
    epoch: a resumed fit sees the same examples.
    """

    epoch = 0  # the current epoch of fit

    def __init__(self, adapter: "Any", strategy: "Any") -> None:
        import tensorflow as tf
        from tensorflow.python.eager import context

        seed = context.global_seed()
        if seed is None:
            seed = int.from_bytes(os.urandom(4), "big") if is_first_worker(strategy) else 0
            seed = int(strategy.gather(tf.constant([seed], tf.int64), axis=0)[0])
        self.seed = seed
        self.size, self.batch = adapter._num_samples, adapter._batch_size

    def shuffle(self) -> None:
        import numpy as np

        self.rows = np.random.default_rng([self.seed, self.epoch]).permutation(self.size)

    def batches(self) -> "Any":
        rows = self.rows
        return (rows[at : at + self.batch] for at in range(0, self.size, self.batch))


def _shuffled(iterator: "Any") -> "Any":
    """The shuffled dataset, or None if there is nothing to shuffle."""
    import tensorflow as tf
    from keras.src import tree
    from keras.src.trainers.data_adapters import array_slicing
    from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

    adapter = iterator.data_adapter
    if not isinstance(adapter, ArrayDataAdapter) or adapter._shuffle is not True:
        return None
    inputs = array_slicing.convert_to_sliceable(adapter._inputs, target_backend="tensorflow")
    if any(isinstance(value, array_slicing.TensorflowSparseWrapper) for value in tree.flatten(inputs)):
        return None
    inputs = tree.map_structure(tf.convert_to_tensor, tree.lists_to_tuples(inputs))
    iterator._paceline_order = order = ShuffleOrder(adapter, iterator._distribute_strategy)
    data = tf.data.Dataset.from_generator(order.batches, output_signature=tf.TensorSpec([None], tf.int64))
    gather = tf.autograph.experimental.do_not_convert(
        lambda rows: tree.map_structure(lambda value: tf.gather(value, rows), inputs)
    )
    data = data.map(gather)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    # The autotuning thread may miss the end of a pipeline: training then hangs at the end of an epoch.
    options.autotune.enabled = False
    return data.prefetch(2).with_options(options)


# ---- steps: they return the results of the whole batch, the same on all workers


def _steps(trainer: "Any") -> None:
    import tensorflow as tf
    from keras.src import tree

    def whole_batch(model: "Any", step_function: "Any") -> "Any":
        def run_step(data: "Any") -> "Any":
            leaves = [value for value in tree.flatten(data) if tf.is_tensor(value)]
            step.rows = tf.shape(leaves[0])[0] if leaves and leaves[0].shape.rank else tf.constant(1)
            try:
                outputs = step_function(data)
            finally:
                step.rows = None
            context = tf.distribute.get_replica_context()
            for results in (
                model.get_metrics_result,
                lambda: {metric.name: metric.result() for metric in model.metrics},
            ):
                if isinstance(outputs, dict) and outputs.keys() == results().keys():  # as Keras does after an epoch
                    return context.merge_call(lambda _, results=results: results())
            tensors = tree.map_structure(lambda value: tf.identity(tf.convert_to_tensor(value)), outputs)
            return context.merge_call(mean, args=(tensors,))

        return run_step

    def mean(strategy: "Any", outputs: "Any") -> "Any":
        return tree.map_structure(lambda value: strategy.reduce("MEAN", value, axis=None), outputs)

    def make(original: "Any") -> "Any":
        def _make_function(self: "Any", step_function: "Any") -> "Any":
            if not is_multi_worker(self.distribute_strategy):
                return original(self, step_function)
            function = original(self, whole_batch(self, step_function))

            def one_by_one(iterator: "Any") -> "Any":
                """Run steps one by one: TensorFlow does not support collectives in a loop in a graph."""
                steps, outputs = self.steps_per_execution, None
                if steps == 1 or not isinstance(iterator, tf.distribute.DistributedIterator):
                    return function(iterator)
                for _ in range(steps):
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
            if reduction == "concat" or not is_multi_worker(strategy):
                return original(values, strategy, reduction)
            return tree.map_structure(lambda value: strategy.experimental_local_results(value)[0], values)

        return reduce_per_replica

    replace(trainer.TensorFlowTrainer, "_make_function", make)
    replace(trainer, "reduce_per_replica", reduce)
