"""Forwards a local port to a port of a pod, through the API server: each connection is a websocket."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx2
from httpx2.websockets import HTTPXWSException, WebSocketUpgradeError

from paceline.backends.kubernetes.api import raw_requests
from paceline.backends.kubernetes.api.cluster import Cluster, Refused, Unreachable

PROTOCOL = "v4.channel.k8s.io"
DATA, ERROR = 0, 1  # channels of the port; the first message of each is the port's number
CHUNK = 32 * 1024
MESSAGE_LIMIT = 16 * 1024 * 1024
CONNECT_S = 10.0
MOST = 100  # connections; each takes a request to the API server, and others of this machine can connect, too


class Forward:
    def __init__(self, cluster: Cluster, port: int, pod: Callable[[], str]) -> None:
        """`pod` returns the name of the pod, for each connection: it may have been replaced. It may raise Refused."""
        self._cluster = cluster
        self._port = port
        self._pod = pod
        self.trouble = ""  # why the last connection failed

    @contextlib.asynccontextmanager
    async def open(self, local: int) -> AsyncIterator[int]:
        """Listen on the loopback address; yields the port. OSError: the port is in use."""
        async with raw_requests.async_client(self._cluster, CONNECT_S) as client:
            connections: set[asyncio.Task[None]] = set()

            def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                if len(connections) >= MOST:
                    writer.close()
                    return
                task = asyncio.create_task(self._serve(client, reader, writer))
                connections.add(task)
                task.add_done_callback(connections.discard)

            server = await asyncio.start_server(accept, "127.0.0.1", local)
            try:
                yield int(server.sockets[0].getsockname()[1])
            finally:
                server.close()
                for task in connections:
                    task.cancel()
                await asyncio.gather(*connections, return_exceptions=True)

    async def _serve(
        self, client: httpx2.AsyncClient, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            pod = await asyncio.to_thread(self._pod)
            path = f"/api/v1/namespaces/{self._cluster.namespace}/pods/{pod}/portforward"
            async with client.websocket(
                path, params={"ports": self._port}, subprotocols=[PROTOCOL], max_message_size_bytes=MESSAGE_LIMIT
            ) as socket:
                await until_first_ends(send_all(reader, socket), self._down(socket, writer))
        except* (Refused, Unreachable) as errors:
            self.trouble = str(innermost(errors))
        except* WebSocketUpgradeError as errors:
            status = getattr(getattr(innermost(errors), "response", None), "status_code", "?")
            permission = "you need permission to create and get pods/portforward"
            self.trouble = f"the cluster refuses to forward a port (HTTP {status}): {permission}"
        except* (OSError, httpx2.HTTPError, HTTPXWSException):
            pass  # one end has closed the connection: the client can reconnect
        finally:
            writer.close()

    async def _down(self, socket: Any, writer: asyncio.StreamWriter) -> None:
        started = set()
        while True:
            message = await socket.receive_bytes()
            channel = message[0]
            if channel not in started:
                started.add(channel)
            elif channel == ERROR:
                self.trouble = message[1:].decode(errors="replace").strip()
                return
            else:
                writer.write(message[1:])
                await writer.drain()


async def send_all(reader: asyncio.StreamReader, socket: Any) -> None:
    while data := await reader.read(CHUNK):
        await socket.send_bytes(bytes((DATA,)) + data)


async def until_first_ends(*directions: Any) -> None:
    """Run both directions of a connection until one of them ends."""
    tasks = [asyncio.ensure_future(direction) for direction in directions]
    try:
        finished, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in finished:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def innermost(error: BaseException) -> BaseException:
    """The first error in nested groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
