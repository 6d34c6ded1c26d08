"""The captain's regular checks, such as which members are silent; not before what they have sent is read.

A process that was stopped, suspended or starved has heartbeats in its sockets, which it must read before it declares
anybody lost.
"""

from __future__ import annotations

from typing import Callable

from paceline.agent.net.loop import Loop

LATE_S = 0.5  # seconds after which a check is late
PAUSED_S = 2.0  # seconds after which members may have been stopped, too, as on a machine that was suspended
READ_WITHIN = 5.0  # seconds in which messages are read before a check that is late


class Ticks:
    def __init__(self, loop: Loop, every: Callable[[], float], beat_every: float, tick: Callable[[], None]) -> None:
        """`every`: the seconds until the next check. `beat_every`: those between the heartbeats of a member."""
        self._loop, self._every, self._beat_every, self._tick = loop, every, beat_every, tick
        self._due = 0.0
        self._has_waited = False  # for heartbeats, since the last check

    def start(self) -> None:
        self._tick()
        self._schedule(self._every())

    def _schedule(self, seconds: float) -> None:
        self._due = self._loop.now() + seconds
        self._loop.after(seconds, self._on_time)

    def _on_time(self) -> None:
        late_by = self._loop.now() - self._due
        if late_by <= LATE_S:
            self._check()
        elif late_by <= PAUSED_S or self._has_waited:
            self._loop.after_pending(READ_WITHIN, self._check)
        else:
            self._loop.after_pending(READ_WITHIN, self._wait_for_heartbeats)

    def _wait_for_heartbeats(self) -> None:
        """Only once: otherwise, an overloaded captain would never notice that a member is lost."""
        self._has_waited = True
        self._schedule(self._beat_every)

    def _check(self) -> None:
        self._has_waited = False
        self._tick()
        self._schedule(self._every())
