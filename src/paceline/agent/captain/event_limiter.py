"""Limits how many events a host can cause: a program that warns in a loop must not fill the disk. No I/O."""

from __future__ import annotations

from paceline.agent.captain.events import Notice

PERIOD = 600.0  # seconds in which the same text is emitted once,
MOST = 100  # and at most this many texts of one host


class EventLimiter:
    def __init__(self) -> None:
        self._emitted_at: dict[str, float] = {}  # by text
        self._periods: dict[str, tuple[float, int]] = {}  # host -> when its current period began, events since then

    def admit(self, notice: Notice, now: float) -> Notice | None:
        """What to emit: the notice, once a statement that more of them are dropped, or nothing."""
        if now < self._emitted_at.get(notice.text, -PERIOD) + PERIOD:
            return None  # several hosts may send the same notice, such as a full disk
        count = self._count(notice.host, now)
        if count < MOST:
            self._emitted_at[notice.text] = now
            return notice
        if count > MOST:
            return None
        minutes = f"{PERIOD / 60:g} minutes"
        text = f"{notice.host} sent more than {MOST} messages within {minutes}; the rest are not shown"
        return Notice(notice.host, text, warning=True)

    def admits(self, what: str, now: float) -> bool:
        """Whether another event about this may be emitted in this period."""
        return self._count(what, now) < MOST

    def _count(self, what: str, now: float) -> int:
        """How many there were in this period."""
        began, count = self._periods.get(what, (now, 0))
        if now >= began + PERIOD:
            began, count = now, 0
            self._emitted_at = {text: at for text, at in self._emitted_at.items() if now < at + PERIOD}
        self._periods[what] = began, count + 1
        return count
