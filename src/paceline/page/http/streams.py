"""Streams of server-sent events, whose number is limited."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from starlette.responses import StreamingResponse

from paceline.page.http.errors import Busy

_MOST = 200


class Streams:
    def __init__(self) -> None:
        self._open = 0

    def response(self, events: AsyncGenerator[bytes]) -> StreamingResponse:
        if self._open >= _MOST:
            raise Busy(f"{_MOST} pages are open, which is the limit", remedy="close some of them")
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(self._counted(events), 200, headers, "text/event-stream")

    async def _counted(self, events: AsyncGenerator[bytes]) -> AsyncIterator[bytes]:
        self._open += 1
        try:
            async with aclosing(events) as closing_events:
                async for data in closing_events:
                    yield data
        finally:
            self._open -= 1
