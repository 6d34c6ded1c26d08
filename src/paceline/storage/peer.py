"""A folder that one agent has and others use: over TLS with the certificates of the run, in frames with a length.

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
from collections.abc import Iterator, Sequence
from typing import Any

from paceline.storage.files import write_all
from paceline.storage.folder import Folder
from paceline.storage.manifest import fit
from paceline.storage.store import PIECE, Sent, StoreError, Unwanted, Wanted

QUESTION_LIMIT = 64 * 1024
ANSWER_LIMIT = 64 * 1024 * 1024
CONNECT_S = 5.0
SILENCE_S = 60.0  # without a byte, either side gives up
AT_ONCE = 1024  # connections
_LENGTH = struct.Struct(">I")

Words = dict[str, Any]


class Closed(Exception):
    """The other side has gone, or says what is no question of ours."""


class Wire:
    def __init__(self, sock: ssl.SSLSocket) -> None:
        sock.settimeout(SILENCE_S)
        self._sock = sock

    def write(self, data: bytes | memoryview) -> None:
        self._sock.sendall(_LENGTH.pack(len(data)))
        if data:
            self._sock.sendall(data)

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
        self._sock.close()

    def _exactly(self, length: int) -> bytearray:
        data = bytearray(length)
        view = memoryview(data)
        while view:
            count = self._sock.recv_into(view, min(len(view), 1 << 20))
            if count == 0:
                raise Closed("the connection ended")
            view = view[count:]
        return data


class Peer:
    """The store of another agent: what hosts need of it."""

    def __init__(self, address: tuple[str, int], tls: ssl.SSLContext, server_name: str) -> None:
        self._address, self._tls, self._server_name = address, tls, server_name
        self._wire: Wire | None = None

    def read(self, name: str, most: int) -> bytes | None:
        wire = self._ask("read", name)
        try:
            if not self._answer(wire, "read", name).get("there"):
                return None
            data = wire.read(ANSWER_LIMIT)
        except (OSError, ValueError, Closed) as error:
            raise self._failed("read", name, error) from None
        if len(data) > most:
            raise StoreError(f"{name} has more than the {most} bytes that such a file may have")
        return bytes(data)

    def send(self, path: str, name: str, wanted: Wanted) -> tuple[int, str]:
        reading = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        digest, size = hashlib.sha256(), 0
        try:
            wire = self._ask("send", name)
            while True:
                data = os.read(reading, PIECE)
                if not wanted(len(data)):
                    raise Unwanted(path)
                wire.write(data)
                if not data:
                    break
                digest.update(data)
                size += len(data)
            answer = self._answer(wire, "write", name)
        except Unwanted:
            self._hang_up()  # what is there of it has no name and goes
            raise
        except (OSError, ValueError, Closed) as error:
            raise self._failed("write", name, error) from None
        finally:
            os.close(reading)
        if (answer.get("size"), answer.get("sha256")) != (size, digest.hexdigest()):
            raise StoreError(f"{name} was changed on its way to {self._server_name}", passing=True)
        return size, digest.hexdigest()

    def send_all(self, files: Sequence[tuple[str, str]], wanted: Wanted, sent: Sent) -> None:
        """All of them each time: the captain's pod, and what was there, may be another one."""
        for path, name in files:
            sent[name] = self.send(path, name, wanted)

    def at_once(self, size: int) -> int:
        return 1  # there is one connection

    def fetch(self, name: str, path: str, wanted: Wanted) -> tuple[int, str]:
        digest, size = hashlib.sha256(), 0
        wire = self._ask("fetch", name)
        try:
            there = self._answer(wire, "read", name).get("there")
        except (OSError, ValueError, Closed) as error:
            raise self._failed("read", name, error) from None
        if not there:
            raise KeyError(name)
        writing = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        complete = False
        try:
            for data in self._heard(wire, name):
                if not wanted(len(data)):
                    raise Unwanted(name)
                digest.update(data)
                write_all(writing, data)
                size += len(data)
            complete = True
        finally:
            os.close(writing)
            if not complete:
                self._hang_up()
        return size, digest.hexdigest()

    def _heard(self, wire: Wire, name: str) -> Iterator[bytearray]:
        try:
            yield from wire.pieces()
        except (OSError, ValueError, Closed) as error:
            raise self._failed("read", name, error) from None

    def _ask(self, verb: str, name: str) -> Wire:
        """A connection that has idled may be gone: once more, then."""
        for again in (True, False):
            try:
                if self._wire is None:
                    sock = socket.create_connection(self._address, CONNECT_S)
                    self._wire = Wire(self._tls.wrap_socket(sock, server_hostname=self._server_name))
                    again = False
                self._wire.say({"do": verb, "name": name})
                return self._wire
            except (OSError, ValueError) as error:
                self._hang_up()
                if not again:
                    raise self._failed(verb, name, error) from None
        raise AssertionError

    def _answer(self, wire: Wire, verb: str, name: str) -> Words:
        answer = wire.hear(QUESTION_LIMIT)
        error = answer.get("error")
        if error is not None:
            raise StoreError(str(error), bool(answer.get("passing")))
        return answer

    def _failed(self, verb: str, name: str, error: Exception) -> StoreError:
        self._hang_up()
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return StoreError(f"cannot {verb} {name} at {self._address[0]}: {why}", passing=True)

    def _hang_up(self) -> None:
        if self._wire is not None:
            self._wire.close()
            self._wire = None

    # ---- what only whoever has the folder does

    def create(self, name: str, data: bytes) -> bool:
        raise NotImplementedError

    def digest(self, name: str, wanted: Wanted) -> tuple[int, str]:
        raise NotImplementedError

    def clear(self, prefix: str) -> None:
        raise NotImplementedError

    def has(self, name: str) -> bool:
        raise NotImplementedError

    def folders(self, prefix: str) -> list[str]:
        raise NotImplementedError

    def names(self, prefix: str) -> list[str]:
        raise NotImplementedError

    def delete(self, name: str) -> None:
        raise NotImplementedError


