"""The listener of agents, with real sockets: peers that reset their connection, come in thousands, or say nothing."""

from __future__ import annotations

import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.agent.net import listener as module
from paceline.agent.net.listener import Listener, Strangers
from paceline.agent.net.loop import Loop
from paceline.agent.net.tls import TlsLink, context
from paceline.backends import certificates
from support.descriptors import no_free_descriptor

pytestmark = pytest.mark.timeout(60)


class Server:
    """Wraps each connection as the captain does."""

    def __init__(self, tls: str) -> None:
        self.loop = Loop()
        self._tls = context(tls, "captain", server=True)
        self.links: list[TlsLink] = []
        self.listener = Listener(self.loop, ("127.0.0.1", 0), 1024, self._admit, self.make_room)

    def _admit(self, sock: socket.socket) -> None:
        self.links.append(TlsLink(sock, self._tls, server=True))

    def make_room(self) -> bool:
        if self.links:
            self.links.pop(0).close()
            return True
        return False

    def dial(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.listener.port), 30)

    def run_until(self, condition: Callable[[], bool], limit: float = 60.0) -> int:
        """The number of iterations of the loop."""
        until, count = time.monotonic() + limit, 0
        while not condition():
            assert time.monotonic() < until, "not in time"
            self.loop.once(0.05)
            count += 1
        return count

    def close(self) -> None:
        self.listener.close()
        for link in self.links:
            link.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    certificates.make(tmp_path / "tls")
    started = Server(str(tmp_path / "tls"))
    yield started
    started.close()
    signal.set_wakeup_fd(-1)


def reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def test_connections_that_are_reset_before_they_are_accepted_end_nothing(server: Server) -> None:
    for _ in range(20):
        reset(server.dial())
    with server.dial() as good:
        server.run_until(lambda: any(_is_from(link, good) for link in server.links))


def _is_from(link: TlsLink, client: socket.socket) -> bool:
    try:
        return bool(link.sock.getpeername() == client.getsockname())
    except OSError:
        return False


def test_without_a_free_descriptor_a_connection_makes_room_for_the_next(server: Server) -> None:
    with server.dial() as first:
        server.run_until(lambda: len(server.links) == 1)
        with server.dial() as second, no_free_descriptor():
            server.run_until(lambda: any(_is_from(link, second) for link in server.links))
            first.settimeout(30)
            assert first.recv(1) == b"", "it was closed"


def test_the_oldest_stranger_is_dropped_first_and_those_with_a_certificate_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MOST_STRANGERS", 3)
    dropped: list[str] = []
    strangers = Strangers(1, dropped.append, lambda name: name.startswith("member"))
    for name in ("member-0", "scan-0", "scan-1", "scan-2", "scan-3", "member-1"):
        strangers.add(name)
    assert dropped == ["scan-0", "scan-1"]
    strangers.discard("scan-2")
    for name in ("member-2", "member-3"):
        strangers.add(name)
    assert dropped == ["scan-0", "scan-1", "scan-3"]
    assert strangers.drop_oldest() and dropped[-1] == "member-0"
