"""Which examples a task trains on: an order made of size, seed and epoch alone, shared out to any number of tasks.

>>> order = Shards(size=10, batch=4, seed=7, rank=0, world=1)
>>> first = [index for batch in order for index in batch]
>>> sorted(first) == list(range(10))
True
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")
_ROUNDS = 6
_MASK = (1 << 64) - 1


class Shards:
    """The indices of this task's share of every global batch, one list a step; iterating goes to the end of the epoch.

    `batch` is that of all tasks together. It is shared out evenly: where the tasks do not divide it, the first ones
    have one example more, and at the end of an epoch some may have none. Where training stands is `state()`, and
    belongs into every snapshot: with it, `load` goes on at the next example, also with another number of tasks.
    """

    def __init__(self, size: int, batch: int, seed: int = 0, rank: int | None = None, world: int | None = None) -> None:
        """`rank` and `world`: as Paceline says, unless given. A task that is not one of a group has all: outside a
        run, in an evaluator, and in a coordinator, which deals them out itself."""
        self.size, self.batch, self.seed = int(size), int(batch), int(seed)
        known = int(os.environ.get("PACELINE_RANK", "0")), int(os.environ.get("PACELINE_WORLD_SIZE", "1"))
        known = known if known[0] >= 0 else (0, 1)
        self.rank, self.world = known[0] if rank is None else rank, known[1] if world is None else world
        if self.size < 0 or self.batch < 1:
            raise ValueError(f"size {size} and batch {batch}: there are no such batches")
        if not 0 <= self.rank < self.world:
            raise ValueError(f"rank {self.rank} of {self.world} tasks: there is no such task")
        self.epoch = 0
        self.position = 0  # examples of this epoch that have been given to all tasks together

    def __len__(self) -> int:
        """Steps that are left in this epoch."""
        return -(-(self.size - self.position) // self.batch)

    def __iter__(self) -> Iterator[list[int]]:
        """The share of each step. A step counts from the moment it is given: take snapshots after it, not in it."""
        return self.through(self.ahead())

    def ahead(self) -> Iterator[list[int]]:
        """The shares of the steps that are left, without going on: for loaders that read ahead, such as
        `DataLoader(data, batch_sampler=order.sampler())`."""
        order = permutation(self.size, self.seed, self.epoch)
        for begin in range(self.position, self.size, self.batch):
            yield [order(index) for index in self._share(begin)]

    def sampler(self) -> Sampler:
        return Sampler(self)

    def through(self, batches: Iterable[T]) -> Iterator[T]:
        """Batches that were made of `ahead`, one a step: this counts them, as training gets them."""
        for batch in batches:
            self.position = min(self.size, self.position + self.batch)
            yield batch
        self.epoch, self.position = self.epoch + 1, 0

    def _share(self, begin: int) -> range:
        count = min(self.batch, self.size - begin)
        each, more = divmod(count, self.world)
        first = begin + self.rank * each + min(self.rank, more)
        return range(first, first + each + (self.rank < more))

    def state(self) -> dict[str, int]:
        return {"size": self.size, "seed": self.seed, "epoch": self.epoch, "position": self.position}

    def load(self, state: dict[str, Any]) -> None:
        """Go on where that was. The batch and the number of tasks may be others, the examples may not."""
        theirs = {name: int(state[name]) for name in ("size", "seed", "epoch", "position")}
        ours = {"size": self.size, "seed": self.seed}
        for name, value in ours.items():
            if theirs[name] != value:
                raise ValueError(f"the snapshot was made with {name} {theirs[name]}, and here it is {value}")
        self.epoch, self.position = theirs["epoch"], min(self.size, theirs["position"])


class Sampler:
    """For torch's `DataLoader(batch_sampler=...)`: may be iterated once an epoch, each time from where training is."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards

    def __iter__(self) -> Iterator[list[int]]:
        return self._shards.ahead()

    def __len__(self) -> int:
        return len(self._shards)


class permutation:
    """A shuffled order of `range(size)`, in no memory: `order(i)` is the i-th. The same on every machine.

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
        while index >= self._size:  # halves of whole bits hold a few numbers more
            index = self._once(index)
        return index

    def _once(self, index: int) -> int:
        """A Feistel network: whatever the mixing does, no two indices become one."""
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
