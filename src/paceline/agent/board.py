"""The agent of TensorBoard's pod: takes what tasks write for TensorBoard from the members, and keeps it running."""

from __future__ import annotations

import binascii
import json
import selectors
import signal
import socket
from typing import Any, Callable

from paceline.agent.held import Held, Refusal, fit
from paceline.agent.journal import last_words
from paceline.agent.link import Link, LinkClosed, context
from paceline.agent.loop import Loop
from paceline.agent.options import PAGE_PORT, Options, endpoint
from paceline.agent.showing import Showing, with_tensorboard
from paceline.agent.wire import PROTOCOL, Message, WireError
from paceline.plan import TENSORBOARD, from_data

FILES_AT_ONCE = 1000
SILENCE_S = 60.0  # a member says something more often than that
SWEEP_S = 10.0


class Peer:
    """One member: it asks, and each question has one answer."""

    def __init__(self, board: Board, sock: socket.socket) -> None:
        self._board = board
        self.link = Link(sock, board.tls, server=True)
        self.host = ""
        self.has: set[str] = set()  # the files that its host has
        self.heard = board.loop.now()
        self._rewatch()

    def _rewatch(self) -> None:
        self._board.loop.watch(self.link, self.link.interest(), self._ready)

    def _ready(self) -> None:
        try:
            for message in self.link.ready():
                self.heard = self._board.loop.now()
                self.link.send(self._board.answer(self, message))
            self._rewatch()
        except (LinkClosed, WireError):
            self._board.drop(self)


class Board:
    def __init__(self, options: Options) -> None:
        with open(options.plan) as file:
            plan = from_data(json.load(file))
        self._options = options
        self._known = {host.name for host in plan.hosts}
        self._image = plan.tensorboard.get("image") or plan.kubernetes.get("image")
        published = plan.tensorboard.get("service") or plan.tensorboard.get("ingress")
        self._held = Held(f"{options.folder}/{TENSORBOARD}")
        self._trouble = ""
        self._peers: set[Peer] = set()
        self._teller: Peer | None = None
        self.loop = Loop()
        self.tls = context(options.tls, TENSORBOARD, server=True)
        host, port = endpoint(options.listen)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=1024)
        self._listener.setblocking(False)
        self.loop.watch(self._listener, selectors.EVENT_READ, self._accept)
        self.loop.on_signal(signal.SIGTERM, self._told_to_go)
        self._drop_silent()
        self._showing: Showing | None = None
        python = with_tensorboard([options.interpreter, "python3", "python"])
        if python:
            # On the loopback address people come by a forwarded port alone. Its memory is the pod's.
            shown = (host if published else "127.0.0.1", PAGE_PORT)
            self._showing = Showing(self.loop, python, self._held.shown, shown, None, self._ended)
        else:
            self._say(f"the image {self._image} has no tensorboard: set tensorboard.image to one that has")

    # ---- members

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return  # out of descriptors, or a peer that left at once
        self._peers.add(Peer(self, sock))

    def answer(self, peer: Peer, message: Message) -> Message:
        kind = message["type"]
        if kind == "hello":
            if message.get("protocol") != PROTOCOL or message.get("run") != self._options.run:
                raise WireError(f"this is run {self._options.run}, protocol {PROTOCOL}")
            host = message.get("host")
            if not isinstance(host, str) or host not in self._known:
                raise WireError("no such host")
            peer.host = host
            return self._answer(peer, {})
        if not peer.host:
            raise WireError("who is this?")
        if kind == "hold":
            paths = message.get("files")
            if not isinstance(paths, list) or len(paths) > FILES_AT_ONCE:
                raise WireError("hold: files is no list, or too long")
            peer.has.update(path for path in paths if fit(path))
            return self._answer(peer, {path: self._held.size(peer.host, path) for path in paths if fit(path)})
        if kind == "begun":
            return self._begun(peer, message)
        if kind == "part":
            return self._take(peer, message)
        raise WireError(f"{kind!r} is no question")

    def _take(self, peer: Peer, message: Message) -> Message:
        path, at, data = message.get("path"), message.get("at"), message.get("data")
        if not isinstance(path, str) or type(at) is not int or at < 0 or not isinstance(data, str):
            raise WireError("part: path, at and data are a text, a number and a text")
        try:
            size = self._held.append(peer.host, path, at, binascii.a2b_base64(data), bool(message.get("anew")))
        except Refusal as refusal:
            return {**self._answer(peer, {}), "refused": str(refusal)}
        except ValueError as error:
            raise WireError(f"part: {error}") from None
        return self._answer(peer, {path: size})

    def _begun(self, peer: Peer, message: Message) -> Message:
        """What its host has, the host itself keeps in one line; what an instance before it has left here, nobody else
        can."""
        after = message.get("after")
        if not isinstance(after, list) or not all(isinstance(each, list) and len(each) == 3 for each in after):
            raise WireError("begun: after is no list of three numbers each")
        self._held.trim(peer.host, peer.has, {int(each[0]): (int(each[1]), int(each[2])) for each in after})
        return self._answer(peer, {})

    def _answer(self, peer: Peer, sizes: dict[str, int]) -> Message:
        """What is wrong is told to one of them: it says so for all."""
        if self._teller not in self._peers:
            self._teller = peer
        return {"type": "held", "sizes": sizes, "trouble": self._trouble if peer is self._teller else ""}

    def drop(self, peer: Peer) -> None:
        self._peers.discard(peer)
        self.loop.unwatch(peer.link)
        peer.link.close()

    def _drop_silent(self) -> None:
        for peer in [peer for peer in self._peers if self.loop.now() - peer.heard > SILENCE_S]:
            self.drop(peer)
        self.loop.after(SWEEP_S, self._drop_silent)

    # ---- TensorBoard

    def _ended(self, how: str) -> None:
        self._say(
            f"TensorBoard in {self._image} ended ({how}) and is started again; its own words are in this pod's log"
        )

    def _say(self, trouble: str) -> None:
        """In this pod's log, and by the members in the run's events."""
        self._trouble = trouble
        print(f"paceline: {trouble}", flush=True)
        last_words(self._options.last_words, {"reason": trouble})

    def _told_to_go(self) -> None:
        if self._showing is not None:
            self._showing.close()
        self.loop.stop()


def main(options: Options, beat: Callable[[Any], None]) -> int:
    board = Board(options)
    beat(board.loop)
    board.loop.run()
    return 0
