"""State dicts as trees of plain values: what `torch.load(weights_only=True)` reads back, and nothing else."""

from __future__ import annotations

import os
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any, Callable

import torch

_PLAIN = frozenset({type(None), bool, int, float, str, bytes, torch.dtype, torch.device, torch.Size})


class SnapshotUnsafe(TypeError):
    """A state holds something that could only be read back by running code (pickle)."""


def trusted() -> bool:
    return os.environ.get("PACELINE_TRUST") == "1"


def mapped(value: Any, change: Callable[[torch.Tensor, str], Any], path: str = "") -> Any:
    """The same tree with other tensors: `change` gets each one and where it is."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        return change(value, path)
    if isinstance(value, Mapping):
        into: Any = kind() if kind in (OrderedDict, Counter) else {}
        for key, inner in value.items():
            plain = type(inner) in _PLAIN  # no path is made for the many that are
            into[key] = inner if plain else mapped(inner, change, f"{path}/{key}" if path else str(key))
        if hasattr(value, "_metadata"):  # of a module: versions of its layers
            into._metadata = value._metadata
        return into
    if kind in (list, tuple, set):
        return kind(
            inner if type(inner) in _PLAIN else mapped(inner, change, f"{path}/{index}")
            for index, inner in enumerate(value)
        )
    if kind.__module__ == "numpy" and hasattr(value, "item") and getattr(value, "shape", None) == ():
        return value.item()
    if trusted():
        return value
    raise SnapshotUnsafe(
        f"{path} is a {kind.__module__}.{kind.__qualname__}: it cannot be read back without pickle. Make it a tensor or"
        " a plain value in state_dict(); or say snapshots.trust: true in the job file to have it written as it is"
    )
