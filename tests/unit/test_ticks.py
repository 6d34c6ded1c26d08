"""A captain that was stopped for a while reads what its members have sent before it declares any of them lost."""

from __future__ import annotations

import selectors
import signal
import socket
from collections.abc import Iterator

import pytest

from paceline.agent.captain_process.ticks import PAUSED_S, READ_WITHIN, Ticks
from paceline.agent.net.loop import SLICE, Loop

MEMBERS = 40
EVERY, BEAT = 0.5, 1.0


class Clock(Loop):
    def __init__(self) -> None:
        self.time = 1000.0
        super().__init__()

    def now(self) -> float:
        return self.time

    def pass_time(self, seconds: float) -> None:
        """In small steps."""
        until = self.time + seconds
        while self.time < until:
            self.once(0.0)
            self.time += 0.01


class Captain:
    """Reads messages of members, each of which takes a while."""

    def __init__(self) -> None:
        self.loop = Clock()
        self.pairs = [socket.socketpair() for _ in range(MEMBERS)]
        self.read: list[int] = []
        self.checks: list[tuple[float, int]] = []  # when, and how many messages had been read before
        for number, (_, near) in enumerate(self.pairs):
            self.loop.watch(near, selectors.EVENT_READ, lambda number=number: self._receive(number))  # type: ignore[misc]
        Ticks(self.loop, lambda: EVERY, BEAT, self._check).start()

    def _receive(self, number: int) -> None:
        self.pairs[number][1].recv(1)
        self.loop.time += SLICE / 4
        self.read.append(number)

    def _check(self) -> None:
        self.checks.append((self.loop.time, len(self.read)))

    def send(self, data: bytes = b"1") -> None:
        for far, _ in self.pairs:
            far.send(data)

    def close(self) -> None:
        for pair in self.pairs:
            for end in pair:
                end.close()
        signal.set_wakeup_fd(-1)  # set by the loop


@pytest.fixture
def captain() -> Iterator[Captain]:
    captain = Captain()
    yield captain
    captain.close()


def test_checks_are_regular(captain: Captain) -> None:
    captain.loop.pass_time(10.0)
    assert len(captain.checks) == 20


@pytest.mark.parametrize("pause", [1.5, PAUSED_S + 1, 60.0])
def test_after_a_pause_all_that_was_sent_is_read_before_a_check(captain: Captain, pause: float) -> None:
    captain.loop.pass_time(0.1)
    captain.checks.clear()
    captain.send()
    captain.loop.time += pause
    captain.loop.pass_time(5.0)
    assert captain.checks[0][1] == MEMBERS and len(captain.checks) > 3


def test_members_that_were_stopped_too_have_the_time_for_a_heartbeat(captain: Captain) -> None:
    captain.loop.pass_time(0.1)
    captain.checks.clear()
    captain.loop.time += 60.0
    resumed = captain.loop.time
    captain.loop.pass_time(5.0)
    assert captain.checks[0][0] >= resumed + BEAT


def test_members_that_send_without_end_do_not_prevent_checks(captain: Captain) -> None:
    captain.loop.pass_time(0.1)
    captain.checks.clear()
    captain.send(b"1" * 10_000)
    captain.loop.time += 60.0
    resumed = captain.loop.time
    captain.loop.pass_time(60.0)
    assert captain.checks[0][0] <= resumed + 2 * READ_WITHIN + BEAT and len(captain.checks) > 5


def test_a_connection_that_is_closed_meanwhile_is_not_waited_for(captain: Captain) -> None:
    captain.loop.pass_time(0.1)
    captain.checks.clear()
    captain.send()
    captain.loop.time += 1.5
    captain.loop.once(0.0)
    assert captain.checks == []
    for _, near in captain.pairs:
        captain.loop.unwatch(near)
    captain.loop.pass_time(0.1)
    assert len(captain.checks) == 1
