"""Simulates many members of a run in one process: the real protocol over real TLS, with as little Python as possible.

Reads commands from standard input ("dial", "fail", "quit"), and prints events as JSON lines. A member decodes only the
messages that it has to answer. All members receive the same roster, and one in a hundred decodes it.
"""

import collections
import json
import os
import random
import select
import socket
import ssl
import struct
import sys
import time

from paceline.agent.net.frames import PROTOCOL, Decoder, encode
from paceline.agent.net.tls import SERVER_NAME, context
from paceline.agent.options import endpoint

PACKED = 0x80000000
DIALING = 256  # handshakes in flight
DECODES = 100  # one member in this many decodes the roster


class Member:
    __slots__ = ("attempt", "buffer", "host", "index", "open", "outbox", "sock", "task")

    def __init__(self, index: int) -> None:
        self.index = index
        self.host, self.task = f"worker-host-{index}", f"worker-{index}"
        self.sock: ssl.SSLSocket | None = None
        self.open = False
        self.buffer = bytearray()
        self.outbox = bytearray()
        self.attempt = 0


class Members:
    def __init__(self, run: str, captain: str, tls: str, first: int, count: int) -> None:
        self.run = run
        self.address = endpoint(captain)
        self.tls = context(tls, "member", server=False)
        self.members = [Member(index) for index in range(first, first + count)]
        self.by_fd: dict[int, Member] = {}
        self.poll = select.epoll()
        self.poll.register(0, select.EPOLLIN)
        self.to_dial: collections.deque[Member] = collections.deque()
        self.dialing = self.welcomed = self.started = self.ended = 0
        self.last_ended = self.end_seen = 0.0
        self.beat_every, self.next_beat, self.beats = 0.0, 0.0, collections.deque()  # type: ignore[var-annotated]
        self.lost = self.decoded = self.beats_sent = 0
        self.step = 1
        self.memory = bytearray(1 << 16)

    def say(self, event: str, **fields: float) -> None:
        print(json.dumps({"event": event, "at": time.monotonic(), **fields}), flush=True)

    def serve(self) -> None:
        self.say("ready")
        while True:
            for fd, events in self.poll.poll(self._until_beat(), 512):
                if fd == 0:
                    if not self._handle(os.read(0, 4096).decode().split()):
                        return
                elif fd in self.by_fd:
                    self._ready(self.by_fd[fd], events)
            self._beat()

    def _handle(self, commands: list[str]) -> bool:
        for command in commands:
            if command == "dial":
                self.to_dial.extend(self.members)
                self._dial()
            elif command == "fail":
                self._fail(self.members[0])
            elif command == "quit":
                return False
        return bool(commands)

    # ---- connecting

    def _dial(self) -> None:
        while self.to_dial and self.dialing < DIALING:
            member = self.to_dial.popleft()
            plain = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            plain.setblocking(False)
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            plain.connect_ex(self.address)
            self.by_fd[plain.fileno()] = member
            self.poll.register(plain.fileno(), select.EPOLLOUT)
            member.sock = plain  # type: ignore[assignment]  # until it is connected
            self.dialing += 1

    def _handshake(self, member: Member) -> None:
        sock = member.sock
        assert sock is not None
        if not isinstance(sock, ssl.SSLSocket):
            sock = member.sock = self.tls.wrap_socket(
                sock, do_handshake_on_connect=False, server_hostname=SERVER_NAME, suppress_ragged_eofs=True
            )
        try:
            sock.do_handshake()
        except ssl.SSLWantReadError:
            self.poll.modify(sock.fileno(), select.EPOLLIN)
            return
        except ssl.SSLWantWriteError:
            self.poll.modify(sock.fileno(), select.EPOLLOUT)
            return
        member.open = True
        self.poll.modify(sock.fileno(), select.EPOLLIN)
        self.dialing -= 1
        join = {
            "type": "join", "protocol": PROTOCOL, "run": self.run, "host": member.host,
            "instance": f"{member.index:016x}", "agent": 1, "replaces": True, "place": "", "generation": 0,
            "running": {}, "exits": [], "offers": self._offers(member), "held": [],
        }  # fmt: skip
        self._send(member, encode(join))
        self._dial()

    def _offers(self, member: Member) -> dict[str, str]:
        index = member.index
        return {member.task: f"10.{index >> 16}.{index >> 8 & 255}.{index & 255}:{random.randrange(20000, 30000)}"}

    # ---- sending and receiving

    def _ready(self, member: Member, events: int) -> None:
        try:
            if not member.open:
                self._handshake(member)
                return
            if member.outbox:
                self._flush(member)
            if events & ~select.EPOLLOUT:
                self._read(member)
        except (OSError, EOFError) as error:
            self.lost += 1
            self.say("lost", host=member.index, why=f"{type(error).__name__}: {error}")  # type: ignore[arg-type]
            assert member.sock is not None
            del self.by_fd[member.sock.fileno()]
            member.sock.close()
            member.open = False

    def _read(self, member: Member) -> None:
        assert member.sock is not None
        while True:
            try:
                size = member.sock.recv_into(self.memory)
            except ssl.SSLWantReadError:
                break
            if not size:
                raise EOFError("the captain has closed the connection")
            member.buffer += self.memory[:size]
        buffer, at = member.buffer, 0
        while len(buffer) - at >= 4:
            (header,) = struct.unpack_from(">I", buffer, at)
            end = at + 4 + (header & ~PACKED)
            if len(buffer) < end:
                break
            if header & PACKED:
                if member.index % DECODES == 0:
                    (message,) = Decoder().feed(bytes(buffer[at:end]))
                    self.decoded += len(message["roster"])
            elif buffer[at + 4 : at + 19] != b'{"type":"beat",':
                self._take(member, json.loads(buffer[at + 4 : end]))
            at = end
        del buffer[:at]

    def _send(self, member: Member, frame: bytes) -> None:
        member.outbox += frame
        self._flush(member)

    def _flush(self, member: Member) -> None:
        assert member.sock is not None
        try:
            sent = member.sock.send(member.outbox)
            del member.outbox[:sent]
        except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
            pass
        self.poll.modify(member.sock.fileno(), select.EPOLLIN | (select.EPOLLOUT if member.outbox else 0))

    # ---- messages

    def _take(self, member: Member, message: dict) -> None:  # type: ignore[type-arg]
        kind = message["type"]
        if kind == "welcome":
            self.welcomed += 1
            self.beat_every = message["beat"]
            self.beats.append((time.monotonic() + self.beat_every, member))
            if self.welcomed == len(self.members):
                self.say("welcomed")
        elif kind == "start":
            member.attempt = message["tasks"][member.task]
            self.started += 1
            if self.started == len(self.members):
                self.say("started", last_ended=self.last_ended, end_seen=self.end_seen, decoded=self.decoded)
                self.started = self.ended = self.decoded = 0
                self.step += 1
            fields = {"task": member.task, "attempt": member.attempt, "pid": 1000 + member.index, "warm": True}
            self._send(member, encode({"type": "started", **fields}))
        elif kind == "end":
            self.end_seen = time.monotonic()
            self._ended(member, message["tasks"])

    def _fail(self, member: Member) -> None:
        exit = {
            "task": member.task, "attempt": member.attempt, "code": None, "signal": "SIGKILL", "expected": False,
            "cause": "signal", "detail": "ended by SIGKILL", "place": "", "survivor": False, "age": 0.0,
        }  # fmt: skip
        self.say("failed")
        self._send(member, self._beat_of(member) + encode({"type": "exited", "exit": exit}))
        self._ended(member, {})

    def _ended(self, member: Member, tasks: dict[str, int]) -> None:
        fields = {"offers": self._offers(member), "states": {}, "stacks": {}}
        self._send(member, self._beat_of(member) + encode({"type": "ended", "tasks": tasks, **fields}))
        self.last_ended = time.monotonic()

    def _beat_of(self, member: Member) -> bytes:
        self.beats_sent += 1
        head = f'{{"type":"beat","n":{self.beats_sent},"tasks":{{"{member.task}":[{self.step},0.02,0.5,{{}}]}},'
        payload = (head + '"memory":0.41}').encode()
        return struct.pack(">I", len(payload)) + payload

    def _until_beat(self) -> float:
        return max(0.0, self.beats[0][0] - time.monotonic()) if self.beats else -1

    def _beat(self) -> None:
        now = time.monotonic()
        while self.beats and self.beats[0][0] <= now:
            due, member = self.beats.popleft()
            if member.open:
                try:
                    self._send(member, self._beat_of(member))
                except OSError:
                    continue  # _read reports it
                self.beats.append((due + self.beat_every, member))


if __name__ == "__main__":
    run, captain, tls, first, count = sys.argv[1:]
    Members(run, captain, tls, int(first), int(count)).serve()
