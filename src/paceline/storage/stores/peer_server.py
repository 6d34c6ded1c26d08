"""Serves a folder: to members over TLS, and to a command line that starts this in a pod."""

from __future__ import annotations

import math
import os
import signal
import socket
import ssl
import threading

from paceline.storage.local_files import write_all
from paceline.storage.snapshots.manifest import is_safe_path
from paceline.storage.stores.folder import FolderStore
from paceline.storage.stores.peer_client import CONNECT_S, REPLY_LIMIT, REQUEST_LIMIT, Closed, Message, Wire
from paceline.storage.stores.protocol import StoreError

AT_ONCE = 1024  # connections
NICE = 10  # lower priority than training
OF_MEMBERS = frozenset(("send", "read", "fetch"))
OF_READERS = frozenset(("read", "fetch", "has", "folders", "names", "digest", "delete", "clear"))


class Server:
    """Serves members, each in its own thread, until the process ends."""

    def __init__(self, listen: tuple[str, int], tls: ssl.SSLContext, folder: FolderStore, run: str) -> None:
        self._tls, self._folder, self._run = tls, folder, run
        family = socket.AF_INET6 if ":" in listen[0] else socket.AF_INET
        self._listener = socket.create_server(listen, family=family, backlog=1024)
        self.port = int(self._listener.getsockname()[1])
        self._free = threading.BoundedSemaphore(AT_ONCE)
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # otherwise the waiting thread would accept one more connection
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0:
                    return
                continue  # out of file descriptors, or the peer has already disconnected
            if not self._free.acquire(blocking=False):
                sock.close()
                continue
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        try:
            sock.settimeout(CONNECT_S)
            wire = Wire(self._tls.wrap_socket(sock, server_side=True))
            try:
                answer_all(wire, self._folder, self._run, OF_MEMBERS)
            finally:
                wire.close()
        except OSError:
            pass  # the peer reconnects if it needs to
        finally:
            sock.close()
            self._free.release()


def answer_all(wire: Wire, folder: FolderStore, run: str, allowed: frozenset[str]) -> None:
    """Until the other side disconnects, or sends a request that is not allowed."""
    try:
        while True:
            _answer(wire, wire.read_object(REQUEST_LIMIT), folder, run, allowed)
    except (OSError, ValueError, KeyError, TypeError, RecursionError, Closed):
        pass


def _answer(wire: Wire, request: Message, folder: FolderStore, run: str, allowed: frozenset[str]) -> None:
    verb, name = request["do"], request["name"]
    if verb not in allowed:
        raise Closed("the request is not allowed")
    if (
        not isinstance(name, str)
        or not name.startswith(f"{run}/")
        or not is_safe_path(name[:-1] if name[-1] == "/" else name)
    ):
        raise Closed("the name does not belong to this run")
    try:
        if verb == "send":
            _receive(wire, folder, name)
        elif verb == "read":
            data = folder.read(name, REPLY_LIMIT)
            wire.write_object({"there": data is not None})
            if data is not None:
                wire.write(data)
        elif verb == "fetch":
            _send(wire, folder, name)
        elif verb == "digest":
            _digest(wire, folder, name)
        elif verb == "has":
            wire.write_object({"there": folder.has(name)})
        elif verb in ("folders", "names"):
            wire.write_object({"found": folder.folders(name) if verb == "folders" else folder.names(name)})
        else:
            if folder.is_link(run):
                raise StoreError(f"{run} is a symbolic link there, and its target is not deleted")
            folder.delete(name) if verb == "delete" else folder.clear(name)
            wire.write_object({})
    except StoreError as error:
        wire.write_object({"error": str(error), "passing": error.is_transient, "reason": error.reason})


def _receive(wire: Wire, folder: FolderStore, name: str) -> None:
    pieces = wire.pieces()
    try:
        size, digest = folder.take(pieces, name)
    except StoreError:
        for _ in pieces:
            pass  # the sender reads the reply only when it has sent everything
        raise
    wire.write_object({"size": size, "sha256": digest})


def _send(wire: Wire, folder: FolderStore, name: str) -> None:
    pieces = folder.give(name)
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
    answer_all(Wire(Pipes()), FolderStore(location), run, OF_READERS)
