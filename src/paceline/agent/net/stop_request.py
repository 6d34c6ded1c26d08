"""Asks the captain of a run to stop it, over the same mutual TLS that members use."""

from __future__ import annotations

import socket
import sys

from paceline.agent.net.frames import Decoder, Message, WireError, encode
from paceline.agent.net.tls import SERVER_NAME, context
from paceline.agent.options import endpoint


def ask_to_stop(
    captain: str, tls: str, certificate: str, reason: str, timeout: float = 5.0, interrupt: bool = False
) -> bool:
    """True if the captain confirms that it stops the run. `interrupt`: tasks receive SIGINT before SIGTERM."""
    message = {"type": "stop", "reason": reason, **({"interrupt": True} if interrupt else {})}
    reply = _request(captain, tls, certificate, message, timeout)
    return reply.get("type") == "stopping"


def _request(captain: str, tls: str, certificate: str, message: Message, timeout: float) -> Message:
    try:
        tls_context = context(tls, certificate, server=False)
        connection = socket.create_connection(endpoint(captain), timeout=timeout)
        with connection, tls_context.wrap_socket(connection, server_hostname=SERVER_NAME) as sock:
            sock.sendall(encode(message))
            decoder = Decoder()
            while data := sock.recv(65536):
                for reply in decoder.feed(data):
                    return reply
    except (OSError, ValueError, WireError):
        pass
    return {}


if __name__ == "__main__":  # run in the captain's pod when the command line cannot reach it directly
    captain, tls, certificate, reason = sys.argv[1:]
    sys.exit(not ask_to_stop(captain, tls, certificate, reason))
