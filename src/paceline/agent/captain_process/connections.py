"""The captain's connections: members, the current instance of each host, and instances that wait to replace it."""

from __future__ import annotations

import socket
from typing import Callable

from paceline.agent.captain import events as ev
from paceline.agent.captain import instructions as ins
from paceline.agent.captain.state_machine import Captain
from paceline.agent.captain_process import pause_requests, scale_requests
from paceline.agent.captain_process.task_requests import KINDS, Instruction, TaskRequests
from paceline.agent.net import messages
from paceline.agent.net.frames import MEMBER_LIMIT, Message, WireError, encode
from paceline.agent.net.listener import Listener, Strangers
from paceline.agent.net.loop import Loop
from paceline.agent.net.task_request import REFUSED
from paceline.agent.net.tls import LinkClosed, TlsLink, context
from paceline.agent.options import Options, endpoint
from paceline.agent.profile_messages import ProfileTaken
from paceline.agent.stack_messages import StacksTaken

JOIN_TIMEOUT = 10.0  # seconds for the first message of a connection
BACKLOG = 4096  # connections: all hosts of a large run may connect at once
REASON_LIMIT = 500  # characters
INSTANCES_KEPT = 100  # of each host: those that were replaced before have ended long ago
REQUEST_MARGIN = 10.0  # seconds for which a command line may wait longer than its request takes


class Connection:
    """A peer: unknown until its first message, then a member or a user's command line."""

    def __init__(self, connections: Connections, sock: socket.socket) -> None:
        self._connections = connections
        self.link = TlsLink(sock, connections.tls, server=True, limit=MEMBER_LIMIT)
        self.host = ""
        self.last_received = connections.loop.now()
        self.patience = JOIN_TIMEOUT  # seconds without a message after which it is closed, unless it is a member
        self.watch()

    def watch(self) -> None:
        self._connections.loop.watch(self.link, self.link.interest(), self._on_ready)

    def _on_ready(self) -> None:
        try:
            for message in self.link.ready():
                self.last_received = self._connections.loop.now()
                self._connections.receive(self, message)
            if self in self._connections.open:
                self.watch()
        except (LinkClosed, WireError):
            self._connections.drop(self)

    def send(self, *frames: bytes) -> None:
        if self not in self._connections.open:
            return  # it was closed: what is sent would be kept
        try:
            self.link.send_bytes(*frames)
            self.watch()
        except LinkClosed:
            self._connections.drop(self)

    def send_message(self, message: messages.CaptainMessage) -> None:
        self.send(encode(messages.captain_message(message)))


