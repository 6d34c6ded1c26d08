"""Limits for connections: the size and time of requests, the time to take a response, the number of connections.

uvicorn's own parser limits only the size of headers; `LimitedProtocol` adds the other limits. (serve/connections.py
does this for the faster parser, which is not always installed.)
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from paceline.page.http.acceptor import Acceptor

_KEEP_ALIVE_S = 75
_TICKS = 3  # of 0.1 s, between two searches for connections that have waited too long
_SWEEP_TICKS = 100


@dataclass(frozen=True)
class ConnectionLimits:
    head: int = 32 * 1024  # bytes of request line and headers
    head_seconds: float = 10.0  # to receive them
    seconds: float = 30.0  # to receive a body, and to take some of a response
    connections: int = 500
    handshakes: int = 200  # connections, besides these, that are in their TLS handshake


def limits_for(descriptors: int) -> ConnectionLimits:
    """Those that leave half of the file descriptors of this process for the files of runs."""
    usual = ConnectionLimits()
    return replace(
        usual, connections=min(usual.connections, descriptors // 3), handshakes=min(usual.handshakes, descriptors // 6)
    )


class LimitedProtocol(H11Protocol):
    def __init__(self, limits: ConnectionLimits, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._limits = limits
        self._waits_since = 0.0  # for the rest of a request
        self._heard_at = 0.0
        self._unsent: tuple[int, float] = (0, 0.0)  # bytes that the client has not taken, and when it last took some

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._heard_at = self._waits_since = self.loop.time()
        if len(self.connections) > self._limits.connections:
            self._make_room()

    def data_received(self, data: bytes) -> None:
        self._heard_at = self.loop.time()
        was_idle = not self._has_partial_request()
        super().data_received(data)
        if was_idle or not self._has_partial_request():
            self._waits_since = self._heard_at

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """WebSockets are not supported: the configuration has no protocol for them."""
        self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:  # a response has begun
            self.transport.abort()

    def close_if_expired(self, now: float) -> None:
        size = self.transport.get_write_buffer_size()
        before, taken_at = self._unsent
        self._unsent = size, now if size < before or not before or not size else taken_at
        limit = self._limits.seconds if self._is_in_body() else self._limits.head_seconds
        is_stuck = size and now - self._unsent[1] > self._limits.seconds
        is_late = (self.cycle is None or self._has_partial_request()) and now - self._waits_since > limit
        if is_stuck or (is_late and not self.flow.read_paused):
            self.transport.abort()  # close() would wait for the client

    def _is_in_body(self) -> bool:
        return self.cycle is not None and self.cycle.more_body and self.conn.their_state is h11.SEND_BODY

    def _has_partial_request(self) -> bool:
        has_begun = self.conn.their_state is h11.IDLE and bool(self.conn.trailing_data[0])
        return has_begun or self._is_in_body()

    def _is_waiting(self) -> bool:
        """Whether no complete request is being answered."""
        return self.cycle is None or self.cycle.response_complete or self._has_partial_request()

    def _make_room(self) -> None:
        """Ends the connection that has waited longest for its client; if all are being answered, this one."""
        others = [each for each in self.connections if isinstance(each, LimitedProtocol) and each is not self]
        waiting = [each for each in others if each._is_waiting()]
        oldest = min(waiting, key=lambda each: each._heard_at) if waiting else self
        self.connections.discard(oldest)
        oldest.transport.abort()


def _uvicorn_config(app: ASGIApp, limits: ConnectionLimits, **tls: Any) -> uvicorn.Config:
    return uvicorn.Config(
        app, http="h11", ws="none", lifespan="off", access_log=False,
        log_config=None, log_level="critical", timeout_keep_alive=_KEEP_ALIVE_S, timeout_graceful_shutdown=1,
        h11_max_incomplete_event_size=limits.head, server_header=False, date_header=True, proxy_headers=False, **tls,
    )  # fmt: skip


class LimitedServer(uvicorn.Server):
    """Ends connections that have waited too long. Ctrl-C and SIGTERM end it at once: streams never end on their own."""

    def __init__(self, app: ASGIApp, limits: ConnectionLimits, sweep: Callable[[float], None], **tls: Any) -> None:
        """`sweep`: called every few seconds, with the time of the monotonic clock."""
        super().__init__(_uvicorn_config(app, limits, **tls))
        self._limits, self._sweep = limits, sweep
        self._acceptors: list[Acceptor] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        config, limits = self.config, self._limits
        protocol = partial(LimitedProtocol, limits, config=config, server_state=self.server_state, app_state={})
        self._acceptors = [
            Acceptor(each, protocol, config.ssl, limits.handshakes, limits.head_seconds) for each in sockets or ()
        ]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for acceptor in self._acceptors:
            acceptor.close()
        for each in list(self.server_state.connections):
            if isinstance(each, LimitedProtocol):
                each.transport.abort()  # a response that its client does not take would never end
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.should_exit = self.force_exit = True

    async def on_tick(self, counter: int) -> bool:
        if counter % _TICKS == 0:
            now = asyncio.get_running_loop().time()
            for each in list(self.server_state.connections):
                if isinstance(each, LimitedProtocol):
                    each.close_if_expired(now)
        if counter % _SWEEP_TICKS == 0:
            self._sweep(time.monotonic())
        return await super().on_tick(counter)
