"""Which examples a task trains on: an order that depends on size, seed and epoch only, for any number of tasks.

>>> order = Shards(size=10, batch=4, seed=7, rank=0, world=1)
>>> first = [index for batch in order for index in batch]
>>> sorted(first) == list(range(10))
True
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from paceline.runtime import task_share

T = TypeVar("T")
_ROUNDS = 6
_MASK = (1 << 64) - 1


class Shards:
    """The indices of this task's share of every global batch, one list per step; iteration ends with the epoch.

    `batch` is the global batch size, of all tasks together. Shares are even, unless host pools of the job have a
    `share`. If a batch cannot be divided exactly, they are rounded, so that each example still belongs to one task;
    some tasks may get none at the end of an epoch. Save `state()` in every snapshot: `load` then resumes at the next
    example, even with another number of tasks.
    """

    def __init__(self, size: int, batch: int, seed: int = 0, rank: int | None = None, world: int | None = None) -> None:
        """`rank` and `world`: default to those that Paceline sets; if one of them is passed, shares are even. A task
        without a group gets all examples: outside a run, in an evaluator, and in a coordinator, which distributes them
        itself."""
        self.size, self.batch, self.seed = int(size), int(batch), int(seed)
        default = task_share.rank_and_world()
        self.rank, self.world = default[0] if rank is None else rank, default[1] if world is None else world
        if self.size < 0 or self.batch < 1:
            raise ValueError(f"size must be at least 0 and batch at least 1, got {size} and {batch}")
        if not 0 <= self.rank < self.world:
            raise ValueError(f"rank must be from 0 to {self.world - 1} (world is {self.world}), got {self.rank}")
        is_default = rank is None and world is None
        self._share = task_share.current() if is_default else task_share.even(self.rank, self.world)
        self.epoch = 0
        self.position = 0  # examples of this epoch that all tasks together have received

    def __len__(self) -> int:
        """Remaining steps of this epoch."""
        return -(-(self.size - self.position) // self.batch)

    def __iter__(self) -> Iterator[list[int]]:
        """The share of each step. The position advances when a step begins: take snapshots after it, not during it."""
        return self.through(self.ahead())

    def ahead(self) -> Iterator[list[int]]:
        """The shares of the remaining steps, without advancing the position: for loaders that read ahead, such as
        `DataLoader(data, batch_sampler=order.sampler())`."""
        order = permutation(self.size, self.seed, self.epoch)
        for begin in range(self.position, self.size, self.batch):
            part = self._share.part(min(self.batch, self.size - begin))
            yield [order(begin + index) for index in part]

    def sampler(self) -> Sampler:
        return Sampler(self)

    def through(self, batches: Iterable[T]) -> Iterator[T]:
        """Yields batches that were loaded by `ahead`, one per step, and advances the position with each."""
        for batch in batches:
            self.position = min(self.size, self.position + self.batch)
            yield batch
        self.epoch, self.position = self.epoch + 1, 0

    def state(self) -> dict[str, int]:
        return {"size": self.size, "seed": self.seed, "epoch": self.epoch, "position": self.position}

    def load(self, state: dict[str, Any]) -> None:
        """Resume from `state()`. The batch size and the number of tasks may differ, size and seed may not."""
        theirs = {name: int(state[name]) for name in ("size", "seed", "epoch", "position")}
        ours = {"size": self.size, "seed": self.seed}
        for name, value in ours.items():
            if theirs[name] != value:
                raise ValueError(f"{name} is {theirs[name]} in the snapshot, but {value} here")
        self.epoch, self.position = theirs["epoch"], min(self.size, theirs["position"])


class Sampler:
    """For torch's `DataLoader(batch_sampler=...)`: iterate it once per epoch; it starts at the current position."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards

    def __iter__(self) -> Iterator[list[int]]:
        return self._shards.ahead()

    def __len__(self) -> int:
        return len(self._shards)


class permutation:
    """A shuffled order of `range(size)` that needs no memory: `order(i)` is the i-th. The same on every machine.

    >>> order = permutation(5, seed=7, epoch=0)
    >>> sorted(order(index) for index in range(5))
    [0, 1, 2, 3, 4]
    """

    def __init__(self, size: int, seed: int, epoch: int) -> None:
        self._size = size
        self._low = max(1, (max(1, size - 1).bit_length() + 1) // 2)  # bits of the two halves of an index
        self._high = max(1, max(1, size - 1).bit_length() - self._low)
        digest = (
            hashlib.sha256(f"{size} {seed} {epoch}".encode()).digest()
            + hashlib.sha256(f"{size} {seed} {epoch} more".encode()).digest()
        )
        self._keys = [int.from_bytes(digest[8 * n : 8 * n + 8], "little") for n in range(_ROUNDS)]

    def __call__(self, index: int) -> int:
        if not 0 <= index < self._size:
            raise IndexError(index)
        index = self._once(index)
        while index >= self._size:  # the range of the two halves is a little larger
            index = self._once(index)
        return index

    def _once(self, index: int) -> int:
        """A Feistel network, which is one-to-one for any mixing function."""
        low, high = self._low, self._high
        right, left = index & ((1 << low) - 1), index >> low
        for number, key in enumerate(self._keys):
            if number % 2:
                right ^= _mix(left ^ key) & ((1 << low) - 1)
            else:
                left ^= _mix(right ^ key) & ((1 << high) - 1)
        return (left << low) | right


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
