"""Serves a folder: to members over TLS, and to a command line that starts this in a pod."""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import socket
import ssl
import threading
import time

from paceline.storage.local_files import write_all
from paceline.storage.stores.folder import FolderStore
from paceline.storage.stores.peer_access import Access, ReaderAccess
from paceline.storage.stores.peer_client import (
    CONNECT_S,
    LARGEST_FILE,
    REPLY_LIMIT,
    REQUEST_LIMIT,
    Closed,
    Message,
    Wire,
)
from paceline.storage.stores.protocol import StoreError

AT_ONCE = 1024  # connections of members
STRANGERS = 256  # connections without a completed handshake; then the oldest is closed
PAUSE_S = 0.1  # without accepting, while no descriptor or thread is free
NICE = 10  # lower priority than training


class Server:
    """Serves members, each in its own thread, until the process ends."""

    def __init__(self, listen: tuple[str, int], tls: ssl.SSLContext, folder: FolderStore, access: Access) -> None:
        """`access`: decides which requests are allowed."""
        self._tls, self._folder, self._access = tls, folder, access
        family = socket.AF_INET6 if ":" in listen[0] else socket.AF_INET
        self._listener = socket.create_server(listen, family=family, backlog=1024)
        self.port = int(self._listener.getsockname()[1])
        self._free = threading.BoundedSemaphore(AT_ONCE)
        self._strangers: dict[ssl.SSLSocket, None] = {}  # in order of arrival
        self._lock = threading.Lock()  # for _strangers
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # otherwise the waiting thread would accept one more connection
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except ConnectionError:
                continue  # the peer has already disconnected
            except OSError:
                if self._listener.fileno() < 0:
                    return
                self._close_stranger()  # out of file descriptors
                time.sleep(PAUSE_S)
                continue
            self._begin(sock)

    def _begin(self, sock: socket.socket) -> None:
        try:
            sock.setblocking(False)
            link = self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        except OSError:
            sock.close()  # the peer has already disconnected
            return
        with self._lock:
            self._strangers[link] = None
            is_full = len(self._strangers) > STRANGERS
        if is_full:
            self._close_stranger()
        try:
            threading.Thread(target=self._serve, args=(link,), daemon=True).start()
        except RuntimeError:  # the machine currently allows no more threads
            self._forget(link)
            link.close()
            time.sleep(PAUSE_S)

    def _close_stranger(self) -> None:
        """Members complete their handshake at once, and connect again if they are closed."""
        with self._lock:
            link = next(iter(self._strangers), None)
            if link is not None:
                del self._strangers[link]
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(link, socket.SHUT_RDWR)  # its thread notices, and closes it

    def _forget(self, link: ssl.SSLSocket) -> None:
        """Before it is closed: another connection may get its descriptor."""
        with self._lock:
            self._strangers.pop(link, None)

    def _serve(self, link: ssl.SSLSocket) -> None:
        try:
            _shake_hands(link, CONNECT_S)
            self._forget(link)
            if self._free.acquire(blocking=False):
                try:
                    answer_all(Wire(link), self._folder, self._access)
                finally:
                    self._free.release()
        except OSError:
            pass  # the peer reconnects if it needs to
        finally:
            self._forget(link)
            link.close()


def _shake_hands(link: ssl.SSLSocket, limit: float) -> None:
    """`limit`: seconds for the whole handshake, however slowly the peer sends. OSError: it failed."""
    until = time.monotonic() + limit
    while True:
        try:
            link.do_handshake()
            return
        except ssl.SSLWantReadError:
            event = select.POLLIN
        except ssl.SSLWantWriteError:
            event = select.POLLOUT
        poll = select.poll()  # select() does not support descriptors above 1023
        poll.register(link, event)
        remaining = until - time.monotonic()
        if remaining <= 0 or not poll.poll(1000 * remaining):
            raise TimeoutError("the peer did not complete the handshake in time")


