"""Forwards connections to the API server: accepts on a socket opened outside the cluster, and connects inside."""

from __future__ import annotations

import asyncio
import contextlib
import socket

from support.lab import network

CHUNK = 1 << 16


def forward(listener: socket.socket) -> None:
    """Never returns. A socket belongs to the network namespace in which it was opened, whichever process uses it."""
    asyncio.run(_serve(listener))


async def _serve(listener: socket.socket) -> None:
    server = await asyncio.start_server(_connection, sock=listener)
    await server.serve_forever()


async def _connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        api_reader, api_writer = await asyncio.open_connection(network.API, network.API_PORT)
    except OSError:
        writer.transport.abort()  # reset, as if no server were listening
        return
    await asyncio.gather(_copy(reader, api_writer), _copy(api_reader, writer))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(CHUNK):
            writer.write(data)
            await writer.drain()
    writer.close()
