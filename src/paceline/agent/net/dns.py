"""Name lookup that does not block the agent: without an answer from a name server it takes many seconds."""

from __future__ import annotations

import ipaddress
import selectors
import socket
import threading
from typing import Any, Callable, Optional

from paceline.agent.net.loop import Loop

ALWAYS = "kubernetes.default.svc"  # a name that exists in every cluster

Address = Optional[tuple[int, Any]]  # address family and socket address


class NameLookup:
    """One lookup at a time. `on_result` is called in the loop, with None if the name has no address or no name server
    answers."""

    def __init__(self, loop: Loop, on_result: Callable[[Address], None]) -> None:
        self._loop = loop
        self._on_result = on_result
        self._in_progress = False
        self._result: Address = None
        self._begun = 0.0
        self._answers = 0  # how many lookups were answered, with or without an address
        self._lock = threading.Lock()  # for _answers and unanswered
        self.unanswered = False  # whether no name server answered the last lookup
        self.addresses: frozenset[str] = frozenset()  # all addresses of the name, from the last lookup
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        loop.watch(self._wake_read, selectors.EVENT_READ, self._finish)

    def begin(self, host: str, port: int) -> None:
        if self._in_progress:
            return  # its result answers this call, too
        try:
            family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
        except ValueError:
            self._in_progress, self._begun = True, self._loop.now()
            try:
                threading.Thread(target=self._look_up, args=(host, port), daemon=True).start()
            except RuntimeError:  # the machine currently allows no more threads
                self._in_progress = False
                self._on_result(None)
        else:
            self._on_result((family, (host, port)))

    def waiting(self) -> float:
        """For how many seconds the current lookup has had no answer; 0 if there is none."""
        return self._loop.now() - self._begun if self._in_progress else 0.0

    def _look_up(self, host: str, port: int) -> None:
        answers_before = self._answers
        try:
            entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            self._result = entries[0][0], entries[0][4]
            self.addresses = frozenset(str(address[0]) for *_, address in entries)
            answered = True
        except (OSError, ValueError) as error:  # ValueError: not a valid name
            self._result, self.addresses = None, frozenset()
            answered = getattr(error, "errno", None) != socket.EAI_AGAIN
        if answered:
            with self._lock:
                self._answers += 1
                self.unanswered = False
        self._wake_write.send(b".")
        if not answered:
            no_server = _no_server_answers()  # may take as long again; another lookup may be answered in the meantime
            with self._lock:
                if self._answers == answers_before:
                    self.unanswered = no_server

    def _finish(self) -> None:
        self._wake_read.recv(16)
        self._in_progress = False
        self._on_result(self._result)


def _no_server_answers() -> bool:
    """Whether the cluster's own name servers are down. A cluster forwards unknown names to external servers, which may
    be unreachable even if its own are fine."""
    try:
        socket.getaddrinfo(ALWAYS, None)
    except OSError as error:
        return error.errno == socket.EAI_AGAIN
    return False
