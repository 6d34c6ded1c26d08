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
        self._begun = 0.0
        self._answers = 0  # so many lookups were answered, with an address or that there is none
        self._lock = threading.Lock()  # of the count and of what follows from it
        self.unanswered = False  # no name server has answered since the last answer
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
            self._under_way, self._begun = True, self._loop.now()
            try:
                threading.Thread(target=self._ask, args=(host, port), daemon=True).start()
            except RuntimeError:  # the machine allows no more threads at this moment
                self._under_way = False
                self._found(None)
        else:
            self._found((family, (host, port)))

    def waiting(self) -> float:
        """For how many seconds the lookup under way has had no answer."""
        return self._loop.now() - self._begun if self._under_way else 0.0

    def _ask(self, host: str, port: int) -> None:
        before = self._answers
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            self._result = found[0][0], found[0][4]
            self.addresses = frozenset(str(address[0]) for *_, address in found)
            answered = True
        except (OSError, ValueError) as error:  # ValueError: it cannot be a name
            self._result, self.addresses = None, frozenset()
            answered = getattr(error, "errno", None) != socket.EAI_AGAIN
        if answered:
            with self._lock:
                self._answers += 1
                self.unanswered = False
        self._tell.send(b".")
        if not answered:
            nobody = _nobody_answers()  # this may take as long again, and another lookup may be answered meanwhile
            with self._lock:
                if self._answers == before:
                    self.unanswered = nobody

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
