"""How a global batch is divided among the tasks that train together: evenly, or by the `share` of their host pools."""

from __future__ import annotations

import os
from typing import NamedTuple


class Share(NamedTuple):
    """`own` of `total` equal portions, after those of the tasks with lower ranks."""

    own: int
    offset: int
    total: int

    def part(self, count: int) -> range:
        """Which of `count` examples belong to this task. Those of all tasks are disjoint and complete.

        >>> [Share(own, offset, 4).part(10) for own, offset in ((2, 0), (1, 2), (1, 3))]
        [range(0, 5), range(5, 8), range(8, 10)]
        """
        # Rounded up: if there are any, rank 0 gets some.
        return range(-(-count * self.offset // self.total), -(-count * (self.offset + self.own) // self.total))


def rank_and_world() -> tuple[int, int]:
    """Of this task among those that train together. A task without a group is alone: outside a run, an evaluator, and a
    coordinator."""
    rank, world = int(os.environ.get("PACELINE_RANK", "0")), int(os.environ.get("PACELINE_WORLD_SIZE", "1"))
    return (rank, world) if rank >= 0 else (0, 1)


def even(rank: int, world: int) -> Share:
    return Share(1, rank, world)


def current() -> Share:
    """The share of this task; see `_share` in frameworks/environment.py."""
    names = ("PACELINE_SHARE", "PACELINE_SHARE_OFFSET", "PACELINE_SHARE_TOTAL")
    if names[0] not in os.environ:
        return even(*rank_and_world())
    own, offset, total = (int(os.environ[name]) for name in names)
    return Share(own, offset, total)


def batch_share(batch: int) -> int:
    """The number of examples of a global batch that this task trains on; outside a run, all of them.

    The shares of all tasks that train together add up to `batch`, for any number of tasks. They are even, unless host
    pools of the job have a `share`. A task may get none.
    """
    if batch < 0:
        raise ValueError(f"batch must be at least 0, got {batch}")
    return len(current().part(batch))
