"""How processes talk to a cluster: one JSON object a line; as long as a connection is open, the cluster is wanted."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

Message = dict[str, Any]


class Line:
    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._reader = connected.makefile("rb")

    def send(self, message: Message) -> None:
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> Message | None:
        """None when the other side is gone."""
        try:
            line = self._reader.readline()
        except ConnectionError:
            return None
        return dict(json.loads(line)) if line.endswith(b"\n") else None

    def close(self) -> None:
        self._reader.close()
        self._socket.close()


def dial(path: Path) -> Line:
    connected = socket.socket(socket.AF_UNIX)
    with _near(path) as near:
        connected.connect(near)
    return Line(connected)


def listen(path: Path) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX)
    with _near(path) as near:
        listening.bind(near)
    listening.listen()
    return listening


class _near:
    """A short name for a path: a socket's address has room for 108 characters only."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> str:
        self._folder = os.open(self._path.parent, os.O_PATH)
        return f"/proc/self/fd/{self._folder}/{self._path.name}"

    def __exit__(self, *_: object) -> None:
        os.close(self._folder)
