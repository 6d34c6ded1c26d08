"""A member's connection to the captain: dials it by name, reconnects when it is lost, and keeps track of the lease."""

from __future__ import annotations

import errno
import os
import selectors
import socket
from typing import Callable

from paceline.agent.captain import events as ev
from paceline.agent.net import messages
from paceline.agent.net.dns import Address, NameLookup
from paceline.agent.net.frames import Message, WireError
from paceline.agent.net.loop import Loop, Timer
from paceline.agent.net.tls import LinkClosed, TlsLink, context
from paceline.agent.options import NO_CAPTAIN, Options, endpoint
from paceline.agent.redaction import Redactor
from paceline.agent.run_files import Echo

OWN_SHARE = 0.9  # fraction of a lease: tasks end before the captain assumes that they have
DIAL_LIMIT = 10.0
NOTICE_LIMIT = 2000  # characters
MOST_NOTICES = 100  # queued while there is no captain
UNANSWERED = 3.0  # seconds until an unanswered name lookup is reported


class InvalidMessage(Exception):
    """The captain sent an invalid message; the text says what is wrong with it."""


class CaptainConnection:
    def __init__(
        self,
        options: Options,
        loop: Loop,
        echo: Echo | None,
        join: Callable[[], ev.MemberJoined],
        beat: Callable[[int], ev.Heartbeat],
        receive: Callable[[messages.CaptainMessage], None],
    ) -> None:
        """`join` and `beat` create the messages to send; heartbeats are numbered. `receive` is called with all messages
        except those about the connection itself."""
        self._options, self._loop, self._echo = options, loop, echo
        self._join, self._heartbeat, self._receive = join, beat, receive
        self._redact = Redactor(os.environ)
        self._tls = context(options.tls, "member", server=False)
        self._link: TlsLink | None = None
        self._connecting: socket.socket | None = None
        self._lookup = NameLookup(loop, self._dial_at)
        self._retry = 0.05
        self._dial_timer: Timer | None = None
        self.joined = False
        self._join_sent = False
        self._since_join: list[messages.MemberMessage] = []  # events that wait for the captain's welcome
        self._early_notices: list[ev.Notice] = []
        self._sent_at: dict[int, float] = {}
        self._beats = 0
        self.beat_every = 1.0
        self.lease = options.lease
        self._lease_from = loop.now()
        self._alone_since = loop.now()
        self._failure = ""  # why the last attempt to reach the captain failed
        self._unanswered_reported = False
        self._hung_up = False

    # ---- dialing

    def dial(self) -> None:
        self._disconnect()
        self._lookup.begin(*endpoint(self._options.captain))

    def _dial_at(self, result: Address) -> None:
        if self._hung_up:
            return  # during the name lookup
        self._disconnect()
        if result is None:
            self._dial_later("the name was not found")
            return
        family, address = result
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
        self._failure = f"no response for {DIAL_LIMIT:g} s"
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
            self._link = TlsLink(sock, self._tls, server=False)
            self._sent_at = {0: self._loop.now()}
            self._link.send(messages.join_message(self._options.run, self._join()))
            self._join_sent = True
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
        """Disconnects permanently; a name lookup in progress is ignored."""
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
        self._join_sent, self._since_join = False, []
        if self.joined:
            self.joined = False
            self._alone_since = self._loop.now()

    # ---- sending

    def send(self, event: messages.MemberMessage) -> None:
        """Drops events while there is no connection: the join message contains the whole state. Queues events between
        the join message and the captain's welcome."""
        if self._link is None:
            return
        if not self.joined:
            if self._join_sent and not isinstance(event, ev.Heartbeat):
                self._since_join.append(event)
            return
        try:
            self._link.send(messages.member_message(event))
            self._rewatch()
        except LinkClosed as error:
            self._dial_later(str(error))

    def notify(self, text: str, warning: bool = False) -> None:
        """Sends a text for the user; keeps it until the captain can be reached."""
        notice = ev.Notice(self._options.host, self._redact(text)[:NOTICE_LIMIT], warning)
        if self.joined:
            self.send(notice)
        elif len(self._early_notices) < MOST_NOTICES:
            self._early_notices.append(notice)

    def beat(self) -> None:
        self._beats += 1
        self._sent_at[self._beats] = self._loop.now()
        for old in [n for n in self._sent_at if n < self._beats - 64]:
            del self._sent_at[old]
        self.send(self._heartbeat(self._beats))

    # ---- receiving

    def _rewatch(self) -> None:
        if self._link is not None:
            self._loop.watch(self._link, self._link.interest(), self._ready)

    def _ready(self) -> None:
        assert self._link is not None
        try:
            for data in self._link.ready():
                self._handle(data)
            self._rewatch()
        except InvalidMessage as error:
            self.notify(f"{self._options.host} received an invalid message from the captain: {error}", True)
            self._dial_later(f"invalid message: {error}")
        except (LinkClosed, WireError) as error:
            self._dial_later(str(error))

    def _handle(self, data: Message) -> None:
        try:
            message = messages.read_captain(data, self._options.host)
        except WireError as error:
            raise InvalidMessage(f"{data['type']}: {error}") from None
        if isinstance(message, messages.HeartbeatReply):
            sent = self._sent_at.pop(message.n, None)
            self._lease_from = max(self._lease_from, sent or 0.0)
        elif isinstance(message, messages.Welcome):
            self._on_welcome(message)
        elif isinstance(message, messages.Wait):
            self._alone_since = self._loop.now()
        elif message is not None:
            self._receive(message)

    def _on_welcome(self, welcome: messages.Welcome) -> None:
        self.joined = True
        self._unanswered_reported = False
        self._retry = 0.05
        if self._dial_timer is not None:
            self._dial_timer.cancel()
            self._dial_timer = None
        self.lease, self.beat_every = welcome.lease, welcome.beat
        self._lease_from = self._sent_at.pop(0, self._loop.now())
        if self._loop.now() - self._lease_from > self.beat_every:
            self.beat()  # the welcome came late: renew the lease immediately
        queued, self._since_join = [*self._since_join, *self._early_notices], []
        self._early_notices = []
        for event in queued:
            self.send(event)

    # ---- without the captain

    def lease_remaining(self) -> float:
        """For how many seconds tasks may still run without a reply from the captain."""
        return self._lease_from + OWN_SHARE * self.lease - self._loop.now()

    def reason_to_leave(self, limit: float) -> str:
        """Why this member gives up, once it has had no captain for `limit` seconds; empty until then. Prints a failing
        name lookup much earlier, as the captain cannot report it."""
        if self.joined or self._hung_up:
            return ""
        seconds = self._loop.now() - self._alone_since
        unanswered = self._unanswered() if seconds > UNANSWERED else ""
        if unanswered and not self._unanswered_reported:
            self._unanswered_reported = True
            if self._echo is not None:
                self._echo.write(f"paceline: {NO_CAPTAIN}{unanswered}\n".encode())
        if seconds <= limit:
            return ""
        failure = unanswered or self._last_failure()
        return f"could not reach the captain for {limit:g} s (limits.start)" + (f": {failure}" if failure else "")

    def _unanswered(self) -> str:
        if not self._lookup.unanswered:
            return ""
        name = endpoint(self._options.captain)[0]
        return f"no name server answers for {name}; check that the cluster's DNS is running"

    def _last_failure(self) -> str:
        """Why the captain cannot be reached, if a name server has answered; empty if unknown."""
        if self._lookup.waiting() > UNANSWERED:
            return f"the name lookup of {endpoint(self._options.captain)[0]} has not finished"
        return f"{self._options.captain}: {self._failure}" if self._failure else ""
