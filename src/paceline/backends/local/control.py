"""A word with the captain of a run, over the same TLS as its members."""

from __future__ import annotations

import json
import socket
from pathlib import Path

from paceline.agent.link import SERVER_NAME, context
from paceline.agent.options import endpoint
from paceline.agent.wire import Decoder, Message, WireError, encode


def ask_to_stop(folder: Path, reason: str, timeout: float = 5.0) -> bool:
    """True when the captain has said that it stops the run."""
    return _ask(folder, {"type": "stop", "reason": reason}, timeout).get("type") == "stopping"


def _ask(folder: Path, message: Message, timeout: float) -> Message:
    try:
        captain = json.loads((folder / "run.json").read_text())["captain"]
        tls = context(str(folder / "tls"), "member", server=False)
        plain = socket.create_connection(endpoint(captain), timeout=timeout)
        with plain, tls.wrap_socket(plain, server_hostname=SERVER_NAME) as sock:
            sock.sendall(encode(message))
            decoder = Decoder()
            while data := sock.recv(65536):
                for answer in decoder.feed(data):
                    return answer
    except (OSError, ValueError, KeyError, WireError):
        pass
    return {}
