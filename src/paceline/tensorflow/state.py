"""The state of a TensorFlow program: copied during training, written, compared with a program's variables, restored.

Files of a snapshot: `ckpt.*`, a plain TensorFlow checkpoint; `more.*`, variables that TensorFlow does not track
(Keras' seeds); `replicas.*`, values that differ between replicas; `state.json`, everything else.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.python.checkpoint.functional_saver import MultiDeviceSaver
from tensorflow.python.util.object_identity import ObjectIdentityDictionary

from paceline.runtime.snapshot_mismatches import Mismatches, SnapshotMismatch, SnapshotRefused

MAIN, MORE, REPLICAS, STATE = "ckpt", "more", "replicas", "state.json"
_VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"
_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
_COUNTER = "save_counter"  # of TensorFlow itself; restored if both the program and the snapshot have it
_BATCH = 64 << 20  # bytes to restore at once, per core; TensorFlow reads tensors of this size or more in parallel
_VARIABLES = (tf.Variable, tf.distribute.DistributedValues)


class Piece(NamedTuple):
    """A tensor of a file, or one part of a tensor that is partitioned over parameter servers."""

    file: str
    name: str
    part: str
    value: Any  # a tensor, or a spec that reads one
    owner: Any


class Copy:
    """A copy of the values; `drop` frees the memory."""

    def __init__(self, pieces: list[Piece]) -> None:
        self._pieces = pieces

    def write(self, folder: Path) -> None:
        with tf.device(host()):  # a new thread has no current device, and in a cluster the default is another one
            for file in sorted({piece.file for piece in self._pieces}):
                pieces = [piece for piece in self._pieces if piece.file == file]
                tf.raw_ops.SaveV2(
                    prefix=str(folder / file),
                    tensor_names=[piece.name for piece in pieces],
                    shape_and_slices=[piece.part for piece in pieces],
                    tensors=[piece.value for piece in pieces],
                )
        (folder / "checkpoint").write_text(f'model_checkpoint_path: "{MAIN}"\n')  # for tf.train.latest_checkpoint

    def drop(self) -> None:
        self._pieces.clear()


class CheckpointLayout:
    """What a checkpoint consists of. It is cached: determining it takes far longer than reading the values."""

    def __init__(self, checkpoint: tf.train.Checkpoint) -> None:
        self.checkpoints = {MAIN: checkpoint}
        self.variables, more = variables(checkpoint)
        if more:
            self.checkpoints[MORE] = tf.train.Checkpoint(variables=more)
        self._objects = {file: _tensors_by_object(each) for file, each in self.checkpoints.items()}
        self._pieces = [
            piece
            for file, objects in self._objects.items()
            for trackable, tensors in objects.items()
            for piece in _pieces(file, trackable, tensors)
        ]
        self.reusable = not any(_already_read(piece.value) for piece in self._pieces if piece.name != _GRAPH)
        own = [piece for piece in self._pieces if _differs_per_replica(piece.owner)]
        self.replicas = Replicas([plain(piece) for piece in own], [piece.owner for piece in own]) if own else None

    def pieces_by_name(self) -> dict[str, Any]:
        """Without the description that TensorFlow adds."""
        return {plain(piece): piece for piece in self._pieces if piece.name != _GRAPH}

    def types_and_shapes(self) -> dict[str, str | None]:
        """Type and shape by name; None if they cannot be determined without reading the value."""
        descriptions: dict[str, str | None] = {}
        for name, piece in self.pieces_by_name().items():
            shape = getattr(piece.owner, "shape", None)
            if shape is None or not piece.name.endswith(_VALUE):
                descriptions[name] = None
            else:  # a part starts with the shape of the whole tensor, followed by its slice
                whole = [int(size) for size in piece.part.split()[:-1]] if piece.part else shape.as_list()
                descriptions[name] = _type_and_shape(piece.owner.dtype, whole)
        return descriptions

    def restore(self, folder: Path, names: set[str]) -> None:
        """Restores the variables with these names; other objects, such as tables, stay unchanged.

        In batches, which reuse the memory of the values that earlier batches have replaced: to get new memory for all
        values takes as long as to read them.
        """
        options = tf.train.CheckpointOptions(experimental_io_device=host())  # not on the parameter servers
        for file, objects in self._objects.items():
            for batch in _batches(file, objects, names):
                MultiDeviceSaver(batch).restore(str(folder / file), options)

    def copy(self) -> Copy:
        pieces = [piece._replace(value=value, owner=None) for piece, value in zip(self._pieces, self._read())]
        if self.replicas is not None:
            pieces += [Piece(REPLICAS, name, "", value, None) for name, value in self.replicas.gather()]
        return Copy(pieces)

    @functools.cached_property
    def _read(self) -> Any:
        """Returns all values. Traced on first use, so that restoring does not wait for it."""
        return tf.function(self._values, autograph=False).get_concrete_function() if self.reusable else self._values

    def _values(self) -> list[Any]:
        with tf.device(host()):
            return [tf.identity(each.value if tf.is_tensor(each.value) else each.value.tensor) for each in self._pieces]


class State:
    """All variables reachable from a checkpoint, including those that TensorFlow does not track."""

    def __init__(self, checkpoint: tf.train.Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._cached_layout: CheckpointLayout | None = None

    @property
    def strategy(self) -> Any:
        """The strategy of the variables, if they have one."""
        for trackable in tf.train.TrackableView(self._checkpoint).descendants():
            variable = _variable(trackable)
            public = isinstance(variable, tf.distribute.DistributedValues)
            strategy = getattr(variable, "distribute_strategy" if public else "_distribute_strategy", None)
            if strategy is not None:
                return strategy
        return tf.distribute.get_strategy()

    def layout(self) -> CheckpointLayout:
        """What the state consists of, as determined by the first call, if possible."""
        if self._cached_layout is None or not self._cached_layout.reusable:
            self._cached_layout = CheckpointLayout(self._checkpoint)
        return self._cached_layout

    def copy(self) -> Copy:
        """A copy of all values, in host memory. In a group, every member must call it: some values need a collective.

        A tensor that was read from a variable never changes: while it is in use, TensorFlow writes new values of the
        variable to new memory. So values that are already on the CPU are not copied here, but by the training step that
        writes to the variable, and never twice.
        """
        return self.layout().copy()

    def verify(self) -> None:
        """Raises SnapshotMismatch if the program has created, replaced or deleted variables since `layout`."""
        assert self._cached_layout is not None
        before, now = self._cached_layout.variables, variables(self._checkpoint)[0]
        changed = sorted({before.get(key) or now[key] for key in before.keys() ^ now.keys()})
        if changed:
            raise SnapshotMismatch(
                "variables were created or replaced after restore() or the first snapshot, and cannot be restored: "
                f"{', '.join(changed)}; build model and optimizer before"
            )

    def restore(self, folder: Path, names: set[str], partial: bool) -> None:
        """`names`: those that fit, as returned by `compare`. `partial`: there are others, which stay unchanged."""
        layout = self.layout()
        if layout.reusable or partial:
            layout.restore(folder, names)
        else:
            options = tf.train.CheckpointOptions(experimental_io_device=host())
            for file, checkpoint in layout.checkpoints.items():
                checkpoint.read(str(folder / file), options).assert_existing_objects_matched()
        own = layout.replicas
        if own is not None and _exists(folder, REPLICAS) and names.issuperset(own.names):
            own.scatter(tf.train.load_checkpoint(str(folder / REPLICAS)))

    def learning_rates(self) -> dict[str, Any]:
        """The learning rates of Keras' optimizers that are variables, by name."""
        pieces = self.layout().pieces_by_name()
        return {name: piece.owner for name, piece in pieces.items() if name.endswith("/_learning_rate")}

    def compare(self, folder: Path, mismatches: Mismatches) -> set[str]:
        """The names of the variables that fit."""
        ours = self.layout().types_and_shapes()
        theirs: dict[str, str] = {}
        for file in (MAIN, MORE):
            if file == MAIN or _exists(folder, file):
                reader = tf.train.load_checkpoint(str(folder / file))
                dtypes = reader.get_variable_to_dtype_map()
                for name, shape in reader.get_variable_to_shape_map().items():
                    if name != _GRAPH:
                        theirs[_plain(file, name)] = _type_and_shape(dtypes[name], shape)
        mismatches.missing += sorted(ours.keys() - theirs.keys() - {_COUNTER})
        mismatches.unexpected += sorted(theirs.keys() - ours.keys() - {_COUNTER})
        both = sorted(ours.keys() & theirs.keys())
        return {name for name in both if ours[name] is None or mismatches.compare(name, theirs[name], ours[name])}


