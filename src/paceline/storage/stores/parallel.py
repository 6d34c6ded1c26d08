"""Several files in parallel: while one waits for a disk or a server, others are read and hashed."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Callable, TypeVar

from paceline.storage.stores.protocol import ContinueCheck, TransferCanceled

Item = TypeVar("Item")
Result = TypeVar("Result")


def together(
    do: Callable[[Item, ContinueCheck], Result],
    items: Iterable[Item],
    at_once: Callable[[Item], int],
    should_continue: ContinueCheck,
) -> list[Result]:
    """Process all items and return the results in order. Items with the same `at_once` share that many threads.

    If one fails, the others are canceled; its error is raised when all have ended, so that nothing is written later.

    >>> together(lambda item, check: 2 * item, [1, 2, 3], lambda item: 2, lambda size: True)
    [2, 4, 6]
    """
    errors: list[BaseException] = []
    has_failed = False

    def continue_check(size: int) -> bool:
        return not has_failed and should_continue(size)

    def run_one(item: Item) -> Result:
        nonlocal has_failed
        if has_failed:
            raise TransferCanceled("another transfer failed")
        try:
            return do(item, continue_check)
        except BaseException as error:
            has_failed = True
            errors.append(error)
            raise

    groups: dict[int, list[tuple[int, Item]]] = {}
    for number, item in enumerate(items):
        groups.setdefault(at_once(item), []).append((number, item))
    results: dict[int, Result] = {}
    futures: list[tuple[int, Future[Result]]] = []
    try:
        for most, group in groups.items():
            if min(most, len(group)) < 2:
                results.update((number, run_one(item)) for number, item in group)
                continue
            with ThreadPoolExecutor(min(most, len(group))) as pool:
                futures = [(number, pool.submit(run_one, item)) for number, item in group]
            if errors:
                raise errors[0]
            results.update((number, future.result()) for number, future in futures)
    finally:
        # An error refers to what was being sent, and to these variables: a cycle that Python may not collect for hours.
        errors.clear()
        futures = []
    return [results[number] for number in sorted(results)]
