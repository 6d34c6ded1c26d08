"""Faults of a server that answers, by a proxy before it: refused, lost and broken-off requests and answers."""

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

BEHIND_S = 60.0  # the server behind is on this machine: one that is silent for a minute hangs
CONDITIONS = ("if-none-match", "x-goog-if-generation-match")
CODES = {403: "AccessDenied", 501: "NotImplemented", 503: "SlowDown"}


@dataclass(frozen=True)
class Asked:
    """A request inside the `with`."""

    number: int  # from 1 on
    again: int  # how often the same was asked before
    method: str
    path: str
    conditional: bool  # it may only create


@dataclass(frozen=True)
class Fault:
    """What becomes of a request."""

    status: int = 0
    """Answered instead of what the server says; 0: what it says, or nothing where it has not got all of it."""
    reaches: Literal["no", "half", "all"] = "all"
    """How much of it the server gets."""
    half: bool = False
    """Of the answer's body half comes, then the connection is closed."""
    late: float = 0.0
    """Seconds until the server gets it."""
    unconditional: bool = False
    """Nobody knows that it may only create. Where that is signed, as for S3 and Azure, the server refuses it."""


Wrong = Callable[[Asked], "Fault | None"]


class Proxy(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, behind: int) -> None:
        super().__init__((HOST, 0), Request)
        self.endpoint = f"http://{HOST}:{self.server_port}"
        self.behind = behind
        self.asked: list[Asked] = []
        self._wrong: Wrong = lambda _: None
        self._seen: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def wrong(self, wrong: Wrong) -> Iterator[list[Asked]]:
        """All that is asked inside the `with` is noted."""
        with self._lock:
            self.asked, self._seen, self._wrong = [], Counter(), wrong
        try:
            yield self.asked
        finally:
            self._wrong = lambda _: None

    def fault(self, method: str, path: str, conditional: bool) -> Fault:
        with self._lock:
            asked = Asked(len(self.asked) + 1, self._seen[method, path], method, path, conditional)
            self._seen[method, path] += 1
            self.asked.append(asked)
            return self._wrong(asked) or Fault()

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):  # clients that are killed go without a word
            super().handle_error(request, client_address)


class Request(BaseHTTPRequestHandler):
    """The requests of one connection, one after the other."""

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
                    pass  # until the server has done with it
            if fault.reaches == "all":
                answer = connection.getresponse()
                said = answer.read()
            if fault.status:
                self._refuse(fault.status)
            elif fault.reaches == "all":
                self._answer(answer, said, fault.half)
            else:
                self.close_connection = True
        except (OSError, http.client.HTTPException):
            self.close_connection = True  # as the server has done
        finally:
            connection.close()

    do_DELETE = do_GET = do_HEAD = do_POST = do_PUT = pass_on

    def _answer(self, answer: http.client.HTTPResponse, said: bytes, half: bool) -> None:
        self.send_response_only(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("connection", "content-length", "keep-alive", "transfer-encoding"):
                self.send_header(name, value)
        if answer.status != 204:
            length = answer.getheader("content-length") if self.command == "HEAD" else str(len(said))
            self.send_header("content-length", length or "0")
        self.end_headers()
        self.wfile.write(said[: len(said) // 2] if half else said)
        self.close_connection = half

    def _refuse(self, status: int) -> None:
        body = b"" if self.command == "HEAD" else f"<Error><Code>{CODES[status]}</Code></Error>".encode()
        self.send_response_only(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextlib.contextmanager
def proxy(behind: int) -> Iterator[Proxy]:
    with Proxy(behind) as found:
        thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield found
        finally:
            found.shutdown()
            thread.join()
