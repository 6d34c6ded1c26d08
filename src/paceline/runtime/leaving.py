"""Whether the group is to take a snapshot now, because a task is about to go."""

from __future__ import annotations


def leaving() -> bool:
    """Ask once a step, in every task. True in all tasks at the same step: take a snapshot now.

    >>> leaving()
    False
    """
    return False
