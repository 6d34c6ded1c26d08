"""A store in a folder of another process, accessed with length-prefixed frames over TLS, or over the pipes of a program
in a pod.

A request is a JSON object and has one reply. File contents follow in frames of bytes; an empty frame ends a file.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Callable, Protocol

from paceline.storage.json_values import parse_json
from paceline.storage.local_files import write_all
from paceline.storage.regular_files import open_regular
from paceline.storage.stores.protocol import PIECE, ContinueCheck, Sent, StoreError, TransferCanceled

REQUEST_LIMIT = 64 * 1024
REPLY_LIMIT = 64 * 1024 * 1024
LARGEST_FILE = 1 << 60  # bytes
CONNECT_S = 5.0
SILENCE_S = 60.0  # either side gives up after this time without a byte
IDLE_S = 30.0  # an idle connection is reopened after this time: the other side may have closed it
_LENGTH = struct.Struct(">I")
_OPERATIONS = {
    "send": "write", "fetch": "read", "has": "read", "digest": "read", "folders": "list", "names": "list",
    "sizes": "list",
}  # fmt: skip

Message = dict[str, Any]


class Closed(Exception):
    """The other side has closed the connection, or has broken the protocol."""


class Transport(Protocol):
    """Carries the frames; a socket is one."""

    def settimeout(self, seconds: float, /) -> None: ...

    def sendall(self, data: bytes | bytearray | memoryview, /) -> None: ...

    def recv_into(self, buffer: memoryview, most: int, /) -> int: ...

    def close(self) -> None: ...


class Wire:
    def __init__(self, transport: Transport) -> None:
        transport.settimeout(SILENCE_S)
        self._transport = transport

    def write(self, data: bytes | memoryview) -> None:
        try:
            self._transport.sendall(_LENGTH.pack(len(data)))
            if data:
                self._transport.sendall(data)
        except OSError as error:
            raise Closed(_reason(error)) from None

    def write_object(self, message: Message) -> None:
        self.write(json.dumps(message).encode())

    def read(self, most: int) -> bytearray:
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        if length > most:
            raise Closed(f"received a frame of {length} bytes, which exceeds the limit of {most}")
        return self._exactly(length)

    def read_object(self, most: int) -> Message:
        message = parse_json(self.read(most))
        if not isinstance(message, dict):
            raise Closed("received JSON that is not an object")
        return message

    def pieces(self) -> Iterator[bytearray]:
        while data := self.read(PIECE):
            yield data

    def close(self) -> None:
        self._transport.close()

    def _exactly(self, length: int) -> bytearray:
        data = bytearray(length)
        view = memoryview(data)
        while view:
            try:
                count = self._transport.recv_into(view, min(len(view), 1 << 20))
            except OSError as error:
                raise Closed(_reason(error)) from None
            if count == 0:
                raise Closed("the connection was closed")
            view = view[count:]
        return data


class PeerStore:
    """The store of another process, which decides which requests it allows."""

    def __init__(self, dial: Callable[[], Transport], location: str) -> None:
        self._dial, self._location = dial, location
        self._wire: Wire | None = None
        self._used = 0.0
        self._lock = threading.Lock()

    def read(self, name: str, most: int) -> bytes | None:
        with self._request("read", name) as wire:
            data = wire.read(REPLY_LIMIT) if _reply(wire).get("there") else None
        if data is not None and len(data) > most:
            raise StoreError(f"{name} at {self._location} is larger than the limit of {most} bytes for such files")
        return None if data is None else bytes(data)

    def has(self, name: str) -> bool:
        return bool(self._call("has", name).get("there"))

    def folders(self, prefix: str) -> list[str]:
        return self._list("folders", prefix)

    def names(self, prefix: str) -> list[str]:
        return self._list("names", prefix)

    def delete(self, name: str) -> None:
        self._call("delete", name)

    def clear(self, prefix: str) -> None:
        self._call("clear", prefix)

    def create(self, name: str, data: bytes) -> bool:
        raise NotImplementedError  # only the process that has the folder commits

    def send(self, path: str, name: str, should_continue: ContinueCheck) -> tuple[int, str]:
        reading = open_regular(path, follow=True)
        digest, size = hashlib.sha256(), 0
        try:
            with self._request("send", name) as wire:
                while True:
                    data = os.read(reading, PIECE)
                    if not should_continue(len(data)):
                        raise TransferCanceled(path)  # the other side deletes what it has received
                    wire.write(data)
                    if not data:
                        break
                    digest.update(data)
                    size += len(data)
                reply = _reply(wire)
        finally:
            os.close(reading)
        if (reply.get("size"), reply.get("sha256")) != (size, digest.hexdigest()):
            raise StoreError(f"{name} was corrupted in transit to {self._location}", is_transient=True)
        return size, digest.hexdigest()

    def send_all(self, files: Sequence[tuple[str, str]], should_continue: ContinueCheck, sent: Sent) -> None:
        """Sends all files each time: the captain's pod may have been replaced, and its files lost."""
        for path, name in files:
            sent[name] = self.send(path, name, should_continue)

    def at_once(self, size: int) -> int:
        return 1  # one connection

    def fetch(self, name: str, path: str, should_continue: ContinueCheck) -> tuple[int, str]:
        with self._request("fetch", name) as wire:
            received = _write_file(wire, name, path, should_continue) if _reply(wire).get("there") else None
        if received is None:
            raise KeyError(name)
        return received

    def fetch_range(self, name: str, start: int, size: int, fd: int, should_continue: ContinueCheck) -> int:
        """Writes these bytes of a file to the same place in `fd`; returns how many came. Their digest is not made: TLS
        protects them. KeyError: there is no such file."""
        written = 0
        with self._request("fetch", name, start=start, size=size) as wire:
            is_there = bool(_reply(wire).get("there"))
            for data in wire.pieces() if is_there else ():
                if not should_continue(len(data)):
                    raise TransferCanceled(name)
                if len(data) > size - written:
                    raise Closed("received more than was requested")
                written += _write_at(fd, data, start + written)
        if not is_there:
            raise KeyError(name)
        return written

    def digest(self, name: str, should_continue: ContinueCheck) -> tuple[int, str]:
        with self._request("digest", name) as wire:
            reply = _reply(wire)
            while "read" in reply:  # progress: a large file takes a while
                if not should_continue(int(reply["read"])):
                    raise TransferCanceled(name)
                reply = _reply(wire)
            digest = (int(reply["size"]), str(reply["sha256"])) if reply.get("there") else None
        if digest is None:
            raise KeyError(name)
        return digest

    def sizes(self, prefix: str) -> dict[str, int]:
        with self._request("sizes", prefix) as wire:
            sizes = _reply(wire).get("found")
            if not isinstance(sizes, dict) or not all(
                type(size) is int and 0 <= size < LARGEST_FILE for size in sizes.values()
            ):
                raise Closed("received a list of files that is invalid")
        return sizes

    def _list(self, verb: str, prefix: str) -> list[str]:
        with self._request(verb, prefix) as wire:
            names = _reply(wire).get("found")
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise Closed("received a list of names that is invalid")
        return names

    def _call(self, verb: str, name: str) -> Message:
        with self._request(verb, name) as wire:
            return _reply(wire)

    @contextmanager
    def _request(self, verb: str, name: str, **more: int) -> Iterator[Wire]:
        """One request at a time. An incomplete reply closes the connection."""
        with self._lock:
            complete = False
            try:
                yield self._send_request({"do": verb, "name": name, **more})
                complete = True
            except (Closed, ValueError, KeyError, TypeError, OverflowError) as error:
                raise self._failed(verb, name, error) from None
            finally:
                self._used = time.monotonic()
                if not complete:
                    self._disconnect()

    def _send_request(self, request: Message) -> Wire:
        """An idle connection may have been closed: reconnect in that case."""
        if time.monotonic() - self._used > IDLE_S:
            self._disconnect()
        if self._wire is not None:
            try:
                self._wire.write_object(request)
                return self._wire
            except Closed:
                self._disconnect()
        try:
            self._wire = Wire(self._dial())
        except OSError as error:
            raise self._failed(str(request["do"]), str(request["name"]), error) from None
        self._wire.write_object(request)
        return self._wire

    def _failed(self, verb: str, name: str, error: Exception) -> StoreError:
        operation = _OPERATIONS.get(verb, verb)
        reason = _reason(error)
        return StoreError(f"cannot {operation} {name} at {self._location}: {reason}", is_transient=True, reason=reason)

    def close(self) -> None:
        with self._lock:
            self._disconnect()

    def _disconnect(self) -> None:
        if self._wire is not None:
            self._wire.close()
            self._wire = None


def over_tls(address: tuple[str, int], tls: ssl.SSLContext, server_name: str) -> PeerStore:
    def dial() -> Transport:
        sock = socket.create_connection(address, CONNECT_S)
        try:
            return tls.wrap_socket(sock, server_hostname=server_name)
        except BaseException:
            sock.close()
            raise

    return PeerStore(dial, address[0])


def _reply(wire: Wire) -> Message:
    reply = wire.read_object(REPLY_LIMIT)
    error = reply.get("error")
    if error is not None:
        raise StoreError(str(error), bool(reply.get("passing")), reason=str(reply.get("reason", "")))
    return reply


def _write_file(wire: Wire, name: str, path: str, should_continue: ContinueCheck) -> tuple[int, str]:
    digest, size = hashlib.sha256(), 0
    writing = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        for data in wire.pieces():
            if not should_continue(len(data)):
                raise TransferCanceled(name)
            digest.update(data)
            write_all(writing, data)
            size += len(data)
    finally:
        os.close(writing)
    return size, digest.hexdigest()


def _write_at(fd: int, data: bytearray, position: int) -> int:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, position)
        view, position = view[written:], position + written
    return len(data)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
