"""Hostile peers and random data for the listeners of agents. The same seed gives the same data.

`PACELINE_FUZZ_SECONDS=3600 PACELINE_FUZZ_SEED=7 python -m pytest tests/local/test_fuzz.py -m "not long"` runs each test
for an hour.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

SEED = int(os.environ.get("PACELINE_FUZZ_SEED", "1"))
SECONDS = os.environ.get("PACELINE_FUZZ_SECONDS")
SILENT = 60  # connections that an attacker keeps open without a word
ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**53, 2**64, 10**400, 1.5, -1e308, float("nan"), float("inf"), "", "x", "\0",
    "\ud800", "../..", "/etc/passwd", "x" * 70_000, [], [[]], {}, {"": ""}, [1, 2, 3], [None],
    {"type": "join"}, "step-1-g1",
)  # fmt: skip


def seconds(usual: float) -> float:
    return usual if SECONDS is None else float(SECONDS)


def payload(rng: random.Random, examples: Sequence[dict[str, Any]]) -> bytes:
    """JSON or nearly: a changed example, or something else."""
    choice = rng.randrange(10)
    if choice == 0:
        return rng.randbytes(rng.randrange(2000))
    if choice == 1:
        depth = rng.choice((100, 900, 990, 1000, 5000, 20_000))
        return b'{"type":"beat","n":' + b"[" * depth + b"]" * depth + b"}"
    if choice == 2:
        return json.dumps(rng.choice(ODD_VALUES)).encode()
    message = dict(rng.choice(examples))
    for _ in range(rng.randrange(1, 4)):
        name = rng.choice([*message, "x"])
        if rng.random() < 0.2:
            message.pop(name, None)
        else:
            message[name] = rng.choice(ODD_VALUES)
    data = bytearray(json.dumps(message).encode())
    if choice == 3:
        for _ in range(rng.randrange(1, 5)):
            data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


def frame(rng: random.Random, data: bytes) -> bytes:
    """With its length, which is sometimes wrong."""
    length = len(data) if rng.random() < 0.85 else rng.choice((0, 1, len(data) + 5, 2**31, 2**32 - 1, 9 << 20))
    return struct.pack(">I", length) + data


def reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


class Attacker:
    """Attacks a port from a thread of its own, until `stop`."""

    def __init__(
        self,
        seed: int,
        port: int,
        tls: ssl.SSLContext,
        server_name: str,
        first: Sequence[dict[str, Any]],
        examples: Sequence[dict[str, Any]],
    ) -> None:
        """`tls`: with a certificate of the run. `first`: valid first messages, if there are any, of a connection."""
        self._rng = random.Random(seed)
        self._port, self._tls, self._server_name = port, tls, server_name
        self._first, self._examples = first, examples
        self._silent: list[socket.socket] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.count = 0  # connections
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()
        for sock in self._silent:
            sock.close()

    def _run(self) -> None:
        attacks: list[Callable[[], None]] = [
            self._reset, self._reset, self._garbage, self._stay_silent, self._half_a_handshake, self._messages,
            self._messages, self._messages,
        ]  # fmt: skip
        while not self._stopping.is_set():
            self.count += 1
            with contextlib.suppress(OSError):
                self._rng.choice(attacks)()

    def _dial(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self._port), 5)

    def _reset(self) -> None:
        sock = self._dial()
        if self._rng.random() < 0.5:
            sock.sendall(self._rng.randbytes(100))
        reset(sock)

    def _garbage(self) -> None:
        with self._dial() as sock:
            sock.sendall(self._rng.randbytes(self._rng.choice((1, 5, 1000, 100_000))))

    def _stay_silent(self) -> None:
        self._silent.append(self._dial())
        if len(self._silent) > SILENT:
            self._silent.pop(self._rng.randrange(SILENT)).close()

    def _half_a_handshake(self) -> None:
        hello = ssl.MemoryBIO()
        client = self._tls.wrap_bio(ssl.MemoryBIO(), hello, server_hostname=self._server_name)
        with contextlib.suppress(ssl.SSLWantReadError):
            client.do_handshake()
        data = bytearray(hello.read())
        data = data[: self._rng.randrange(1, len(data))]
        if self._rng.random() < 0.5:
            data[self._rng.randrange(len(data))] ^= 1 << self._rng.randrange(8)
        sock = self._dial()
        sock.sendall(data)
        reset(sock) if self._rng.random() < 0.5 else sock.close()

    def _messages(self) -> None:
        sock = self._dial()
        try:
            with self._tls.wrap_socket(sock, server_hostname=self._server_name) as link:
                link.settimeout(5)
                if self._first and self._rng.random() < 0.7:
                    data = json.dumps(self._rng.choice(self._first)).encode()
                    link.sendall(struct.pack(">I", len(data)) + data)
                for _ in range(self._rng.randrange(1, 20)):
                    link.sendall(frame(self._rng, payload(self._rng, self._examples)))
                if self._rng.random() < 0.3:
                    reset(link)
        finally:
            sock.close()


class HttpAttacker(Attacker):
    """Attacks a server of HTTP."""

    def _request(self) -> bytes:
        return self._rng.choice(
            (
                b"GET /metrics HTTP/1.1\r\nAccept: application/openmetrics-text\r\n\r\n",
                b"GET /" + b"a/" * self._rng.choice((1, 100, 10_000)) + b" HTTP/1.1\r\n\r\n",
                b"POST /metrics HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n" + bytes(100_000),
                b"HEAD /metrics HTTP/1.0\n\n" * 50,
            )
        )

    def _messages(self) -> None:
        data = bytearray(self._request())
        for _ in range(self._rng.choice((0, 0, 1, 5))):
            data[self._rng.randrange(len(data))] = self._rng.randrange(256)
        sock = self._dial()
        try:
            for start in range(0, len(data), step := self._rng.choice((1000, 100_000))):
                sock.sendall(data[start : start + step])
            if self._rng.random() < 0.7:
                sock.recv(self._rng.choice((1, 100_000)))
            if self._rng.random() < 0.3:
                reset(sock)
        finally:
            sock.close()


class PageAttacker(HttpAttacker):
    """Attacks the server of `paceline page`, with a session or without."""

    session = ""  # the Cookie header
    run = ""

    def _dial(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self._port), 0.5)  # streams do not end

    def _request(self) -> bytes:
        rng = self._rng
        names = (
            "",
            "stream",
            "tasks",
            "events",
            "timeline",
            "series",
            "series.csv",
            "hosts",
            "restarts",
            "logs",
            "job",
        )
        names += ("logs/stream", "logs/tasks", "plan", "goodput", "report", "snapshots/step-1-g1/verify", "stacks")
        key = rng.choice((self.run, self.run, "x", "..", "%2e%2e", "a" * 300, "%ff", f"{self.run}@0123456789"))
        path = rng.choice((f"/api/runs/{key}/{rng.choice(names)}".rstrip("/"), "/", "/api/runs/stream", "/app.js"))
        parameters = "&".join(f"{self._parameter()}={self._value()}" for _ in range(rng.randrange(4)))
        method = rng.choice(("GET", "GET", "GET", "POST", "HEAD", "PUT"))
        body = payload(rng, ({"tasks": ["worker-0"]}, {"context": "x"})) if method in ("POST", "PUT") else b""
        host = rng.choice((f"127.0.0.1:{self._port}",) * 4 + ("evil.example", ""))
        head = f"{method} {path}?{parameters} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n"
        head += f"Content-Type: application/json\r\nOrigin: http://127.0.0.1:{self._port}\r\n"
        cookie = f"Cookie: {self.session}\r\n" if self.session and rng.random() < 0.8 else ""
        return (head + cookie + "\r\n").encode("utf-8", "replace") + body

    def _parameter(self) -> str:
        names = (
            "task",
            "position",
            "limit",
            "direction",
            "find",
            "grep",
            "at",
            "name",
            "from",
            "to",
            "points",
            "first",
        )
        return self._rng.choice((*names, "tasks", "resolution", "after", "kind", "newest", "series", "token", "full"))

    def _value(self) -> str:
        values = (
            "worker-0",
            "0",
            "1",
            "-1",
            "1e308",
            "nan",
            "99999999999999999999",
            "",
            "*",
            "%00",
            "..%2f",
            "(",
            "a" * 2000,
        )
        return self._rng.choice((*values, "forward", "around", "2026-11-15T04:30:00.000Z", "loss", "restart", "%ff%fe"))


def attack(limit: float, attackers: Sequence[Attacker], work: Callable[[], None]) -> None:
    """Does the usual work, again and again, while the attackers do theirs."""
    until = time.monotonic() + limit
    try:
        while time.monotonic() < until:
            work()
    finally:
        for attacker in attackers:
            attacker.stop()
    work()  # also afterwards
    assert all(attacker.count for attacker in attackers)
