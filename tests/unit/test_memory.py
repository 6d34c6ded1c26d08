"""Copying in pieces."""

from __future__ import annotations

import ctypes

import pytest

from paceline.runtime.memory import block, copy


@pytest.mark.parametrize("threads", [1, 3])
def test_every_byte_is_copied(threads: int) -> None:
    size = (24 << 20) + 7
    there, here = block(size), block(size)
    there[:] = bytes(range(251)) * (size // 251) + bytes(size % 251)
    addresses = [ctypes.addressof(ctypes.c_char.from_buffer(memory)) for memory in (here, there)]
    copy([(addresses[0], addresses[1], size - 3), (addresses[0] + size - 3, addresses[1] + size - 3, 3)], threads)
    assert here[:] == there[:]


def test_nothing_is_copied_too() -> None:
    copy([], 4)
