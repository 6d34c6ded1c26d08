"""How the server goes: told to by SIGTERM, it answers for a while and ends the connections that clients keep.

A connection that is closed while its client sends a request loses that request, and no client can tell whether it was
worked on. So each answer says `Connection: close` first, and the client comes back by a new connection, which leads to
another server; `/readyz` says that no new ones are wanted. Ctrl-C, or a second SIGTERM, ends it as soon as it has
answered what it was asked.
"""

from __future__ import annotations

import signal
import time
from types import FrameType

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class Going:
    """Whether it goes: told by the signal, read by the answers."""

    def __init__(self) -> None:
        self.told = False


class Leaving(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, going: Going, seconds: float) -> None:
        """`seconds`: between SIGTERM and the end."""
        super().__init__(config)
        self._going, self._seconds, self._until = going, seconds, 0.0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # uvicorn's own would send itself the signal once more at the end, and end by it.
        if self.should_exit:
            self.force_exit = True
        elif sig == signal.SIGTERM and self._seconds and not self._going.told:
            self._until = time.monotonic() + self._seconds
        else:
            self.should_exit = True
        self._going.told = True

    async def on_tick(self, counter: int) -> bool:
        if self._until and time.monotonic() >= self._until:
            self.should_exit = True
        return await super().on_tick(counter)


class LastAnswers:
    """Those that are given once it goes close their connections."""

    def __init__(self, app: ASGIApp, going: Going) -> None:
        self._app, self._going = app, going

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def answer(message: Message) -> None:
            if self._going.told and message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)

        await self._app(scope, receive, answer)
