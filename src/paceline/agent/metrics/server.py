"""Serves metrics over HTTP in an event loop. Anyone who can reach the port can connect: whatever they send, and however
many they are, neither ends nor delays what else the loop does.
"""

from __future__ import annotations

import ipaddress
import re
import selectors
import socket
from typing import Callable

from paceline.agent.metrics.openmetrics_text import OPENMETRICS, PROMETHEUS
from paceline.agent.net.listener import Listener
from paceline.agent.net.loop import Loop
from paceline.agent.options import METRICS_PATH

MOST = 16  # connections; then the oldest is closed
BACKLOG = 64
HEAD_LIMIT = 8 * 1024  # bytes of a request
EXCHANGE_S = 10.0  # for a request and its response
SWEEP_S = 1.0  # between looks for connections that take too long
AT_ONCE = 64 * 1024  # bytes sent before others are served
FRESH_S = 1.0  # the same text is sent for that long, however many ask for it
MOST_REPORTED = 10  # different problems
RETRY_S = 30.0  # until the port is tried again

Text = Callable[[bool], bytes]  # whether in the format of OpenMetrics -> the metrics

_STATUS = {
    200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 421: "Misdirected Request",
    431: "Request Header Fields Too Large", 500: "Internal Server Error",
}  # fmt: skip
_REQUEST = re.compile(rb"([A-Z]{1,20}) (\S+) HTTP/1\.[01]\r?\n", re.ASCII)
_HOST = re.compile(rb"^host:(.*)$", re.I | re.M)
_ACCEPT = re.compile(rb"^accept:.*application/openmetrics-text", re.I | re.M)


class _Exchange:
    """A request and its response. Each has a connection of its own."""

    def __init__(self, sock: socket.socket, until: float) -> None:
        self.sock, self.until = sock, until
        self.head = b""
        self.response: memoryview | None = None  # what is left of it; None: the request is incomplete


