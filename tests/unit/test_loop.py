"""The agent's loop: whatever there is to do, timers get their turn."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator

import pytest

from paceline.agent.net.loop import SLICE, Loop


class Clock(Loop):
    time = 1000.0

    def now(self) -> float:
        return self.time


@pytest.fixture
def loop() -> Iterator[Clock]:
    before = signal.getsignal(signal.SIGCHLD)
    yield Clock()
    signal.signal(signal.SIGCHLD, before)
    signal.set_wakeup_fd(-1)  # set by the loop


def test_thousands_of_children_that_end_do_not_delay_timers(loop: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    zombies, reaped, groups = list(range(5000, 8000)), list[int](), list[int]()

    def wait(_: int, __: int) -> tuple[int, int]:
        loop.time += 0.0005
        return (zombies.pop(0), 0) if zombies else (0, 0)

    def beat() -> None:
        beats.append(loop.time)
        loop.after(0.01, beat)

    beats: list[float] = []
    monkeypatch.setattr(os, "waitpid", wait)
    loop.on_child(lambda pid, _: reaped.append(pid), lambda: groups.append(len(reaped)))
    beat()
    os.kill(os.getpid(), signal.SIGCHLD)
    for _ in range(200):
        loop.once(0.0)
    assert reaped == list(range(5000, 8000)) and groups[-1] == 3000
    assert max(after - before for before, after in itertools.pairwise(beats)) < 2 * SLICE
