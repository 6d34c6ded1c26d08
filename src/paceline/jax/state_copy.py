"""A copy of a state in host memory, in one block that all snapshots reuse."""

from __future__ import annotations

import mmap
import os
from typing import Any

import jax
import numpy as np

from paceline.jax.leaves import Leaf
from paceline.runtime.copy_buffer import block, copy

_ALIGN = 64


class StateCopy:
    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None

    def prepare(self, leaves: list[Leaf]) -> list[tuple[Leaf, int, int]]:
        """Allocate the memory, so that the first snapshot does not wait for it. Returns the offset of each piece in it.

        Arrays from a GPU are already copies. On CPU numpy sees JAX's own memory, which a jitted function may reuse if
        the state was donated to it.
        """
        offsets, size = [], 0
        for leaf in leaves:
            for number, (_, piece) in enumerate(leaf.pieces):
                if not isinstance(piece, jax.Array) or next(iter(piece.devices())).platform == "cpu":
                    offsets.append((leaf, number, size))
                    size += -(-piece.nbytes // _ALIGN) * _ALIGN
        if self._memory is None or not size <= len(self._memory) <= 1.05 * size + mmap.PAGESIZE:
            self._memory = block(size)
            np.frombuffer(self._memory, np.uint8).fill(0)  # makes the kernel allocate the pages now
        return offsets

    def copy(self, leaves: list[Leaf]) -> None:
        """Replace the arrays of the leaves by copies. Overwrites the copies of an earlier call."""
        for leaf in leaves:  # start all copies from devices before waiting for the first
            for _, piece in leaf.pieces:
                if isinstance(piece, jax.Array):
                    piece.copy_to_host_async()
        offsets = self.prepare(leaves)
        for leaf in leaves:
            leaf.pieces = [(index, np.ascontiguousarray(piece).reshape(piece.shape)) for index, piece in leaf.pieces]
        spans = []
        for leaf, number, offset in offsets:
            index, array = leaf.pieces[number]
            if array.nbytes:
                assert self._memory is not None
                slot: Any = np.frombuffer(self._memory, np.uint8, array.nbytes, offset)
                spans.append((slot.ctypes.data, array.ctypes.data, array.nbytes, array))
                leaf.pieces[number] = (index, slot.view(array.dtype).reshape(array.shape))
        copy([span[:3] for span in spans], _threads())

    def free(self) -> None:
        self._memory = None


def _threads() -> int:
    limit = os.environ.get("OMP_NUM_THREADS", "")
    return int(limit) if limit.isdigit() else os.cpu_count() or 1
