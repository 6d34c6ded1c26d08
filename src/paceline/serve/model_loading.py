"""Loads an exported model: a SavedModel, a .pt2 or StableHLO. Runs only the operators of the format, no other code.

Checked before loading by: paceline.serve.saved_model_safety, paceline.torch.model_safety, paceline.jax.model_safety.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from paceline.runtime.model_folder import ABOUT, FILES
from paceline.serve import saved_model_safety
from paceline.serve.signatures import STRING, Arrays, Signature, Tensor, read
from paceline.storage.json_values import read_json


class CannotLoad(Exception):
    """The model cannot be loaded; the message says why."""


@dataclass(frozen=True)
class Model:
    version: int
    format: str
    signatures: Mapping[str, Signature]
    calls: Mapping[str, Callable[[Arrays], Arrays]]


def load(folder: Path, version: int) -> Model:
    signatures = _read_signatures(folder)
    if (folder / FILES["saved_model"]).is_file():
        return _saved_model(folder, version)
    if (folder / FILES["pt2"]).is_file():
        return _pt2(folder, version, signatures)
    if (folder / FILES["stablehlo"]).is_file():
        return _stablehlo(folder, version, signatures)
    raise CannotLoad(f"{folder} contains no model: none of {', '.join(FILES.values())}")


def _read_signatures(folder: Path) -> dict[str, Signature]:
    path = folder / ABOUT
    if not path.is_file():
        return {}
    try:
        return read(read_json(str(path))["signatures"])
    except (OSError, KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CannotLoad(f"{path} is damaged: {error!r}") from None


# ---- TensorFlow


def _saved_model(folder: Path, version: int) -> Model:
    try:
        import tensorflow as tf
    except ImportError:
        raise CannotLoad(f"{folder} contains a SavedModel, but tensorflow is not installed") from None
    try:
        with saved_model_safety.private_copy(folder) as copy:
            if problem := saved_model_safety.find_problem(copy):
                raise CannotLoad(f"{folder} {problem}")
            loaded = tf.saved_model.load(str(copy))
    except saved_model_safety.LinkInModel as error:
        raise CannotLoad(f"{folder} {error}") from None
    signatures: dict[str, Signature] = {}
    calls: dict[str, Callable[[Arrays], Arrays]] = {}
    for name, function in loaded.signatures.items():
        specs = function.structured_input_signature[1]
        signatures[name] = Signature(_tensors(tf, specs), _tensors(tf, function.structured_outputs))
        calls[name] = partial(_call_tensorflow, tf, loaded, function, specs)
    if not signatures:
        raise CannotLoad(f"{folder} has no signatures: its inputs are unknown")
    return Model(version, "saved_model", signatures, calls)


def _tensors(tf: Any, specs: Mapping[str, Any]) -> dict[str, Tensor]:
    tensors = {}
    for name, spec in sorted(specs.items()):
        shape = None if spec.shape.rank is None else tuple(-1 if size is None else int(size) for size in spec.shape)
        tensors[name] = Tensor(STRING if spec.dtype == tf.string else spec.dtype.name, shape)
    return tensors


def _call_tensorflow(tf: Any, loaded: Any, function: Any, specs: Mapping[str, Any], inputs: Arrays) -> Arrays:
    # `loaded` is a parameter to keep it alive: a function does not keep its variables alive.
    tensors = {name: tf.constant(value, dtype=specs[name].dtype) for name, value in inputs.items()}
    return {name: _numpy(tf, value) for name, value in sorted(function(**tensors).items())}


def _numpy(tf: Any, value: Any) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = (tf.cast(value, tf.float32) if value.dtype == tf.bfloat16 else value).numpy()
    return np.asarray(array)


# ---- torch and JAX


def _pt2(folder: Path, version: int, signatures: Mapping[str, Signature]) -> Model:
    try:
        import torch

        from paceline.torch import exporting
    except ImportError:
        raise CannotLoad(f"{folder} contains model.pt2, but torch is not installed") from None
    name, signature = _only_signature(folder, signatures)
    call = partial(_call_torch, torch, exporting.load(folder), signature)
    return Model(version, "pt2", {name: signature}, {name: call})


def _call_torch(torch: Any, module: Any, signature: Signature, inputs: Arrays) -> Arrays:
    types = {name: getattr(torch, tensor.dtype) for name, tensor in signature.inputs.items()}
    # Copied because arrays from JSON may be read-only, which torch does not support.
    tensors = {name: torch.from_numpy(value.copy()).to(types[name]) for name, value in inputs.items()}
    with torch.inference_mode():
        result = module(**tensors)
    values = [result[name] for name in signature.outputs] if isinstance(result, Mapping) else result
    values = values if isinstance(values, list | tuple) else [values]
    return {
        name: (value.float() if value.dtype == torch.bfloat16 else value).numpy(force=True)
        for name, value in zip(signature.outputs, values, strict=True)
    }


def _stablehlo(folder: Path, version: int, signatures: Mapping[str, Signature]) -> Model:
    try:
        from paceline.jax import exporting
    except ImportError:
        raise CannotLoad(f"{folder} contains model.stablehlo, but jax is not installed") from None
    name, signature = _only_signature(folder, signatures)
    call = partial(_call_jax, exporting.load(folder), signature)
    return Model(version, "stablehlo", {name: signature}, {name: call})


def _call_jax(function: Callable[[Arrays], Mapping[str, Any]], signature: Signature, inputs: Arrays) -> Arrays:
    # XLA compiles for each number of rows: rounding up to powers of 2 keeps these few.
    rows = next((each.shape[0] for each in inputs.values()), 0) if signature.can_batch else 0
    padding = (1 << (rows - 1).bit_length()) - rows if rows else 0
    if padding:
        inputs = {name: np.concatenate([each, each[-1:].repeat(padding, axis=0)]) for name, each in inputs.items()}
    results = {name: np.asarray(value) for name, value in function(inputs).items()}
    outputs = {
        name: each.astype("float32") if each.dtype.name == "bfloat16" else each for name, each in results.items()
    }
    return {name: each[:rows] for name, each in outputs.items()} if padding else outputs


def _only_signature(folder: Path, signatures: Mapping[str, Signature]) -> tuple[str, Signature]:
    if len(signatures) != 1:
        raise CannotLoad(f"{folder}/paceline.json must describe exactly one signature")
    return next(iter(signatures.items()))


# ---- warm-up


def warm_up(model: Model) -> None:
    """Calls each signature once, because the first call is slow."""
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
            continue  # zeros may not be valid input
