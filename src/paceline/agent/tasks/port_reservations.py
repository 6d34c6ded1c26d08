"""Ports for tasks: no two agents of a machine choose the same one, although programs often listen seconds later."""

from __future__ import annotations

import errno
import socket
from collections.abc import Collection

from paceline.agent import machine

_ATTEMPTS = 1000


class PortReservations:
    def __init__(self) -> None:
        self._sockets: dict[int, socket.socket] = {}

    def reserve(self) -> int:
        for _ in range(_ATTEMPTS):
            port = machine.free_port()
            if port not in self._sockets and (reservation := machine.port_reservation(port)) is not None:
                self._sockets[port] = reservation
                return port
        raise OSError(errno.EADDRINUSE, "no port is free")

    def release(self, except_for: Collection[int]) -> None:
        for port in [port for port in self._sockets if port not in except_for]:
            self._sockets.pop(port).close()
