"""A receiver of notifications on loopback: it answers as it is told, and records what it accepts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from support.loopback_server import LoopbackServer, SilentHandler


class Receiver(LoopbackServer):
    def __init__(self) -> None:
        self.answers: list[int | tuple[int, Mapping[str, str]]] = []  # to the next requests; then 200
        self.requests: list[str] = []  # method and path of all requests
        self.accepted: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []  # of those that were accepted
        receiver = self

        class Handler(SilentHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.requests.append(f"{self.command} {self.path}")
                answer = receiver.answers.pop(0) if receiver.answers else 200
                status, headers = (answer, {}) if isinstance(answer, int) else answer
                if status == 200:
                    receiver.headers.append(dict(self.headers))
                    receiver.accepted.append(json.loads(body))
                self.send_response(status)
                for name, value in {"Content-Length": "0", **headers}.items():
                    self.send_header(name, value)
                self.end_headers()

            def do_GET(self) -> None:
                receiver.requests.append(f"{self.command} {self.path}")
                self.send_error(404)

        super().__init__(Handler)
        self.url += "/hooks/secret-part-of-the-address"


@contextmanager
def receiving() -> Iterator[Receiver]:
    receiver = Receiver()
    try:
        yield receiver
    finally:
        receiver.close()
