"""Several files at once: in their order, and none goes on where one has failed."""

from __future__ import annotations

import threading
import time

import pytest

from paceline.storage.snapshots import always
from paceline.storage.store import StoreError, Unwanted, Wanted
from paceline.storage.together import together


def test_they_are_done_at_once_and_stay_in_order() -> None:
    meeting = threading.Barrier(3, timeout=60)

    def one(number: int, _: Wanted) -> int:
        meeting.wait()
        time.sleep(0.01 * (3 - number % 3))
        return number

    assert together(one, range(6), lambda _: 3, always) == list(range(6))


def test_no_more_at_once_than_asked_for() -> None:
    threads = set()
    meeting = threading.Barrier(2, timeout=60)

    def two(_: int, __: Wanted) -> None:
        threads.add(threading.get_ident())
        meeting.wait()

    def one(_: int, __: Wanted) -> None:
        threads.add(threading.get_ident())

    together(two, range(20), lambda _: 2, always)
    assert len(threads) == 2
    threads.clear()
    together(one, range(3), lambda _: 1, always)
    assert threads == {threading.get_ident()}


def test_each_is_done_with_others_of_its_kind() -> None:
    meetings = {2: threading.Barrier(2, timeout=60), 3: threading.Barrier(3, timeout=60)}

    def one(kind: int, _: Wanted) -> int:
        meetings[kind].wait()
        return kind

    assert together(one, [3, 2, 3, 2, 3], lambda kind: kind, always) == [3, 2, 3, 2, 3]


def test_where_one_fails_the_others_are_given_up_before_its_error_is_raised() -> None:
    ended: list[int] = []

    def one(number: int, wanted: Wanted) -> None:
        if number == 1:
            raise StoreError("no room")
        try:
            while wanted(1):
                time.sleep(0.001)
            raise Unwanted(str(number))
        finally:
            ended.append(number)

    with pytest.raises(StoreError, match="no room"):
        together(one, range(50), lambda _: 3, always)
    assert set(ended) <= {0, 2}  # all others were never begun


def test_what_is_not_wanted_any_more_ends_all() -> None:
    def one(_: int, wanted: Wanted) -> None:
        while wanted(1):
            time.sleep(0.001)
        raise Unwanted("given up")

    until = time.monotonic() + 0.05
    with pytest.raises(Unwanted):
        together(one, range(5), lambda _: 2, lambda _: time.monotonic() < until)
