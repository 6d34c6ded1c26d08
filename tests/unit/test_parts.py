"""How large files are split into parts for a bucket."""

from __future__ import annotations

import pytest

from paceline.storage.stores.bucket import in_parts

MIB, GIB = 1 << 20, 1 << 30


@pytest.mark.parametrize("size", [9 * MIB, 78 * GIB, 79 * GIB, 80_000 * MIB + 1, 500 * GIB, 5 << 40])
def test_no_file_has_more_parts_than_a_store_accepts(size: int) -> None:
    part, _ = in_parts(size)
    assert -(-size // part) <= 10_000
    assert part >= 5 * MIB, "S3 accepts no smaller part, except the last"


def test_parts_are_no_larger_than_necessary_and_memory_is_bounded() -> None:
    assert in_parts(9 * MIB) == in_parts(78 * GIB) == (8 * MIB, 4)
    for size in (79 * GIB, 150 * GIB, 500 * GIB, 5 << 40):
        part, at_once = in_parts(size)
        assert part <= size // 10_000 + 1
        assert at_once == 1 or part * at_once <= 32 * MIB
