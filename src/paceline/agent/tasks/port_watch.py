"""Watches whether the tasks of a group ever meet: whether any socket used the port at which rank 0 should listen."""

from __future__ import annotations

TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
SURE_AFTER = 3  # looks, one per beat: a program that ends sooner may have listened in between
OFTEN = 60  # looks, after which it looks only every tenth time: on a busy machine, the tables are long


class PortWatch:
    def __init__(self, port: int, tables: tuple[str, ...] = TABLES) -> None:
        self._text = b":%04X " % port
        self._tables = tables
        self._calls = 0
        self._looks = 0
        self._seen = False

    def look(self) -> None:
        """Called once per beat while the task runs."""
        self._calls += 1
        if self._calls <= OFTEN or self._calls % 10 == 0:
            self._look()

    def finish(self) -> bool | None:
        """Called when the task has ended. Whether the port was used; None: unknown.

        The kernel lists a closed connection for a minute, so this also finds one that was opened since the last look.
        """
        self._look()
        return True if self._seen else False if self._looks > SURE_AFTER else None

    def _look(self) -> None:
        if self._seen:
            return
        is_readable = False
        for table in self._tables:
            try:
                with open(table, "rb") as file:
                    self._seen = self._seen or self._text in file.read()
                is_readable = True
            except OSError:
                continue  # without IPv6 there is no tcp6, and on other systems than Linux there is no /proc
        self._looks += is_readable
