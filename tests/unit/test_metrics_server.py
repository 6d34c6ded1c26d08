"""The server of metrics, with real sockets: requests, and peers that are wrong, slow, silent or many."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from paceline.agent.metrics import server as module
from paceline.agent.metrics.openmetrics_text import OPENMETRICS, PROMETHEUS
from paceline.agent.metrics.server import MOST, MetricsServer
from paceline.agent.net.loop import Loop
from support.fuzz import reset
from support.metrics_text import ask
from support.runs import eventually

pytestmark = pytest.mark.timeout(60)


class Served:
    """A server whose loop runs in a thread."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.problems: list[str] = []
        self.rendered = 0
        self.body: Callable[[bool], bytes] = lambda openmetrics: b"open\n" if openmetrics else b"older\n"
        self.server = MetricsServer(self.loop, ("127.0.0.1", 0), self._text, self.problems.append)
        self.port = self.server.port
        self._failure: list[BaseException] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _text(self, openmetrics: bool) -> bytes:
        self.rendered += 1
        return self.body(openmetrics)

    def _run(self) -> None:
        try:
            while self.loop._running:
                self.loop.once(0.02)
        except BaseException as error:
            self._failure.append(error)

    def dial(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), 20)

    def stop(self) -> None:
        self.loop.stop()
        self._thread.join()
        self.server.close()
        assert not self._failure


@pytest.fixture
def served() -> Iterator[Served]:
    started = Served()
    yield started
    started.stop()
    signal.set_wakeup_fd(-1)


def test_the_client_chooses_the_format(served: Served) -> None:
    head, body = ask(served.port)
    assert head.startswith("HTTP/1.1 200 OK\r\n") and f"Content-Type: {PROMETHEUS}" in head and body == "older\n"
    accept = b"application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
    head, body = ask(served.port, b"GET /metrics?x=1 HTTP/1.1\r\naccept: " + accept + b"\r\n\r\n")
    assert f"Content-Type: {OPENMETRICS}" in head and "Content-Length: 5" in head and body == "open\n"
    head, body = ask(served.port, b"HEAD /metrics HTTP/1.0\n\n")
    assert "Content-Length: 6" in head and body == ""


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "404 Not Found"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", "405 Method Not Allowed"),
        (b"\x16\x03\x01\r\n\r\n", "400 Bad Request"),
        (b"GET /metrics HTTP/1.1\r\nx: " + b"x" * 10_000, "431 Request Header Fields Too Large"),
    ],
)
def test_other_requests_are_refused(served: Served, request_bytes: bytes, status: str) -> None:
    head, body = ask(served.port, request_bytes)
    assert head.startswith(f"HTTP/1.1 {status}\r\n") and body.endswith("the metrics are at /metrics\n")
    assert not served.rendered


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:80", "LOCALHOST.", "[::1]:9464"])
def test_names_of_this_machine_are_answered(served: Served, host: str) -> None:
    assert ask(served.port, f"GET /metrics HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())[1] == "older\n"


@pytest.mark.parametrize("headers", ["Host: evil.example:80", "host:\tevil.example", "Host: localhost\r\nHost: b.org"])
def test_a_web_page_cannot_read_metrics_by_dns_rebinding(served: Served, headers: str) -> None:
    head, _ = ask(served.port, f"GET /metrics HTTP/1.1\r\n{headers}\r\n\r\n".encode())
    assert head.startswith("HTTP/1.1 421 Misdirected Request\r\n") and not served.rendered


def test_other_addresses_have_any_name() -> None:
    loop = Loop()
    server = MetricsServer(loop, ("0.0.0.0", 0), lambda openmetrics: b"x", [].append)
    try:
        assert server._respond(b"GET /metrics HTTP/1.1\r\nHost: captain.team.svc\r\n\r\n").startswith(b"HTTP/1.1 200 ")
    finally:
        server.close()
        signal.set_wakeup_fd(-1)


def test_a_large_text_is_sent_in_parts_even_to_a_slow_reader(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("EXCHANGE_S", "FRESH_S"):
        monkeypatch.setattr(module, name, 60.0)
    served.body = lambda openmetrics: b"x" * 8_000_000
    with served.dial() as slow:
        slow.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        slow.recv(1)
        _, body = ask(served.port)  # others need not wait
        assert len(body) == 8_000_000
        size = 1
        while piece := slow.recv(1 << 20):
            size += len(piece)
        assert size > 8_000_000
    assert served.rendered == 1, "both have got the same text"


def test_an_error_is_reported_once_and_ends_nothing(served: Served) -> None:
    def fail(openmetrics: bool) -> bytes:
        raise ValueError("no")

    served.body = fail
    for _ in range(3):
        assert ask(served.port)[0].startswith("HTTP/1.1 500 ")
    assert served.problems == ["metrics cannot be served: ValueError('no')"]
    served.body = lambda openmetrics: b"again"
    assert ask(served.port)[1] == "again"


def test_silent_and_reset_connections_leave_room_for_others(served: Served) -> None:
    silent = [served.dial() for _ in range(3 * MOST)]
    for _ in range(50):
        broken = served.dial()
        broken.sendall(b"GET /met")
        reset(broken)
    try:
        assert ask(served.port)[1] == "older\n"
        silent[0].settimeout(20)
        assert silent[0].recv(1) == b"", "the oldest was closed"
        assert len(served.server._exchanges) <= MOST
    finally:
        for sock in silent:
            sock.close()


def test_connections_leave_no_timers_behind(served: Served) -> None:
    """Each connection comes when there is no other one."""
    for _ in range(100):
        assert ask(served.port)[1] == "older\n"
    with served.dial():
        eventually("the connection is admitted", lambda: len(served.server._exchanges) == 1)
        assert len(served.loop._timers) <= 1


def test_a_connection_has_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EXCHANGE_S", 0.1)
    monkeypatch.setattr(module, "SWEEP_S", 0.05)
    served = Served()
    try:
        with served.dial() as sock:
            sock.sendall(b"GET /metrics HTTP/1.1\r\n")
            assert sock.recv(1) == b""
    finally:
        served.stop()
        signal.set_wakeup_fd(-1)


def test_a_port_that_is_in_use_is_reported_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.01)
    loop, problems = Loop(), list[str]()
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        server = MetricsServer(loop, ("127.0.0.1", port), lambda openmetrics: b"", problems.append)
        for _ in range(3):
            loop.once(0.05)
        assert server.port == 0
    try:
        for _ in range(100):
            if not server.port:
                loop.once(0.05)
        assert server.port == port
        assert problems == [f"metrics are not served: cannot listen on 127.0.0.1:{port}: Address already in use"]
    finally:
        server.close()
        signal.set_wakeup_fd(-1)
