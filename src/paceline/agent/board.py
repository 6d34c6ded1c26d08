"""The agent of TensorBoard's pod: takes what tasks write for TensorBoard from the members, and keeps it running."""

from __future__ import annotations

import binascii
import json
import os
import selectors
import signal
import socket
import subprocess
from typing import Any, Callable

from paceline.agent.held import Held, Refusal, fit
from paceline.agent.journal import last_words
from paceline.agent.link import Link, LinkClosed, context
from paceline.agent.loop import Loop
from paceline.agent.options import PAGE_PORT, Options, endpoint
from paceline.agent.wire import PROTOCOL, Message, WireError
from paceline.plan import TENSORBOARD, from_data

FILES_AT_ONCE = 1000
SILENCE_S = 60.0  # a member says something more often than that
SWEEP_S = 10.0
SOON_S, LATE_S = 1.0, 30.0  # between two starts of TensorBoard
STEADY_S = 60.0  # it has come up well once it has lived that long
ASKED_S = 15.0
# Next to TensorFlow, TensorBoard imports it: 0.7 GiB and many seconds, for reading checkpoints in its projector. This
# module, if there is one, keeps it from that.
_LIGHT = (
    "import sys, types; sys.modules['tensorboard.compat.notf'] = types.ModuleType('notf'); "
    "sys.argv[0] = 'tensorboard'; from tensorboard.main import run_main; run_main()"
)


class Peer:
    """One member: it asks, and each question has one answer."""

    def __init__(self, board: Board, sock: socket.socket) -> None:
        self._board = board
        self.link = Link(sock, board.tls, server=True)
        self.host = ""
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
        self._image = plan.kubernetes.get("tensorboard_image") or plan.kubernetes.get("image")
        self._held = Held(f"{options.folder}/{TENSORBOARD}")
        self._trouble = ""
        self._pid = 0
        self._started = 0.0
        self._wait = SOON_S
        self._peers: set[Peer] = set()
        self._teller: Peer | None = None
        self.loop = Loop()
        self.tls = context(options.tls, TENSORBOARD, server=True)
        host, port = endpoint(options.listen)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=1024)
        self._listener.setblocking(False)
        self.loop.watch(self._listener, selectors.EVENT_READ, self._accept)
        self.loop.on_child(self._child_ended)
        self.loop.on_signal(signal.SIGTERM, self._told_to_go)
        self._drop_silent()
        self._python = _with_tensorboard([options.interpreter, "python3", "python"])
        if self._python:
            self._start()
        else:
            self._say(f"the image {self._image} has no tensorboard: set kubernetes.tensorboard_image to one that has")

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
            return self._answer(peer, {path: self._held.size(peer.host, path) for path in paths if fit(path)})
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

    def _start(self) -> None:
        words = [
            "--logdir",
            self._held.shown,
            "--host",
            "127.0.0.1",
            "--port",
            str(PAGE_PORT),
            "--reload_interval",
            "5",
        ]
        self._started = self.loop.now()
        self._pid = os.posix_spawn(self._python, [self._python, "-c", _LIGHT, *words], os.environ)

    def _child_ended(self, pid: int, status: int) -> None:
        if pid != self._pid:
            return  # something that it had started
        self._wait = SOON_S if self.loop.now() - self._started > STEADY_S else min(LATE_S, 2 * self._wait)
        how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit code {os.WEXITSTATUS(status)}"
        self._say(
            f"TensorBoard in {self._image} ended ({how}) and is started again; its own words are in this pod's log"
        )
        self._pid = 0
        self.loop.after(self._wait, self._start)

    def _say(self, trouble: str) -> None:
        """In this pod's log, and by the members in the run's events."""
        self._trouble = trouble
        print(f"paceline: {trouble}", flush=True)
        last_words(self._options.last_words, {"reason": trouble})

    def _told_to_go(self) -> None:
        if self._pid:
            os.kill(self._pid, signal.SIGTERM)
        self.loop.stop()


def _with_tensorboard(names: list[str]) -> str:
    """The first of these interpreters that has TensorBoard; the image's own Python may not be the one on its PATH."""
    import shutil

    ask = "import importlib.util, sys; sys.exit(importlib.util.find_spec('tensorboard') is None)"
    for path in dict.fromkeys(filter(None, map(shutil.which, filter(None, names)))):
        try:
            if not subprocess.run([path, "-c", ask], stdin=subprocess.DEVNULL, timeout=ASKED_S).returncode:
                return path
        except (OSError, subprocess.TimeoutExpired):
            continue
    return ""


def main(options: Options, beat: Callable[[Any], None]) -> int:
    board = Board(options)
    beat(board.loop)
    board.loop.run()
    return 0