class Server:
    """Answers peers, each in a thread of its own, until the process ends."""

    def __init__(self, listen: tuple[str, int], tls: ssl.SSLContext, folder: Folder, run: str) -> None:
        self._tls, self._folder, self._below = tls, folder, f"{run}/"
        family = socket.AF_INET6 if ":" in listen[0] else socket.AF_INET
        self._listener = socket.create_server(listen, family=family, backlog=1024)
        self.port = int(self._listener.getsockname()[1])
        self._free = threading.BoundedSemaphore(AT_ONCE)
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # or the thread that waits would take one more
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0:
                    return
                continue  # out of descriptors, or a peer that left at once
            if not self._free.acquire(blocking=False):
                sock.close()
                continue
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            sock.settimeout(CONNECT_S)
            wire = Wire(self._tls.wrap_socket(sock, server_side=True))
            try:
                while True:
                    self._answer(wire, wire.hear(QUESTION_LIMIT))
            finally:
                wire.close()
        except (OSError, ValueError, KeyError, TypeError, RecursionError, Closed):
            pass  # it dials again if it has more to ask
        finally:
            sock.close()
            self._free.release()

    def _answer(self, wire: Wire, words: Words) -> None:
        verb, name = words["do"], words["name"]
        if not isinstance(name, str) or not name.startswith(self._below) or not fit(name):
            raise Closed("a name that is not of this run")
        try:
            if verb == "send":
                self._take(wire, name)
            elif verb == "read":
                data = self._folder.read(name, ANSWER_LIMIT)
                wire.say({"there": data is not None})
                if data is not None:
                    wire.write(data)
            elif verb == "fetch":
                self._give(wire, name)
            else:
                raise Closed("no such question")
        except StoreError as error:
            wire.say({"error": str(error), "passing": error.passing})

    def _take(self, wire: Wire, name: str) -> None:
        pieces = wire.pieces()
        try:
            size, digest = self._folder.take(pieces, name)
        except StoreError:
            for _ in pieces:
                pass  # whoever sends hears the answer when it has sent all
            raise
        wire.say({"size": size, "sha256": digest})

    def _give(self, wire: Wire, name: str) -> None:
        pieces = self._folder.give(name)
        wire.say({"there": pieces is not None})
        for data in pieces or ():
            wire.write(data)
        if pieces is not None:
            wire.write(b"")