class MetricsServer:
    def __init__(self, loop: Loop, address: tuple[str, int], text: Text, report: Callable[[str], None]) -> None:
        """`report`: is called with each problem, once."""
        self._loop, self._address, self._text, self._report = loop, address, text, report
        self._exchanges: dict[_Exchange, None] = {}  # in order of arrival
        self._recent: dict[bool, tuple[float, bytes]] = {}  # format -> until when it is sent, and the text
        self._reported: set[str] = set()
        self._listener: Listener | None = None
        self._is_sweeping = False  # a timer for `_sweep` is set
        self._is_closed = False
        self._listen()

    @property
    def port(self) -> int:
        """0: it does not listen."""
        return 0 if self._listener is None else self._listener.port

    def close(self) -> None:
        self._is_closed = True
        if self._listener is not None:
            self._listener.close()
        for exchange in list(self._exchanges):
            self._drop(exchange)

    # ---- connections

    def _listen(self) -> None:
        if self._is_closed:
            return
        try:
            self._listener = Listener(self._loop, self._address, BACKLOG, self._admit, self._drop_oldest)
        except OSError as error:
            host, port = self._address
            self._report_once(f"metrics are not served: cannot listen on {host}:{port}: {error.strerror or error}")
            self._loop.after(RETRY_S, self._listen)

    def _admit(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        exchange = _Exchange(sock, self._loop.now() + EXCHANGE_S)
        self._exchanges[exchange] = None
        self._sweep_later()
        self._watch(exchange, selectors.EVENT_READ)
        if len(self._exchanges) > MOST:
            self._drop_oldest()

    def _drop_oldest(self) -> bool:
        """False: there is none."""
        oldest = next(iter(self._exchanges), None)
        if oldest is not None:
            self._drop(oldest)
        return oldest is not None

    def _drop(self, exchange: _Exchange) -> None:
        if exchange in self._exchanges:
            del self._exchanges[exchange]
            self._loop.unwatch(exchange.sock)
            exchange.sock.close()

    def _sweep_later(self) -> None:
        """One timer is enough: with one for each connection, a client could make them more and more."""
        if self._exchanges and not self._is_sweeping:
            self._is_sweeping = True
            self._loop.after(SWEEP_S, self._sweep)

    def _sweep(self) -> None:
        self._is_sweeping = False
        now = self._loop.now()
        for exchange in [each for each in self._exchanges if now >= each.until]:
            self._drop(exchange)
        self._sweep_later()

    # ---- requests and responses

    def _watch(self, exchange: _Exchange, events: int) -> None:
        self._loop.watch(exchange.sock, events, lambda: self._on_ready(exchange))

    def _on_ready(self, exchange: _Exchange) -> None:
        try:
            is_open = self._receive(exchange) if not exchange.response else self._send(exchange)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            is_open = False
        if not is_open:
            self._drop(exchange)

    def _receive(self, exchange: _Exchange) -> bool:
        """False: the other side has closed the connection."""
        data = exchange.sock.recv(HEAD_LIMIT)
        if not data or exchange.response is not None:
            return bool(data)  # the response was sent: the connection is closed once the other side has read it
        exchange.head += data
        is_complete = b"\r\n\r\n" in exchange.head or b"\n\n" in exchange.head
        if is_complete or len(exchange.head) >= HEAD_LIMIT:
            exchange.response = memoryview(self._respond(exchange.head if is_complete else b""))
            self._watch(exchange, selectors.EVENT_WRITE)
        return True

    def _send(self, exchange: _Exchange) -> bool:
        assert exchange.response is not None
        exchange.response = exchange.response[exchange.sock.send(exchange.response[:AT_ONCE]) :]
        if not exchange.response:
            exchange.sock.shutdown(socket.SHUT_WR)
            self._watch(exchange, selectors.EVENT_READ)
        return True

    def _respond(self, head: bytes) -> bytes:
        """`head`: of the request; empty: it is too long."""
        request = _REQUEST.match(head)
        if request is None:
            return _response(400 if head else 431)
        method, target = request[1], request[2].split(b"?")[0]
        if method not in (b"GET", b"HEAD"):
            return _response(405)
        if not self._answers_for(_HOST.findall(head)):
            return _response(421)
        if target != METRICS_PATH.encode():
            return _response(404)
        openmetrics = _ACCEPT.search(head) is not None
        try:
            body = self._recent_text(openmetrics)
        except Exception as error:  # whatever it is: the loop continues
            self._report_once(f"metrics cannot be served: {error!r}")
            return _response(500)
        return _response(200, body, OPENMETRICS if openmetrics else PROMETHEUS, is_head=method == b"HEAD")

    def _answers_for(self, hosts: list[bytes]) -> bool:
        """On loopback, only for names of this machine: a web page could otherwise have its own name resolve to
        127.0.0.1 (DNS rebinding), and the browser would let it read the metrics."""
        assert self._listener is not None
        own = self._listener.host
        if not ipaddress.ip_address(own.partition("%")[0]).is_loopback:
            return True
        names = {"127.0.0.1", "localhost", "[::1]", f"[{own}]" if ":" in own else own, self._address[0].lower()}
        return not hosts or (len(hosts) == 1 and _without_port(hosts[0]) in names)

    def _recent_text(self, openmetrics: bool) -> bytes:
        now = self._loop.now()
        until, text = self._recent.get(openmetrics, (0.0, b""))
        if now >= until:
            text = self._text(openmetrics)
            self._recent[openmetrics] = self._loop.now() + FRESH_S, text
        return text

    def _report_once(self, problem: str) -> None:
        if problem not in self._reported and len(self._reported) < MOST_REPORTED:
            self._reported.add(problem)
            self._report(problem)


def _without_port(host: bytes) -> str:
    """The name or address in the value of a Host header."""
    text = host.strip().decode("latin-1").lower()
    name, _, port = text.rpartition(":")
    is_port = not port or (port.isascii() and port.isdigit())
    return (name if name and is_port else text).rstrip(".")


def _response(code: int, body: bytes = b"", kind: str = "text/plain; charset=utf-8", is_head: bool = False) -> bytes:
    body = body if code == 200 else f"{_STATUS[code]}; the metrics are at {METRICS_PATH}\n".encode()
    allowed = "Allow: GET, HEAD\r\n" if code == 405 else ""
    head = (
        f"HTTP/1.1 {code} {_STATUS[code]}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n{allowed}"
        "Cache-Control: no-store\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (b"" if is_head else body)
