"""State dicts as trees of plain values that `torch.load(weights_only=True)` can read."""

from __future__ import annotations

import os
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any, Callable

import torch

_PLAIN = frozenset({type(None), bool, int, float, str, bytes, torch.dtype, torch.device, torch.Size})


class SnapshotUnsafe(TypeError):
    """A state contains a value that could only be restored by running code (pickle)."""


def trusted() -> bool:
    return os.environ.get("PACELINE_TRUST") == "1"


def mapped(value: Any, change: Callable[[torch.Tensor, str], Any], path: str = "") -> Any:
    """The same tree with other tensors: `change` is called with each tensor and its path."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        return change(value, path)
    if isinstance(value, Mapping):
        copied: Any = kind() if kind in (OrderedDict, Counter) else {}
        for key, inner in value.items():
            plain = type(inner) in _PLAIN  # most values are plain and need no path
            copied[key] = inner if plain else mapped(inner, change, f"{path}/{key}" if path else str(key))
        if hasattr(value, "_metadata"):  # the state dict of a module: versions of its layers
            copied._metadata = value._metadata
        return copied
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
        f"{path}: a {kind.__module__}.{kind.__qualname__} cannot be restored without pickle; convert it to a tensor or"
        " a plain value in state_dict(), or set snapshots.trust: true in the job file to save it unchanged"
    )
