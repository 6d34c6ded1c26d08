"""The model server in a thread, with a model that is a Python function, for tests of its limits."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn

from paceline.serve import listening
from paceline.serve.app import Limits, Server
from paceline.serve.connections import ConnectionLimits, uvicorn_config
from paceline.serve.graceful_exit import GracefulServer, Shutdown
from paceline.serve.metrics import Metrics
from paceline.serve.model_loading import Model
from paceline.serve.signatures import Arrays, Signature, Tensor
from paceline.serve.versions import Versions
from support.runs import eventually

SIGNATURE = Signature({"x": Tensor("float32", (-1, 2))}, {"y": Tensor("float32", (-1, 2))})
BODY = b'{"instances": [[1, 2]]}'
ANSWER = b'{"predictions":[[1.0,2.0]]}'


@contextlib.contextmanager
def serving(
    server: uvicorn.Server,
    listener: socket.socket,
    clients: list[socket.socket],
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> Iterator[threading.Thread]:
    """The server runs in a thread; at the end, it and the sockets of its clients are closed."""

    def serve() -> None:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(server.serve(sockets=[listener]))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        eventually("the server has started", lambda: server.started)
        yield thread
    finally:
        for each in clients:
            each.close()
        server.should_exit = server.force_exit = True
        thread.join(30)
        listener.close()
        assert not thread.is_alive()


@dataclass
class Running:
    port: int
    app: Server
    server: GracefulServer
    host: str = "127.0.0.1"
    sockets: list[socket.socket] = field(default_factory=list)

    def connect(self, *data: bytes, receive_buffer: int = 0) -> socket.socket:
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        connection = socket.socket(family)
        self.sockets.append(connection)
        connection.settimeout(30)
        if receive_buffer:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)  # the sender's buffer is small, too
        connection.connect((self.host, self.port))
        for each in data:
            connection.sendall(each)
        return connection

    def predict(self, body: bytes = BODY, host: str = "localhost", connection: socket.socket | None = None) -> bytes:
        """The whole response."""
        connection = connection or self.connect()
        connection.sendall(head(len(body), host) + body)
        return response(connection)

    def open_connections(self) -> int:
        return len(self.server.server_state.connections)


def head(length: int, host: str = "localhost") -> bytes:
    return f"POST /v1/models/toy:predict HTTP/1.1\r\nHost: {host}\r\nContent-Length: {length}\r\n\r\n".encode()


def response(connection: socket.socket) -> bytes:
    """The next response on a connection; what has come before the end if the server ends the connection."""
    data = b""
    while True:
        headers, end, body = data.partition(b"\r\n\r\n")
        length = next((int(line[15:]) for line in headers.lower().split(b"\r\n") if line[:15] == b"content-length:"), 0)
        if end and len(body) >= length:
            return data
        try:
            part = connection.recv(1 << 16)
        except ConnectionResetError:
            part = b""
        if not part:
            return data
        data += part


def is_closed(connection: socket.socket) -> bool:
    """Reads to the end, within the time limit of the connection."""
    try:
        while connection.recv(1 << 16):
            pass
    except (ConnectionResetError, BrokenPipeError):
        pass
    return True


@contextlib.contextmanager
def running(
    limits: Limits | None = None,
    connection_limits: ConnectionLimits | None = None,
    call: Callable[[Arrays], Arrays] = lambda inputs: {"y": inputs["x"]},
    host: str = "127.0.0.1",
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> Iterator[Running]:
    versions = Versions(Path("/none"), Metrics(), lambda _: None)
    versions.model = Model(1, "saved_model", {"serving_default": SIGNATURE}, {"serving_default": call})
    shutdown = Shutdown()
    listener = listening.listen(host, 0)
    hosts = listening.allowed_hosts(listener, host)
    app = Server("toy", versions, Metrics(), limits or Limits(), shutdown, hosts)
    config = uvicorn_config(app.app(), connection_limits or ConnectionLimits())
    server = GracefulServer(config, shutdown, 0)
    at = Running(listener.getsockname()[1], app, server, "::1" if ":" in host else "127.0.0.1")
    with serving(server, listener, at.sockets, loop_factory):
        yield at
