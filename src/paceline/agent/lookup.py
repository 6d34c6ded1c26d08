"""Looks up a name without holding up the agent: a name server that does not answer takes many seconds to say so."""

from __future__ import annotations

import ipaddress
import selectors
import socket
import threading
from typing import Any, Callable, Optional

from paceline.agent.loop import Loop

ALWAYS = "kubernetes.default.svc"  # a name that every cluster has

Found = Optional[tuple[int, Any]]  # address family and socket address


class Lookup:
    """One at a time; `found` is called in the loop, with None where the name has no address or nobody answers."""

    def __init__(self, loop: Loop, found: Callable[[Found], None]) -> None:
        self._loop = loop
        self._found = found
        self._under_way = False
        self._result: Found = None
        self.unanswered = False  # the last one: no name server has answered
        self.addresses: frozenset[str] = frozenset()  # of the last one, all that the name has
        self._told, self._tell = socket.socketpair()
        self._told.setblocking(False)
        loop.watch(self._told, selectors.EVENT_READ, self._done)

    def begin(self, host: str, port: int) -> None:
        if self._under_way:
            return  # its answer is for this call too
        try:
            family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
        except ValueError:
            self._under_way = True
            threading.Thread(target=self._ask, args=(host, port), daemon=True).start()
        else:
            self._found((family, (host, port)))

    def _ask(self, host: str, port: int) -> None:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            self.addresses = frozenset(str(address[0]) for *_, address in found)
            self._result, self.unanswered = (found[0][0], found[0][4]), False
        except OSError as error:
            self._result, self.addresses = None, frozenset()
            self._tell.send(b".")
            self.unanswered = error.errno == socket.EAI_AGAIN and _nobody_answers()
        else:
            self._tell.send(b".")

    def _done(self) -> None:
        self._told.recv(16)
        self._under_way = False
        self._found(self._result)


def _nobody_answers() -> bool:
    """Names that a cluster does not know are asked of servers outside, and these may be out of reach, which is no
    trouble of the cluster's own."""
    try:
        socket.getaddrinfo(ALWAYS, None)
    except OSError as error:
        return error.errno == socket.EAI_AGAIN
    return False
