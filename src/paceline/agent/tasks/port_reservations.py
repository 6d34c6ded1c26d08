"""Ports for tasks: no two agents of a machine choose the same one, although programs often listen seconds later."""

from __future__ import annotations

import errno
import socket
from collections.abc import Collection

from paceline.agent import machine

_ATTEMPTS = 1000


class PortReservations:
    """A port is reserved by an abstract Unix socket of its name, which exists once per network namespace, as the port
    does, and which the kernel removes when this agent ends."""

    def __init__(self) -> None:
        self._sockets: dict[int, socket.socket] = {}

    def reserve(self) -> int:
        for _ in range(_ATTEMPTS):
            port = machine.free_port()
            if port not in self._sockets and (name := reserved_name(port)) is not None:
                self._sockets[port] = name
                return port
        raise OSError(errno.EADDRINUSE, "no port is free")

    def release(self, except_for: Collection[int]) -> None:
        for port in [port for port in self._sockets if port not in except_for]:
            self._sockets.pop(port).close()


def reserved_name(port: int) -> socket.socket | None:
    """None: another agent has reserved the port."""
    holder = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        holder.bind(f"\0paceline-port-{port}")
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            holder.close()
            return None
        # Some sandboxes have no abstract names: the port is probably free nevertheless.
    return holder
