"""Which generation numbers can be true.

A damaged number, which a program may have written into a file of its host, must neither lead the captain to numbers
that no member accepts, nor keep the host from starting tasks.
"""

from __future__ import annotations

MOST = 99_999_999  # names of snapshots have room for 8 digits
MOST_LEARNED = 50_000_000  # the highest that a captain takes over from a member: it can begin as many itself
# Generations that members can know and a captain with notes or a store does not: it could not write either of them. One
# begins at a restart, at most about once per second.
MOST_MISSED = 1_000_000


def is_plausible(number: int, known: int) -> bool:
    """Whether a member can have seen this generation. `known`: the newest that the captain knows; 0: none,
    because the notes are lost and the store cannot be reached, so that only members know it.

    >>> [is_plausible(number, known=5) for number in (0, 4, 6, 1_000_000, 10_000_000)]
    [True, True, True, True, False]
    >>> is_plausible(10_000_000, known=0)
    True
    """
    return number <= known or number <= min(MOST_LEARNED, known + MOST_MISSED if known else MOST_LEARNED)


def is_outdated(number: int, own: int) -> bool:
    """Whether a captain that starts this generation was replaced, as this host has seen a later one. If its own number
    is implausibly high, that is the damaged one: the captain ignores it.

    >>> is_outdated(4, own=5), is_outdated(5, own=5), is_outdated(5, own=10_000_000)
    (True, False, False)
    """
    return number < own and is_plausible(own, known=number)