class Replicas:
    """Variables with a separate value per replica: TensorFlow's checkpoints contain only their sum or mean."""

    def __init__(self, names: list[str], variables: list[Any]) -> None:
        self.names = names
        self._variables = variables
        self._strategy = variables[0].distribute_strategy
        self._gather = tf.function(lambda: self._strategy.run(self._gather_in_replica), autograph=False)
        self._scatter = tf.function(
            lambda values: self._strategy.run(self._assign_in_replica, (values,)), autograph=False
        )

    def _gather_in_replica(self) -> Any:
        context = tf.distribute.get_replica_context()
        return [context.all_gather(variable.read_value()[tf.newaxis], axis=0) for variable in self._variables]

    def _assign_in_replica(self, values: Any) -> None:
        number = tf.distribute.get_replica_context().replica_id_in_sync_group
        for variable, value in zip(self._variables, values):
            variable.assign(tf.gather(value, number))

    def gather(self) -> Iterable[tuple[str, Any]]:
        values = [tf.identity(self._strategy.experimental_local_results(each)[0]) for each in self._gather()]
        return zip(self.names, values)

    def scatter(self, reader: Any) -> None:
        """Restores each replica's value; with another number of replicas, they keep the restored sum or mean."""
        values = [reader.get_tensor(name) for name in self.names if reader.has_tensor(name)]
        if len(values) == len(self.names) and len(values[0]) == self._strategy.num_replicas_in_sync:
            self._scatter(values)


