"""Sends what the tasks of a host write for TensorBoard to its pod, in a thread of its own: nothing waits for it."""

from __future__ import annotations

import binascii
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator

from paceline.agent.link import BOARD_NAME, context
from paceline.agent.options import Options, endpoint
from paceline.agent.wire import PROTOCOL, Decoder, Message, WireError, encode
from paceline.agent.written import Notes, notes_path
from paceline.storage.curves import find

EVERY_S = 3.0
SHARE = 0.05  # of its time it may be busy: where that is not enough, it looks less often
PING_S = 20.0
PART = 256 * 1024
ASKED_AT_ONCE = 500
TIMEOUT_S = 10.0
AWAY_S = 120.0  # without an answer, until that is said
AT_THE_END_S = 5.0


class Sending:
    def __init__(self, options: Options, speaks: bool) -> None:
        """`speaks`: says that nobody answers; a few hosts of a run are enough for that."""
        self._options = options
        self._folder = f"{options.folder}/tensorboard"
        self._speaks = speaks
        self._tls = context(options.tls, "member", server=False)
        self._sock: socket.socket | None = None
        self._decoder = Decoder()
        self._held: dict[str, int] = {}  # what the other side has, as it says itself
        self._inodes: dict[str, int] = {}
        self._refused: set[str] = set()
        self._notes = Notes(notes_path(options.folder))
        self._begun = 0.0
        self._answered = time.monotonic()
        self._said: deque[str] = deque()
        self._told: set[str] = set()
        self._closing = threading.Event()
        self._done = False
        self._until = 0.0
        self._thread = threading.Thread(target=self._run, name="tensorboard", daemon=True)

    def start(self) -> None:
        os.makedirs(self._folder, exist_ok=True)
        self._thread.start()

    def said(self) -> Iterator[str]:
        """What a person should know, each once."""
        while self._said:
            yield self._said.popleft()

    def close(self, limit: float = AT_THE_END_S) -> None:
        """Sends the rest, for as long as that; tasks have ended."""
        self._until = time.monotonic() + limit
        self._closing.set()
        self._thread.join(limit)
        if not self._done:
            print("paceline: what tasks wrote last for TensorBoard was not sent: its pod does not answer", flush=True)

    # ---- in the thread

    def _run(self) -> None:
        while True:
            last = self._closing.is_set()
            began = time.monotonic()
            done = self._attempt()
            self._done = last and done
            if last and (done or time.monotonic() > self._until):
                self._hang_up()
                return
            if last:
                time.sleep(0.2)
            else:
                self._closing.wait(max(EVERY_S, (time.monotonic() - began) / SHARE))

    def _attempt(self) -> bool:
        try:
            self.sweep()
            self._answered = time.monotonic()
            return True
        except (OSError, WireError, KeyError, TypeError, ValueError) as error:
            self._hang_up()
            if self._speaks and time.monotonic() - self._answered > AWAY_S:
                why = str(error) or type(error).__name__
                self._say(f"TensorBoard does not answer at {self._options.tensorboard} ({why}): training goes on")
            return False

    def sweep(self) -> None:
        """All that is new, once. What the other side holds is what it says: whoever started anew goes on from there."""
        found = find(self._folder)
        if not found and self._notes.read().generation < 2:
            return
        after = self._notes.read().after
        if self._sock is None:
            self._connect()
        unknown = [path for path in found if path not in self._held]
        for begin in range(0, len(unknown), ASKED_AT_ONCE):
            asked = unknown[begin : begin + ASKED_AT_ONCE]
            sizes = self._ask({"type": "hold", "files": asked})["sizes"]
            self._held.update({path: int(sizes.get(path, 0)) for path in asked})
        for path, (inode, size) in found.items():
            replaced = self._inodes.setdefault(path, inode) != inode or size < self._held[path]
            if path not in self._refused and (replaced or size != self._held[path]):
                self._send(path, size, replaced)
                self._inodes[path] = inode
        if time.monotonic() - self._begun > PING_S or self._closing.is_set():
            # Also so that the other side hears from here.
            self._ask({"type": "begun", "after": [[number, *each] for number, each in after.items()]})
            self._begun = time.monotonic()

    def _send(self, path: str, size: int, replaced: bool) -> None:
        try:
            fd = os.open(f"{self._folder}/{path}", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return  # it is gone again
        try:
            at = 0 if replaced else self._held[path]
            while at < size:
                data = os.pread(fd, min(PART, size - at), at)
                if not data:
                    return  # cut while it was read: it is looked at again
                words = {"path": path, "at": at, "anew": replaced and at == 0}
                answer = self._ask(
                    {"type": "part", **words, "data": binascii.b2a_base64(data, newline=False).decode("ascii")}
                )
                if "refused" in answer:
                    self._refused.add(path)
                    self._say(f"TensorBoard's pod does not take {path}: {answer['refused']}")
                    return
                before, at = at, int(answer["sizes"][path])
                self._held[path] = at
                if at <= before:
                    raise WireError(f"{path} does not grow there")
        finally:
            os.close(fd)

    # ---- the connection

    def _connect(self) -> None:
        sock = socket.create_connection(endpoint(self._options.tensorboard), TIMEOUT_S)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sock = self._tls.wrap_socket(sock, server_hostname=BOARD_NAME)
        except BaseException:
            sock.close()
            raise
        self._decoder = Decoder()
        self._held, self._refused = {}, set()
        words = {"protocol": PROTOCOL, "run": self._options.run, "host": self._options.host}
        self._ask({"type": "hello", **words})

    def _ask(self, question: Message) -> Message:
        assert self._sock is not None
        self._sock.sendall(encode(question))
        answers: list[Message] = []
        while not answers:
            data = self._sock.recv(65536)
            if not data:
                raise OSError("it has hung up")
            answers = self._decoder.feed(data)
        if answers[0].get("trouble"):
            self._say(str(answers[0]["trouble"]))
        return answers[0]

    def _hang_up(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def _say(self, text: str) -> None:
        if text not in self._told and len(self._told) < 20:
            self._told.add(text)
            self._said.append(text)
