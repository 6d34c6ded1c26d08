"""Faults of a server, injected by a proxy in front of it: refused, lost and truncated requests and answers."""

from __future__ import annotations

import contextlib
import http.client
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

from support.stores.serving import HOST

BEHIND_S = 60.0  # the upstream server is on this machine: if it does not answer for a minute, it hangs
CONDITIONS = ("if-none-match", "x-goog-if-generation-match")
CODES = {403: "AccessDenied", 501: "NotImplemented", 503: "SlowDown"}


@dataclass(frozen=True)
class Asked:
    """A request received inside the `with` block."""

    number: int  # from 1 on
    again: int  # how many times the same request came before
    method: str
    path: str
    conditional: bool  # it must not overwrite


@dataclass(frozen=True)
class Fault:
    """What happens to a request."""

    status: int = 0
    """The status sent instead of the server's answer; 0: its answer, or none if it did not get the whole request."""
    reaches: Literal["no", "half", "all"] = "all"
    """How much of the request the server gets."""
    half: bool = False
    """The connection is closed after half of the answer's body."""
    late: float = 0.0
    """Seconds until the request is passed to the server."""
    unconditional: bool = False
    """The condition is removed. If its header is signed, as for S3 and Azure, the server refuses the request."""


Wrong = Callable[[Asked], "Fault | None"]


class Proxy(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, behind: int) -> None:
        super().__init__((HOST, 0), Request)
        self.endpoint = f"http://{HOST}:{self.server_port}"
        self.behind = behind
        self.asked: list[Asked] = []
        self._choose_fault: Wrong = lambda _: None
        self._counts: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def wrong(self, choose_fault: Wrong) -> Iterator[list[Asked]]:
        """Applies these faults inside the `with` block, and records all requests there."""
        with self._lock:
            self.asked, self._counts, self._choose_fault = [], Counter(), choose_fault
        try:
            yield self.asked
        finally:
            self._choose_fault = lambda _: None

    def fault(self, method: str, path: str, conditional: bool) -> Fault:
        with self._lock:
            request = Asked(len(self.asked) + 1, self._counts[method, path], method, path, conditional)
            self._counts[method, path] += 1
            self.asked.append(request)
            return self._choose_fault(request) or Fault()

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):  # killed clients just drop their connections
            super().handle_error(request, client_address)


class Request(BaseHTTPRequestHandler):
    """Handles the requests of one connection, one after the other."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Proxy

    def pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        conditional = any(name in self.headers for name in CONDITIONS)
        fault = self.server.fault(self.command, self.path, conditional)
        connection = http.client.HTTPConnection(HOST, self.server.behind, timeout=BEHIND_S)
        time.sleep(fault.late)
        try:
            if fault.reaches != "no":
                connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                for name, value in self.headers.items():
                    if not (fault.unconditional and name.lower() in CONDITIONS):
                        connection.putheader(name, value)
                connection.endheaders(body if fault.reaches == "all" else body[: len(body) // 2])
            if fault.reaches == "half" and connection.sock:
                connection.sock.shutdown(socket.SHUT_WR)
                while connection.sock.recv(1 << 16):
                    pass  # until the server has closed the connection
            if fault.reaches == "all":
                response = connection.getresponse()
                content = response.read()
            if fault.status:
                self._refuse(fault.status)
            elif fault.reaches == "all":
                self._answer(response, content, fault.half)
            else:
                self.close_connection = True
        except (OSError, http.client.HTTPException):
            self.close_connection = True  # as the server has done
        finally:
            connection.close()

    do_DELETE = do_GET = do_HEAD = do_POST = do_PUT = pass_on

    def _answer(self, response: http.client.HTTPResponse, content: bytes, half: bool) -> None:
        self.send_response_only(response.status)
        for name, value in response.getheaders():
            if name.lower() not in ("connection", "content-length", "keep-alive", "transfer-encoding"):
                self.send_header(name, value)
        if response.status != 204:
            length = response.getheader("content-length") if self.command == "HEAD" else str(len(content))
            self.send_header("content-length", length or "0")
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if half else content)
        self.close_connection = half

    def _refuse(self, status: int) -> None:
        body = b"" if self.command == "HEAD" else f"<Error><Code>{CODES[status]}</Code></Error>".encode()
        self.send_response_only(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextlib.contextmanager
def proxy(behind: int) -> Iterator[Proxy]:
    with Proxy(behind) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
