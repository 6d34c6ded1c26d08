"""Requests over HTTP: no redirects, a time limit for each, and errors that tell whether trying again can help.

Errors never contain the address, which may be a secret."""

from __future__ import annotations

import http.client
import os
import socket
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

TIMEOUT = 10.0  # seconds until the server accepts a connection, and between two parts of its response
LONGEST = 30.0  # seconds for a request and its response: a server that sends byte by byte must not block others
LARGEST_RESPONSE = 4 * 1024 * 1024  # bytes
LONGEST_DELAY = 300.0  # seconds that a server may ask for
_TOO_SLOW = f"no complete response within {LONGEST:g} s"
_TRY_AGAIN = (408, 425, 429)  # and those of servers, from 500 on


class DeliveryError(Exception):
    """The server did not accept the request. The text is for users."""

    def __init__(self, text: str, status: int = 0, body: bytes = b"", retry: bool = True, delay: float = 0.0) -> None:
        """`retry`: whether it may accept it later. `delay`: the least number of seconds it asks the client to wait."""
        super().__init__(text)
        self.status, self.body, self.retry, self.delay = status, body, retry, delay


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect could lead to another host, which must not get what is sent."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


class _TimeLimit:
    """Disconnects after a time. Timeouts of sockets begin again with each byte."""

    def __init__(self, seconds: float) -> None:
        self._connections: list[socket.socket] = []
        self._lock = threading.Lock()
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True
        self.is_over = False

    def __enter__(self) -> _TimeLimit:
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        with self._lock:
            for connection in self._connections:
                connection.close()
            self._connections.clear()

    def connect(self, *args: Any, **options: Any) -> socket.socket:
        """In place of socket.create_connection."""
        connection = socket.create_connection(*args, **options)
        with self._lock:
            self._connections.append(connection.dup())  # TLS takes the descriptor of the original
        if self.is_over:
            self._end()
        return connection

    def _end(self) -> None:
        self.is_over = True
        with self._lock:
            for connection in self._connections:
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass  # already disconnected


class _Handler(urllib.request.AbstractHTTPHandler):
    """Connections with a time limit; those with TLS verify certificates, as is the default."""

    def __init__(self, limit: _TimeLimit) -> None:
        super().__init__()
        self._limit = limit

    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(self._connections(http.client.HTTPConnection), request)

    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(self._connections(http.client.HTTPSConnection), request)

    http_request = https_request = urllib.request.AbstractHTTPHandler.do_request_

    def _connections(self, kind: type[http.client.HTTPConnection]) -> Any:
        def connection(host: str, /, **options: Any) -> http.client.HTTPConnection:
            new = kind(host, **options)
            vars(new)["_create_connection"] = self._limit.connect
            return new

        return connection


def send(method: str, url: str, data: bytes | None, headers: Mapping[str, str]) -> bytes:
    """The body of the response. DeliveryError: the server cannot be reached, or does not accept the request."""
    request = urllib.request.Request(url, data, {"User-Agent": "paceline", **headers}, method=method)
    with _TimeLimit(LONGEST) as limit:
        try:
            with _opener(limit).open(request, timeout=TIMEOUT) as response:
                body = bytes(response.read(LARGEST_RESPONSE))
        except urllib.error.HTTPError as error:
            with error:
                raise _refusal(error) from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise DeliveryError(_TOO_SLOW if limit.is_over else _reason(error)) from None
        if limit.is_over:
            raise DeliveryError(_TOO_SLOW)  # the body may be incomplete
        return body


def _opener(limit: _TimeLimit) -> urllib.request.OpenerDirector:
    """Without handlers for files and other protocols."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(), _Handler(limit),
        urllib.request.HTTPDefaultErrorHandler(), urllib.request.HTTPErrorProcessor(), _NoRedirects(),
    ):  # fmt: skip
        opener.add_handler(handler)
    return opener


def _refusal(error: urllib.error.HTTPError) -> DeliveryError:
    try:
        body = error.read(LARGEST_RESPONSE)
    except (OSError, http.client.HTTPException):
        body = b""
    name = http.client.responses.get(error.code, "")
    text = f"HTTP {error.code} {name}".rstrip()
    if 300 <= error.code < 400:
        return DeliveryError(f"{text}: redirects are not followed", error.code, body, retry=False)
    asked = error.headers.get("Retry-After", "") if error.headers else ""
    delay = min(float(asked), LONGEST_DELAY) if asked.isdecimal() else 0.0
    return DeliveryError(text, error.code, body, error.code >= 500 or error.code in _TRY_AGAIN, delay)


def _reason(error: Exception) -> str:
    """Without the address, which the text of some errors contains."""
    cause = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(cause, (TimeoutError, socket.timeout)):
        return f"no response for {TIMEOUT:g} s"
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"its certificate is not valid: {cause.verify_message}"
    if isinstance(cause, socket.gaierror):
        return "its host name cannot be resolved"
    if isinstance(cause, OSError) and cause.errno:
        return os.strerror(cause.errno)
    if isinstance(cause, UnicodeError):
        return "its host name is not valid"
    return f"invalid response ({type(cause).__name__})"
