"""Runs a program in a pod, through the API server, with its standard input and output as a local socket."""

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

from paceline.backends.kubernetes.api import raw_requests
from paceline.backends.kubernetes.api.cluster import Cluster, Refused, Unreachable
from paceline.backends.kubernetes.api.pending_reasons import remedy
from paceline.backends.kubernetes.api.port_forward import innermost, send_all, until_first_ends

PROTOCOLS = ["v5.channel.k8s.io", "v4.channel.k8s.io"]
STDOUT, STDERR, STATUS = 1, 2, 3  # channels; 0 is stdin
END_OF_INPUT = bytes((255, 0))
OPEN_S = 20.0
CLOSE_S = 5.0
MESSAGE_LIMIT = 256 * 1024  # a kubelet sends messages of up to 32 KiB
QUEUE = 64  # unread messages
STDERR_LIMIT = 2000  # bytes of standard error that are kept
KILLED = "137"  # exit code


class Program:
    """Has the methods of a socket; its errors say why the program ended."""

    def __init__(self, cluster: Cluster, pod: str, container: str, command: Sequence[str]) -> None:
        """Refused, Unreachable: the program cannot be started."""
        self._cluster, self._pod = cluster, pod
        self._params: dict[str, Any] = {"container": container, "command": list(command)}
        self._params |= dict.fromkeys(("stdin", "stdout", "stderr"), True)
        self._opened = threading.Event()
        self._failed: Exception | None = None
        self._stderr = b""
        self._end_reason = ""
        self._socket, remote_end = socket.socketpair()
        self._socket.settimeout(OPEN_S)
        self._thread = threading.Thread(target=self._run, args=(remote_end,), daemon=True)
        self._thread.start()
        self._opened.wait()
        if self._failed is not None:
            self.close()
            raise self._failed

    def settimeout(self, seconds: float) -> None:
        self._socket.settimeout(seconds)

    def sendall(self, data: bytes | bytearray | memoryview) -> None:
        try:
            self._socket.sendall(data)
        except ConnectionError:
            raise self._ended() from None

    def recv_into(self, buffer: memoryview, most: int) -> int:
        count = self._socket.recv_into(buffer, most)
        if count == 0:
            raise self._ended()
        return count

    def _ended(self) -> ConnectionError:
        self._thread.join(CLOSE_S)
        return ConnectionError(self._end_reason or "the connection ended")

    def close(self) -> None:
        """Also closes the program's standard input."""
        self._socket.close()
        self._thread.join(CLOSE_S)

    def _run(self, remote_end: socket.socket) -> None:
        try:
            asyncio.run(self._carry(remote_end))
        except Exception as errors:  # any error is passed to the thread that waits
            error = innermost(errors)
            self._end_reason = f"the connection to {self._cluster.server} failed: {str(error) or type(error).__name__}"
            if isinstance(error, WebSocketUpgradeError):
                self._failed = self._refusal(error.response)
            else:
                self._failed = Unreachable(f"cannot run a program in pod {self._pod}: {self._end_reason}")
        finally:
            self._opened.set()
            remote_end.close()

    async def _carry(self, remote_end: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=remote_end)
        path = f"/api/v1/namespaces/{self._cluster.namespace}/pods/{self._pod}/exec"
        try:
            async with raw_requests.async_client(self._cluster, OPEN_S) as client:
                client.event_hooks = {"response": [_read_refusal]}
                async with client.websocket(
                    path, params=self._params, subprotocols=PROTOCOLS, max_message_size_bytes=MESSAGE_LIMIT,
                    queue_size=QUEUE, keepalive_ping_interval_seconds=None,
                ) as stream:  # fmt: skip
                    self._opened.set()
                    await until_first_ends(self._up(reader, stream), self._down(stream, writer))
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _up(self, reader: asyncio.StreamReader, stream: Any) -> None:
        await send_all(reader, stream)
        if stream.subprotocol == PROTOCOLS[0]:
            await stream.send_bytes(END_OF_INPUT)  # closing the connection does not end the program's input

    async def _down(self, stream: Any, writer: asyncio.StreamWriter) -> None:
        while True:
            message = await stream.receive_bytes()
            channel, data = message[0], message[1:]
            if channel == STDOUT:
                writer.write(data)
                await writer.drain()
            elif channel == STDERR:
                self._stderr = (self._stderr + data)[-STDERR_LIMIT:]
            elif channel == STATUS:
                self._end_reason = self._reason_of(data)
                return

    def _reason_of(self, data: bytes) -> str:
        """The last line of its standard error is the most specific."""
        status = decode_status(data)
        lines = [line.strip() for line in self._stderr.decode(errors="replace").splitlines()]
        causes = (status.details.causes if status.details else None) or []
        code = next((cause.message for cause in causes if cause.reason == "ExitCode"), None)
        if code == KILLED:
            return "the program was killed: its pod may have been deleted"
        return next(filter(None, reversed(lines)), "") or status.message or "the program ended"

    def _refusal(self, response: httpx2.Response) -> Refused:
        try:
            status = decode_status(response.content)
            message, reason = status.message or "", status.reason or ""
        except Exception:  # for example the error page of a proxy
            message, reason = f"HTTP {response.status_code}", ""
        permission = "you need permission to create and get pods/exec" if response.status_code == 403 else ""
        hints = filter(None, (permission, remedy(reason, message, self._cluster.namespace)))
        what = f"cannot run a program in pod {self._pod}: {message}"
        return Refused(what, reason, message=message, remedy="; ".join(hints))


async def _read_refusal(response: httpx2.Response) -> None:
    """Read the body now: a closed response cannot be read."""
    if response.status_code != httpx2.codes.SWITCHING_PROTOCOLS:
        await response.aread()
