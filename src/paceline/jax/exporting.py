"""A function of JAX as StableHLO, for batches of any size, and its parameters beside it as plain arrays."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Callable

import jax
import numpy as np
from jax import export as jax_export

from paceline.jax import archive
from paceline.jax.leaves import flat, is_key
from paceline.runtime import exporting
from paceline.runtime.exporting import DEFAULT, FILES, CannotExport

_FILE, PARAMS = FILES["stablehlo"], "params.npz"
_ONE = "inputs"


def export(
    function: Callable[..., Any],
    params: Any,
    inputs: Any,
    to: Any = None,
    platforms: Sequence[str] = ("cpu", "cuda"),
) -> Path:
    """Writes the model to the folder of `paceline export`, or to `to`, which is new or empty; gives that folder.

    `function(params, inputs)` gives what the model does: one array, or `{name: array}`. `params` is any tree of arrays.
    `inputs`: an example of what it takes: one array, or `{name: array}`; the first dimension of each is that of the
    batch, and stays free. Where an operation cannot be had for all `platforms`, name those that it is to run on.

    `model.stablehlo` is what `jax.export` serializes, `params.npz` what numpy reads without pickle: `load` puts both
    together, and so do three lines without Paceline (docs/models.md).
    """
    folder = exporting.target(to)
    named = inputs if isinstance(inputs, Mapping) else {_ONE: inputs}
    stored = {path: _stored(value) for path, value in flat(params)}
    like, structure = dict(flat(params)), jax.tree_util.tree_structure(params)

    def call(arrays: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
        tree = jax.tree_util.tree_unflatten(structure, [_back(arrays[path], like[path]) for path in like])
        return _outputs(function(tree, given if isinstance(inputs, Mapping) else given[_ONE]))

    (batch,) = jax_export.symbolic_shape("batch")
    specs = {name: _spec(name, value, batch) for name, value in named.items()}
    kinds = {path: jax.ShapeDtypeStruct(array.shape, array.dtype) for path, array in stored.items()}
    made = jax_export.export(jax.jit(call), platforms=list(platforms))(kinds, specs)
    archive.check(made, folder / _FILE)  # better now than when somebody loads it
    (folder / _FILE).write_bytes(made.serialize())
    _write(folder / PARAMS, stored)
    outputs = jax.tree_util.tree_unflatten(made.out_tree, made.out_avals)
    signature = {"inputs": _described(specs), "outputs": _described(outputs)}
    exporting.describe(folder, "stablehlo", {DEFAULT: signature})
    return folder


def load(folder: Any) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """The exported model: a function of `{name: array}` that gives `{name: array}`. No code of the folder is run but
    the program itself, which XLA compiles. It can compute; one that calls anything is refused (`paceline.jax.archive`).
    """
    path = Path(folder, _FILE)
    made = jax_export.deserialize(bytearray(path.read_bytes()))
    archive.check(made, path)
    with np.load(Path(folder, PARAMS), allow_pickle=False) as file:
        params = {name: jax.numpy.asarray(file[name]) for name in file.files}
    called = jax.jit(made.call)
    return lambda inputs: dict(called(params, {name: jax.numpy.asarray(value) for name, value in inputs.items()}))


def _spec(name: str, value: Any, batch: Any) -> jax.ShapeDtypeStruct:
    if not np.ndim(value):
        raise CannotExport(f"the example of {name} is one number: give a batch of them")
    return jax.ShapeDtypeStruct((batch, *np.shape(value)[1:]), jax.numpy.asarray(value).dtype)


def _stored(value: Any) -> Any:
    """As an array that numpy has a name for; its bits are read back by the program itself."""
    if is_key(value):
        value = jax.random.key_data(value)
    array = np.asarray(jax.numpy.asarray(value))
    if array.dtype.isbuiltin == 1:
        return array
    if array.dtype.name.startswith(("int", "uint", "float4")):
        raise CannotExport(f"a parameter of {array.dtype}, which is less than a byte: export it as another type")
    return array.view(np.dtype(f"uint{8 * array.dtype.itemsize}"))


def _back(array: Any, like: Any) -> Any:
    if is_key(like):
        return jax.random.wrap_key_data(array, impl=jax.random.key_impl(like))
    dtype = jax.numpy.asarray(like).dtype
    return array if array.dtype == dtype else jax.lax.bitcast_convert_type(array, dtype)


def _write(path: Path, arrays: Mapping[str, Any]) -> None:
    """An .npz file, whatever the arrays are called."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as file:
        for name, array in arrays.items():
            with file.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.asarray(array, order="C"), allow_pickle=False)


def _outputs(given: Any) -> dict[str, Any]:
    if isinstance(given, Mapping):
        return dict(given)
    values = given if isinstance(given, (tuple, list)) else (given,)
    return {f"output_{number}": value for number, value in enumerate(values)}


def _described(arrays: Mapping[str, Any]) -> dict[str, Any]:
    return {name: exporting.tensor(str(array.dtype), array.shape) for name, array in arrays.items()}
