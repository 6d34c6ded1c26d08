"""Free ports, and reserved ports: no two runs of a machine choose the same one, although programs often listen seconds
later."""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Collection

_PORTS = (20000, 30000)  # below the range of ephemeral ports
_ANY_PORT = 0  # any that the kernel chooses
_ATTEMPTS = 1000


def free_port() -> int:
    """A port that is neither in use nor reserved at the moment."""
    for chosen in [*(random.randrange(*_PORTS) for _ in range(1000)), _ANY_PORT]:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind(("", chosen))
            except OSError:
                continue
            port = int(probe.getsockname()[1])
        reservation = port_reservation(port)
        if reservation is not None:
            reservation.close()
            return port
    raise OSError(errno.EADDRINUSE, "no port is free")


def port_reservation(port: int) -> socket.socket | None:
    """An abstract Unix socket of the port's name, which exists once per network namespace, as the port does, and which
    the kernel removes when this process ends. None: another process has reserved the port."""
    holder = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        holder.bind(f"\0paceline-port-{port}")
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            holder.close()
            return None
        # Some sandboxes have no abstract names: the port is probably free nevertheless.
    return holder


class PortReservations:
    def __init__(self) -> None:
        self._sockets: dict[int, socket.socket] = {}

    def reserve(self) -> int:
        for _ in range(_ATTEMPTS):
            port = free_port()
            if port not in self._sockets and (reservation := port_reservation(port)) is not None:
                self._sockets[port] = reservation
                return port
        raise OSError(errno.EADDRINUSE, "no port is free")

    def add(self, port: int) -> None:
        """Reserve a port that was chosen before, unless another process has reserved it since."""
        if port not in self._sockets and (reservation := port_reservation(port)) is not None:
            self._sockets[port] = reservation

    def descriptors(self) -> list[int]:
        """The ports stay reserved while any process has these open."""
        return [reservation.fileno() for reservation in self._sockets.values()]

    def release(self, except_for: Collection[int]) -> None:
        for port in [port for port in self._sockets if port not in except_for]:
            self._sockets.pop(port).close()
