"""Makes `fit`, `evaluate` and `predict` of Keras 3 work on several workers, with the results of a single process.

Loaded by its file when a program imports Keras; it acts in steps of a model under MultiWorkerMirroredStrategy alone.
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
        if several(distribute_strategy):
            _say(words)
        begin(self, distribute_strategy, *args, **kwargs)

    trainer.TFEpochIterator.__init__ = warn


def several(strategy: "Any") -> bool:
    """Whether models of this strategy are trained by several workers together."""
    import tensorflow as tf

    kind = tf.distribute.MultiWorkerMirroredStrategy
    return isinstance(strategy, kind) and bool(strategy.extended._in_multi_worker_mode())


def first(strategy: "Any") -> bool:
    """Whether this is the worker whose files count."""
    return not several(strategy) or bool(strategy.extended._is_chief)


_said: "set[str]" = set()


def _say(words: str) -> None:
    if words not in _said:
        _said.add(words)
        print(words, file=sys.stderr, flush=True)


class Step(threading.local):
    rows: "Any" = None  # how many examples this replica has, within a step


step = Step()


def _patch(version: str) -> None:
    from keras.src.backend.tensorflow import trainer

    _data(trainer, version)
    _steps(trainer)
    for name in ("keras_losses.py", "keras_files.py"):
        _beside(name).patch(SimpleNamespace(**globals()))


def _beside(name: str) -> "Any":
    """Another module of this folder, which may be in no package that can be imported here."""
    from importlib.util import module_from_spec, spec_from_file_location

    spec = spec_from_file_location("paceline " + name, Path(__file__).with_name(name))
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def replace(owner: "Any", name: str, make: "Callable[[Any], Any]") -> None:
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
            if not several(distribute_strategy):
                original(self, distribute_strategy, *args, **kwargs)
                return
            if first(distribute_strategy):
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
            if iterator is None or not several(self.distribute_strategy):
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

    replace(trainer.TFEpochIterator, "__init__", begin)
    replace(trainer.TFEpochIterator, "_get_iterator", again)
    replace(trainer.TensorFlowTrainer, "_maybe_symbolic_build", build)


def _local(spec: "Any") -> "Any":
    spec = getattr(spec, "_value_specs", (spec,))[0]
    return spec if hasattr(spec, "dtype") else None  # what stands for None has none


class Order:
    """The order of arrays that `fit` shuffles, the same on all workers: Keras' own differs between them, also with a
    seed, as iterators that it drops draw from it; then some examples are seen by two workers, and some by none.

    With a seed, it is that of the epoch: a fit that goes on in the middle sees what it would have seen.
    """

    epoch = 0  # the one that fit is in

    def __init__(self, adapter: "Any", strategy: "Any") -> None:
        import tensorflow as tf
        from tensorflow.python.eager import context

        seed = context.global_seed()
        if seed is None:
            seed = int.from_bytes(os.urandom(4), "big") if first(strategy) else 0
            seed = int(strategy.gather(tf.constant([seed], tf.int64), axis=0)[0])
        self.seed = seed
        self.size, self.batch = adapter._num_samples, adapter._batch_size

    def renew(self) -> None:
        import numpy as np

        self.rows = np.random.default_rng([self.seed, self.epoch]).permutation(self.size)

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
    if any(isinstance(value, array_slicing.TensorflowSparseWrapper) for value in tree.flatten(inputs)):
        return None
    inputs = tree.map_structure(tf.convert_to_tensor, tree.lists_to_tuples(inputs))
    iterator._paceline_order = order = Order(adapter, iterator._distribute_strategy)
    data = tf.data.Dataset.from_generator(order.batches, output_signature=tf.TensorSpec([None], tf.int64))
    chosen = tf.autograph.experimental.do_not_convert(
        lambda rows: tree.map_structure(lambda value: tf.gather(value, rows), inputs)
    )
    data = data.map(chosen)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    # The thread that tunes a pipeline may miss that it is over: training then stands still at the end of an epoch.
    options.autotune.enabled = False
    return data.prefetch(2).with_options(options)


# ---- steps: what they return is the same on all workers, and that of the whole batch


def _steps(trainer: "Any") -> None:
    import tensorflow as tf
    from keras.src import tree

    def whole(model: "Any", step_function: "Any") -> "Any":
        def one(data: "Any") -> "Any":
            leaves = [value for value in tree.flatten(data) if tf.is_tensor(value)]
            step.rows = tf.shape(leaves[0])[0] if leaves and leaves[0].shape.rank else tf.constant(1)
            try:
                outputs = step_function(data)
            finally:
                step.rows = None
            context = tf.distribute.get_replica_context()
            for results in (model.get_metrics_result, lambda: {each.name: each.result() for each in model.metrics}):
                if isinstance(outputs, dict) and outputs.keys() == results().keys():  # as Keras does after an epoch
                    return context.merge_call(lambda _, results=results: results())
            placed = tree.map_structure(lambda value: tf.identity(tf.convert_to_tensor(value)), outputs)
            return context.merge_call(mean, args=(placed,))

        return one

    def mean(strategy: "Any", outputs: "Any") -> "Any":
        return tree.map_structure(lambda value: strategy.reduce("MEAN", value, axis=None), outputs)

    def make(original: "Any") -> "Any":
        def _make_function(self: "Any", step_function: "Any") -> "Any":
            if not several(self.distribute_strategy):
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
            if reduction == "concat" or not several(strategy):
                return original(values, strategy, reduction)
            return tree.map_structure(lambda value: strategy.experimental_local_results(value)[0], values)

        return reduce_per_replica

    replace(trainer.TensorFlowTrainer, "_make_function", make)
    replace(trainer, "reduce_per_replica", reduce)
