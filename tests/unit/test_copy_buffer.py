"""Copying in pieces."""

from __future__ import annotations

import ctypes

import pytest

from paceline.runtime.copy_buffer import block, copy


@pytest.mark.parametrize("threads", [1, 3])
def test_every_byte_is_copied(threads: int) -> None:
    size = (24 << 20) + 7
    source, target = block(size), block(size)
    source[:] = bytes(range(251)) * (size // 251) + bytes(size % 251)
    addresses = [ctypes.addressof(ctypes.c_char.from_buffer(memory)) for memory in (target, source)]
    copy([(addresses[0], addresses[1], size - 3), (addresses[0] + size - 3, addresses[1] + size - 3, 3)], threads)
    assert target[:] == source[:]


def test_an_empty_list_copies_nothing() -> None:
    copy([], 4)
