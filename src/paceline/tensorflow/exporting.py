"""A model of TensorFlow as a SavedModel: inference alone, by named inputs, for batches of any size."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Callable

import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

from paceline.runtime import exporting
from paceline.runtime.exporting import DEFAULT, CannotExport

_ONE = "inputs"  # the name of an input that has none


def export(model: Any, inputs: Any = None, signatures: Mapping[str, Any] | None = None, to: Any = None) -> Path:
    """Writes the model to the folder of `paceline export`, or to `to`, which is new or empty; gives that folder.

    A Keras model that knows its inputs needs nothing else; it is called with `training=False`. For others, `inputs`
    says what one call takes: `{name: example}` or one example, of which the first dimension is that of the batch and
    stays free; or `tf.TensorSpec`, which is taken as it is.

    `signatures`: `{name: function}` instead of the model's call. Each is a `tf.function` with an `input_signature`, or
    takes `inputs` by name; what it gives is one tensor, or `{name: tensor}`. It may use the variables and tables that
    `model` leads to, and no others. Whoever names no signature is given `serving_default`: where there is none, the
    first.
    """
    folder = exporting.target(to)
    given = dict(signatures) if signatures else {DEFAULT: _call(model)}
    specs = None if inputs is None else _specs(inputs)
    traced = {}
    for name, function in given.items():
        traced[name] = _traced(name, function, specs if signatures or specs else dict(_known(model)))
    if DEFAULT not in traced:
        traced = {DEFAULT: next(iter(traced.values())), **traced}
    # Not the model itself: that would bring its optimizer along.
    root = tf.Module()
    root.variables_ = [variable for function in traced.values() for variable in function.variables]
    found = tf.train.TrackableView(model).descendants() if _trackable(model) else []
    root.resources = [each for each in found if isinstance(each, tf.saved_model.experimental.TrackableResource)]
    options = tf.saved_model.SaveOptions(experimental_custom_gradients=False)
    tf.saved_model.save(root, os.fspath(folder), traced, options)
    exporting.describe(folder, "saved_model", describe(folder))
    return folder


def describe(folder: Any) -> dict[str, Any]:
    """The signatures of any SavedModel, as paceline.json has them. Nothing of it is loaded."""
    saved = saved_model_pb2.SavedModel()
    saved.ParseFromString((Path(folder) / "saved_model.pb").read_bytes())
    return {
        name: {"inputs": _tensors(each.inputs), "outputs": _tensors(each.outputs)}
        for name, each in sorted(saved.meta_graphs[0].signature_def.items())
        if not name.startswith("__")
    }


def _tensors(given: Any) -> dict[str, Any]:
    found = {}
    for name, each in sorted(given.items()):
        shape = [] if each.tensor_shape.unknown_rank else [dimension.size for dimension in each.tensor_shape.dim]
        found[name] = exporting.tensor(tf.as_dtype(each.dtype).name, shape)
    return found


def _specs(inputs: Any) -> dict[str, tf.TensorSpec]:
    named = inputs if isinstance(inputs, Mapping) else {_ONE: inputs}
    return {name: _spec(name, value) for name, value in named.items()}


def _spec(name: str, value: Any) -> tf.TensorSpec:
    if isinstance(value, tf.TensorSpec):
        return tf.TensorSpec(value.shape, value.dtype, name)
    tensor = tf.convert_to_tensor(value)
    if not tensor.shape.rank:
        raise CannotExport(f"the example of {name} is one number: give a batch of them, or a tf.TensorSpec")
    return tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype, name)


def _traced(name: str, function: Any, specs: Mapping[str, tf.TensorSpec] | None) -> Any:
    if hasattr(function, "structured_input_signature"):  # concrete already
        return function
    if getattr(function, "input_signature", None) is not None:
        return function.get_concrete_function()
    if not specs:
        raise CannotExport(
            f"nothing says what {name} takes: give inputs={{name: an example or a tf.TensorSpec}}, or a tf.function "
            "with an input_signature"
        )
    return tf.function(function, autograph=not hasattr(function, "python_function")).get_concrete_function(**specs)


def _call(model: Any) -> Callable[..., Any]:
    """By named inputs."""
    keras = _is_keras(model)
    more = {"training": False} if keras else {}
    structure = _structure(model) if keras else None

    def call(**inputs: Any) -> Any:
        values = list(inputs.values())
        if isinstance(structure, Mapping):
            return model(inputs, **more)
        if len(values) == 1:
            return model(values[0], **more)
        return model(values, **more) if structure is not None else model(**inputs, **more)

    return call


def _known(model: Any) -> Iterator[tuple[str, tf.TensorSpec]]:
    """What a Keras model takes, where it knows."""
    structure = _structure(model) if _is_keras(model) else None
    if structure is None:
        return
    if isinstance(structure, Mapping):
        named = dict(structure)
    else:
        tensors = list(structure) if isinstance(structure, (list, tuple)) else [structure]
        named = {_name(tensor, number, len(tensors)): tensor for number, tensor in enumerate(tensors)}
    for name, tensor in named.items():
        yield name, tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype, name)


def _structure(model: Any) -> Any:
    try:
        return model.input
    except (AttributeError, ValueError):  # made by a subclass, which takes what it likes
        known = getattr(model, "inputs", None)  # but a Sequential of Keras 3 has these alone
        return known[0] if known and len(known) == 1 else None


def _name(tensor: Any, number: int, of: int) -> str:
    name = re.sub(r"\W", "_", str(tensor.name).split(":")[0])
    if not name.startswith("keras_tensor"):
        return name
    return _ONE if of == 1 else f"{_ONE}_{number}"


def _is_keras(model: Any) -> bool:
    return any(kind.__module__.split(".")[0] in ("keras", "tf_keras") for kind in type(model).__mro__)


def _trackable(model: Any) -> bool:
    return isinstance(model, (tf.Module, tf.train.Checkpoint)) or hasattr(model, "_trackable_children")
