"""Accepts connections, of which only some may be in their TLS handshake: all other limits begin after it."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from functools import partial

_BATCH = 50  # connections accepted before others are served
_PAUSE_S = 0.5  # when no file descriptor is free


class Acceptor:
    """asyncio's own one accepts connections until no file descriptor is left, and waits a minute for each handshake."""

    def __init__(
        self, listener: socket.socket, create_protocol: Callable[[], asyncio.Protocol],
        tls: ssl.SSLContext | None, most: int, seconds: float,
    ) -> None:  # fmt: skip
        """`most`: handshakes at a time; the oldest is then ended. `seconds`: time limit of each."""
        self._listener, self._create_protocol, self._tls = listener, create_protocol, tls
        self._most, self._seconds = most, seconds
        self._loop = asyncio.get_running_loop()
        self._handshakes: dict[asyncio.Task[None], None] = {}  # oldest first
        self._pause: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        self._listen()

    def close(self) -> None:
        self._loop.remove_reader(self._listener)
        if self._pause is not None:
            self._pause.cancel()
        for handshake in self._handshakes:
            handshake.cancel()

    def _listen(self) -> None:
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(_BATCH):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError:
                self._loop.remove_reader(self._listener)
                self._pause = self._loop.call_later(_PAUSE_S, self._listen)
                return
            connection.setblocking(False)
            task = self._loop.create_task(self._shake_hands(connection))
            self._handshakes[task] = None
            task.add_done_callback(partial(self._finished, connection))
            if len(self._handshakes) > self._most:
                oldest = next(iter(self._handshakes))
                del self._handshakes[oldest]
                oldest.cancel()

    async def _shake_hands(self, connection: socket.socket) -> None:
        limit = self._seconds if self._tls is not None else None
        try:
            await self._loop.connect_accepted_socket(
                self._create_protocol, connection, ssl=self._tls, ssl_handshake_timeout=limit
            )
        except OSError:  # the client has left, speaks no TLS, or took too long
            connection.close()

    def _finished(self, connection: socket.socket, task: asyncio.Task[None]) -> None:
        self._handshakes.pop(task, None)
        if task.cancelled():  # perhaps before it began
            connection.close()
