"""Exports a TensorFlow model as a SavedModel: inference only, with named inputs, for batches of any size."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Callable

import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

from paceline.runtime import model_folder
from paceline.runtime.model_folder import DEFAULT, CannotExport

_DEFAULT_INPUT = "inputs"  # the name of an input that has none


def export(model: Any, inputs: Any = None, signatures: Mapping[str, Any] | None = None, to: Any = None) -> Path:
    """Write the model to the folder of `paceline export`, or to `to`, a new or empty folder; return that folder.

    A Keras model with known inputs needs nothing else; it is called with `training=False`. For other models, `inputs`
    describes the inputs of one call: `{name: example}` or one example, whose first dimension is the batch size and
    stays variable; or `tf.TensorSpec`, which is used unchanged.

    `signatures`: `{name: function}` instead of calling the model. Each is a `tf.function` with an `input_signature`, or
    takes `inputs` by name; it returns one tensor, or `{name: tensor}`. It may only use variables and tables that are
    reachable from `model`. Clients that name no signature get `serving_default`; if there is none, the first signature
    is used for it.
    """
    folder = model_folder.target(to)
    functions = dict(signatures) if signatures else {DEFAULT: _call(model)}
    specs = None if inputs is None else _specs(inputs)
    traced = {}
    for name, function in functions.items():
        traced[name] = _trace(name, function, specs if signatures or specs else dict(_model_inputs(model)))
    if DEFAULT not in traced:
        traced = {DEFAULT: next(iter(traced.values())), **traced}
    # Not the model itself: that would include its optimizer.
    root = tf.Module()
    root.variables_ = [variable for function in traced.values() for variable in function.variables]
    objects = tf.train.TrackableView(model).descendants() if _is_trackable(model) else []
    root.resources = [each for each in objects if isinstance(each, tf.saved_model.experimental.TrackableResource)]
    options = tf.saved_model.SaveOptions(experimental_custom_gradients=False)
    tf.saved_model.save(root, os.fspath(folder), traced, options)
    model_folder.describe(folder, "saved_model", describe(folder))
    return folder


def describe(folder: Any) -> dict[str, Any]:
    """The signatures of any SavedModel, in the form of paceline.json. The model is not loaded."""
    saved = saved_model_pb2.SavedModel()
    saved.ParseFromString((Path(folder) / "saved_model.pb").read_bytes())
    return {
        name: {"inputs": _tensors(each.inputs), "outputs": _tensors(each.outputs)}
        for name, each in sorted(saved.meta_graphs[0].signature_def.items())
        if not name.startswith("__")
    }


def _tensors(infos: Any) -> dict[str, Any]:
    tensors = {}
    for name, each in sorted(infos.items()):
        shape = [] if each.tensor_shape.unknown_rank else [dimension.size for dimension in each.tensor_shape.dim]
        tensors[name] = model_folder.tensor(tf.as_dtype(each.dtype).name, shape)
    return tensors


def _specs(inputs: Any) -> dict[str, tf.TensorSpec]:
    named = inputs if isinstance(inputs, Mapping) else {_DEFAULT_INPUT: inputs}
    return {name: _spec(name, value) for name, value in named.items()}


def _spec(name: str, value: Any) -> tf.TensorSpec:
    if isinstance(value, tf.TensorSpec):
        return tf.TensorSpec(value.shape, value.dtype, name)
    tensor = tf.convert_to_tensor(value)
    if not tensor.shape.rank:
        raise CannotExport(f"the example of {name} is a single value; pass a batch, or a tf.TensorSpec")
    return tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype, name)


def _trace(name: str, function: Any, specs: Mapping[str, tf.TensorSpec] | None) -> Any:
    if hasattr(function, "structured_input_signature"):  # already a concrete function
        return function
    if getattr(function, "input_signature", None) is not None:
        return function.get_concrete_function()
    if not specs:
        raise CannotExport(
            f"the inputs of {name} are unknown; pass inputs={{name: an example or a tf.TensorSpec}}, or a tf.function "
            "with an input_signature"
        )
    return tf.function(function, autograph=not hasattr(function, "python_function")).get_concrete_function(**specs)


def _call(model: Any) -> Callable[..., Any]:
    """A function that calls the model with named inputs."""
    keras = _is_keras(model)
    arguments = {"training": False} if keras else {}
    structure = _structure(model) if keras else None

    def call(**inputs: Any) -> Any:
        values = list(inputs.values())
        if isinstance(structure, Mapping):
            return model(inputs, **arguments)
        if len(values) == 1:
            return model(values[0], **arguments)
        return model(values, **arguments) if structure is not None else model(**inputs, **arguments)

    return call


def _model_inputs(model: Any) -> Iterator[tuple[str, tf.TensorSpec]]:
    """The inputs of a Keras model, if it knows them."""
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
    except (AttributeError, ValueError):  # a subclass, which may accept any inputs
        inputs = getattr(model, "inputs", None)  # a Sequential of Keras 3 has only this attribute
        return inputs[0] if inputs and len(inputs) == 1 else None


def _name(tensor: Any, number: int, count: int) -> str:
    name = re.sub(r"\W", "_", str(tensor.name).split(":")[0])
    if not name.startswith("keras_tensor"):
        return name
    return _DEFAULT_INPUT if count == 1 else f"{_DEFAULT_INPUT}_{number}"


def _is_keras(model: Any) -> bool:
    return any(kind.__module__.split(".")[0] in ("keras", "tf_keras") for kind in type(model).__mro__)


def _is_trackable(model: Any) -> bool:
    return isinstance(model, (tf.Module, tf.train.Checkpoint)) or hasattr(model, "_trackable_children")
