"""A model of torch as `model.pt2`: its graph for batches of any size, and its parameters."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.export
from torch.nn.parallel import DistributedDataParallel

from paceline.runtime import exporting
from paceline.runtime.exporting import DEFAULT, FILES, CannotExport
from paceline.torch import archive

_FILE = FILES["pt2"]


def export(module: torch.nn.Module, inputs: Any, outputs: Sequence[str] = (), to: Any = None) -> Path:
    """Writes the model to the folder of `paceline export`, or to `to`, which is new or empty; gives that folder.

    `inputs`: examples of what one call takes: a tensor, several as a tuple, or `{name: tensor}` by the names that
    `forward` has. The first dimension of each is that of the batch, and stays free. The module is exported as it is in
    `eval` mode; whether it was is left as it was. `outputs`: names of what `forward` gives, where it is no dictionary.
    """
    folder = exporting.target(to)
    module = getattr(module, "_orig_mod", module)
    module = module.module if isinstance(module, DistributedDataParallel) else module
    named = {name: _several(name, value) for name, value in _named(module, inputs).items()}
    batch = torch.export.Dim("batch")
    training = module.training
    try:
        module.eval()
        with torch.no_grad():
            shapes = {name: {0: batch} for name in named}
            made = torch.export.export(module, (), named, dynamic_shapes=shapes)
            given = module(**named)
    finally:
        module.train(training)
    torch.export.save(made, folder / _FILE)
    archive.check(folder / _FILE)  # better now than when somebody loads it
    size = len(next(iter(named.values())))
    found = {"inputs": named, "outputs": _outputs(given, outputs)}
    signature = {kind: {name: _tensor(each, size) for name, each in values.items()} for kind, values in found.items()}
    exporting.describe(folder, "pt2", {DEFAULT: signature})
    return folder


def load(folder: Any) -> Any:
    """The module of an exported model: call it with the inputs by name.

    torch itself would run code that a prepared file holds. Here a file is refused that has anything but tensors and
    torch's own operators in it: see `paceline.torch.archive`.
    """
    path = Path(folder, _FILE)
    archive.check(path)
    return torch.export.load(path).module()


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
            raise CannotExport(f"the example of {name} is no batch: give a tensor whose first dimension is the batch")
    if not named or len({value.shape[0] for value in named.values()}) > 1:
        raise CannotExport("the examples of all inputs are batches of the same size")
    return named


def _several(name: str, value: torch.Tensor) -> torch.Tensor:
    """torch takes a batch of one, or of none, for something special."""
    if not len(value):
        raise CannotExport(f"the example of {name} is empty: give a batch of two")
    return torch.cat([value, value]) if len(value) == 1 else value


def _outputs(given: Any, names: Sequence[str]) -> dict[str, torch.Tensor]:
    if isinstance(given, Mapping):
        named = dict(given)
    else:
        values = given if isinstance(given, (tuple, list)) else (given,)
        named = dict(zip(names or [f"output_{number}" for number in range(len(values))], values))
    if not all(isinstance(value, torch.Tensor) for value in named.values()):
        raise CannotExport(
            f"{type(given).__name__} is no result for an exported model: give tensors, or {{name: tensor}}"
        )
    return named


def _tensor(value: torch.Tensor, batch: int) -> dict[str, Any]:
    shape = [None if not number and size == batch else size for number, size in enumerate(value.shape)]
    return exporting.tensor(str(value.dtype).replace("torch.", ""), shape)