class Connections:
    def __init__(
        self, options: Options, captain: Captain, beat_every: float, loop: Loop, handle: Callable[[ev.Event], None]
    ) -> None:
        """`handle`: passes an event to the captain."""
        self._options, self._captain, self._beat_every, self._handle = options, captain, beat_every, handle
        self.loop = loop
        self.tls = context(options.tls, "captain", server=True)
        self.open: set[Connection] = set()
        self._members: dict[str, Connection] = {}
        # Instances that wait until the current instance of their host leaves.
        self._successors: dict[str, tuple[Connection, ev.MemberJoined]] = {}
        self._instances: dict[str, list[str]] = {}  # host -> instances in order of arrival; the last is current
        self._delayed_frames: dict[str, tuple[bytes, ...]] = {}
        self._task_requests = TaskRequests(captain.plan, loop, self._instruct)
        # By host: the newest that waits for `release_joins`. None: members may join.
        self._held_joins: dict[str, tuple[Connection, ev.MemberJoined]] | None = None
        self._strangers = Strangers(len(captain.plan.hosts), self.drop, lambda connection: connection.link.open)
        address = endpoint(options.listen or options.captain)
        self._listener = Listener(loop, address, BACKLOG, self._admit, self._strangers.drop_oldest)

    def _admit(self, sock: socket.socket) -> None:
        connection = Connection(self, sock)
        self.open.add(connection)
        self._strangers.add(connection)

    # ---- received messages

    def receive(self, connection: Connection, message: Message) -> None:
        if connection.host:
            if message["type"] in KINDS:
                self._task_requests.on_reply(connection.host, message)
                return
            event = messages.read_member(message, connection.host)
            if isinstance(event, ev.Heartbeat):
                connection.send_message(messages.HeartbeatReply(event.n))
            if event is not None and not isinstance(event, (StacksTaken, ProfileTaken)):
                self._handle(event)
        elif message["type"] == "join":
            self._join_or_hold(connection, messages.read_join(message, self._options.run))
        elif message["type"] == "stop":
            text = message.get("reason")
            reason = (text if isinstance(text, str) and text else "stopped by a user")[:REASON_LIMIT]
            connection.send(encode({"type": "stopping", "grace": self._captain.plan.limits.grace}))
            self._handle(ev.StopRequested(reason, message.get("interrupt") is True))
        elif message["type"] in (*KINDS, scale_requests.SCALE, *pause_requests.KINDS):
            self._carry_out(connection, message)
        else:  # the connection is closed: command lines of newer versions conclude that this version lacks the request
            raise WireError(f"message {message['type']!r} before join")

    def _carry_out(self, connection: Connection, request: Message) -> None:
        """A request of a user. It always gets a reply, because a command line may be of another version."""
        try:
            if request["type"] in KINDS:
                connection.patience = self._task_requests.begin(request, connection.send) + REQUEST_MARGIN
            elif request["type"] == scale_requests.SCALE:
                connection.send(*map(encode, scale_requests.reply_to(request, self._captain, self._handle)))
            else:
                connection.send(*map(encode, pause_requests.reply_to(request, self._captain, self._handle)))
        except WireError as error:
            connection.send(encode({"type": REFUSED, "reason": f"invalid request: {error}"}))

    def hold_joins(self) -> None:
        """Members of a new run have to wait until `release_joins`. If that takes long, they connect again. If one
        shows that the run is not new, and only this captain is, none waits: the leases of tasks would expire."""
        self._held_joins = {}

    def _join_or_hold(self, connection: Connection, joined: ev.MemberJoined) -> None:
        if self._held_joins is not None and not (joined.generation or joined.running):
            self._check_host(joined.host)
            self._held_joins[joined.host] = connection, joined
            connection.send_message(messages.Wait())
        else:
            self._join(connection, joined)
            self.release_joins()

    def release_joins(self) -> None:
        held, self._held_joins = self._held_joins or {}, None
        for connection, joined in held.values():
            if connection in self.open:
                try:
                    self._join(connection, joined)
                except WireError:
                    self.drop(connection)

    def _join(self, connection: Connection, joined: ev.MemberJoined) -> None:
        self._check_host(joined.host)
        instances = self._instances.setdefault(joined.host, [])
        if joined.instance in instances[:-1]:
            reason = "another instance has replaced this host"
            connection.send_message(ins.DismissMember(joined.host, "replaced", reason))
            return
        connection.last_received = self.loop.now()
        previous = self._members.get(joined.host)
        if joined.instance not in instances:
            if self._is_present(joined.host) and not self._displaces(joined):
                # The current instance trains, or its tasks are ending: before it leaves, it reports how they ended.
                self._successors[joined.host] = connection, joined
                connection.send_message(messages.Wait())
                return
            if previous is not None and joined.running:
                del instances[-1]  # it joined first after a captain restart, and has to wait now
            instances.append(joined.instance)
            del instances[:-INSTANCES_KEPT]
        if previous is not None:
            self.drop(previous)
        connection.host = joined.host
        self._strangers.discard(connection)
        self._members[joined.host] = connection
        connection.send_message(messages.Welcome(self._options.lease, self._beat_every))
        if connection in self.open:
            self._handle(joined)

    def _check_host(self, host: str) -> None:
        if host not in self._captain.members:
            raise WireError(f"host {host!r} is not part of this run")

    def _is_present(self, host: str) -> bool:
        """Whether the host is connected, or runs tasks under a lease and may reconnect."""
        member = self._captain.members[host]
        is_leased = not member.has_left and self.loop.now() < member.lease_until
        return host in self._members or (is_leased and bool(self._captain.ledger.running_on(host)))

    def _displaces(self, joined: ev.MemberJoined) -> bool:
        """Whether the previous instance cannot be running, or runs no task while this one does."""
        member = self._captain.members[joined.host]
        is_only_trainer = bool(joined.running) and not self._captain.ledger.running_on(joined.host)
        return joined.replaces or is_only_trainer or bool(joined.place and joined.place == member.place)

    def admit_successors(self) -> None:
        """Let instances join that waited for a previous instance, if it has left."""
        for host, (connection, joined) in list(self._successors.items()):
            if connection not in self.open:
                del self._successors[host]  # it will reconnect
            elif not self._is_present(host):
                del self._successors[host]
                self._join(connection, joined)

    # ---- sent messages

    def send(self, host: str, *frames: bytes) -> None:
        """Delayed frames for this host go first, to keep the order."""
        frames = (*self._delayed_frames.pop(host, ()), *frames)
        connection = self._members.get(host)
        if connection is not None and frames:
            connection.send(*frames)

    def _instruct(self, host: str, message: Instruction) -> bool:
        """False: the host is not connected."""
        is_connected = host in self._members
        if is_connected:
            self.send(host, encode(messages.captain_message(message)))
        return is_connected

    def send_later(self, host: str, frames: tuple[bytes, ...], seconds: float) -> None:
        self._delayed_frames[host] = frames
        self.loop.after(seconds, lambda: self.send(host))

    # ---- closed connections

    def drop(self, connection: Connection) -> None:
        if connection not in self.open:
            return
        self.open.discard(connection)
        self._strangers.discard(connection)
        self.loop.unwatch(connection.link)
        connection.link.close()
        if connection.host and self._members.get(connection.host) is connection:
            del self._members[connection.host]
            self._delayed_frames.pop(connection.host, None)
            self._task_requests.on_disconnect(connection.host)
            self._handle(ev.MemberDisconnected(connection.host))
            if connection.host in self._successors:
                self.loop.after(0.0, self.admit_successors)

    def drop_silent(self) -> None:
        now = self.loop.now()
        for connection in list(self.open):
            limit = self._options.lease if connection.host else connection.patience
            if now - connection.last_received > limit:
                self.drop(connection)

    def dismiss_successors(self, status: str, reason: str) -> None:
        for host, (connection, _) in self._successors.items():
            connection.send_message(ins.DismissMember(host, status, reason))

    def close_all(self) -> None:
        for connection in list(self.open):
            self.open.discard(connection)
            connection.link.close()

    def stop_listening(self) -> None:
        self._listener.stop()
