"""A program in a pod, through the API server: its standard input and output are a socket of this machine."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import httpx2
from httpx2.websockets import WebSocketUpgradeError
from lightkube.core.decoders import decode_status

from paceline.backends.kubernetes import raw
from paceline.backends.kubernetes.cluster import Cluster, Refused, Unreachable
from paceline.backends.kubernetes.forward import first, one, up
from paceline.backends.kubernetes.reasons import remedy

PROTOCOLS = ["v5.channel.k8s.io", "v4.channel.k8s.io"]
OUT, WORDS, END = 1, 2, 3  # channels; the program's input is 0, as is a forwarded port
END_OF_INPUT = bytes((255, 0))
OPEN_S = 20.0
CLOSE_S = 5.0
MESSAGE_LIMIT = 256 * 1024  # a kubelet's have 32 KiB
QUEUE = 64  # messages that wait to be read
MOST_WORDS = 2000
KILLED = "137"  # exit code


class Program:
    """As a socket has it, with an error that says why it ended."""

    def __init__(self, cluster: Cluster, pod: str, container: str, command: Sequence[str]) -> None:
        """Refused, Unreachable: there is no such program."""
        self._cluster, self._pod = cluster, pod
        self._asked: dict[str, Any] = {"container": container, "command": list(command)}
        self._asked |= dict.fromkeys(("stdin", "stdout", "stderr"), True)
        self._opened = threading.Event()
        self._failed: Exception | None = None
        self._words = b""  # what it has written to its standard error
        self._why = ""
        self._ours, theirs = socket.socketpair()
        self._ours.settimeout(OPEN_S)
        self._thread = threading.Thread(target=self._run, args=(theirs,), daemon=True)
        self._thread.start()
        self._opened.wait()
        if self._failed is not None:
            self.close()
            raise self._failed

    def settimeout(self, seconds: float) -> None:
        self._ours.settimeout(seconds)

    def sendall(self, data: bytes | bytearray | memoryview) -> None:
        try:
            self._ours.sendall(data)
        except ConnectionError:
            raise self._ended() from None

    def recv_into(self, buffer: memoryview, most: int) -> int:
        count = self._ours.recv_into(buffer, most)
        if count == 0:
            raise self._ended()
        return count

    def _ended(self) -> ConnectionError:
        self._thread.join(CLOSE_S)
        return ConnectionError(self._why or "the connection ended")

    def close(self) -> None:
        """The program's input ends with it."""
        self._ours.close()
        self._thread.join(CLOSE_S)

    def _run(self, theirs: socket.socket) -> None:
        try:
            asyncio.run(self._carry(theirs))
        except Exception as errors:  # whatever it was, whoever waits is told
            error = one(errors)
            self._why = f"the connection to {self._cluster.server} failed: {str(error) or type(error).__name__}"
            if isinstance(error, WebSocketUpgradeError):
                self._failed = self._refused(error.response)
            else:
                self._failed = Unreachable(f"cannot run a program in pod {self._pod}: {self._why}")
        finally:
            self._opened.set()
            theirs.close()

    async def _carry(self, theirs: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=theirs)
        path = f"/api/v1/namespaces/{self._cluster.namespace}/pods/{self._pod}/exec"
        try:
            async with raw.async_client(self._cluster, OPEN_S) as client:
                client.event_hooks = {"response": [_read_refusal]}
                async with client.websocket(
                    path, params=self._asked, subprotocols=PROTOCOLS, max_message_size_bytes=MESSAGE_LIMIT,
                    queue_size=QUEUE, keepalive_ping_interval_seconds=None,
                ) as stream:  # fmt: skip
                    self._opened.set()
                    await first(self._up(reader, stream), self._down(stream, writer))
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _up(self, reader: asyncio.StreamReader, stream: Any) -> None:
        await up(reader, stream)
        if stream.subprotocol == PROTOCOLS[0]:
            await stream.send_bytes(END_OF_INPUT)  # a connection that ends does not tell the program

    async def _down(self, stream: Any, writer: asyncio.StreamWriter) -> None:
        while True:
            message = await stream.receive_bytes()
            channel, data = message[0], message[1:]
            if channel == OUT:
                writer.write(data)
                await writer.drain()
            elif channel == WORDS:
                self._words = (self._words + data)[-MOST_WORDS:]
            elif channel == END:
                self._why = self._told(data)
                return

    def _told(self, data: bytes) -> str:
        """Its own last line says most."""
        status = decode_status(data)
        lines = [line.strip() for line in self._words.decode(errors="replace").splitlines()]
        causes = (status.details.causes if status.details else None) or []
        code = next((cause.message for cause in causes if cause.reason == "ExitCode"), None)
        if code == KILLED:
            return "it was killed there: is its pod gone?"
        return next(filter(None, reversed(lines)), "") or status.message or "it ended"

    def _refused(self, response: httpx2.Response) -> Refused:
        try:
            status = decode_status(response.content)
            message, reason = status.message or "", status.reason or ""
        except Exception:  # a proxy's own words, say
            message, reason = f"HTTP {response.status_code}", ""
        told = "; it takes the right to create and get pods/exec" if response.status_code == 403 else ""
        hint = remedy(reason, message, self._cluster.namespace)
        return Refused(f"cannot run a program in pod {self._pod}: {message}{told}{hint}", reason)


async def _read_refusal(response: httpx2.Response) -> None:
    """While it is there: nothing can be read of a response that is closed."""
    if response.status_code != httpx2.codes.SWITCHING_PROTOCOLS:
        await response.aread()
