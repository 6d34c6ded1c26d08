"""The protocol between processes and a cluster: one JSON object per line; an open connection keeps the cluster up."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

Message = dict[str, Any]


class Line:
    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._reader = connection.makefile("rb")

    def send(self, message: Message) -> None:
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> Message | None:
        """The next message; None if the other side has disconnected."""
        try:
            line = self._reader.readline()
        except ConnectionError:
            return None
        return dict(json.loads(line)) if line.endswith(b"\n") else None

    def close(self) -> None:
        self._reader.close()
        self._socket.close()


def dial(path: Path) -> Line:
    connection = socket.socket(socket.AF_UNIX)
    with _short_path(path) as address:
        connection.connect(address)
    return Line(connection)


def listen(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    with _short_path(path) as address:
        listener.bind(address)
    listener.listen()
    return listener


class _short_path:
    """A short alias for a path: the address of a socket is limited to 108 characters."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> str:
        self._folder = os.open(self._path.parent, os.O_PATH)
        return f"/proc/self/fd/{self._folder}/{self._path.name}"

    def __exit__(self, *_: object) -> None:
        os.close(self._folder)
