"""The state of a TensorFlow program: copied out of training, written, compared with what a program has, put back.

Files of a snapshot: `ckpt.*`, a plain TensorFlow checkpoint; `more.*`, variables that TensorFlow does not find by
itself (Keras' seeds); `replicas.*`, values that each replica has for itself; `state.json`, everything else.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf

from paceline.runtime.misfits import Misfits, SnapshotMismatch, SnapshotRefused

MAIN, MORE, REPLICAS, STATE = "ckpt", "more", "replicas", "state.json"
_VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"
_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
_NOT_OURS = (_GRAPH, "save_counter" + _VALUE)  # of TensorFlow itself
_VARIABLES = (tf.Variable, tf.distribute.DistributedValues)


class Piece(NamedTuple):
    """A tensor of a file, or a part of one that is shared out over parameter servers."""

    file: str
    name: str
    part: str
    value: Any  # a tensor, or what reads one
    owner: Any


class Copy:
    """Values as they were; `drop` gives the memory back."""

    def __init__(self, pieces: list[Piece]) -> None:
        self._pieces = pieces

    def write(self, folder: Path) -> None:
        with tf.device(host()):  # a thread of its own begins without a device, which is another one in a cluster
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


class Plan:
    """What a checkpoint consists of: looking that up takes far longer than reading it, so it is kept."""

    def __init__(self, checkpoint: tf.train.Checkpoint) -> None:
        self.checkpoints = {MAIN: checkpoint}
        self.variables, more = variables(checkpoint)
        if more:
            self.checkpoints[MORE] = tf.train.Checkpoint(variables=more)
        self._pieces = [piece for file, each in self.checkpoints.items() for piece in _pieces(file, each)]
        self.same = not any(_already_read(piece.value) for piece in self._pieces if piece.name != _GRAPH)
        own = [piece for piece in self._pieces if _for_itself(piece.owner)]
        self.replicas = Replicas([plain(piece) for piece in own], [piece.owner for piece in own]) if own else None
        self._read = self._values
        if self.same:
            self._read = tf.function(self._values, autograph=False).get_concrete_function()

    def owners(self) -> dict[str, Any]:
        """By name, without what is TensorFlow's own."""
        return {plain(piece): piece for piece in self._pieces if piece.name not in _NOT_OURS}

    def words(self) -> dict[str, str | None]:
        """Kind and shape by name; None where they are not known without reading."""
        found: dict[str, str | None] = {}
        for name, piece in self.owners().items():
            shape = getattr(piece.owner, "shape", None)
            if shape is None or not piece.name.endswith(_VALUE):
                found[name] = None
            else:  # a part says how large the whole is, before where it lies in it
                whole = [int(size) for size in piece.part.split()[:-1]] if piece.part else shape.as_list()
                found[name] = _words(piece.owner.dtype, whole)
        return found

    def assign(self, folder: Path, names: set[str]) -> None:
        """These variables alone; what has no variable, such as a table, stays."""
        for piece in self._pieces:
            if plain(piece) in names and isinstance(piece.owner, _VARIABLES) and piece.name.endswith(_VALUE):
                with tf.device(host()):
                    (value,) = tf.raw_ops.RestoreV2(
                        prefix=str(folder / piece.file),
                        tensor_names=[piece.name],
                        shape_and_slices=[piece.part],
                        dtypes=[piece.owner.dtype],
                    )
                piece.owner.assign(value)

    def copy(self) -> Copy:
        pieces = [piece._replace(value=value, owner=None) for piece, value in zip(self._pieces, self._read())]
        if self.replicas is not None:
            pieces += [Piece(REPLICAS, name, "", value, None) for name, value in self.replicas.gather()]
        return Copy(pieces)

    def _values(self) -> list[Any]:
        with tf.device(host()):
            return [tf.identity(each.value if tf.is_tensor(each.value) else each.value.tensor) for each in self._pieces]


