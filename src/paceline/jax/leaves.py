"""The leaves of a state, by path: arrays on devices (sharded or not), numpy arrays, random keys, plain values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

_PLAIN = (bool, int, float, str)


@dataclass
class Leaf:
    """`pieces`: the parts that this process has to write, as (offset in the whole, array)."""

    path: str
    kind: str  # array, key or plain
    shape: list[int] = field(default_factory=list)
    dtype: str = ""
    value: Any = None  # the value of a plain leaf; the implementation of a key
    stored: tuple[list[int], str] = ([], "")  # shape and dtype in the files
    pieces: list[tuple[list[int], Any]] = field(default_factory=list)

    def type_and_shape(self) -> str:
        return f"{self.dtype}{self.shape}" if self.kind != "plain" else "a plain value"


def flatten(state: Any) -> list[tuple[str, Any]]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    named = [(jax.tree_util.keystr(path, simple=True, separator="/"), value) for path, value in leaves]
    if len({path for path, _ in named}) < len(named):  # {"a": {"b": 1}, "a/b": 2}
        named = [(jax.tree_util.keystr(path), value) for path, value in leaves]
    return named


def is_key(value: Any) -> bool:
    return hasattr(value, "dtype") and jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key)


def describe(path: str, value: Any) -> Leaf:
    """The leaf without its pieces; also works for a `jax.ShapeDtypeStruct`."""
    if is_key(value):
        return Leaf(path, "key", list(value.shape), str(value.dtype))
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return Leaf(path, "array", list(value.shape), np.dtype(value.dtype).name)
    if type(value) in _PLAIN:
        return Leaf(path, "plain", value=value)
    raise TypeError(
        f"{path} is a {type(value).__qualname__}: a state may only contain arrays, random keys and plain values"
    )


def leaves_to_write(state: Any) -> list[Leaf]:
    """All leaves, with the pieces that this process has to write."""
    leaves = []
    for path, value in flatten(state):
        leaf = describe(path, value)
        if leaf.kind == "key":
            leaf.value = str(jax.random.key_impl(value))
            value = jax.random.key_data(value)
        if leaf.kind != "plain":
            leaf.stored = (list(value.shape), np.dtype(value.dtype).name)
            leaf.pieces = list(_pieces(value))
        leaves.append(leaf)
    return leaves


def _pieces(value: Any) -> Iterator[tuple[list[int], Any]]:
    is_local = not isinstance(value, jax.Array) or value.is_fully_addressable
    if is_local and jax.process_index() != 0:
        return  # each process has its own value, and only the first one's is saved
    if not isinstance(value, jax.Array):
        yield [0] * np.ndim(value), np.asarray(value)
        return
    for shard in value.addressable_shards:
        if shard.replica_id == 0:
            yield [part.start or 0 for part in shard.index], shard.data
