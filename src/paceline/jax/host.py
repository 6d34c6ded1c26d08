"""A copy of a state in host memory, in one block that every snapshot uses again."""

from __future__ import annotations

import mmap
import os
from typing import Any

import jax
import numpy as np

from paceline.jax.leaves import Leaf
from paceline.runtime.memory import block, copy

_ALIGN = 64


class Host:
    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None

    def prepare(self, leaves: list[Leaf]) -> list[tuple[Leaf, int, int]]:
        """Take the memory, so that the first snapshot does not wait for it. Which pieces go where in it.

        What comes from a GPU is a copy already. On CPU numpy sees the memory of JAX itself, which a jitted function may
        use again where the state was donated to it.
        """
        places, size = [], 0
        for leaf in leaves:
            for number, (_, piece) in enumerate(leaf.pieces):
                if not isinstance(piece, jax.Array) or next(iter(piece.devices())).platform == "cpu":
                    places.append((leaf, number, size))
                    size += -(-piece.nbytes // _ALIGN) * _ALIGN
        if self._memory is None or not size <= len(self._memory) <= 1.05 * size + mmap.PAGESIZE:
            self._memory = block(size)
            np.frombuffer(self._memory, np.uint8).fill(0)  # the pages are there from now on
        return places

    def hold(self, leaves: list[Leaf]) -> None:
        """Have the leaves hold arrays of our own. Those of an earlier call are overwritten."""
        for leaf in leaves:  # all copies from devices are under way before the first is waited for
            for _, piece in leaf.pieces:
                if isinstance(piece, jax.Array):
                    piece.copy_to_host_async()
        places = self.prepare(leaves)
        for leaf in leaves:
            leaf.pieces = [(at, np.ascontiguousarray(piece).reshape(piece.shape)) for at, piece in leaf.pieces]
        spans = []
        for leaf, number, offset in places:
            at, array = leaf.pieces[number]
            if array.nbytes:
                assert self._memory is not None
                slot: Any = np.frombuffer(self._memory, np.uint8, array.nbytes, offset)
                spans.append((slot.ctypes.data, array.ctypes.data, array.nbytes, array))
                leaf.pieces[number] = (at, slot.view(array.dtype).reshape(array.shape))
        copy([span[:3] for span in spans], _threads())

    def free(self) -> None:
        self._memory = None


def _threads() -> int:
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdigit() else os.cpu_count() or 1
