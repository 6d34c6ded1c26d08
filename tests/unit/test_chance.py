"""Random state as bytes."""

from __future__ import annotations

import random

import numpy as np

from paceline.runtime import chance


def draw() -> list[float]:
    return [random.random(), random.gauss(0, 1), float(np.random.rand()), float(np.random.randn())]


def test_it_goes_on_where_it_was() -> None:
    random.gauss(0, 1), np.random.randn()  # each keeps a second number for the next time
    before = chance.state()
    expected = draw()
    chance.load(before)
    assert draw() == expected
    assert len(before) == len(chance.state()) == chance.SIZE


def test_in_a_group_of_another_size_each_rank_has_a_new_one_and_always_the_same() -> None:
    saved = chance.state()
    numbers = [chance.derived(saved, rank, 3) for rank in range(3)]
    assert len({*numbers, chance.derived(saved, 0, 2), chance.derived(saved[::-1], 0, 3)}) == 5
    assert numbers == [chance.derived(saved, rank, 3) for rank in range(3)]
    chance.seed(numbers[0])
    first = draw()
    chance.seed(numbers[0])
    assert draw() == first


def test_outside_of_numbers_that_numpy_knows() -> None:
    chance.seed(2**63 - 1)
    assert 0 <= chance.derived(b"", 0, 1) < 2**63
