"""Asks the captain of a run for the stacks of its tasks, over the same mutual TLS that members use."""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Iterator, Sequence

from paceline.agent.net.frames import MEMBER_LIMIT, Decoder, Message, WireError, encode
from paceline.agent.net.tls import SERVER_NAME, context
from paceline.agent.options import endpoint
from paceline.agent.stacks import ANSWER_WITHIN

END = "stacks-end"  # type of the last message
_CONNECT_WITHIN = 5.0  # seconds


def ask_for_stacks(captain: str, tls: str, certificate: str, tasks: Sequence[str], seconds: float) -> Iterator[Message]:
    """The replies of members, as messages, then one of the type END. Without that, the captain did not complete them.

    `tasks`: none means all. `seconds`: take samples for that time; 0: one.
    """
    deadline = time.monotonic() + _CONNECT_WITHIN + seconds + ANSWER_WITHIN + 1.0
    try:
        tls_context = context(tls, certificate, server=False)
        connection = socket.create_connection(endpoint(captain), timeout=_CONNECT_WITHIN)
        with connection, tls_context.wrap_socket(connection, server_hostname=SERVER_NAME) as sock:
            sock.sendall(encode({"type": "stacks", "tasks": list(tasks), "seconds": seconds}))
            decoder = Decoder(MEMBER_LIMIT)
            while (remaining := deadline - time.monotonic()) > 0:
                sock.settimeout(remaining)
                data = sock.recv(65536)
                for reply in decoder.feed(data):
                    yield reply
                    if reply["type"] == END:
                        return
                if not data:
                    return
    except (OSError, ValueError, WireError):
        return


if __name__ == "__main__":  # run in the captain's pod: the command line cannot reach it directly
    captain, tls, certificate, options = sys.argv[1:]
    wanted = json.loads(options)
    for message in ask_for_stacks(captain, tls, certificate, wanted["tasks"], wanted["seconds"]):
        print(json.dumps(message), flush=True)