def read_metadata(folder: Path) -> dict[str, Any]:
    """The contents of a snapshot besides variables."""
    try:
        data = json.loads((folder / STATE).read_text())
        return {"rates": {}, "settings": None, **{name: data[name] for name in ("step", "order", "random")}, **data}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        message = f"{folder}: no valid {STATE}: the snapshot was not written by paceline.tensorflow"
        raise SnapshotRefused(message) from error


def host() -> str:
    """The CPU device of this process, even if it is part of a cluster."""
    return str(tf.config.list_logical_devices("CPU")[0].name)


def _tensors_by_object(checkpoint: tf.train.Checkpoint) -> Any:
    """What the checkpoint would write: object -> name -> a tensor, or a spec that reads one, or a dict of its parts."""
    tensors, _, savers, _ = checkpoint._saver._gather_serialized_tensors()
    if savers:
        raise TypeError(f"objects with their own saver are not supported in snapshots: {', '.join(map(str, savers))}")
    return tensors


def _pieces(file: str, trackable: Any, tensors: Any) -> Iterator[Piece]:
    for name, value in tensors.items():
        for part, spec in (value if isinstance(value, dict) else {"": value}).items():
            yield Piece(file, name, part.strip(), spec, _variable(trackable))


def _batches(file: str, objects: Any, names: set[str]) -> Iterator[Any]:
    """The objects whose tensors have these names, with their tensors; without tables and other objects whose values
    are not variables."""
    batch, size = ObjectIdentityDictionary(), 0
    for trackable, tensors in objects.items():
        pieces = list(_pieces(file, trackable, tensors))
        if not pieces or any(plain(piece) not in names or _already_read(piece.value) for piece in pieces):
            continue
        batch[trackable] = tensors
        size += _size(pieces[0].owner)
        if size >= _BATCH * (os.cpu_count() or 1):
            yield batch
            batch, size = ObjectIdentityDictionary(), 0
    if batch:
        yield batch


def _size(variable: Any) -> int:
    """In bytes, if known."""
    shape = getattr(variable, "shape", None)
    return 0 if shape is None else (shape.num_elements() or 0) * variable.dtype.size


def _variable(trackable: Any) -> Any:
    """The TensorFlow variable inside a Keras variable, or inside a saveable object.

    Avoids looking up missing attributes of a distributed variable: it would read its value to answer, and wait for all
    other workers to do so.
    """
    if isinstance(trackable, _VARIABLES):
        return trackable
    trackable = getattr(trackable, "obj", trackable)
    is_keras = not isinstance(trackable, _VARIABLES) and hasattr(trackable, "path")
    inner = getattr(trackable, "_value", None) if is_keras else None
    return trackable if inner is None else inner


def _already_read(value: Any) -> bool:
    """Whether it is a plain value, as of tables and iterators, and not a variable that can be read again."""
    return bool(tf.is_tensor(value)) and not isinstance(value, _VARIABLES)


def _differs_per_replica(owner: Any) -> bool:
    return (
        isinstance(owner, tf.distribute.DistributedValues)
        and getattr(owner, "synchronization", None) == tf.VariableSynchronization.ON_READ
        and owner.distribute_strategy.num_replicas_in_sync > 1
    )


def variables(checkpoint: tf.train.Checkpoint) -> tuple[dict[int, str], list[Any]]:
    """Names of all variables by id, and the variables of Keras' layers that TensorFlow does not track: their seeds.

    Reads no values, unlike TensorFlow's own listing of what it would write.
    """
    objects = tf.train.TrackableView(checkpoint).descendants()
    names = {id(_variable(each)): str(each.name) for each in objects if isinstance(_variable(each), _VARIABLES)}
    untracked = []
    for each in objects:
        if isinstance(_variable(each), _VARIABLES):
            continue
        for variable in _layer_variables(each):
            if id(_variable(variable)) not in names:
                names[id(_variable(variable))] = str(variable.name)
                untracked.append(variable)
    return names, untracked


def _layer_variables(layer: Any) -> list[Any]:
    """Variables of a layer that TensorFlow may not track: in Keras 3, all but metrics; in tf_keras, its random
    generator, after `tf_keras.backend.experimental.enable_tf_random_generator`."""
    layer_class: Any = getattr(getattr(sys.modules.get("keras"), "layers", None), "Layer", ())
    if isinstance(layer, layer_class):
        metrics = {id(variable) for variable in getattr(layer, "metrics_variables", ())}
        return [variable for variable in layer.variables if id(variable) not in metrics]
    generator = getattr(getattr(layer, "_random_generator", None), "_generator", None)
    return [generator.state] if isinstance(generator, tf.random.Generator) else []


def _type_and_shape(dtype: Any, shape: list[int]) -> str:
    return f"{tf.as_dtype(dtype).name}{shape}"


def plain(piece: Piece) -> str:
    return _plain(piece.file, piece.name)


def _plain(file: str, name: str) -> str:
    return (name if file == MAIN else f"{file}/{name}").replace(_VALUE, "")


def _exists(folder: Path, file: str) -> bool:
    return (folder / f"{file}.index").exists()
