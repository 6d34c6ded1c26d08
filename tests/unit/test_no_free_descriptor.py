"""Every listener waits while this process has no free file descriptor, without using a core, and then continues."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvloop

from paceline.agent.metrics.server import MetricsServer
from paceline.agent.net.listener import Listener
from paceline.agent.net.loop import Loop
from paceline.agent.net.tls import SERVER_NAME, context
from paceline.backends import certificates
from paceline.page.http.connections import ConnectionLimits, LimitedServer
from paceline.serve.listening import listen
from paceline.storage.stores.folder import FolderStore
from paceline.storage.stores.peer_access import ReaderAccess
from paceline.storage.stores.peer_server import Server
from support import in_process_server
from support.descriptors import no_free_descriptor
from support.runs import eventually

pytestmark = pytest.mark.timeout(120)

Opened = Iterator[tuple[int, Callable[[socket.socket], object]]]  # the port, and the answer to a connection


@contextlib.contextmanager
def looping(loop: Loop) -> Iterator[None]:
    stopping = threading.Event()

    def run() -> None:
        while not stopping.is_set():
            loop.once(0.01)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()
        signal.set_wakeup_fd(-1)


def agents(tmp_path: Path) -> Opened:
    """The captain's, and that of TensorBoard's pod."""
    loop, accepted = Loop(), []
    listener = Listener(loop, ("127.0.0.1", 0), 64, accepted.append, lambda: False)
    try:
        with looping(loop):
            yield listener.port, lambda _: accepted
    finally:
        listener.close()
        for each in accepted:
            each.close()


def metrics(tmp_path: Path) -> Opened:
    loop = Loop()
    server = MetricsServer(loop, ("127.0.0.1", 0), lambda _: b"x 1\n", [].append)
    try:
        with looping(loop):
            yield server.port, lambda client: _answer(client, b"GET /metrics HTTP/1.1\r\n\r\n")
    finally:
        server.close()


def snapshots(tmp_path: Path) -> Opened:
    certificates.make(tmp_path / "tls")
    tls = context(str(tmp_path / "tls"), "captain", server=True)
    server = Server(("127.0.0.1", 0), tls, FolderStore(str(tmp_path)), ReaderAccess("run"))
    client_tls = context(str(tmp_path / "tls"), "member", server=False)

    def answer(client: socket.socket) -> object:
        with client_tls.wrap_socket(client.dup(), server_hostname=SERVER_NAME) as link:
            return link.version()

    try:
        yield server.port, answer
    finally:
        server.close()


def page(tmp_path: Path) -> Opened:
    async def app(scope: object, receive: object, send: Callable[..., object]) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})  # type: ignore[misc]
        await send({"type": "http.response.body", "body": b"x"})  # type: ignore[misc]

    listener = listen("127.0.0.1", 0)
    server = LimitedServer(app, ConnectionLimits(), lambda _: None)  # type: ignore[arg-type]
    with in_process_server.serving(server, listener, []):
        yield listener.getsockname()[1], lambda client: _answer(client, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")


def served_model(tmp_path: Path) -> Opened:
    with in_process_server.running(loop_factory=uvloop.new_event_loop) as server:
        yield server.port, lambda client: _answer(client, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")


def _answer(client: socket.socket, request: bytes) -> bool:
    client.sendall(request)
    return client.recv(1 << 16).startswith(b"HTTP/1.1 200")


LISTENERS = (agents, metrics, snapshots, page, served_model)


@pytest.mark.parametrize("listener", LISTENERS, ids=lambda each: each.__name__)
def test_a_listener_waits_for_a_free_descriptor_without_trying_all_the_time(
    listener: Callable[[Path], Opened], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept, calls = socket.socket.accept, []

    def counted(self: socket.socket) -> object:
        calls.append(self)
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", counted)
    with contextlib.contextmanager(listener)(tmp_path) as (port, answer):
        with socket.socket() as waiting, no_free_descriptor():
            waiting.connect(("127.0.0.1", port))
            before = time.process_time()
            time.sleep(0.4)
            assert len(calls) < 50 and time.process_time() - before < 0.3, "it spins"

        def is_answered() -> bool:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 30) as client:
                return bool(answer(client))
            return False

        eventually("a connection is answered", is_answered)
