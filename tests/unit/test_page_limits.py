"""The limits of the page's server: clients that send too much, or too slowly, do not keep others from answers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from paceline.page.access import certificate as certificates
from paceline.page.http.connections import ConnectionLimits, LimitedProtocol, LimitedServer
from paceline.serve.listening import listen
from support.in_process_server import is_closed, response, serving
from support.runs import eventually

GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
START = b"GET / HTTP/1.1\r\nHost: localhost\r\n"
LARGE = b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n"
STREAM = b"GET /stream HTTP/1.1\r\nHost: localhost\r\n\r\n"


@dataclass
class Running:
    server: LimitedServer
    port: int
    thread: threading.Thread
    ended_streams: list[int] = field(default_factory=list)
    sockets: list[socket.socket] = field(default_factory=list)

    def connect(self, *data: bytes, receive_buffer: int = 0) -> socket.socket:
        connection = socket.socket()
        self.sockets.append(connection)
        connection.settimeout(30)
        if receive_buffer:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)  # the sender's buffer is small, too
        connection.connect(("127.0.0.1", self.port))
        for each in data:
            connection.sendall(each)
        return connection

    def ask(self, connection: socket.socket | None = None) -> bytes:
        connection = connection or self.connect()
        connection.sendall(GET)
        return response(connection)

    def open_connections(self) -> int:
        return len(self.server.server_state.connections)


@contextlib.contextmanager
def running(limits: ConnectionLimits | None = None, **tls: Any) -> Iterator[Running]:
    listener = listen("127.0.0.1", 0)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        answer: Response = StreamingResponse(endless()) if scope["path"] == "/stream" else PlainTextResponse("answer")
        if scope["path"] == "/large":
            answer = PlainTextResponse("x" * 50_000)
        if scope["method"] == "POST":
            answer = PlainTextResponse(str(len(await Request(scope, receive).body())))
        await answer(scope, receive, send)

    async def endless() -> AsyncIterator[bytes]:
        count = 0
        try:
            while True:
                count += 1
                yield b"x" * 1000
                await asyncio.sleep(0)
        finally:
            at.ended_streams.append(count)

    server = LimitedServer(app, limits or ConnectionLimits(), lambda now: None, **tls)
    sockets: list[socket.socket] = []
    with serving(server, listener, sockets) as thread:
        at = Running(server, listener.getsockname()[1], thread, sockets=sockets)
        yield at


@pytest.mark.parametrize("start", [b"GET /", START + b"X-One: ", START + b"X-"], ids=["the path", "a header", "a name"])
def test_headers_are_limited_in_size(start: bytes) -> None:
    with running() as server:
        attacker, sent = server.connect(start), 0
        with pytest.raises(OSError):  # the server closes the connection
            for _ in range(1000):
                attacker.sendall(b"a" * 65536)
                sent += 65536
        assert sent < 16 * 1024 * 1024  # most of it in buffers of the system
        assert server.ask().endswith(b"answer")


def test_requests_that_do_not_end_are_closed() -> None:
    with running(ConnectionLimits(head_seconds=2.0, seconds=2.5)) as server:
        healthy = server.connect(GET)
        assert response(healthy).endswith(b"answer")
        in_body = server.connect(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        silent, in_head, second = server.connect(), server.connect(START), server.connect(GET + START)
        trickling, stopping = server.connect(START), threading.Event()

        def trickle() -> None:
            with contextlib.suppress(OSError):
                while not stopping.wait(0.05):
                    trickling.sendall(b"X: y\r\n")

        thread = threading.Thread(target=trickle)
        thread.start()
        assert response(second).endswith(b"answer")
        for each in (silent, in_head, second, in_body):
            assert is_closed(each)
        eventually("a client that sends one header at a time is disconnected", lambda: not thread.is_alive())
        stopping.set()
        assert server.ask(healthy).endswith(b"answer")
        assert server.open_connections() == 1


def test_a_body_may_take_longer_than_the_headers() -> None:
    with running(ConnectionLimits(head_seconds=2.0, seconds=20)) as server:
        slow = server.connect(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n1")
        other = server.connect()
        assert is_closed(other)  # the shorter limit has passed
        slow.sendall(b"2")
        assert response(slow).endswith(b"\r\n\r\n2")


def test_a_client_that_does_not_take_a_stream_is_disconnected() -> None:
    with running(ConnectionLimits(seconds=5.0)) as server:
        taking, stuck = server.connect(STREAM), server.connect(STREAM, receive_buffer=4096)
        stopping = threading.Event()
        received: list[int] = []

        def take() -> None:
            with contextlib.suppress(OSError):
                while not stopping.is_set():
                    received.append(len(taking.recv(1 << 16)))

        thread = threading.Thread(target=take)
        thread.start()
        eventually("the stream of the other ends", lambda: len(server.ended_streams) == 1)
        before = sum(received)
        eventually("this one continues", lambda: sum(received) > before)
        assert server.ask().endswith(b"answer") and stuck.fileno() >= 0
        stopping.set()
        thread.join(30)


def test_a_client_that_takes_no_responses_does_not_delay_the_end() -> None:
    with running() as server:
        stuck = server.connect(receive_buffer=1)
        stuck.setblocking(False)
        connections = server.server.server_state.connections

        def is_stuck() -> bool:
            with contextlib.suppress(BlockingIOError):
                stuck.send(LARGE)
            return any(each.flow.write_paused for each in connections if isinstance(each, LimitedProtocol))

        eventually("the client is stuck", is_stuck)
        server.server.should_exit = server.server.force_exit = True
        server.thread.join(30)
        assert not server.thread.is_alive()


def test_silent_connections_make_room_for_others() -> None:
    with running(ConnectionLimits(connections=20)) as server:
        healthy, streaming = server.connect(), server.connect(STREAM)
        assert server.ask(healthy).endswith(b"answer")
        attackers = []
        for number in range(60):
            attackers.append(server.connect(START if number % 2 else b""))
            if number % 10 == 0:
                # The second request is sent when all that connected earlier have been accepted.
                assert server.ask(server.connect()).endswith(b"answer")
                assert server.ask(healthy).endswith(b"answer")
                assert server.open_connections() <= 20
        assert is_closed(attackers[0])
        assert len(streaming.recv(1000)) > 0 and not server.ended_streams


def test_silent_connections_do_not_keep_others_from_their_tls_handshake(tmp_path: Path) -> None:
    certificate, key = certificates.make(tmp_path, ["localhost"])
    tls = {"ssl_certfile": certificate, "ssl_keyfile": key}
    with running(ConnectionLimits(handshakes=10), **tls) as server:
        silent = [server.connect() for _ in range(30)]
        trusting = ssl.create_default_context(cafile=certificate)
        with trusting.wrap_socket(server.connect(), server_hostname="localhost") as healthy:
            assert server.ask(healthy).endswith(b"answer")
        assert all(map(is_closed, silent[:20]))  # they made room
    with running(ConnectionLimits(handshakes=10, head_seconds=0.5), **tls) as server:
        assert all(map(is_closed, [server.connect() for _ in range(10)]))  # they took too long


def test_responses_do_not_wait_for_acknowledgements() -> None:
    with running() as at:
        at.ask()
        [connection] = at.server.server_state.connections
        assert isinstance(connection, LimitedProtocol)
        server_side: socket.socket = connection.transport.get_extra_info("socket")
        assert server_side.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


def test_if_all_connections_are_streams_the_next_is_refused() -> None:
    with running(ConnectionLimits(connections=2)) as server:
        streams = [server.connect(STREAM) for _ in range(2)]
        assert all(each.recv(1000) for each in streams)
        assert is_closed(server.connect(GET)) and server.open_connections() == 2


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", b"GET / HTTP/9.9\r\n\r\n", b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", b"\0" * 1000,
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n",
    ],
)  # fmt: skip
def test_garbage_gets_an_answer_or_nothing(data: bytes) -> None:
    with running() as server:
        broken = server.connect(data)
        broken.shutdown(socket.SHUT_WR)
        assert is_closed(broken)
        assert server.ask().endswith(b"answer")
