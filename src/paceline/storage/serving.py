"""Who has a folder answers questions about it: to members over TLS, and to a command line that runs this in a pod."""

from __future__ import annotations

import math
import os
import signal
import socket
import ssl
import threading

from paceline.storage.files import write_all
from paceline.storage.folder import Folder
from paceline.storage.manifest import fit
from paceline.storage.peer import ANSWER_LIMIT, CONNECT_S, QUESTION_LIMIT, Closed, Wire, Words
from paceline.storage.store import StoreError

AT_ONCE = 1024  # connections
NICE = 10  # training goes first
OF_MEMBERS = frozenset(("send", "read", "fetch"))
OF_READERS = frozenset(("read", "fetch", "has", "folders", "names", "digest", "delete", "clear"))


class Server:
    """Answers members, each in a thread of its own, until the process ends."""

    def __init__(self, listen: tuple[str, int], tls: ssl.SSLContext, folder: Folder, run: str) -> None:
        self._tls, self._folder, self._run = tls, folder, run
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
                answer_all(wire, self._folder, self._run, OF_MEMBERS)
            finally:
                wire.close()
        except OSError:
            pass  # it dials again if it has more to ask
        finally:
            sock.close()
            self._free.release()


def answer_all(wire: Wire, folder: Folder, run: str, allowed: frozenset[str]) -> None:
    """Until the other side has gone, or asks what it may not."""
    try:
        while True:
            _answer(wire, wire.hear(QUESTION_LIMIT), folder, run, allowed)
    except (OSError, ValueError, KeyError, TypeError, RecursionError, Closed):
        pass


def _answer(wire: Wire, words: Words, folder: Folder, run: str, allowed: frozenset[str]) -> None:
    verb, name = words["do"], words["name"]
    if verb not in allowed:
        raise Closed("no such question")
    if not isinstance(name, str) or not name.startswith(f"{run}/") or not fit(name[:-1] if name[-1] == "/" else name):
        raise Closed("a name that is not of this run")
    try:
        if verb == "send":
            _take(wire, folder, name)
        elif verb == "read":
            data = folder.read(name, ANSWER_LIMIT)
            wire.say({"there": data is not None})
            if data is not None:
                wire.write(data)
        elif verb == "fetch":
            _give(wire, folder, name)
        elif verb == "digest":
            _digest(wire, folder, name)
        elif verb == "has":
            wire.say({"there": folder.has(name)})
        elif verb in ("folders", "names"):
            wire.say({"found": folder.folders(name) if verb == "folders" else folder.names(name)})
        else:
            if folder.is_link(run):
                raise StoreError(f"{run} is a link there: what it leads to is not deleted")
            folder.delete(name) if verb == "delete" else folder.clear(name)
            wire.say({})
    except StoreError as error:
        wire.say({"error": str(error), "passing": error.passing})


def _take(wire: Wire, folder: Folder, name: str) -> None:
    pieces = wire.pieces()
    try:
        size, digest = folder.take(pieces, name)
    except StoreError:
        for _ in pieces:
            pass  # whoever sends hears the answer when it has sent all
        raise
    wire.say({"size": size, "sha256": digest})


def _give(wire: Wire, folder: Folder, name: str) -> None:
    pieces = folder.give(name)
    wire.say({"there": pieces is not None})
    for data in pieces or ():
        wire.write(data)
    if pieces is not None:
        wire.write(b"")


def _digest(wire: Wire, folder: Folder, name: str) -> None:
    def told(size: int) -> bool:
        wire.say({"read": size})
        return True

    try:
        size, digest = folder.digest(name, told)
    except KeyError:
        wire.say({"there": False})
        return
    wire.say({"there": True, "size": size, "sha256": digest})


class Pipes:
    """Standard input and output, as a socket has them; nobody else may write there."""

    def __init__(self) -> None:
        self._silence = 0
        self._out = os.dup(1)
        os.dup2(2, 1)

    def settimeout(self, seconds: float) -> None:
        self._silence = math.ceil(seconds)

    def sendall(self, data: bytes | bytearray | memoryview) -> None:
        signal.alarm(self._silence)  # which ends this process: whoever has asked is gone
        write_all(self._out, data)
        signal.alarm(0)

    def recv_into(self, buffer: memoryview, most: int) -> int:
        signal.alarm(self._silence)
        count = os.readv(0, [buffer[:most]])
        signal.alarm(0)
        return count

    def close(self) -> None:
        os.close(self._out)


def main(place: str, run: str) -> None:
    """For one command line, which has these pipes."""
    os.nice(NICE)
    answer_all(Wire(Pipes()), Folder(place), run, OF_READERS)
