"""Boxes in an array of any number of dimensions, and their overlap."""

from __future__ import annotations

from collections.abc import Sequence

Numbers = Sequence[int]
Slices = tuple[slice, ...]


def overlap(offset: Numbers, size: Numbers, begin: Numbers, shape: Numbers) -> tuple[Slices, Slices] | None:
    """The overlap of the box of `size` at `offset` and the piece of `shape` at `begin`, as slices of each.

    >>> overlap([2], [4], [0], [3])
    ((slice(0, 1, None),), (slice(2, 3, None),))
    >>> overlap([2], [4], [6], [3]) is None
    True
    """
    low = [max(ours, theirs) for ours, theirs in zip(offset, begin)]
    high = [min(o + s, b + n) for o, s, b, n in zip(offset, size, begin, shape)]
    if any(a >= b for a, b in zip(low, high)):
        return None
    ours = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offset))
    theirs = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, begin))
    return ours, theirs
