"""Accepts connections in an event loop. Anyone who can reach the port can connect: peers that reset their connection,
say nothing, or come in thousands harm neither the agent nor the connections of members.
"""

from __future__ import annotations

import errno
import resource
import select
import selectors
import socket
from typing import Any, Callable

from paceline.agent.net.loop import Loop

ACCEPT_AT_ONCE = 64  # connections; then the others are served
PAUSE_S = 0.1  # without accepting, while no descriptor is free; the loop would spin otherwise
MOST_STRANGERS = 1024  # connections that have not identified themselves; the hosts of the run are added
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Strangers:
    """Connections that have not identified themselves. If there are too many, the oldest is dropped: members identify
    themselves at once, and connect again if they are dropped."""

    def __init__(self, hosts: int, drop: Callable[[Any], None], has_certificate: Callable[[Any], bool]) -> None:
        """`hosts`: all of them may connect at once. `has_certificate`: such connections are dropped last."""
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = MOST_STRANGERS + hosts
        if descriptors != resource.RLIM_INFINITY:
            self._most = min(self._most, max(16, descriptors // 4))  # the others are for members and files
        self._drop, self._has_certificate = drop, has_certificate
        self._peers: dict[Any, None] = {}  # in order of arrival

    def add(self, peer: Any) -> None:
        self._peers[peer] = None
        while len(self._peers) > self._most:
            self.drop_oldest()

    def discard(self, peer: Any) -> None:
        self._peers.pop(peer, None)

    def drop_oldest(self) -> bool:
        """False: there is none."""
        peer = next((each for each in self._peers if not self._has_certificate(each)), next(iter(self._peers), None))
        if peer is None:
            return False
        del self._peers[peer]
        self._drop(peer)
        return True


class Listener:
    def __init__(
        self,
        loop: Loop,
        address: tuple[str, int],
        backlog: int,
        on_connection: Callable[[socket.socket], None],
        make_room: Callable[[], bool],
    ) -> None:
        """`on_connection`: may raise OSError, as the peer may have disconnected. `make_room`: closes a connection when
        no descriptor is free; False: it cannot."""
        self._loop, self._on_connection, self._make_room = loop, on_connection, make_room
        self._is_closed = False
        # Not create_server(): with it, a captain that listens on [::] could not be reached over IPv4.
        self._socket = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_STREAM)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(address)
            self._socket.listen(backlog)
            self._socket.setblocking(False)
            self._watch()
        except BaseException:
            self._socket.close()
            raise

    @property
    def host(self) -> str:
        """The address, even if it was specified by a name."""
        return str(self._socket.getsockname()[0])

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    def stop(self) -> None:
        """Accepts no more connections; the port stays in use until `close`."""
        self._is_closed = True
        self._loop.unwatch(self._socket)

    def close(self) -> None:
        self.stop()
        self._socket.close()

    def _watch(self) -> None:
        if not self._is_closed:
            self._loop.watch(self._socket, selectors.EVENT_READ, self._accept)

    def _has_waiting(self) -> bool:
        """Without a free descriptor, accept() fails even if no connection is waiting."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    def _accept(self) -> None:
        for _ in range(ACCEPT_AT_ONCE):
            try:
                sock, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionError:
                continue  # the peer has already disconnected
            except OSError as error:
                if error.errno in _NO_ROOM:
                    if not self._has_waiting():
                        return
                    if self._make_room():
                        continue
                self._loop.unwatch(self._socket)
                self._loop.after(PAUSE_S, self._watch)
                return
            try:
                self._on_connection(sock)
            except OSError:
                sock.close()  # the peer has disconnected in the meantime