def answer_all(wire: Wire, folder: FolderStore, access: Access) -> None:
    """Until the other side disconnects, or sends something that is not a request."""
    try:
        while True:
            _answer(wire, wire.read_object(REQUEST_LIMIT), folder, access)
    except (OSError, ValueError, KeyError, TypeError, OverflowError, Closed):
        pass


def _answer(wire: Wire, request: Message, folder: FolderStore, access: Access) -> None:
    verb, name = request["do"], request["name"]
    if not isinstance(verb, str) or not isinstance(name, str):
        raise Closed("not a request")
    try:
        _check(wire, verb, name, access)
        if verb == "send":
            _receive(wire, folder, name)
        elif verb == "read":
            data = folder.read(name, REPLY_LIMIT)
            wire.write_object({"there": data is not None})
            if data is not None:
                wire.write(data)
        elif verb == "fetch":
            _send(wire, folder, name, request)
        elif verb == "digest":
            _digest(wire, folder, name)
        elif verb == "has":
            wire.write_object({"there": folder.has(name)})
        elif verb == "sizes":
            wire.write_object({"found": folder.sizes(name)})
        elif verb in ("folders", "names"):
            wire.write_object({"found": folder.folders(name) if verb == "folders" else folder.names(name)})
        else:
            run = name.partition("/")[0]
            if folder.is_link(run):
                raise StoreError(f"{run} is a symbolic link there, and its target is not deleted")
            folder.delete(name) if verb == "delete" else folder.clear(name)
            wire.write_object({})
    except StoreError as error:
        wire.write_object({"error": str(error), "passing": error.is_transient, "reason": error.reason})


def _check(wire: Wire, verb: str, name: str, access: Access) -> None:
    try:
        access(verb, name)
    except StoreError:
        if verb == "send":
            for _ in wire.pieces():
                pass  # the sender reads the reply only when it has sent everything
        raise


def _receive(wire: Wire, folder: FolderStore, name: str) -> None:
    pieces = wire.pieces()
    try:
        size, digest = folder.take(pieces, name)
    except StoreError:
        for _ in pieces:
            pass  # the sender reads the reply only when it has sent everything
        raise
    wire.write_object({"size": size, "sha256": digest})


def _send(wire: Wire, folder: FolderStore, name: str, request: Message) -> None:
    start, size = request.get("start", 0), request.get("size")
    for number in (start, 0 if size is None else size):
        if type(number) is not int or not 0 <= number < LARGEST_FILE:
            raise Closed("not a request")
    with folder.give(name, start, size) as pieces:
        wire.write_object({"there": pieces is not None})
        for data in pieces or ():
            wire.write(data)
        if pieces is not None:
            wire.write(b"")


def _digest(wire: Wire, folder: FolderStore, name: str) -> None:
    def report_progress(size: int) -> bool:
        wire.write_object({"read": size})
        return True

    try:
        size, digest = folder.digest(name, report_progress)
    except KeyError:
        wire.write_object({"there": False})
        return
    wire.write_object({"there": True, "size": size, "sha256": digest})


class Pipes:
    """Standard input and output as a transport; other output goes to standard error."""

    def __init__(self) -> None:
        self._silence = 0
        self._out = os.dup(1)
        os.dup2(2, 1)

    def settimeout(self, seconds: float) -> None:
        self._silence = math.ceil(seconds)

    def sendall(self, data: bytes | bytearray | memoryview) -> None:
        signal.alarm(self._silence)  # SIGALRM ends this process: the client has disconnected
        write_all(self._out, data)
        signal.alarm(0)

    def recv_into(self, buffer: memoryview, most: int) -> int:
        signal.alarm(self._silence)
        count = os.readv(0, [buffer[:most]])
        signal.alarm(0)
        return count

    def close(self) -> None:
        os.close(self._out)


def main(location: str, run: str) -> None:
    """Serves one command line over pipes."""
    os.nice(NICE)
    answer_all(Wire(Pipes()), FolderStore(location), ReaderAccess(run))
