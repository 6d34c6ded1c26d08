"""A folder that another process has: asked in frames with a length, over TLS or over the pipes of a program in a pod.

A question is a JSON object and has one answer. Files follow in frames of bytes; an empty one is the end.
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

from paceline.storage.files import write_all
from paceline.storage.store import PIECE, Sent, StoreError, Unwanted, Wanted

QUESTION_LIMIT = 64 * 1024
ANSWER_LIMIT = 64 * 1024 * 1024
CONNECT_S = 5.0
SILENCE_S = 60.0  # without a byte, either side gives up
IDLE_S = 30.0  # after which the other side may have given up: it is dialled again
_LENGTH = struct.Struct(">I")
_WORDS = {"send": "write", "fetch": "read", "has": "read", "digest": "read", "folders": "list", "names": "list"}

Words = dict[str, Any]


class Closed(Exception):
    """The other side has gone, or says what is no question of ours."""


class Line(Protocol):
    """What frames are carried by: as sockets have it."""

    def settimeout(self, seconds: float, /) -> None: ...

    def sendall(self, data: bytes | bytearray | memoryview, /) -> None: ...

    def recv_into(self, buffer: memoryview, most: int, /) -> int: ...

    def close(self) -> None: ...


class Wire:
    def __init__(self, line: Line) -> None:
        line.settimeout(SILENCE_S)
        self._line = line

    def write(self, data: bytes | memoryview) -> None:
        try:
            self._line.sendall(_LENGTH.pack(len(data)))
            if data:
                self._line.sendall(data)
        except OSError as error:
            raise Closed(_why(error)) from None

    def say(self, words: Words) -> None:
        self.write(json.dumps(words).encode())

    def read(self, most: int) -> bytearray:
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        if length > most:
            raise Closed(f"a frame of {length} bytes")
        return self._exactly(length)

    def hear(self, most: int) -> Words:
        words = json.loads(self.read(most))
        if not isinstance(words, dict):
            raise Closed("no object")
        return words

    def pieces(self) -> Iterator[bytearray]:
        while data := self.read(PIECE):
            yield data

    def close(self) -> None:
        self._line.close()

    def _exactly(self, length: int) -> bytearray:
        data = bytearray(length)
        view = memoryview(data)
        while view:
            try:
                count = self._line.recv_into(view, min(len(view), 1 << 20))
            except OSError as error:
                raise Closed(_why(error)) from None
            if count == 0:
                raise Closed("the connection ended")
            view = view[count:]
        return data


class Peer:
    """The store of another process, which decides what it may be asked."""

    def __init__(self, dial: Callable[[], Line], where: str) -> None:
        self._dial, self._where = dial, where
        self._wire: Wire | None = None
        self._used = 0.0
        self._turn = threading.Lock()

    def read(self, name: str, most: int) -> bytes | None:
        with self._asked("read", name) as wire:
            data = wire.read(ANSWER_LIMIT) if _answer(wire).get("there") else None
        if data is not None and len(data) > most:
            raise StoreError(f"{name} has more than the {most} bytes that such a file may have")
        return None if data is None else bytes(data)

    def has(self, name: str) -> bool:
        return bool(self._told("has", name).get("there"))

    def folders(self, prefix: str) -> list[str]:
        return [str(name) for name in self._told("folders", prefix).get("found") or ()]

    def names(self, prefix: str) -> list[str]:
        return [str(name) for name in self._told("names", prefix).get("found") or ()]

    def delete(self, name: str) -> None:
        self._told("delete", name)

    def clear(self, prefix: str) -> None:
        self._told("clear", prefix)

    def create(self, name: str, data: bytes) -> bool:
        raise NotImplementedError  # only whoever has the folder commits

    def send(self, path: str, name: str, wanted: Wanted) -> tuple[int, str]:
        reading = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        digest, size = hashlib.sha256(), 0
        try:
            with self._asked("send", name) as wire:
                while True:
                    data = os.read(reading, PIECE)
                    if not wanted(len(data)):
                        raise Unwanted(path)  # what is there of it has no name and goes
                    wire.write(data)
                    if not data:
                        break
                    digest.update(data)
                    size += len(data)
                answer = _answer(wire)
        finally:
            os.close(reading)
        if (answer.get("size"), answer.get("sha256")) != (size, digest.hexdigest()):
            raise StoreError(f"{name} was changed on its way to {self._where}", passing=True)
        return size, digest.hexdigest()

    def send_all(self, files: Sequence[tuple[str, str]], wanted: Wanted, sent: Sent) -> None:
        """All of them each time: the captain's pod, and what was there, may be another one."""
        for path, name in files:
            sent[name] = self.send(path, name, wanted)

    def at_once(self, size: int) -> int:
        return 1  # there is one connection

    def fetch(self, name: str, path: str, wanted: Wanted) -> tuple[int, str]:
        with self._asked("fetch", name) as wire:
            found = _written(wire, name, path, wanted) if _answer(wire).get("there") else None
        if found is None:
            raise KeyError(name)
        return found

    def digest(self, name: str, wanted: Wanted) -> tuple[int, str]:
        with self._asked("digest", name) as wire:
            answer = _answer(wire)
            while "read" in answer:  # of a large file, it takes its time
                if not wanted(int(answer["read"])):
                    raise Unwanted(name)
                answer = _answer(wire)
            found = (int(answer["size"]), str(answer["sha256"])) if answer.get("there") else None
        if found is None:
            raise KeyError(name)
        return found

    def _told(self, verb: str, name: str) -> Words:
        with self._asked(verb, name) as wire:
            return _answer(wire)

    @contextmanager
    def _asked(self, verb: str, name: str) -> Iterator[Wire]:
        """One question at a time. What breaks off in the middle of an answer ends the connection."""
        with self._turn:
            complete = False
            try:
                yield self._ask(verb, name)
                complete = True
            except (Closed, ValueError, KeyError, TypeError) as error:
                raise self._failed(verb, name, error) from None
            finally:
                self._used = time.monotonic()
                if not complete:
                    self._hang_up()

    def _ask(self, verb: str, name: str) -> Wire:
        """A connection that has idled may be gone: once more, then."""
        if time.monotonic() - self._used > IDLE_S:
            self._hang_up()
        question = {"do": verb, "name": name}
        if self._wire is not None:
            try:
                self._wire.say(question)
                return self._wire
            except Closed:
                self._hang_up()
        try:
            self._wire = Wire(self._dial())
        except OSError as error:
            raise self._failed(verb, name, error) from None
        self._wire.say(question)
        return self._wire

    def _failed(self, verb: str, name: str, error: Exception) -> StoreError:
        return StoreError(f"cannot {_WORDS.get(verb, verb)} {name} at {self._where}: {_why(error)}", passing=True)

    def close(self) -> None:
        with self._turn:
            self._hang_up()

    def _hang_up(self) -> None:
        if self._wire is not None:
            self._wire.close()
            self._wire = None


def over_tls(address: tuple[str, int], tls: ssl.SSLContext, server_name: str) -> Peer:
    def dial() -> Line:
        sock = socket.create_connection(address, CONNECT_S)
        try:
            return tls.wrap_socket(sock, server_hostname=server_name)
        except BaseException:
            sock.close()
            raise

    return Peer(dial, address[0])


def _answer(wire: Wire) -> Words:
    answer = wire.hear(ANSWER_LIMIT)
    error = answer.get("error")
    if error is not None:
        raise StoreError(str(error), bool(answer.get("passing")))
    return answer


def _written(wire: Wire, name: str, path: str, wanted: Wanted) -> tuple[int, str]:
    digest, size = hashlib.sha256(), 0
    writing = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        for data in wire.pieces():
            if not wanted(len(data)):
                raise Unwanted(name)
            digest.update(data)
            write_all(writing, data)
            size += len(data)
    finally:
        os.close(writing)
    return size, digest.hexdigest()


def _why(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
