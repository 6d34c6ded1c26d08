"""Parallel transfers: results stay in order, and if one fails the others stop."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest

from paceline.storage.snapshots.repository import always
from paceline.storage.stores.parallel import together
from paceline.storage.stores.protocol import ContinueCheck, StoreError, TransferCanceled


def test_transfers_run_in_parallel_and_stay_in_order() -> None:
    meeting = threading.Barrier(3, timeout=60)

    def transfer(number: int, _: ContinueCheck) -> int:
        meeting.wait()
        time.sleep(0.01 * (3 - number % 3))
        return number

    assert together(transfer, range(6), lambda _: 3, always) == list(range(6))


def test_no_more_transfers_run_at_once_than_allowed() -> None:
    threads = set()
    meeting = threading.Barrier(2, timeout=60)

    def transfer_in_pairs(_: int, __: ContinueCheck) -> None:
        threads.add(threading.get_ident())
        meeting.wait()

    def transfer(_: int, __: ContinueCheck) -> None:
        threads.add(threading.get_ident())

    together(transfer_in_pairs, range(20), lambda _: 2, always)
    assert len(threads) == 2
    threads.clear()
    together(transfer, range(3), lambda _: 1, always)
    assert threads == {threading.get_ident()}


def test_transfers_of_the_same_kind_run_together() -> None:
    meetings = {2: threading.Barrier(2, timeout=60), 3: threading.Barrier(3, timeout=60)}

    def transfer(kind: int, _: ContinueCheck) -> int:
        meetings[kind].wait()
        return kind

    assert together(transfer, [3, 2, 3, 2, 3], lambda kind: kind, always) == [3, 2, 3, 2, 3]


def test_if_one_fails_the_others_are_canceled_before_its_error_is_raised() -> None:
    ended: list[int] = []

    def transfer(number: int, should_continue: ContinueCheck) -> None:
        if number == 1:
            raise StoreError("no room")
        try:
            while should_continue(1):
                time.sleep(0.001)
            raise TransferCanceled(str(number))
        finally:
            ended.append(number)

    with pytest.raises(StoreError, match="no room"):
        together(transfer, range(50), lambda _: 3, always)
    assert set(ended) <= {0, 2}  # the others never started


def test_a_cancellation_ends_all_transfers() -> None:
    def transfer(_: int, should_continue: ContinueCheck) -> None:
        while should_continue(1):
            time.sleep(0.001)
        raise TransferCanceled("canceled")

    deadline = time.monotonic() + 0.05
    with pytest.raises(TransferCanceled):
        together(transfer, range(5), lambda _: 2, lambda _: time.monotonic() < deadline)


@pytest.mark.parametrize("at_once", [1, 2])
def test_what_a_failed_transfer_was_sending_is_freed_at_once(at_once: int) -> None:
    """A process that transfers little allocates little: Python may not look for cycles for hours."""

    class Data:
        pass

    sending = []

    def transfer(number: int, _: ContinueCheck) -> None:
        data = Data()
        sending.append(weakref.ref(data))
        raise StoreError(f"{number} failed")

    gc.disable()
    try:
        with pytest.raises(StoreError):
            together(transfer, range(2), lambda _: at_once, always)
        assert sending and not any(data() for data in sending)
    finally:
        gc.enable()
