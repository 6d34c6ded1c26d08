"""A port of this machine that leads to a port of a pod, through the API server: each connection is a websocket."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx2
from httpx2.websockets import HTTPXWSException, WebSocketUpgradeError

from paceline.backends.kubernetes import raw
from paceline.backends.kubernetes.cluster import Cluster, Refused, Unreachable

PROTOCOL = "v4.channel.k8s.io"
DATA, ERROR = 0, 1  # channels of the one port that is asked for; the first message of each is its number
CHUNK = 32 * 1024
MESSAGE_LIMIT = 16 * 1024 * 1024
REACH_S = 10.0


class Forward:
    def __init__(self, cluster: Cluster, port: int, pod: Callable[[], str]) -> None:
        """`pod` names the pod to ask, for each connection anew: it may have been replaced. Refused: there is none."""
        self._cluster = cluster
        self._port = port
        self._pod = pod
        self.trouble = ""  # why the last connection failed

    @contextlib.asynccontextmanager
    async def open(self, local: int) -> AsyncIterator[int]:
        """Listens on the loopback address; the port that it is. OSError where that is taken."""
        async with raw.async_client(self._cluster, REACH_S) as client:
            open_ones: set[asyncio.Task[None]] = set()

            def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                task = asyncio.create_task(self._serve(client, reader, writer))
                open_ones.add(task)
                task.add_done_callback(open_ones.discard)

            server = await asyncio.start_server(begin, "127.0.0.1", local)
            try:
                yield int(server.sockets[0].getsockname()[1])
            finally:
                server.close()
                for task in open_ones:
                    task.cancel()
                await asyncio.gather(*open_ones, return_exceptions=True)

    async def _serve(
        self, client: httpx2.AsyncClient, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            pod = await asyncio.to_thread(self._pod)
            path = f"/api/v1/namespaces/{self._cluster.namespace}/pods/{pod}/portforward"
            async with client.websocket(
                path, params={"ports": self._port}, subprotocols=[PROTOCOL], max_message_size_bytes=MESSAGE_LIMIT
            ) as socket:
                await first(up(reader, socket), self._down(socket, writer))
        except* (Refused, Unreachable) as errors:
            self.trouble = str(one(errors))
        except* WebSocketUpgradeError as errors:
            status = getattr(getattr(one(errors), "response", None), "status_code", "?")
            self.trouble = (
                f"the cluster opens no port to the pod (HTTP {status}): you need the right to pods/portforward"
            )
        except* (OSError, httpx2.HTTPError, HTTPXWSException):
            pass  # one of the two ends has gone: whoever wants more dials again
        finally:
            writer.close()

    async def _down(self, socket: Any, writer: asyncio.StreamWriter) -> None:
        begun = set()
        while True:
            message = await socket.receive_bytes()
            channel = message[0]
            if channel not in begun:
                begun.add(channel)
            elif channel == ERROR:
                self.trouble = message[1:].decode(errors="replace").strip()
                return
            else:
                writer.write(message[1:])
                await writer.drain()


async def up(reader: asyncio.StreamReader, socket: Any) -> None:
    while data := await reader.read(CHUNK):
        await socket.send_bytes(bytes((DATA,)) + data)


async def first(*ways: Any) -> None:
    """Until one of them ends: there is no half of a connection."""
    tasks = [asyncio.ensure_future(way) for way in ways]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def one(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
