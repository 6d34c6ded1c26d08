"""A member's connection to a captain that the test plays: real sockets and TLS, a clock that the test moves."""

from __future__ import annotations

import selectors
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from paceline.agent.captain import events as ev
from paceline.agent.net import dns, messages
from paceline.agent.net.captain_connection import CaptainConnection
from paceline.agent.net.frames import encode
from paceline.agent.net.loop import Callback, Loop, Timer
from paceline.agent.net.tls import LinkClosed, TlsLink
from paceline.agent.options import Options

NAME = "captain.digits"
SOON = 30.0  # seconds that real sockets may take on a busy machine
LEASE, BEAT = 10.0, 1.0
WELCOME = {"type": "welcome", "lease": LEASE, "beat": BEAT}
ROSTER: dict[str, Any] = {"type": "roster", "generation": 1, "roster": {}}


class Clock(Loop):
    """The agent's loop with a clock that only the test moves."""

    def __init__(self) -> None:
        self.time = 1000.0
        self.waits: list[float] = []
        super().__init__()

    def now(self) -> float:
        return self.time

    def after(self, seconds: float, callback: Callback) -> Timer:
        self.waits.append(seconds)
        return super().after(seconds, callback)

    def pass_time(self, seconds: float) -> None:
        self.time += seconds
        self.once(0.0)

    def until(self, condition: Callable[[], object], step: float = 0.0) -> None:
        """`step`: how far the clock moves after each check."""
        limit = time.monotonic() + SOON
        while not condition():
            assert time.monotonic() < limit, "the condition was not met in time"
            self.once(0.02)
            self.time += step

    def settle(self) -> None:
        """Run until no socket is ready."""
        while self._selector.select(0.0):
            self.once(0.0)


class Peer:
    """The captain's end of one connection."""

    def __init__(self, sock: socket.socket, tls: ssl.SSLContext, loop: Clock) -> None:
        self.link = TlsLink(sock, tls, server=True)
        self.received: list[dict[str, Any]] = []
        self.close_reason = ""
        self._loop = loop
        self._watch()

    def _watch(self) -> None:
        self._loop.watch(self.link, self.link.interest(), self._ready)

    def _ready(self) -> None:
        try:
            self.received += self.link.ready()
            self._watch()
        except LinkClosed as error:
            self.close_reason = str(error)
            self.hang_up()

    def send(self, *outgoing: dict[str, Any]) -> None:
        self.link.send_bytes(*map(encode, outgoing))
        self._watch()

    def kinds(self) -> list[str]:
        return [message["type"] for message in self.received]

    def hang_up(self) -> None:
        self._loop.unwatch(self.link)
        self.link.close()

    def reset(self) -> None:
        self.link.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.hang_up()


class Captain:
    """Listens and accepts every connection; sends nothing on its own."""

    def __init__(self, tls: ssl.SSLContext, loop: Clock, port: int = 0) -> None:
        self._tls, self._loop = tls, loop
        self.listener = socket.create_server(("127.0.0.1", port))
        self.listener.setblocking(False)
        self.port: int = self.listener.getsockname()[1]
        self.peers: list[Peer] = []
        loop.watch(self.listener, selectors.EVENT_READ, self._accept)

    def _accept(self) -> None:
        self.peers.append(Peer(self.listener.accept()[0], self._tls, self._loop))

    def close(self) -> None:
        self._loop.unwatch(self.listener)
        self.listener.close()
        for peer in self.peers:
            peer.hang_up()


class Echo:
    def __init__(self) -> None:
        self.output: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.output.append(data)


class Names:
    """A name server whose answers, and their timing, the test controls."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.port = 0  # of the captain; 0: the name has no address
        self.error: Exception = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        self.queries: list[str] = []
        self.gates: dict[str, threading.Event] = {}  # names whose answer waits for the event
        self.always: Exception | None = None  # the error for a name that every cluster has; None: it is found
        patch.setattr(socket, "getaddrinfo", self._answer)

    def block(self, name: str) -> threading.Event:
        gate = self.gates[name] = threading.Event()
        return gate

    def is_down(self) -> None:
        self.port, self.error = 0, socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        self.always = self.error

    def is_up(self, port: int) -> None:
        self.port, self.always = port, None

    def _answer(self, host: str, port: int | None, *_: Any, **__: Any) -> list[Any]:
        self.queries.append(host)
        gate, error, captain_port = self.gates.get(host), self.error, self.port
        always = self.always
        if gate is not None:
            assert gate.wait(SOON)
        if host == dns.ALWAYS:
            if always is not None:
                raise always
            return []
        if not captain_port:
            raise error
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", captain_port))]


class Host:
    """A member, as far as its connection needs it."""

    def __init__(self, folder: str, loop: Clock, address: str) -> None:
        self.loop, self.address = loop, address
        self.echo = Echo()
        self.generation = 3
        self.received: list[messages.CaptainMessage] = []
        echo: Any = self.echo
        options = Options("run", "worker-host-0", "", "", folder, address, lease=LEASE)
        self.connection = CaptainConnection(
            options, loop, echo, self._join, lambda n: ev.Heartbeat("worker-host-0", n, {}, 0.5), self.received.append
        )

    def _join(self) -> ev.MemberJoined:
        return ev.MemberJoined(
            "worker-host-0", "a", 1, True, "here", self.generation, offers={"worker-0": "127.0.0.1:2000"}
        )


def await_join(host: Host, captain: Captain, number: int = 0) -> Peer:
    """Wait until the captain has received the join."""
    host.loop.until(lambda: len(captain.peers) > number and captain.peers[number].received)
    assert captain.peers[number].kinds() == ["join"]
    return captain.peers[number]


def join(host: Host, captain: Captain, number: int = 0) -> Peer:
    if not number:
        host.connection.dial()
    peer = await_join(host, captain, number)
    peer.send(WELCOME)
    host.loop.until(lambda: host.connection.joined)
    peer.received.clear()
    return peer
