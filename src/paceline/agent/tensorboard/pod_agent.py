"""The agent of the TensorBoard pod: receives TensorBoard files from the members, and keeps TensorBoard running."""

from __future__ import annotations

import binascii
import json
import signal
import socket
from typing import Any, Callable

from paceline.agent.net.frames import PROTOCOL, Message, WireError
from paceline.agent.net.listener import Listener, Strangers
from paceline.agent.net.loop import Loop
from paceline.agent.net.tls import LinkClosed, TlsLink, context
from paceline.agent.options import PAGE_PORT, Options, endpoint
from paceline.agent.run_files import write_termination_message
from paceline.agent.tensorboard.received_files import MOST_FILES, ReceivedFiles, Refusal, is_valid_path
from paceline.agent.tensorboard.server import NOT_INSTALLED, TensorBoardServer, with_tensorboard
from paceline.plan import TENSORBOARD, from_data

BACKLOG = 1024  # connections
FILES_AT_ONCE = 1000
SILENCE_S = 60.0  # members send messages more often than that
HELLO_S = 10.0  # for the first message of a connection
SWEEP_S = 5.0


class Peer:
    """The connection of one member, which sends requests; each has one reply."""

    def __init__(self, board: TensorBoardPod, sock: socket.socket) -> None:
        self._board = board
        self.link = TlsLink(sock, board.tls, server=True)
        self.host = ""
        self.files: set[str] = set()  # files on its host
        self.last_message_at = board.loop.now()
        self._rewatch()

    def _rewatch(self) -> None:
        self._board.loop.watch(self.link, self.link.interest(), self._ready)

    def _ready(self) -> None:
        try:
            for message in self.link.ready():
                self.last_message_at = self._board.loop.now()
                self.link.send(self._board.answer(self, message))
            self._rewatch()
        except (LinkClosed, WireError):
            self._board.drop(self)


class TensorBoardPod:
    def __init__(self, options: Options) -> None:
        with open(options.plan) as file:
            plan = from_data(json.load(file))
        self._options = options
        self._hosts = {host.name for host in plan.hosts}
        self._image = plan.tensorboard.get("image") or plan.kubernetes.get("image")
        published = plan.tensorboard.get("service") or plan.tensorboard.get("ingress")
        self._files = ReceivedFiles(f"{options.folder}/{TENSORBOARD}")
        self._problem = ""
        self._peers: set[Peer] = set()
        self._reporter: Peer | None = None  # the member that reports problems
        self.loop = Loop()
        self.tls = context(options.tls, TENSORBOARD, server=True)
        host, port = endpoint(options.listen)
        self._strangers = Strangers(len(plan.hosts), self.drop, lambda peer: peer.link.open)
        self._listener = Listener(self.loop, (host, port), BACKLOG, self._admit, self._strangers.drop_oldest)
        self.loop.on_signal(signal.SIGTERM, self._stop)
        self._drop_silent()
        self._server: TensorBoardServer | None = None
        python = with_tensorboard([options.interpreter, "python3", "python"])
        if python:
            # Users reach the loopback address only through a forwarded port. The pod has the memory limit.
            address = (host if published else "127.0.0.1", PAGE_PORT)
            self._server = TensorBoardServer(self.loop, python, self._files.shown, address, None, self._restarted)
        else:
            remedy = "set tensorboard.image to an image that contains it"
            self._report(f"{NOT_INSTALLED} in the image {self._image}; {remedy}")

    # ---- members

    def _admit(self, sock: socket.socket) -> None:
        peer = Peer(self, sock)
        self._peers.add(peer)
        self._strangers.add(peer)

    def answer(self, peer: Peer, message: Message) -> Message:
        kind = message["type"]
        if kind == "hello":
            if message.get("protocol") != PROTOCOL or message.get("run") != self._options.run:
                raise WireError(f"this is run {self._options.run}, protocol {PROTOCOL}")
            host = message.get("host")
            if not isinstance(host, str) or host not in self._hosts:
                raise WireError(f"hello: unknown host {host!r}")
            peer.host = host
            self._strangers.discard(peer)
            return self._answer(peer, {})
        if not peer.host:
            raise WireError("the first message must be hello")
        if kind == "hold":
            paths = message.get("files")
            if not isinstance(paths, list) or len(paths) > FILES_AT_ONCE:
                raise WireError("hold: files is not a list, or too long")
            valid = [path for path in paths if is_valid_path(path)]
            peer.files.update(valid)
            if len(peer.files) > MOST_FILES:
                raise WireError(f"hold: more than {MOST_FILES} files")
            return self._answer(peer, {path: self._files.size(peer.host, path) for path in valid})
        if kind == "begun":
            return self._trim(peer, message)
        if kind == "part":
            return self._append(peer, message)
        raise WireError(f"unknown request {kind!r}")

    def _append(self, peer: Peer, message: Message) -> Message:
        path, at, data = message.get("path"), message.get("at"), message.get("data")
        if not isinstance(path, str) or type(at) is not int or at < 0 or not isinstance(data, str):
            raise WireError("part: path and data must be text, and at a number")
        try:
            size = self._files.append(peer.host, path, at, binascii.a2b_base64(data), bool(message.get("anew")))
        except Refusal as refusal:
            return {**self._answer(peer, {}), "refused": str(refusal)}
        except ValueError as error:
            raise WireError(f"part: {error}") from None
        return self._answer(peer, {path: size})

    def _trim(self, peer: Peer, message: Message) -> Message:
        """Hosts trim their own files. Files of an earlier instance of the host exist only here."""
        after = message.get("after")
        if not isinstance(after, list) or not all(map(_is_three_integers, after)):
            raise WireError("begun: after is not a list of lists of three integers")
        self._files.trim(peer.host, peer.files, {each[0]: (each[1], each[2]) for each in after})
        return self._answer(peer, {})

    def _answer(self, peer: Peer, sizes: dict[str, int]) -> Message:
        """Only one member receives the current problem, and reports it for all."""
        if self._reporter not in self._peers:
            self._reporter = peer
        return {"type": "held", "sizes": sizes, "trouble": self._problem if peer is self._reporter else ""}

    def drop(self, peer: Peer) -> None:
        self._peers.discard(peer)
        self._strangers.discard(peer)
        self.loop.unwatch(peer.link)
        peer.link.close()

    def _drop_silent(self) -> None:
        for peer in list(self._peers):
            if self.loop.now() - peer.last_message_at > (SILENCE_S if peer.host else HELLO_S):
                self.drop(peer)
        self.loop.after(SWEEP_S, self._drop_silent)

    # ---- TensorBoard

    def _restarted(self, problem: str) -> None:
        text = f"TensorBoard in {self._image} ended ({problem}) and is being restarted"
        self._report(f"{text}; its output is in the log of its pod")

    def _report(self, problem: str) -> None:
        """In this pod's log, and through a member in the run's events."""
        self._problem = problem
        print(f"paceline: {problem}", flush=True)
        write_termination_message(self._options.last_words, {"reason": problem})

    def _stop(self) -> None:
        if self._server is not None:
            self._server.close()
        self.loop.stop()


def _is_three_integers(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 3 and all(type(each) is int for each in value)


def main(options: Options, beat: Callable[[Any], None]) -> int:
    board = TensorBoardPod(options)
    beat(board.loop)
    board.loop.run()
    return 0
