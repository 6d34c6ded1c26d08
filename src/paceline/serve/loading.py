"""Loads an exported model: a SavedModel, a .pt2 or StableHLO. No code of the archive is run but what its format is.

Each is looked at before: paceline.serve.saved_models, paceline.torch.archive, paceline.jax.archive.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from paceline.runtime.exporting import ABOUT, FILES
from paceline.serve import saved_models
from paceline.serve.signatures import STRING, Arrays, Signature, Tensor, read


class CannotLoad(Exception):
    """The text says why."""


@dataclass(frozen=True)
class Model:
    version: int
    format: str
    signatures: Mapping[str, Signature]
    calls: Mapping[str, Callable[[Arrays], Arrays]]


def load(folder: Path, version: int) -> Model:
    described = _described(folder)
    if (folder / FILES["saved_model"]).is_file():
        return _saved_model(folder, version)
    if (folder / FILES["pt2"]).is_file():
        return _pt2(folder, version, described)
    if (folder / FILES["stablehlo"]).is_file():
        return _stablehlo(folder, version, described)
    raise CannotLoad(f"{folder} holds no model: none of {', '.join(FILES.values())}")


def _described(folder: Path) -> dict[str, Signature]:
    path = folder / ABOUT
    if not path.is_file():
        return {}
    try:
        return read(json.loads(path.read_text())["signatures"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CannotLoad(f"{path} is damaged: {error!r}") from None


# ---- TensorFlow


def _saved_model(folder: Path, version: int) -> Model:
    try:
        import tensorflow as tf
    except ImportError:
        raise CannotLoad(f"{folder} is a SavedModel, and this Python has no tensorflow") from None
    if why := saved_models.wrong(folder):
        raise CannotLoad(f"{folder} {why}")
    loaded = tf.saved_model.load(str(folder))
    signatures: dict[str, Signature] = {}
    calls: dict[str, Callable[[Arrays], Arrays]] = {}
    for name, function in loaded.signatures.items():
        specs = function.structured_input_signature[1]
        signatures[name] = Signature(_tensors(tf, specs), _tensors(tf, function.structured_outputs))
        calls[name] = partial(_call_tensorflow, tf, loaded, function, specs)
    if not signatures:
        raise CannotLoad(f"{folder} has no signatures: nothing says what it takes")
    return Model(version, "saved_model", signatures, calls)


def _tensors(tf: Any, specs: Mapping[str, Any]) -> dict[str, Tensor]:
    made = {}
    for name, spec in sorted(specs.items()):
        shape = None if spec.shape.rank is None else tuple(-1 if size is None else int(size) for size in spec.shape)
        made[name] = Tensor(STRING if spec.dtype == tf.string else spec.dtype.name, shape)
    return made


def _call_tensorflow(tf: Any, loaded: Any, function: Any, specs: Mapping[str, Any], inputs: Arrays) -> Arrays:
    # `loaded` is held: a function does not hold the variables that it uses.
    given = {name: tf.constant(value, dtype=specs[name].dtype) for name, value in inputs.items()}
    return {name: _numpy(tf, value) for name, value in sorted(function(**given).items())}


def _numpy(tf: Any, value: Any) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = (tf.cast(value, tf.float32) if value.dtype == tf.bfloat16 else value).numpy()
    return np.asarray(array)


# ---- torch and JAX


def _pt2(folder: Path, version: int, described: Mapping[str, Signature]) -> Model:
    try:
        import torch

        from paceline.torch import exporting
    except ImportError:
        raise CannotLoad(f"{folder} holds model.pt2, and this Python has no torch") from None
    name, signature = _one(folder, described)
    call = partial(_call_torch, torch, exporting.load(folder), signature)
    return Model(version, "pt2", {name: signature}, {name: call})


def _call_torch(torch: Any, module: Any, signature: Signature, inputs: Arrays) -> Arrays:
    types = {name: getattr(torch, tensor.dtype) for name, tensor in signature.inputs.items()}
    # A copy: what came from JSON may be read-only, which torch does not know.
    given = {name: torch.from_numpy(value.copy()).to(types[name]) for name, value in inputs.items()}
    with torch.inference_mode():
        got = module(**given)
    values = [got[name] for name in signature.outputs] if isinstance(got, Mapping) else got
    values = values if isinstance(values, list | tuple) else [values]
    return {
        name: (value.float() if value.dtype == torch.bfloat16 else value).numpy(force=True)
        for name, value in zip(signature.outputs, values, strict=True)
    }


def _stablehlo(folder: Path, version: int, described: Mapping[str, Signature]) -> Model:
    try:
        from paceline.jax import exporting
    except ImportError:
        raise CannotLoad(f"{folder} holds model.stablehlo, and this Python has no jax") from None
    name, signature = _one(folder, described)
    call = partial(_call_jax, exporting.load(folder), signature)
    return Model(version, "stablehlo", {name: signature}, {name: call})


def _call_jax(function: Callable[[Arrays], Mapping[str, Any]], signature: Signature, inputs: Arrays) -> Arrays:
    # XLA compiles for each number of rows: with powers of 2 these are few.
    rows = next((each.shape[0] for each in inputs.values()), 0) if signature.joins else 0
    more = (1 << (rows - 1).bit_length()) - rows if rows else 0
    if more:
        inputs = {name: np.concatenate([each, each[-1:].repeat(more, axis=0)]) for name, each in inputs.items()}
    got = {name: np.asarray(value) for name, value in function(inputs).items()}
    wide = {name: each.astype("float32") if each.dtype.name == "bfloat16" else each for name, each in got.items()}
    return {name: each[:rows] for name, each in wide.items()} if more else wide


def _one(folder: Path, described: Mapping[str, Signature]) -> tuple[str, Signature]:
    if len(described) != 1:
        raise CannotLoad(f"{folder}/paceline.json must describe the one signature of the model")
    return next(iter(described.items()))


# ---- before it is used


def warm(model: Model) -> None:
    """Calls each signature once, so that the first request does not wait for what the first call costs."""
    for name, signature in model.signatures.items():
        if any(each.shape is None or each.dtype == STRING for each in signature.inputs.values()):
            continue
        sizes = {
            each: tuple(1 if size == -1 else size for size in signature.inputs[each].shape or ())
            for each in signature.inputs
        }
        types = {
            each: "float32" if tensor.dtype == "bfloat16" else tensor.dtype for each, tensor in signature.inputs.items()
        }
        try:
            model.calls[name]({each: np.zeros(sizes[each], types[each]) for each in signature.inputs})
        except Exception:
            continue  # zeros may be no input for it
