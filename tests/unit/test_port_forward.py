"""The local port that leads to a pod: everyone on this machine can connect."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx2
import pytest

from paceline.backends.kubernetes.api import port_forward
from paceline.backends.kubernetes.api.cluster import Cluster, Refused
from paceline.backends.kubernetes.api.port_forward import Forward


class Access:
    def async_transport(self) -> httpx2.AsyncBaseTransport:
        return httpx2.AsyncHTTPTransport()


@pytest.mark.timeout(60)
def test_connections_are_limited_and_later_ones_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_forward, "MOST", 3)
    access: Any = Access()
    answering = threading.Event()

    def pod() -> str:
        answering.wait(30)
        raise Refused("there is no pod", "NotFound")

    async def test() -> None:
        forward = Forward(Cluster(None, "shared", "team", "https://127.0.0.1:1", access), 6006, pod)  # type: ignore[arg-type]
        async with forward.open(0) as port:
            waiting = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            assert await reader.read() == b"" and forward.trouble == "", "it was closed"
            assert not any(each.at_eof() for each, _ in waiting)
            answering.set()
            assert [await each.read() for each, _ in waiting] == [b""] * 3 and forward.trouble == "there is no pod"
            forward.trouble = ""
            again, last = await asyncio.open_connection("127.0.0.1", port)
            assert await again.read() == b"" and forward.trouble == "there is no pod"
            for each in (writer, last, *(writer for _, writer in waiting)):
                each.close()

    asyncio.run(test())
