"""Graceful shutdown: after SIGTERM the server continues to answer for a while and closes keep-alive connections.

If a connection is closed while the client sends a request, the request is lost, and the client cannot tell whether it
was processed. So each response first announces `Connection: close`, and the client opens a new connection, which leads
to another server; `/readyz` fails in the meantime. After Ctrl-C or a second SIGTERM the server exits as soon as pending
requests are answered.
"""

from __future__ import annotations

import asyncio
import signal
import time
from types import FrameType

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.serve.connections import close_expired

_TICKS = 3  # of 0.1 s, between two searches for connections that have waited too long


class Shutdown:
    """Whether a shutdown was requested: set by the signal handler, read when responses are sent."""

    def __init__(self) -> None:
        self.requested = False


class GracefulServer(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, shutdown: Shutdown, seconds: float) -> None:
        """`seconds`: between SIGTERM and the exit."""
        super().__init__(config)
        self._shutdown, self._seconds, self._deadline = shutdown, seconds, 0.0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # uvicorn's own handler would raise the signal again at the end and die by it.
        if self.should_exit:
            self.force_exit = True
        elif sig == signal.SIGTERM and self._seconds and not self._shutdown.requested:
            self._deadline = time.monotonic() + self._seconds
        else:
            self.should_exit = True
        self._shutdown.requested = True

    async def on_tick(self, counter: int) -> bool:
        if self._deadline and time.monotonic() >= self._deadline:
            self.should_exit = True
        if counter % _TICKS == 0:
            close_expired(self.server_state.connections, asyncio.get_running_loop().time())
        return await super().on_tick(counter)


class CloseConnections:
    """Middleware that makes responses during shutdown close their connections."""

    def __init__(self, app: ASGIApp, shutdown: Shutdown) -> None:
        self._app, self._shutdown = app, shutdown

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_closing(message: Message) -> None:
            if self._shutdown.requested and message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)

        await self._app(scope, receive, send_closing)
