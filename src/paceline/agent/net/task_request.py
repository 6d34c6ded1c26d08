"""Sends the captain of a run a request of the user about its tasks, over the same mutual TLS that members use."""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Iterator

from paceline.agent.net.frames import MEMBER_LIMIT, Decoder, Message, WireError, encode
from paceline.agent.net.tls import SERVER_NAME, context
from paceline.agent.options import endpoint

REFUSED = "refused"  # type of the only reply to a request that the captain does not accept, with a `reason`
UNKNOWN = "unknown"  # type of the only reply if the captain does not know this kind of request
_CONNECT_WITHIN = 5.0  # seconds


def end_type(request: Message) -> str:
    """The type of the last reply."""
    return f"{request['type']}-end"


def ask_captain(captain: str, tls: str, certificate: str, request: Message, seconds: float) -> Iterator[Message]:
    """The replies of members, as messages, then one of the type `end_type`. Without that, the captain did not complete
    them. `seconds`: how long the captain may take.

    A captain of an older version closes the connection if it does not know the request. One that has just ended does
    so, too, but then cannot be reached again."""
    closed = 0
    while True:
        has_reply = False
        try:
            for reply in _replies(captain, tls, certificate, request, seconds):
                has_reply = True
                yield reply
            return
        except _Closed:
            closed += 1
            if has_reply:
                return
        except (OSError, ValueError, WireError):
            return
        if closed == 2:
            yield {"type": UNKNOWN}
            return


class _Closed(Exception):
    """The captain has received the request, and closed the connection before its last reply."""


def _replies(captain: str, tls: str, certificate: str, request: Message, seconds: float) -> Iterator[Message]:
    deadline = time.monotonic() + _CONNECT_WITHIN + seconds + 1.0
    tls_context = context(tls, certificate, server=False)
    connection = socket.create_connection(endpoint(captain), timeout=_CONNECT_WITHIN)
    with connection, tls_context.wrap_socket(connection, server_hostname=SERVER_NAME) as sock:
        sock.sendall(encode(request))
        decoder = Decoder(MEMBER_LIMIT)
        while (remaining := deadline - time.monotonic()) > 0:
            sock.settimeout(remaining)
            try:
                data = sock.recv(65536)
            except ConnectionError:
                raise _Closed from None
            for reply in decoder.feed(data):
                yield reply
                if reply["type"] in (end_type(request), REFUSED):
                    return
            if not data:
                raise _Closed


if __name__ == "__main__":  # run in the captain's pod: the command line cannot reach it directly
    captain, tls, certificate, options = sys.argv[1:]
    wanted = json.loads(options)
    for message in ask_captain(captain, tls, certificate, wanted["request"], wanted["seconds"]):
        print(json.dumps(message), flush=True)
