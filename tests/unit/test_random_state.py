"""Random state as bytes."""

from __future__ import annotations

import random

import numpy as np

from paceline.runtime import random_state


def draw() -> list[float]:
    return [random.random(), random.gauss(0, 1), float(np.random.rand()), float(np.random.randn())]


def test_random_numbers_continue_after_a_load() -> None:
    random.gauss(0, 1), np.random.randn()  # each keeps a second number for the next call
    saved = random_state.state()
    expected = draw()
    random_state.load(saved)
    assert draw() == expected
    assert len(saved) == len(random_state.state()) == random_state.SIZE


def test_in_a_group_of_another_size_each_rank_gets_a_new_deterministic_seed() -> None:
    saved = random_state.state()
    numbers = [random_state.derived(saved, rank, 3) for rank in range(3)]
    assert len({*numbers, random_state.derived(saved, 0, 2), random_state.derived(saved[::-1], 0, 3)}) == 5
    assert numbers == [random_state.derived(saved, rank, 3) for rank in range(3)]
    random_state.seed(numbers[0])
    first = draw()
    random_state.seed(numbers[0])
    assert draw() == first


def test_seeds_beyond_the_range_of_numpy() -> None:
    random_state.seed(2**63 - 1)
    assert 0 <= random_state.derived(b"", 0, 1) < 2**63
