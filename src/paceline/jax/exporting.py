"""Exports a JAX function as StableHLO, for batches of any size, with its parameters as plain arrays."""

from __future__ import annotations

import struct
import tokenize
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Callable

import jax
import numpy as np
from jax import export as jax_export

from paceline.jax import model_safety
from paceline.jax.leaves import flatten, is_key
from paceline.runtime import model_folder
from paceline.runtime.model_folder import DEFAULT, FILES, CannotExport
from paceline.runtime.plain_zip import PlainZip
from paceline.runtime.snapshot_mismatches import SnapshotRefused

_FILE, PARAMS = FILES["stablehlo"], "params.npz"
_DEFAULT_INPUT = "inputs"


def export(
    function: Callable[..., Any],
    params: Any,
    inputs: Any,
    to: Any = None,
    platforms: Sequence[str] = ("cpu", "cuda"),
) -> Path:
    """Write the model to the folder of `paceline export`, or to `to`, a new or empty folder; return that folder.

    `function(params, inputs)` computes the result of the model: one array, or `{name: array}`. `params` is any tree of
    arrays. `inputs`: example inputs: one array, or `{name: array}`; the first dimension of each is the batch size,
    which stays variable. If an operation is not available on all `platforms`, name the platforms to support.

    `model.stablehlo` is serialized by `jax.export`; numpy reads `params.npz` without pickle. `load` combines both; so
    do three lines without Paceline (docs/models.md).
    """
    folder = model_folder.target(to)
    named = inputs if isinstance(inputs, Mapping) else {_DEFAULT_INPUT: inputs}
    stored = {path: _to_stored(value) for path, value in flatten(params)}
    like, structure = dict(flatten(params)), jax.tree_util.tree_structure(params)

    def call(arrays: dict[str, Any], call_inputs: dict[str, Any]) -> dict[str, Any]:
        tree = jax.tree_util.tree_unflatten(structure, [_from_stored(arrays[path], like[path]) for path in like])
        return _outputs(function(tree, call_inputs if isinstance(inputs, Mapping) else call_inputs[_DEFAULT_INPUT]))

    (batch,) = jax_export.symbolic_shape("batch")
    specs = {name: _spec(name, value, batch) for name, value in named.items()}
    param_specs = {path: jax.ShapeDtypeStruct(array.shape, array.dtype) for path, array in stored.items()}
    program = jax_export.export(jax.jit(call), platforms=list(platforms))(param_specs, specs)
    model_safety.check(program, folder / _FILE)  # fail now rather than when the model is loaded
    (folder / _FILE).write_bytes(program.serialize())
    _write_npz(folder / PARAMS, stored)
    outputs = jax.tree_util.tree_unflatten(program.out_tree, program.out_avals)
    signature = {"inputs": _describe(specs), "outputs": _describe(outputs)}
    model_folder.describe(folder, "stablehlo", {DEFAULT: signature})
    return folder


def load(folder: Any) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """The exported model: a function from `{name: array}` to `{name: array}`. The only code that runs is the program
    itself, compiled by XLA. A program with calls to anything else is rejected (`paceline.jax.model_safety`).
    """
    path = Path(folder, _FILE)
    data = bytearray(path.read_bytes())
    try:
        program = jax_export.deserialize(data)
    except Exception as error:
        raise SnapshotRefused(f"{path}: not a model written by jax.export: {error!r}") from error
    model_safety.check(program, path)
    stored = _read_npz(Path(folder, PARAMS))
    _check_params(program, stored, Path(folder, PARAMS))
    params = {name: jax.numpy.asarray(array) for name, array in stored.items()}
    call = jax.jit(program.call)
    return lambda inputs: dict(call(params, {name: jax.numpy.asarray(value) for name, value in inputs.items()}))


def _spec(name: str, value: Any, batch: Any) -> jax.ShapeDtypeStruct:
    if not np.ndim(value):
        raise CannotExport(f"the example of {name} is a single number; pass a batch")
    return jax.ShapeDtypeStruct((batch, *np.shape(value)[1:]), jax.numpy.asarray(value).dtype)


def _to_stored(value: Any) -> Any:
    """An array of a type that numpy supports; the exported program converts the bits back."""
    if is_key(value):
        value = jax.random.key_data(value)
    array = np.asarray(jax.numpy.asarray(value))
    if array.dtype.isbuiltin == 1:
        return array
    if array.dtype.name.startswith(("int", "uint", "float4")):
        raise CannotExport(f"a parameter has the type {array.dtype}, which is less than a byte; export another type")
    return array.view(np.dtype(f"uint{8 * array.dtype.itemsize}"))


def _from_stored(array: Any, like: Any) -> Any:
    if is_key(like):
        return jax.random.wrap_key_data(array, impl=jax.random.key_impl(like))
    dtype = jax.numpy.asarray(like).dtype
    return array if array.dtype == dtype else jax.lax.bitcast_convert_type(array, dtype)


def _write_npz(path: Path, arrays: Mapping[str, Any]) -> None:
    """Unlike numpy.savez, it accepts any array names."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as file:
        for name, array in arrays.items():
            with file.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asarray(array, order="C"), allow_pickle=False)


def _read_npz(path: Path) -> dict[str, Any]:
    """Unlike numpy.load, it rejects names that occur twice, and anything but arrays."""
    arrays = {}
    try:
        with PlainZip(path) as file:
            for name in file.sizes:
                if not name.endswith(".npy"):
                    raise ValueError(f"{name!r} is not an array")
                with file.open(name) as member:
                    arrays[name[: -len(".npy")]] = np.lib.format.read_array(member, allow_pickle=False)
    except (zipfile.BadZipFile, ValueError, EOFError, struct.error, MemoryError, tokenize.TokenError) as error:
        raise SnapshotRefused(f"{path}: the parameters cannot be read: {error}") from error
    return arrays


def _check_params(program: Any, stored: Mapping[str, Any], path: Path) -> None:
    """Otherwise, the model would be loaded, and each of its calls would fail."""
    try:
        (expected, _), _ = jax.tree_util.tree_unflatten(program.in_tree, program.in_avals)
        wanted = {name: (array.shape, array.dtype) for name, array in expected.items()}
    except (ValueError, TypeError, AttributeError):
        raise SnapshotRefused(f"{path}: the program does not take parameters and inputs") from None
    present = {name: (array.shape, array.dtype) for name, array in stored.items()}
    wrong = sorted(name for name in {*wanted, *present} if wanted.get(name) != present.get(name))
    if wrong:
        raise SnapshotRefused(f"{path}: the parameter {wrong[0]!r} is not the one that the program expects")


def _outputs(result: Any) -> dict[str, Any]:
    if isinstance(result, Mapping):
        return dict(result)
    values = result if isinstance(result, (tuple, list)) else (result,)
    return {f"output_{number}": value for number, value in enumerate(values)}


def _describe(arrays: Mapping[str, Any]) -> dict[str, Any]:
    return {name: model_folder.tensor(str(array.dtype), array.shape) for name, array in arrays.items()}
