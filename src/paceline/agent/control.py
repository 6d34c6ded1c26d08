"""A word with the captain of a run, over the same TLS as its members."""

from __future__ import annotations

import socket
import sys

from paceline.agent.link import SERVER_NAME, context
from paceline.agent.options import endpoint
from paceline.agent.wire import Decoder, Message, WireError, encode


def ask_to_stop(captain: str, tls: str, certificate: str, reason: str, timeout: float = 5.0) -> bool:
    """True when the captain has said that it stops the run."""
    return _ask(captain, tls, certificate, {"type": "stop", "reason": reason}, timeout).get("type") == "stopping"


def _ask(captain: str, tls: str, certificate: str, message: Message, timeout: float) -> Message:
    try:
        trusted = context(tls, certificate, server=False)
        plain = socket.create_connection(endpoint(captain), timeout=timeout)
        with plain, trusted.wrap_socket(plain, server_hostname=SERVER_NAME) as sock:
            sock.sendall(encode(message))
            decoder = Decoder()
            while data := sock.recv(65536):
                for answer in decoder.feed(data):
                    return answer
    except (OSError, ValueError, WireError):
        pass
    return {}


if __name__ == "__main__":  # in the captain's own pod, where a command line cannot reach it otherwise
    address, folder, name, why = sys.argv[1:]
    sys.exit(not ask_to_stop(address, folder, name, why))
