"""The order of examples: fixed by size, seed and epoch; each example once per epoch, however it is split."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

import paceline
from paceline.runtime.shards import Shards, permutation

sizes, batches, worlds = st.integers(0, 200), st.integers(1, 40), st.integers(1, 9)
seeds = st.integers(0, 3)


def tasks(size: int, batch: int, seed: int, world: int, state: dict[str, int] | None = None) -> list[Shards]:
    shards = [Shards(size, batch, seed, rank, world) for rank in range(world)]
    for each in shards:
        if state is not None:
            each.load(state)
    return shards


@given(st.integers(1, 3000), seeds, st.integers(0, 3))
def test_an_order_has_every_index_once(size: int, seed: int, epoch: int) -> None:
    order = permutation(size, seed, epoch)
    assert sorted(map(order, range(size))) == list(range(size))


def test_orders_differ_by_seed_and_epoch_and_never_change() -> None:
    """A new version of Paceline must keep the order: a resumed run would otherwise see examples twice."""
    assert [permutation(10, 7, 0)(index) for index in range(10)] == [6, 0, 1, 3, 8, 9, 7, 5, 2, 4]
    orders = {tuple(map(permutation(50, seed, epoch), range(50))) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_no_position_is_preferred() -> None:
    """Over many epochs, each of 5 examples is equally often at each position."""
    counts = Counter((position, permutation(5, 0, epoch)(position)) for epoch in range(5000) for position in range(5))
    assert all(850 < count < 1150 for count in counts.values()) and len(counts) == 25


@given(sizes, batches, seeds, worlds)
def test_each_example_comes_once_per_epoch_for_any_number_of_tasks(
    size: int, batch: int, seed: int, world: int
) -> None:
    epochs = [list(each) for each in tasks(size, batch, seed, world)]
    assert sorted(index for steps in epochs for share in steps for index in share) == list(range(size))
    assert {len(steps) for steps in epochs} == {-(-size // batch)}, "all tasks have the same number of steps"


@given(sizes, batches, seeds, worlds, worlds, st.data())
def test_another_number_of_tasks_continues_with_the_next_example(
    size: int, batch: int, seed: int, world: int, later: int, data: st.DataObject
) -> None:
    before = tasks(size, batch, seed, world)
    steps = data.draw(st.integers(0, len(before[0])))
    indices = [index for each in before for _, share in zip(range(steps), each, strict=False) for index in share]
    states = [each.state() for each in before]
    assert all(state == states[0] for state in states)
    after = tasks(size, batch, seed, later, states[0])
    indices += [index for each in after for share in each for index in share] if states[0]["epoch"] == 0 else []
    assert sorted(indices) == list(range(size))


@given(sizes, batches, seeds, worlds, st.data())
def test_a_resumed_task_gets_the_same_examples_as_an_undisturbed_one(
    size: int, batch: int, seed: int, world: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, world - 1))
    undisturbed = Shards(size, batch, seed, rank, world)
    expected = [list(undisturbed), list(undisturbed)]
    first = Shards(size, batch, seed, rank, world)
    steps = data.draw(st.integers(0, len(first)))
    shares = [share for _, share in zip(range(steps), first, strict=False)]
    resumed = Shards(size, batch, seed, rank, world)
    resumed.load(first.state())
    if resumed.epoch == 0:
        shares += list(resumed)
    assert [shares, list(resumed)] == expected


def test_with_a_loader_that_reads_ahead_only_batches_used_in_training_count() -> None:
    order = Shards(10, 4, rank=0, world=1)
    loaded = list(order.sampler())
    assert order.position == 0 and len(order.sampler()) == 3
    steps = order.through(loaded)
    assert next(steps) == loaded[0] and order.position == 4
    assert list(steps) == loaded[1:] and (order.epoch, order.position) == (1, 0)


def test_state_of_other_examples_is_rejected_with_the_reason() -> None:
    state = Shards(10, 4, seed=1, rank=0, world=1).state()
    with pytest.raises(ValueError, match="size is 10 in the snapshot, but 11 here"):
        Shards(11, 4, seed=1, rank=0, world=1).load(state)
    with pytest.raises(ValueError, match="seed is 1 in the snapshot, but 2 here"):
        Shards(10, 4, seed=2, rank=0, world=1).load(state)


@pytest.mark.parametrize(("rank", "world"), [(3, 3), (-1, 2), (0, 0)])
def test_an_invalid_rank_is_rejected(rank: int, world: int) -> None:
    with pytest.raises(ValueError, match="rank must be from 0 to"):
        Shards(10, 4, rank=rank, world=world)


def test_rank_and_world_are_those_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_RANK", "1")
    monkeypatch.setenv("PACELINE_WORLD_SIZE", "3")
    assert (Shards(10, 4).rank, Shards(10, 4).world) == (1, 3)


@given(st.integers(0, 10_000), st.lists(st.integers(1, 9), min_size=1, max_size=9), st.booleans())
def test_shares_of_a_batch_add_up_and_are_in_proportion(batch: int, shares: list[int], is_set: bool) -> None:
    """`is_set`: host pools of the job have a `share`; otherwise, shares are even."""
    shares = shares if is_set else [1] * len(shares)
    sizes, indices = [], []
    for rank, share in enumerate(shares):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PACELINE_RANK", str(rank))
            patch.setenv("PACELINE_WORLD_SIZE", str(len(shares)))
            if is_set:
                patch.setenv("PACELINE_SHARE", str(share))
                patch.setenv("PACELINE_SHARE_OFFSET", str(sum(shares[:rank])))
                patch.setenv("PACELINE_SHARE_TOTAL", str(sum(shares)))
            sizes.append(paceline.batch_share(batch))
            steps = list(Shards(50, 20))
            assert list(map(len, steps)) == [paceline.batch_share(count) for count in (20, 20, 10)]
            indices += [index for step in steps for index in step]
    assert sum(sizes) == batch and sorted(indices) == list(range(50))
    assert all(abs(size - batch * share / sum(shares)) < 1 for size, share in zip(sizes, shares, strict=True))
    assert sizes[0] > 0 or batch == 0


def test_a_task_that_names_its_group_gets_an_even_share(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("", "2"), ("_OFFSET", "0"), ("_TOTAL", "3")):
        monkeypatch.setenv(f"PACELINE_SHARE{name}", value)
    assert [len(step) for step in Shards(12, 12)] == [8]
    assert [len(step) for step in Shards(12, 12, rank=1, world=2)] == [6]


def test_outside_a_run_a_program_gets_the_whole_batch() -> None:
    assert paceline.batch_share(64) == 64
    with pytest.raises(ValueError, match="batch must be at least 0, got -1"):
        paceline.batch_share(-1)


def test_a_coordinator_gets_all_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the variables of a parameter-server job, whose tasks have no rank."""
    monkeypatch.setenv("PACELINE_RANK", "-1")
    monkeypatch.setenv("PACELINE_WORLD_SIZE", "0")
    assert (Shards(10, 4).rank, Shards(10, 4).world) == (0, 1)
