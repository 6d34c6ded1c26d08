"""The way to the API server from outside: accepts on a socket that was opened out there, and connects in here."""

from __future__ import annotations

import asyncio
import contextlib
import socket

from support.lab import network

CHUNK = 1 << 16


def forward(listening: socket.socket) -> None:
    """Never returns. A socket belongs to the network namespace it was opened in, whoever uses it."""
    asyncio.run(_serve(listening))


async def _serve(listening: socket.socket) -> None:
    server = await asyncio.start_server(_connection, sock=listening)
    await server.serve_forever()


async def _connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        there_reader, there_writer = await asyncio.open_connection(network.API, network.API_PORT)
    except OSError:
        writer.transport.abort()  # reset, as from a server that is not there
        return
    await asyncio.gather(_copy(reader, there_writer), _copy(there_reader, writer))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(CHUNK):
            writer.write(data)
            await writer.drain()
    writer.close()
