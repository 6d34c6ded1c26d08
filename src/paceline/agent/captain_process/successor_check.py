"""Whether the backend has replaced this captain: its name then resolves to another one."""

from __future__ import annotations

from typing import Callable

from paceline.agent.net.dns import Address, NameLookup
from paceline.agent.net.loop import Loop
from paceline.agent.options import endpoint

EVERY_S = 10.0
REPLACED_AFTER_S = 25.0  # for which the name resolves to another captain; DNS may be out of date for less


class SuccessorCheck:
    def __init__(self, loop: Loop, name: str, address: str, on_replaced: Callable[[str], None]) -> None:
        """`name`: host and port that members dial; `address`: this captain's own. `on_replaced` is called with the
        reason."""
        self._loop = loop
        self._name, self._address = name, address
        self._on_replaced = on_replaced
        self._resolved_at: float | None = None  # when the name last resolved to this captain
        self._lookup = NameLookup(loop, self._check)
        self._look_up()

    def _look_up(self) -> None:
        self._lookup.begin(*endpoint(self._name))
        self._loop.after(EVERY_S, self._look_up)

    def _check(self, _: Address) -> None:
        now, addresses = self._loop.now(), self._lookup.addresses
        if self._address in addresses:
            self._resolved_at = now
        elif addresses and self._resolved_at is not None and now - self._resolved_at > REPLACED_AFTER_S:
            self._on_replaced(f"{self._name} now resolves to another captain ({', '.join(sorted(addresses))})")
