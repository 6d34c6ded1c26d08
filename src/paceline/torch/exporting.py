"""Exports a torch model as `model.pt2`: its graph for batches of any size, and its parameters."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.export
from torch.nn.parallel import DistributedDataParallel

from paceline.runtime import model_folder
from paceline.runtime.model_folder import DEFAULT, FILES, CannotExport
from paceline.runtime.snapshot_mismatches import SnapshotRefused
from paceline.torch import model_safety

_FILE = FILES["pt2"]


def export(module: torch.nn.Module, inputs: Any, outputs: Sequence[str] = (), to: Any = None) -> Path:
    """Write the model to the folder of `paceline export`, or to `to`, a new or empty folder; return that folder.

    `inputs`: example inputs of one call: a tensor, a tuple of tensors, or `{name: tensor}` by the parameter names of
    `forward`. The first dimension of each is the batch size, which stays variable. The module is exported in `eval`
    mode; its own mode is left unchanged. `outputs`: names for the results of `forward`, if it returns no dictionary.
    """
    folder = model_folder.target(to)
    module = getattr(module, "_orig_mod", module)
    module = module.module if isinstance(module, DistributedDataParallel) else module
    named = {name: _at_least_two(name, value) for name, value in _named(module, inputs).items()}
    batch = torch.export.Dim("batch")
    training = module.training
    try:
        module.eval()
        with torch.no_grad():
            shapes = {name: {0: batch} for name in named}
            program = torch.export.export(module, (), named, dynamic_shapes=shapes)
            result = module(**named)
    finally:
        module.train(training)
    torch.export.save(program, folder / _FILE)
    model_safety.check(folder / _FILE)  # fail now rather than when the model is loaded
    size = len(next(iter(named.values())))
    tensors = {"inputs": named, "outputs": _outputs(result, outputs)}
    signature = {kind: {name: _tensor(each, size) for name, each in values.items()} for kind, values in tensors.items()}
    model_folder.describe(folder, "pt2", {DEFAULT: signature})
    return folder


def load(folder: Any) -> Any:
    """The module of an exported model: call it with the inputs by name.

    torch itself would run code contained in a malicious file. This function rejects files with anything but tensors
    and torch's own operators: see `paceline.torch.model_safety`.
    """
    path = Path(folder, _FILE)
    with model_safety.checked_copy(path) as copy:
        try:
            return torch.export.load(copy).module()
        except Exception as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise SnapshotRefused(f"{path}: torch cannot load the model: {reason}") from error


def _named(module: torch.nn.Module, inputs: Any) -> dict[str, torch.Tensor]:
    if isinstance(inputs, Mapping):
        named = dict(inputs)
    else:
        values = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
        try:
            named = dict(inspect.signature(module.forward).bind(*values).arguments)
        except TypeError as error:
            raise CannotExport(f"{type(module).__name__}.forward cannot be called with these inputs: {error}") from None
    for name, value in named.items():
        if not isinstance(value, torch.Tensor) or not value.dim():
            raise CannotExport(
                f"the example of {name} is not a batch; pass a tensor whose first dimension is the batch"
            )
    if not named or len({value.shape[0] for value in named.values()}) > 1:
        raise CannotExport("the examples of all inputs must be batches of the same size")
    return named


def _at_least_two(name: str, value: torch.Tensor) -> torch.Tensor:
    """torch.export would specialize the graph for a batch of one or zero examples."""
    if not len(value):
        raise CannotExport(f"the example of {name} is empty; pass a batch of two")
    return torch.cat([value, value]) if len(value) == 1 else value


def _outputs(result: Any, names: Sequence[str]) -> dict[str, torch.Tensor]:
    if isinstance(result, Mapping):
        named = dict(result)
    else:
        values = result if isinstance(result, (tuple, list)) else (result,)
        named = dict(zip(names or [f"output_{number}" for number in range(len(values))], values))
    if not all(isinstance(value, torch.Tensor) for value in named.values()):
        raise CannotExport(
            f"an exported model cannot return a {type(result).__name__}; return tensors, or {{name: tensor}}"
        )
    return named


def _tensor(value: torch.Tensor, batch: int) -> dict[str, Any]:
    shape = [None if not number and size == batch else size for number, size in enumerate(value.shape)]
    return model_folder.tensor(str(value.dtype).replace("torch.", ""), shape)