class State:
    """All variables that a checkpoint leads to, also those that TensorFlow does not find by itself."""

    def __init__(self, checkpoint: tf.train.Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._plan: Plan | None = None

    @property
    def strategy(self) -> Any:
        """That of the variables, where they have one."""
        for found in tf.train.TrackableView(self._checkpoint).descendants():
            found = _variable(found)
            public = isinstance(found, tf.distribute.DistributedValues)
            strategy = getattr(found, "distribute_strategy" if public else "_distribute_strategy", None)
            if strategy is not None:
                return strategy
        return tf.distribute.get_strategy()

    def settle(self) -> Plan:
        """From now on, this is what the state consists of."""
        if self._plan is None or not self._plan.same:
            self._plan = Plan(self._checkpoint)
        return self._plan

    def copy(self) -> Copy:
        """Of all values, in host memory. In a group, every member has to do this: some values are made by all of them.

        A tensor that was read from a variable never changes: TensorFlow gives a variable that is written to new memory
        while somebody holds the old. So what is on the CPU already is not copied here, but by the training step that
        writes to it, and never twice.
        """
        return self.settle().copy()

    def verify(self) -> None:
        """SnapshotMismatch where the program has made, replaced or lost variables since `settle`."""
        assert self._plan is not None
        before, now = self._plan.variables, variables(self._checkpoint)[0]
        changed = sorted({before.get(key) or now[key] for key in before.keys() ^ now.keys()})
        if changed:
            raise SnapshotMismatch(
                "made or replaced after restore() or the first snapshot, so that they cannot be restored: "
                f"{', '.join(changed)} (build model and optimizer before)"
            )

    def restore(self, folder: Path, names: set[str] | None = None) -> None:
        """All of it; or these variables, by `compare`."""
        plan = self.settle()
        options = tf.train.CheckpointOptions(experimental_io_device=host())  # not on the parameter servers
        if names is not None:
            plan.assign(folder, names)
        else:
            for file, checkpoint in plan.checkpoints.items():
                checkpoint.read(str(folder / file), options).assert_existing_objects_matched()
        own = plan.replicas
        if own is not None and _written(folder, REPLICAS) and (names is None or names.issuperset(own.names)):
            own.scatter(tf.train.load_checkpoint(str(folder / REPLICAS)))

    def rates(self) -> dict[str, Any]:
        """The learning rates of Keras' optimizers that are variables, by name."""
        found = self.settle().owners()
        return {name: piece.owner for name, piece in found.items() if name.endswith("/_learning_rate")}

    def compare(self, folder: Path, misfits: Misfits) -> set[str]:
        """What fits, by name."""
        here = self.settle().words()
        there: dict[str, str] = {}
        for file in (MAIN, MORE):
            if file == MAIN or _written(folder, file):
                reader = tf.train.load_checkpoint(str(folder / file))
                kinds = reader.get_variable_to_dtype_map()
                for name, shape in reader.get_variable_to_shape_map().items():
                    if name not in _NOT_OURS:
                        there[_plain(file, name)] = _words(kinds[name], shape)
        misfits.missing += sorted(here.keys() - there.keys())
        misfits.unexpected += sorted(there.keys() - here.keys())
        both = sorted(here.keys() & there.keys())
        return {name for name in both if here[name] is None or misfits.compare(name, there[name], here[name])}


class Replicas:
    """Variables of which each replica has its own value: checkpoints of TensorFlow hold but their sum or mean."""

    def __init__(self, names: list[str], variables: list[Any]) -> None:
        self.names = names
        self._variables = variables
        self._strategy = variables[0].distribute_strategy
        self._gather = tf.function(lambda: self._strategy.run(self._of_one), autograph=False)
        self._scatter = tf.function(lambda all: self._strategy.run(self._to_one, (all,)), autograph=False)

    def _of_one(self) -> Any:
        context = tf.distribute.get_replica_context()
        return [context.all_gather(variable.read_value()[tf.newaxis], axis=0) for variable in self._variables]

    def _to_one(self, values: Any) -> None:
        number = tf.distribute.get_replica_context().replica_id_in_sync_group
        for variable, value in zip(self._variables, values):
            variable.assign(tf.gather(value, number))

    def gather(self) -> Iterable[tuple[str, Any]]:
        values = [tf.identity(self._strategy.experimental_local_results(each)[0]) for each in self._gather()]
        return zip(self.names, values)

    def scatter(self, reader: Any) -> None:
        """To as many replicas as there were; with another number, the sum or mean stays, shared out."""
        values = [reader.get_tensor(name) for name in self.names if reader.has_tensor(name)]
        if len(values) == len(self.names) and len(values[0]) == self._strategy.num_replicas_in_sync:
            self._scatter(values)


def kept(folder: Path) -> dict[str, Any]:
    """What a snapshot holds besides variables."""
    try:
        found = json.loads((folder / STATE).read_text())
        return {"rates": {}, "settings": None, **{name: found[name] for name in ("step", "order", "random")}, **found}
    except (OSError, ValueError, KeyError, TypeError) as error:
        told = f"{folder} holds no {STATE} of ours: it was not written by paceline.tensorflow"
        raise SnapshotRefused(told) from error


def host() -> str:
    """The CPU of this process, also where it is one of a cluster."""
    return str(tf.config.list_logical_devices("CPU")[0].name)


def _pieces(file: str, checkpoint: tf.train.Checkpoint) -> Iterator[Piece]:
    """What the checkpoint would write."""
    tensors, _, savers, _ = checkpoint._saver._gather_serialized_tensors()
    if savers:
        raise TypeError(f"these write themselves, and not into snapshots: {', '.join(map(str, savers))}")
    for owner, values in tensors.items():
        for name, value in values.items():
            for part, spec in (value if isinstance(value, dict) else {"": value}).items():
                yield Piece(file, name, part.strip(), spec, _variable(owner))


def _variable(found: Any) -> Any:
    """The variable of TensorFlow inside one of Keras, or inside what writes one.

    A variable of several replicas is asked for nothing that it may not have: it would read its value to answer, and
    wait for all other workers to do so.
    """
    if isinstance(found, _VARIABLES):
        return found
    found = getattr(found, "obj", found)
    inner = getattr(found, "_value", None) if not isinstance(found, _VARIABLES) and hasattr(found, "path") else None
    return found if inner is None else inner


def _already_read(value: Any) -> bool:
    """Tables and iterators have no variable to read again."""
    return bool(tf.is_tensor(value)) and not isinstance(value, _VARIABLES)


def _for_itself(owner: Any) -> bool:
    return (
        isinstance(owner, tf.distribute.DistributedValues)
        and getattr(owner, "synchronization", None) == tf.VariableSynchronization.ON_READ
        and owner.distribute_strategy.num_replicas_in_sync > 1
    )


def variables(checkpoint: tf.train.Checkpoint) -> tuple[dict[int, str], list[Any]]:
    """Names of all variables by id, and those that Keras' layers have and TensorFlow does not find: their seeds.

    Reads no values, unlike TensorFlow when it makes a list of what it would write.
    """
    objects = tf.train.TrackableView(checkpoint).descendants()
    seen = {id(_variable(each)): str(each.name) for each in objects if isinstance(_variable(each), _VARIABLES)}
    more = []
    for each in objects:
        if isinstance(_variable(each), _VARIABLES):
            continue
        for variable in _hidden(each):
            if id(_variable(variable)) not in seen:
                seen[id(_variable(variable))] = str(variable.name)
                more.append(variable)
    return seen, more


def _hidden(layer: Any) -> list[Any]:
    """What a layer has, and TensorFlow does not find: of Keras 3, all its variables but metrics; of tf_keras, what it
    draws random numbers from, after `tf_keras.backend.experimental.enable_tf_random_generator`."""
    kind: Any = getattr(getattr(sys.modules.get("keras"), "layers", None), "Layer", ())
    if isinstance(layer, kind):
        passing = {id(variable) for variable in getattr(layer, "metrics_variables", ())}
        return [variable for variable in layer.variables if id(variable) not in passing]
    generator = getattr(getattr(layer, "_random_generator", None), "_generator", None)
    return [generator.state] if isinstance(generator, tf.random.Generator) else []


def _words(dtype: Any, shape: list[int]) -> str:
    return f"{tf.as_dtype(dtype).name}{shape}"


def plain(piece: Piece) -> str:
    return _plain(piece.file, piece.name)


def _plain(file: str, name: str) -> str:
    return (name if file == MAIN else f"{file}/{name}").replace(_VALUE, "")


def _written(folder: Path, file: str) -> bool:
    return (folder / f"{file}.index").exists()
