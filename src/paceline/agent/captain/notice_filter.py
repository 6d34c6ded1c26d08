"""Which notices of hosts become events: a program that warns in a loop must not fill the disk. No I/O."""

from __future__ import annotations

from paceline.agent.captain.events import Notice

PERIOD = 600.0  # seconds in which the same text is emitted once,
MOST = 100  # and at most this many texts of one host


class NoticeFilter:
    def __init__(self) -> None:
        self._emitted_at: dict[str, float] = {}  # by text
        self._periods: dict[str, tuple[float, int]] = {}  # host -> when its current period began, notices since then

    def admit(self, notice: Notice, now: float) -> Notice | None:
        """What to emit: the notice, once a statement that more of them are dropped, or nothing."""
        if now < self._emitted_at.get(notice.text, -PERIOD) + PERIOD:
            return None  # several hosts may send the same notice, such as a full disk
        began, count = self._periods.get(notice.host, (now, 0))
        if now >= began + PERIOD:
            began, count = now, 0
            self._emitted_at = {text: at for text, at in self._emitted_at.items() if now < at + PERIOD}
        self._periods[notice.host] = began, count + 1
        if count < MOST:
            self._emitted_at[notice.text] = now
            return notice
        if count > MOST:
            return None
        minutes = f"{PERIOD / 60:g} minutes"
        text = f"{notice.host} sent more than {MOST} messages within {minutes}; the rest are not shown"
        return Notice(notice.host, text, warning=True)
