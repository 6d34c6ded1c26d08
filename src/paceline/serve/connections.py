"""Limits for connections: the size and time of requests, the time to take a response, the number of connections.

With its fast parser uvicorn limits none of these: headers of any size are collected, and a client that stops in the
middle of a request or of a response keeps its connection and its memory for ever. `LimitedProtocol` notes what it waits
for; `close_expired`, called several times a second, ends connections that have waited too long, so that requests
themselves do not need timers.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

_KEEP_ALIVE_S = 75  # for the next request on a connection
_LATER_S = 1.0  # the application's own time limit, with a better message, comes first


@dataclass(frozen=True)
class ConnectionLimits:
    head: int = 64 * 1024  # bytes of request line and headers
    head_seconds: float = 10.0  # to receive them
    seconds: float = 30.0  # to receive a body, and to take a response
    connections: int = 1000


class _TooLarge(Exception):
    """The headers are larger than allowed."""


class LimitedProtocol(HttpToolsProtocol):
    def __init__(self, limits: ConnectionLimits, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._limits = limits
        self._due = math.inf  # when the client must have sent the rest of what it has begun to send
        self._is_in_head = True
        self._head = 0  # bytes of the request line and headers so far
        self._unparsed = 0  # bytes received since the parser reported anything
        self._heard_at = 0.0  # when the client sent something, or was sent a response
        self._responses = 0
        self._unsent: tuple[int, float] | None = None  # the response that the client has not taken, and since when

    # ---- what the parser reports

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._heard_at = self.loop.time()
        self._expect_head()
        if len(self.connections) > self._limits.connections:
            self._make_room()

    def data_received(self, data: bytes) -> None:
        self._heard_at = self.loop.time()
        if self._due == math.inf:
            self._expect_head()
        self._unparsed += len(data)
        super().data_received(data)
        if self._head + self._unparsed > self._limits.head and not self.transport.is_closing():
            self._refuse_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head = 0
        self._expect_head()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + len(": \r\n"))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._due = self._heard_at + self._limits.seconds + _LATER_S
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._due, self._head, self._unparsed = math.inf, 0, 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._responses += 1
        self._heard_at = self.loop.time()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        if self._head > self._limits.head:
            self._refuse_head()
        elif not self.transport.is_closing():
            super().send_400_response(msg)

    def _expect_head(self) -> None:
        self._is_in_head = True
        self._due = self._heard_at + self._limits.head_seconds

    def _count(self, size: int) -> None:
        self._unparsed = 0
        self._head += size
        if self._head > self._limits.head:
            raise _TooLarge  # the parser stops, and uvicorn calls send_400_response

    # ---- limits

    def close_if_expired(self, now: float) -> None:
        if self.flow.read_paused:  # the server does not read: it is not the client that is slow
            self._due = max(self._due, now + self._limits.seconds)
        if not self.transport.get_write_buffer_size():
            self._unsent = None
        elif self._unsent is None or self._unsent[0] != self._responses:
            self._unsent = self._responses, now
        if self._unsent is not None and now - self._unsent[1] > self._limits.seconds:
            self.transport.abort()  # close() would wait for the client to take the rest
        elif now > self._due:
            if self.transport.is_closing() or not (self._head or self._unparsed):
                self.transport.abort()
            else:
                seconds = self._limits.head_seconds if self._is_in_head else self._limits.seconds
                self._refuse(408, f"the request was not complete within {seconds:g} s")

    def _make_room(self) -> None:
        """Ends the connection that has waited longest for its client: for a request, otherwise to take a response. If
        all are being answered, this one."""
        others = [each for each in self.connections if isinstance(each, LimitedProtocol) and each is not self]
        waiting = [each for each in others if each._is_waiting()]
        unsent = {each: each._unsent[1] for each in others if each._unsent is not None}
        if waiting:
            oldest = min(waiting, key=lambda each: (each._due == math.inf, each._heard_at))  # half-sent requests first
        elif unsent:
            oldest = min(unsent, key=lambda each: unsent[each])
        else:
            self._refuse(503, f"the server has {self._limits.connections} connections, its limit; try again later")
            return
        self.connections.discard(oldest)
        oldest.transport.abort()

    def _is_waiting(self) -> bool:
        """Whether no complete request is being answered."""
        is_idle = self.cycle is None or self.cycle.response_complete
        return not self.flow.read_paused and not self.pipeline and (is_idle or self._due != math.inf)

    def _refuse_head(self) -> None:
        self._refuse(431, f"request line and headers have more than {self._limits.head} bytes, which is the limit")

    def _refuse(self, status: int, reason: str) -> None:
        if self.cycle is None or self.cycle.response_complete:  # else it would end up in another response
            body = json.dumps({"error": reason}).encode()
            headers = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[status] + headers + body)
        self.transport.close()


def uvicorn_config(app: ASGIApp, limits: ConnectionLimits) -> uvicorn.Config:
    return uvicorn.Config(
        app, http=cast(Any, partial(LimitedProtocol, limits)), ws="none", access_log=False,
        log_level="error",  # uvicorn warns of each invalid request: clients could fill the log
        timeout_graceful_shutdown=int(limits.seconds) + 1, timeout_keep_alive=_KEEP_ALIVE_S,
    )  # fmt: skip


def close_expired(connections: Iterable[Any], now: float) -> None:
    for each in list(connections):
        if isinstance(each, LimitedProtocol):
            each.close_if_expired(now)
