"""A member's line to the captain: dialled by name, and again whenever it ends. The lease comes by it."""

from __future__ import annotations

import errno
import os
import selectors
import socket
from typing import Callable

from paceline.agent import events as ev
from paceline.agent import messages
from paceline.agent.journal import Echo
from paceline.agent.link import Link, LinkClosed, context
from paceline.agent.lookup import Found, Lookup
from paceline.agent.loop import Loop, Timer
from paceline.agent.options import Options, endpoint
from paceline.agent.wire import Message, WireError

OWN_SHARE = 0.9  # of a lease: tasks are gone before the captain counts on it
DIAL_LIMIT = 10.0
UNANSWERED = 3.0  # seconds until it is worth a word that no name server answers


class Line:
    def __init__(
        self,
        options: Options,
        loop: Loop,
        echo: Echo | None,
        join: Callable[[], ev.Joined],
        beat: Callable[[], Message],
        receive: Callable[[Message], None],
    ) -> None:
        """`join` and `beat`: what is said then. `receive` gets what is not about the line itself."""
        self._options, self._loop, self._echo = options, loop, echo
        self._join, self._words, self._receive = join, beat, receive
        self._tls = context(options.tls, "member", server=False)
        self._link: Link | None = None
        self._connecting: socket.socket | None = None
        self._lookup = Lookup(loop, self._dial_at)
        self._retry = 0.05
        self._dial_timer: Timer | None = None
        self.joined = False
        self._asked_in = False  # its join is sent
        self._since_join: list[Message] = []
        self._said_early: list[Message] = []
        self._sent_at: dict[int, float] = {}
        self._beats = 0
        self.beat_every = 1.0
        self.lease = options.lease
        self._lease_from = loop.now()
        self._alone_since = loop.now()
        self._failure = ""  # of the last attempt to reach the captain
        self._said_unanswered = False
        self._hung_up = False

    # ---- dialling

    def dial(self) -> None:
        self._disconnect()
        self._lookup.begin(*endpoint(self._options.captain))

    def _dial_at(self, found: Found) -> None:
        if self._hung_up:
            return  # while the address was being looked up
        self._disconnect()
        if found is None:
            self._dial_later("the name is not found")
            return
        family, address = found
        sock = None
        try:
            sock = socket.socket(family, socket.SOCK_STREAM)
            sock.setblocking(False)
            number = sock.connect_ex(address)
            if number not in (0, errno.EINPROGRESS):
                raise OSError(number, os.strerror(number))
        except OSError as error:
            if sock is not None:
                sock.close()
            self._dial_later(error.strerror or str(error))
            return
        self._connecting = sock
        self._loop.watch(sock, selectors.EVENT_WRITE, self._connected)
        self._dial_timer = self._loop.after(DIAL_LIMIT, self._dial_again)

    def _dial_again(self) -> None:
        self._failure = f"no answer for {DIAL_LIMIT:g} s"
        self.dial()

    def _connected(self) -> None:
        sock, self._connecting = self._connecting, None
        assert sock is not None
        self._loop.unwatch(sock)
        number = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number:
            sock.close()
            self._dial_later(os.strerror(number))
            return
        try:
            self._link = Link(sock, self._tls, server=False)
            self._sent_at = {0: self._loop.now()}
            self._link.send(messages.join(self._options.run, self._join()))
            self._asked_in = True
            self._rewatch()
        except (OSError, LinkClosed) as error:
            sock.close()
            self._dial_later(str(error))

    def _dial_later(self, failure: str) -> None:
        self._failure = failure
        self._disconnect()
        self._dial_timer = self._loop.after(self._retry, self.dial)
        self._retry = min(1.0, self._retry * 1.5)

    def hang_up(self) -> None:
        """For good: an address that is still being looked up is not dialled either."""
        self._hung_up = True
        self._disconnect()

    def _disconnect(self) -> None:
        if self._dial_timer is not None:
            self._dial_timer.cancel()
            self._dial_timer = None
        if self._connecting is not None:
            self._loop.unwatch(self._connecting)
            self._connecting.close()
            self._connecting = None
        if self._link is not None:
            self._loop.unwatch(self._link)
            self._link.close()
            self._link = None
        self._asked_in, self._since_join = False, []
        if self.joined:
            self.joined = False
            self._alone_since = self._loop.now()

    # ---- what is said

    def send(self, message: Message) -> None:
        """What is said while the captain is away is lost on purpose: joining again tells it all. What is said between
        that and its welcome waits."""
        if self._link is None:
            return
        if not self.joined:
            if self._asked_in and message["type"] != "beat":
                self._since_join.append(message)
            return
        try:
            self._link.send(message)
            self._rewatch()
        except LinkClosed as error:
            self._dial_later(str(error))

    def said(self, text: str, warning: bool = False) -> None:
        message: Message = {"type": "said", "text": text[:2000], "warning": warning}
        if self.joined:
            self.send(message)
        elif len(self._said_early) < 100:
            self._said_early.append(message)

    def beat(self) -> None:
        self._beats += 1
        self._sent_at[self._beats] = self._loop.now()
        for old in [n for n in self._sent_at if n < self._beats - 64]:
            del self._sent_at[old]
        self.send({"type": "beat", "n": self._beats, **self._words()})

    # ---- what is heard

    def _rewatch(self) -> None:
        if self._link is not None:
            self._loop.watch(self._link, self._link.interest(), self._ready)

    def _ready(self) -> None:
        assert self._link is not None
        try:
            for message in self._link.ready():
                self._hear(message)
            self._rewatch()
        except (LinkClosed, WireError) as error:
            self._dial_later(str(error))
        except (KeyError, ValueError, TypeError, AttributeError, OverflowError) as error:
            self.said(f"{self._options.host} did not understand the captain: {error!r}", True)
            self._dial_later(f"not understood: {error!r}")

    def _hear(self, message: Message) -> None:
        if message["type"] == "beat":
            sent = self._sent_at.pop(int(message.get("n") or 0), None)
            self._lease_from = max(self._lease_from, sent or 0.0)
        elif message["type"] == "welcome":
            self._welcome(message)
        elif message["type"] == "wait":
            self._alone_since = self._loop.now()  # another instance of this host is still there
        else:
            self._receive(message)

    def _welcome(self, message: Message) -> None:
        lease, beat_every = float(message["lease"]), float(message["beat"])
        self.joined = True
        self._said_unanswered = False
        self._retry = 0.05
        if self._dial_timer is not None:
            self._dial_timer.cancel()
            self._dial_timer = None
        self.lease, self.beat_every = lease, beat_every
        self._lease_from = self._sent_at.pop(0, self._loop.now())
        if self._loop.now() - self._lease_from > self.beat_every:
            self.beat()  # it has waited for its welcome
        waiting, self._since_join = [*self._since_join, *self._said_early], []
        self._said_early = []
        for said in waiting:
            self.send(said)

    # ---- without a word

    def left(self) -> float:
        """Seconds of the lease that tasks may still run."""
        return self._lease_from + OWN_SHARE * self.lease - self._loop.now()

    def alone(self, limit: float) -> str:
        """Why to leave, once nobody has answered for that long. Until then nobody hears this member but whoever reads
        its output."""
        if self.joined or self._hung_up:
            return ""
        seconds = self._loop.now() - self._alone_since
        unanswered = self._unanswered() if seconds > UNANSWERED else ""
        if unanswered and not self._said_unanswered:
            self._said_unanswered = True
            if self._echo is not None:
                self._echo.write(f"paceline: {unanswered}\n".encode())
        if seconds <= limit:
            return ""
        because = unanswered or self._failed()
        return f"left, without a captain for {limit:g} s (limits.start)" + (f": {because}" if because else "")

    def _unanswered(self) -> str:
        if not self._lookup.unanswered:
            return ""
        name = endpoint(self._options.captain)[0]
        return f"no name server answers, so the captain is not found ({name}): is the DNS up?"

    def _failed(self) -> str:
        """What is known of why the captain is not reached, where a name server has answered."""
        if self._lookup.waiting() > UNANSWERED:
            return f"{endpoint(self._options.captain)[0]} is still being looked up"
        return f"{self._options.captain}: {self._failure}" if self._failure else ""
