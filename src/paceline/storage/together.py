"""Several files at once: while one waits for a disk or a server, others are read and digested."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Callable, TypeVar

from paceline.storage.store import Unwanted, Wanted

Item = TypeVar("Item")
Made = TypeVar("Made")


def together(
    do: Callable[[Item, Wanted], Made], items: Iterable[Item], at_once: Callable[[Item], int], wanted: Wanted
) -> list[Made]:
    """What is made of each, in their order. Those that want the same number at once are done by as many threads.

    Where one fails the others are given up; its error is raised when all have ended, so that nobody writes any more.

    >>> together(lambda item, wanted: 2 * item, [1, 2, 3], lambda item: 2, lambda size: True)
    [2, 4, 6]
    """
    failed: list[BaseException] = []

    def still(size: int) -> bool:
        return not failed and wanted(size)

    def one(item: Item) -> Made:
        if failed:
            raise Unwanted("another one has failed")
        try:
            return do(item, still)
        except BaseException as error:
            failed.append(error)
            raise

    groups: dict[int, list[tuple[int, Item]]] = {}
    for number, item in enumerate(items):
        groups.setdefault(at_once(item), []).append((number, item))
    made: dict[int, Made] = {}
    for most, group in groups.items():
        if min(most, len(group)) < 2:
            made.update((number, one(item)) for number, item in group)
            continue
        with ThreadPoolExecutor(min(most, len(group))) as pool:
            begun = [(number, pool.submit(one, item)) for number, item in group]
        if failed:
            raise failed[0]
        made.update((number, each.result()) for number, each in begun)
    return [made[number] for number in sorted(made)]
