"""A member's connection to the captain: real sockets and TLS, a clock that the test moves, and no name server."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.agent import member
from paceline.agent.captain import events as ev
from paceline.agent.captain import instructions as ins
from paceline.agent.member import Member
from paceline.agent.net import captain_connection as module
from paceline.agent.net import dns, messages
from paceline.agent.net import tls as links
from paceline.agent.net.captain_connection import CaptainConnection
from paceline.agent.net.frames import WireError, encode
from paceline.agent.net.loop import Callback, Loop, Timer
from paceline.agent.net.tls import LinkClosed, TlsLink, context
from paceline.agent.options import LEAVING, Options
from paceline.agent.spares import spare
from paceline.backends import certificates
from paceline.frameworks import amx
from paceline.plan import to_json
from support.worlds import make_plan

pytestmark = pytest.mark.timeout(60)
NAME = "captain.digits"
SOON = 30.0  # seconds that real sockets may take on a busy machine
LEASE, BEAT = 10.0, 1.0
WELCOME = {"type": "welcome", "lease": LEASE, "beat": BEAT}
ROSTER: dict[str, Any] = {"type": "roster", "generation": 1, "roster": {}}


class Clock(Loop):
    """The agent's loop with a clock that only the test moves."""

    def __init__(self) -> None:
        self.time = 1000.0
        self.waits: list[float] = []
        super().__init__()

    def now(self) -> float:
        return self.time

    def after(self, seconds: float, callback: Callback) -> Timer:
        self.waits.append(seconds)
        return super().after(seconds, callback)

    def pass_time(self, seconds: float) -> None:
        self.time += seconds
        self.once(0.0)

    def until(self, condition: Callable[[], object], step: float = 0.0) -> None:
        """`step`: how far the clock moves after each check."""
        limit = time.monotonic() + SOON
        while not condition():
            assert time.monotonic() < limit, "the condition was not met in time"
            self.once(0.02)
            self.time += step

    def settle(self) -> None:
        """Run until no socket is ready."""
        while self._selector.select(0.0):
            self.once(0.0)


class Peer:
    """The captain's end of one connection."""

    def __init__(self, sock: socket.socket, tls: ssl.SSLContext, loop: Clock) -> None:
        self.link = TlsLink(sock, tls, server=True)
        self.received: list[dict[str, Any]] = []
        self.close_reason = ""
        self._loop = loop
        self._watch()

    def _watch(self) -> None:
        self._loop.watch(self.link, self.link.interest(), self._ready)

    def _ready(self) -> None:
        try:
            self.received += self.link.ready()
            self._watch()
        except LinkClosed as error:
            self.close_reason = str(error)
            self.hang_up()

    def send(self, *outgoing: dict[str, Any]) -> None:
        self.link.send_bytes(*map(encode, outgoing))
        self._watch()

    def kinds(self) -> list[str]:
        return [message["type"] for message in self.received]

    def hang_up(self) -> None:
        self._loop.unwatch(self.link)
        self.link.close()

    def reset(self) -> None:
        self.link.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.hang_up()


class Captain:
    """Listens and accepts every connection; sends nothing on its own."""

    def __init__(self, tls: ssl.SSLContext, loop: Clock, port: int = 0) -> None:
        self._tls, self._loop = tls, loop
        self.listener = socket.create_server(("127.0.0.1", port))
        self.listener.setblocking(False)
        self.port: int = self.listener.getsockname()[1]
        self.peers: list[Peer] = []
        loop.watch(self.listener, selectors.EVENT_READ, self._accept)

    def _accept(self) -> None:
        self.peers.append(Peer(self.listener.accept()[0], self._tls, self._loop))

    def close(self) -> None:
        self._loop.unwatch(self.listener)
        self.listener.close()
        for peer in self.peers:
            peer.hang_up()


class Echo:
    def __init__(self) -> None:
        self.output: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.output.append(data)


class Names:
    """A name server whose answers, and their timing, the test controls."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.port = 0  # of the captain; 0: the name has no address
        self.error: Exception = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        self.queries: list[str] = []
        self.gates: dict[str, threading.Event] = {}  # names whose answer waits for the event
        self.always: Exception | None = None  # the error for a name that every cluster has; None: it is found
        patch.setattr(socket, "getaddrinfo", self._answer)

    def block(self, name: str) -> threading.Event:
        gate = self.gates[name] = threading.Event()
        return gate

    def is_down(self) -> None:
        self.port, self.error = 0, socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        self.always = self.error

    def is_up(self, port: int) -> None:
        self.port, self.always = port, None

    def _answer(self, host: str, port: int | None, *_: Any, **__: Any) -> list[Any]:
        self.queries.append(host)
        gate, error, captain_port = self.gates.get(host), self.error, self.port
        always = self.always
        if gate is not None:
            assert gate.wait(SOON)
        if host == dns.ALWAYS:
            if always is not None:
                raise always
            return []
        if not captain_port:
            raise error
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", captain_port))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tls")
    certificates.make(path)
    return str(path)


@pytest.fixture
def clock() -> Iterator[Clock]:
    yield Clock()
    signal.set_wakeup_fd(-1)  # set by the loop


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[Names]:
    server = Names(monkeypatch)
    yield server
    for gate in server.gates.values():
        gate.set()


@pytest.fixture
def captain(folder: str, clock: Clock) -> Iterator[Captain]:
    listening = Captain(context(folder, "captain", server=True), clock)
    yield listening
    listening.close()


class Host:
    """A member, as far as its connection needs it."""

    def __init__(self, folder: str, loop: Clock, address: str) -> None:
        self.loop, self.address = loop, address
        self.echo = Echo()
        self.generation = 3
        self.received: list[messages.CaptainMessage] = []
        echo: Any = self.echo
        options = Options("run", "worker-host-0", "", "", folder, address, lease=LEASE)
        self.connection = CaptainConnection(
            options, loop, echo, self._join, lambda n: ev.Heartbeat("worker-host-0", n, {}, 0.5), self.received.append
        )

    def _join(self) -> ev.MemberJoined:
        return ev.MemberJoined(
            "worker-host-0", "a", 1, True, "here", self.generation, offers={"worker-0": "127.0.0.1:2000"}
        )


@pytest.fixture
def host(folder: str, clock: Clock, captain: Captain) -> Iterator[Host]:
    member_host = Host(folder, clock, f"127.0.0.1:{captain.port}")
    yield member_host
    member_host.connection.hang_up()


@pytest.fixture
def named(folder: str, clock: Clock, names: Names, captain: Captain) -> Iterator[Host]:
    """A host that has the captain's name instead of its address."""
    names.port = captain.port
    member_host = Host(folder, clock, f"{NAME}:{captain.port}")
    yield member_host
    member_host.connection.hang_up()


def await_join(host: Host, captain: Captain, number: int = 0) -> Peer:
    """Wait until the captain has received the join."""
    host.loop.until(lambda: len(captain.peers) > number and captain.peers[number].received)
    assert captain.peers[number].kinds() == ["join"]
    return captain.peers[number]


def join(host: Host, captain: Captain, number: int = 0) -> Peer:
    if not number:
        host.connection.dial()
    peer = await_join(host, captain, number)
    peer.send(WELCOME)
    host.loop.until(lambda: host.connection.joined)
    peer.received.clear()
    return peer


# ---- joining


def test_a_member_introduces_itself_and_has_joined_once_it_is_welcomed(host: Host, captain: Captain) -> None:
    host.connection.dial()
    peer = await_join(host, captain)
    join_message = messages.read_join(peer.received[0], "run")
    assert (join_message.host, join_message.generation, join_message.offers) == (
        "worker-host-0",
        3,
        {"worker-0": "127.0.0.1:2000"},
    )
    assert not host.connection.joined
    peer.send({"type": "welcome", "lease": 40.0, "beat": 4.0})
    host.loop.until(lambda: host.connection.joined)
    assert (host.connection.lease, host.connection.beat_every) == (40.0, 4.0)
    assert host.received == []


def test_both_ends_show_certificates_of_the_run(host: Host, captain: Captain) -> None:
    peer = join(host, captain)
    certificate = peer.link.sock.getpeercert()
    assert certificate is not None and (("commonName", "member"),) in certificate["subject"]


def test_nothing_is_sent_to_a_captain_of_another_run(
    host: Host, clock: Clock, tmp_path: Path, captain: Captain
) -> None:
    certificates.make(tmp_path)
    captain._tls = context(str(tmp_path), "captain", server=True)
    host.connection.dial()
    clock.until(lambda: captain.peers and captain.peers[0].close_reason)
    clock.settle()
    assert captain.peers[0].received == [] and not host.connection.joined
    clock.pass_time(31.0)
    assert "certificate verify failed" in host.connection.reason_to_leave(30.0).lower().replace("_", " ")


@pytest.mark.parametrize("name", ["member", "tensorboard"])
def test_another_certificate_of_the_run_does_not_make_a_captain(
    host: Host, clock: Clock, folder: str, captain: Captain, name: str
) -> None:
    captain._tls = context(folder, name, server=True)
    host.connection.dial()
    clock.until(lambda: captain.peers and captain.peers[0].close_reason)
    assert captain.peers[0].received == []


def test_messages_of_a_member_without_a_certificate_are_not_read(captain: Captain, clock: Clock, folder: str) -> None:
    tls = ssl.create_default_context(cafile=f"{folder}/ca.pem")
    stranger = TlsLink(socket.create_connection(("127.0.0.1", captain.port)), tls, server=False)
    stranger.send({"type": "join"})
    close_reasons: list[str] = []

    def ready() -> None:
        try:
            stranger.ready()
            clock.watch(stranger, stranger.interest(), ready)
        except LinkClosed as error:
            close_reasons.append(str(error))
            clock.unwatch(stranger)

    clock.watch(stranger, stranger.interest(), ready)
    clock.until(lambda: close_reasons and captain.peers[0].close_reason)
    stranger.close()
    assert captain.peers[0].received == []


# ---- sending


def test_messages_before_the_welcome_wait_for_it_and_heartbeats_are_dropped(host: Host, captain: Captain) -> None:
    host.connection.dial()
    peer = await_join(host, captain)
    host.connection.send(ev.SaveRequested("worker-host-0", "worker-0"))
    host.connection.beat()
    host.connection.notify("hello", True)
    host.loop.settle()
    assert peer.kinds() == ["join"]
    peer.send(WELCOME)
    host.loop.until(lambda: len(peer.received) == 3)
    assert peer.received[1:] == [
        {"type": "save", "task": "worker-0"}, {"type": "said", "text": "hello", "warning": True},
    ]  # fmt: skip


def test_messages_without_a_connection_are_dropped_as_the_join_carries_the_state(host: Host, captain: Captain) -> None:
    host.connection.send(ev.SaveRequested("worker-host-0", "worker-0"))
    peer = join(host, captain)
    host.connection.send(ev.SaveRequested("worker-host-0", "worker-1"))
    host.loop.until(lambda: peer.received)
    assert peer.received == [{"type": "save", "task": "worker-1"}]


def test_notices_for_the_user_are_kept_up_to_a_limit(host: Host, captain: Captain) -> None:
    for number in range(150):
        host.connection.notify(f"{number} " + "x" * 3000)
    peer = join(host, captain)
    host.loop.until(lambda: len(peer.received) == 100)
    host.connection.notify("the last")
    host.loop.until(lambda: len(peer.received) == 101)
    assert [message["text"].split()[0] for message in peer.received] == [*map(str, range(100)), "the"]
    assert len(peer.received[0]["text"]) == 2000


def test_notices_contain_no_secret_of_the_host(
    monkeypatch: pytest.MonkeyPatch, folder: str, clock: Clock, captain: Captain
) -> None:
    """Also not the part of it that remains when the text is shortened."""
    monkeypatch.setenv("STORE_TOKEN", "from-a-secret")
    host = Host(folder, clock, f"127.0.0.1:{captain.port}")
    host.connection.notify(f"{'x' * 1990} from-a-secret at http://me:pw@store/")
    peer = join(host, captain)
    host.loop.until(lambda: peer.received)
    assert peer.received[0]["text"] == f"{'x' * 1990} *** at ht"
    host.connection.hang_up()


def test_a_notice_is_sent_only_once(host: Host, captain: Captain) -> None:
    host.connection.notify("hello")
    peer = join(host, captain)
    host.loop.until(lambda: peer.received)
    peer.hang_up()
    host.loop.until(lambda: not host.connection.joined)
    host.loop.pass_time(0.06)
    again = join(host, captain, 1)
    host.connection.notify("and again")
    host.loop.until(lambda: again.received)
    assert [message["text"] for message in again.received] == ["and again"]


# ---- the lease


def test_the_lease_counts_from_the_request_of_the_member(host: Host, captain: Captain, clock: Clock) -> None:
    host.connection.dial()
    peer = await_join(host, captain)
    clock.pass_time(0.5)
    peer.send(WELCOME)
    clock.until(lambda: host.connection.joined)
    assert host.connection.lease_remaining() == pytest.approx(0.9 * LEASE - 0.5)
    clock.pass_time(4.0)
    host.connection.beat()
    clock.until(lambda: "beat" in peer.kinds())
    clock.pass_time(2.0)
    assert host.connection.lease_remaining() == pytest.approx(0.9 * LEASE - 6.5)
    peer.send({"type": "beat", "n": peer.received[-1]["n"]})
    clock.until(lambda: host.connection.lease_remaining() > 5.0)
    assert host.connection.lease_remaining() == pytest.approx(0.9 * LEASE - 2.0)


def test_a_late_answer_does_not_shorten_the_lease(host: Host, captain: Captain, clock: Clock) -> None:
    peer = join(host, captain)
    for _ in range(2):
        clock.pass_time(1.0)
        host.connection.beat()
    clock.until(lambda: len(peer.received) == 2)
    first, second = (message["n"] for message in peer.received)
    peer.send({"type": "beat", "n": second}, {"type": "beat", "n": first}, ROSTER)
    clock.until(lambda: host.received)
    assert host.connection.lease_remaining() == pytest.approx(0.9 * LEASE)


def test_an_answer_to_a_heartbeat_that_was_not_sent_does_not_extend_the_lease(
    host: Host, captain: Captain, clock: Clock
) -> None:
    peer = join(host, captain)
    clock.pass_time(1.0)
    peer.send({"type": "beat", "n": 77}, ROSTER)
    clock.until(lambda: host.received)
    assert host.connection.lease_remaining() == pytest.approx(0.9 * LEASE - 1.0)


def test_a_member_that_waited_for_its_welcome_sends_a_heartbeat_immediately(
    host: Host, captain: Captain, clock: Clock
) -> None:
    """Its lease is older than a heartbeat interval by then."""
    host.connection.dial()
    peer = await_join(host, captain)
    clock.pass_time(2.0)
    peer.send(WELCOME)
    clock.until(lambda: "beat" in peer.kinds())
    assert peer.received[-1] == {"type": "beat", "n": 1, "tasks": {}, "memory": 0.5, "asking": []}


# ---- receiving


def test_messages_that_are_not_about_the_connection_are_passed_on(host: Host, captain: Captain) -> None:
    peer = join(host, captain)
    finish = {"type": "finish", "status": "replaced", "reason": "why"}
    peer.send({"type": "wait"}, {"type": "beat", "n": 1}, {"type": "novel"}, ROSTER, finish)
    host.loop.until(lambda: len(host.received) == 2)
    assert host.received == [messages.Roster(1, {}), ins.DismissMember("worker-host-0", "replaced", "why")]


def test_a_message_in_many_pieces_is_reassembled(host: Host, captain: Captain) -> None:
    peer = join(host, captain)
    roster = {f"worker-{n}": "x" * 100 for n in range(10_000)}
    peer.send({**ROSTER, "roster": roster})
    host.loop.until(lambda: host.received)
    assert host.received == [messages.Roster(1, roster)]


def test_an_invalid_message_is_reported_to_the_captain_and_the_member_joins_again(host: Host, captain: Captain) -> None:
    peer = join(host, captain)
    peer.send({"type": "start", "generation": "first"})
    host.loop.until(lambda: not host.connection.joined)
    host.loop.until(lambda: peer.close_reason)
    [notice] = peer.received
    assert (
        notice["text"]
        == "worker-host-0 received an invalid message from the captain: start: generation: not an integer"
        and notice["warning"]
    )
    host.loop.pass_time(0.06)
    join(host, captain, 1)


@pytest.mark.parametrize("frame", [b"\0\0\0\2[]", b"\xff\xff\xff\xff", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_garbage_ends_the_connection_and_the_member_reconnects(host: Host, captain: Captain, frame: bytes) -> None:
    peer = join(host, captain)
    peer.link.send_bytes(frame)
    host.loop.until(lambda: peer.close_reason)
    assert not host.connection.joined
    host.loop.pass_time(0.06)
    join(host, captain, 1)


def test_a_port_without_tls_is_dialed_again(host: Host, captain: Captain, clock: Clock) -> None:
    clock.unwatch(captain.listener)
    host.connection.dial()
    plain, _ = captain.listener.accept()
    plain.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
    clock.until(lambda: clock.waits.count(0.05))
    plain.close()
    clock.watch(captain.listener, selectors.EVENT_READ, captain._accept)
    clock.pass_time(0.06)
    peer = await_join(host, captain)
    peer.send(WELCOME)
    clock.until(lambda: host.connection.joined)


@pytest.mark.parametrize("fields", [{}, {"lease": "long", "beat": 1.0}, {"lease": 10.0}, {"lease": 10.0, "beat": None}])
def test_an_invalid_welcome_does_not_count(host: Host, captain: Captain, clock: Clock, fields: dict[str, Any]) -> None:
    """So a member that receives nothing else leaves eventually, and does not dial as fast as it can."""
    host.connection.dial()
    for number in range(3):
        peer = await_join(host, captain, number)
        peer.send({"type": "welcome", **fields})
        clock.until(lambda peer=peer: peer.close_reason)
        assert not host.connection.joined
        clock.pass_time(10.0)
    assert clock.waits.count(0.05) == 1
    assert "invalid message" in host.connection.reason_to_leave(25.0)


# ---- dialing again


def test_a_captain_that_hangs_up_is_dialed_again_and_gets_the_current_state(host: Host, captain: Captain) -> None:
    peer = join(host, captain)
    peer.hang_up()
    host.loop.until(lambda: not host.connection.joined)
    host.generation = 4
    host.connection.notify("in between")
    host.loop.pass_time(0.06)
    again = await_join(host, captain, 1)
    assert again.received[0]["generation"] == 4
    again.send(WELCOME)
    host.loop.until(lambda: len(again.received) > 1)
    assert again.received[1]["text"] == "in between"


def test_a_message_sent_just_before_a_reset_is_received(host: Host, captain: Captain) -> None:
    peer = join(host, captain)
    peer.send({"type": "finish", "status": "succeeded", "reason": ""})
    peer.reset()
    host.loop.until(lambda: not host.connection.joined)
    assert host.received == [ins.DismissMember("worker-host-0", "succeeded", "")]


def test_the_delay_between_dials_grows_up_to_a_second(host: Host, captain: Captain, clock: Clock) -> None:
    captain.close()
    clock.waits.clear()
    host.connection.dial()
    for number in range(1, 12):
        clock.until(lambda number=number: len([wait for wait in clock.waits if wait <= 1.0]) == number)
        clock.pass_time(1.0)
    waits = [wait for wait in clock.waits if wait <= 1.0]
    assert waits[:3] == pytest.approx([0.05, 0.075, 0.1125]) and waits[9:11] == [1.0, 1.0]
    assert waits == sorted(waits)


def test_the_delay_starts_over_after_a_welcome(host: Host, captain: Captain, clock: Clock) -> None:
    captain.close()
    host.connection.dial()
    for number in range(1, 6):
        clock.pass_time(1.0)
        clock.until(lambda number=number: len([wait for wait in clock.waits if wait <= 1.0]) == number)
    returned = Captain(captain._tls, clock, captain.port)
    clock.pass_time(1.0)
    peer = await_join(host, returned)
    peer.send(WELCOME)
    clock.until(lambda: host.connection.joined)
    clock.waits.clear()
    peer.hang_up()
    clock.until(lambda: not host.connection.joined)
    assert clock.waits == [0.05]
    returned.close()


def test_a_captain_that_sends_nothing_is_dialed_again(host: Host, captain: Captain, clock: Clock) -> None:
    host.connection.dial()
    first = await_join(host, captain)
    clock.pass_time(module.DIAL_LIMIT - 1.0)
    clock.settle()
    assert not first.close_reason
    clock.pass_time(2.0)
    clock.until(lambda: first.close_reason)
    await_join(host, captain, 1)
    clock.pass_time(5.0)
    assert host.connection.reason_to_leave(10.0).endswith(f"127.0.0.1:{captain.port}: no response for 10 s")


def test_a_captain_that_has_sent_a_welcome_is_not_dialed_again(host: Host, captain: Captain, clock: Clock) -> None:
    peer = join(host, captain)
    clock.pass_time(10 * module.DIAL_LIMIT)
    clock.settle()
    assert not peer.close_reason and host.connection.joined and len(captain.peers) == 1


def test_a_member_that_has_hung_up_does_not_dial_again(host: Host, captain: Captain, clock: Clock) -> None:
    peer = join(host, captain)
    host.connection.hang_up()
    clock.until(lambda: peer.close_reason)
    clock.pass_time(100.0)
    clock.settle()
    assert len(captain.peers) == 1 and not host.connection.joined and host.connection.reason_to_leave(1.0) == ""


def test_a_member_that_hangs_up_while_waiting_to_dial_does_not_dial(host: Host, captain: Captain, clock: Clock) -> None:
    peer = join(host, captain)
    peer.hang_up()
    clock.until(lambda: not host.connection.joined)
    host.connection.hang_up()
    clock.pass_time(100.0)
    clock.settle()
    assert len(captain.peers) == 1


# ---- the captain's name


def test_a_captain_is_dialed_by_its_name(named: Host, names: Names, captain: Captain) -> None:
    join(named, captain)
    assert names.queries == [NAME]


def test_a_name_that_does_not_exist_yet_is_looked_up_again(
    named: Host, names: Names, captain: Captain, clock: Clock
) -> None:
    names.port = 0
    named.connection.dial()
    for number in range(1, 4):
        clock.until(lambda number=number: len(clock.waits) == number)
        assert names.queries == [NAME] * number
        clock.pass_time(1.0)
    names.port = captain.port
    clock.until(lambda: len(clock.waits) > 3)
    clock.pass_time(1.0)
    await_join(named, captain)


def test_a_name_server_that_hangs_blocks_nothing(named: Host, names: Names, captain: Captain, clock: Clock) -> None:
    gate = names.block(NAME)
    named.connection.dial()
    clock.until(lambda: names.queries)
    clock.pass_time(20.0)
    named.connection.dial()  # its answer is for this call, too
    named.connection.notify("hello")
    assert names.queries == [NAME] and captain.peers == []
    gate.set()
    await_join(named, captain)
    assert names.queries == [NAME]


def test_a_member_that_hangs_up_during_a_lookup_does_not_dial(
    named: Host, names: Names, captain: Captain, clock: Clock
) -> None:
    gate = names.block(NAME)
    named.connection.dial()
    clock.until(lambda: names.queries)
    named.connection.hang_up()
    clock.pass_time(1.0)
    gate.set()
    clock.until(lambda: named.connection._lookup.waiting() == 0.0)
    clock.settle()
    clock.pass_time(100.0)
    clock.settle()
    assert captain.peers == [] and names.queries == [NAME]


@pytest.mark.parametrize("error", [UnicodeError("label empty or too long"), ValueError("embedded null character")])
def test_an_invalid_name_has_no_address(named: Host, names: Names, clock: Clock, error: Exception) -> None:
    names.port, names.error = 0, error
    named.connection.dial()
    clock.until(lambda: clock.waits == [0.05])
    clock.pass_time(10.0)
    clock.until(lambda: len(clock.waits) == 2)
    assert named.connection.reason_to_leave(5.0).endswith(f"(limits.start): {named.address}: the name was not found")


def test_a_lookup_is_retried_if_no_thread_can_be_started(
    named: Host, captain: Captain, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        named.connection.dial()
    clock.pass_time(0.06)
    await_join(named, captain)


# ---- without a captain


def lookup_threads() -> list[threading.Thread]:
    """The threads that look up a name, or check whether any name server answers."""
    return [thread for thread in threading.enumerate() if thread.name.endswith("(_look_up)")]


def test_a_member_without_a_captain_leaves_after_its_limit(host: Host, captain: Captain, clock: Clock) -> None:
    captain.close()
    host.connection.dial()
    clock.until(lambda: clock.waits)
    clock.pass_time(8.0)
    assert host.connection.reason_to_leave(8.0) == ""
    clock.pass_time(0.1)
    clock.settle()
    reason = f"could not reach the captain for 8 s (limits.start): 127.0.0.1:{captain.port}: Connection refused"
    assert host.connection.reason_to_leave(8.0) == reason
    assert host.echo.output == []


def test_a_joined_member_stays_and_its_limit_counts_from_the_disconnection(
    host: Host, captain: Captain, clock: Clock
) -> None:
    peer = join(host, captain)
    clock.pass_time(100.0)
    assert host.connection.reason_to_leave(8.0) == ""
    peer.hang_up()
    captain.close()
    clock.until(lambda: not host.connection.joined)
    clock.pass_time(7.9)
    assert host.connection.reason_to_leave(8.0) == ""
    clock.pass_time(0.2)
    assert host.connection.reason_to_leave(8.0) != ""


def test_a_member_that_waits_for_another_instance_of_its_host_does_not_leave(
    host: Host, captain: Captain, clock: Clock
) -> None:
    host.connection.dial()
    clock.pass_time(7.0)
    peer = await_join(host, captain)
    peer.send({"type": "wait"})
    clock.until(lambda: host.connection._alone_since == clock.time)
    clock.pass_time(2.0)
    assert host.connection.reason_to_leave(8.0) == "" and not host.connection.joined
    peer.send(WELCOME)
    clock.until(lambda: host.connection.joined)


def test_a_name_server_that_does_not_answer_is_reported_once(named: Host, names: Names, clock: Clock) -> None:
    names.is_down()
    named.connection.dial()
    clock.until(lambda: named.connection._lookup.unanswered)
    assert named.connection.reason_to_leave(8.0) == "" and named.echo.output == []
    clock.pass_time(module.UNANSWERED + 0.1)
    assert named.connection.reason_to_leave(8.0) == "" and named.connection.reason_to_leave(8.0) == ""
    cause = f"no name server answers for {NAME}; check that the cluster's DNS is running"
    assert named.echo.output == [f"paceline: cannot find the captain: {cause}\n".encode()]
    clock.pass_time(8.0)
    assert named.connection.reason_to_leave(8.0) == f"could not reach the captain for 8 s (limits.start): {cause}"
    assert len(named.echo.output) == 1


def test_a_name_server_is_not_blamed_once_it_has_answered(
    named: Host, names: Names, captain: Captain, clock: Clock
) -> None:
    names.is_down()
    named.connection.dial()
    clock.until(lambda: named.connection._lookup.unanswered)
    clock.pass_time(module.UNANSWERED + 0.1)
    assert named.connection.reason_to_leave(8.0) == "" and named.echo.output
    names.is_up(captain.port)
    captain.close()
    clock.until(
        lambda: named.connection.reason_to_leave(8.0).endswith(f"(limits.start): {named.address}: Connection refused"),
        1.0,
    )
    assert len(named.echo.output) == 1


def test_a_late_name_server_failure_is_ignored_once_a_name_was_found(
    named: Host, names: Names, captain: Captain, clock: Clock
) -> None:
    """After a failure, a second query checks for any name server; it may take longer than the next lookup."""
    names.is_down()
    gate = names.block(dns.ALWAYS)
    named.connection.dial()
    clock.until(lambda: dns.ALWAYS in names.queries)
    names.is_up(captain.port)
    clock.until(lambda: captain.peers, 1.0)
    threads = lookup_threads()
    gate.set()
    for thread in threads:
        thread.join(SOON)
    assert threads and not named.connection._lookup.unanswered


def test_a_failed_external_lookup_is_not_blamed_on_the_name_server_of_the_cluster(
    named: Host, names: Names, clock: Clock
) -> None:
    names.is_down()
    names.always = None
    named.connection.dial()
    clock.until(lambda: dns.ALWAYS in names.queries and clock.waits)
    for thread in lookup_threads():
        thread.join(SOON)
    clock.pass_time(10.0)
    assert named.connection.reason_to_leave(8.0).endswith(f"(limits.start): {named.address}: the name was not found")
    assert named.echo.output == []


def test_a_lookup_that_takes_longer_than_the_limit_is_the_reason(named: Host, names: Names, clock: Clock) -> None:
    names.block(NAME)
    named.connection.dial()
    clock.until(lambda: names.queries)
    clock.pass_time(10.0)
    assert (
        named.connection.reason_to_leave(8.0)
        == f"could not reach the captain for 8 s (limits.start): the name lookup of {NAME} has not finished"
    )


# ---- one connection


@pytest.fixture
def ends(folder: str) -> Iterator[tuple[TlsLink, TlsLink]]:
    ours, theirs = socket.socketpair()
    first = TlsLink(ours, context(folder, "member", server=False), server=False)
    second = TlsLink(theirs, context(folder, "captain", server=True), server=True)
    while not (first.open and second.open):
        first.ready()
        second.ready()
    yield first, second
    first.close()
    second.close()


def test_messages_wait_for_the_handshake(folder: str) -> None:
    ours, theirs = socket.socketpair()
    first = TlsLink(ours, context(folder, "member", server=False), server=False)
    second = TlsLink(theirs, context(folder, "captain", server=True), server=True)
    first.send({"type": "early"})
    received: list[Any] = []
    while not received:
        assert first.ready() == []
        received = second.ready()
    assert received == [{"type": "early"}]
    first.close()
    second.close()


def test_a_peer_that_reads_slowly_gets_everything(
    ends: tuple[TlsLink, TlsLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "OUTBOX_LIMIT", 8_000_000)  # less than the total, more than is queued at any time
    first, second = ends
    sent = [{"type": "x", "text": str(number) * 100_000} for number in range(30)]
    for _ in range(2):
        for message in sent:
            first.send(message)
        assert first.interest() & selectors.EVENT_WRITE
        received: list[Any] = []
        while len(received) < len(sent):
            first.ready()
            received += second.ready()
        assert received == sent and first.interest() == selectors.EVENT_READ


def test_the_connection_to_a_peer_that_never_reads_is_closed(
    ends: tuple[TlsLink, TlsLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "OUTBOX_LIMIT", 1_000_000)
    with pytest.raises(LinkClosed, match="the peer does not read"):
        for _ in range(100):
            ends[0].send({"type": "x", "text": "x" * 100_000})


def test_a_message_over_the_limit_is_refused(folder: str, ends: tuple[TlsLink, TlsLink]) -> None:
    ends[0].send_bytes(struct.pack(">I", 5 << 20))
    with pytest.raises(WireError, match="over the limit"):
        ends[1].ready()


def test_messages_before_the_end_of_a_connection_are_returned_first(ends: tuple[TlsLink, TlsLink]) -> None:
    first, second = ends
    first.send({"type": "finish"})
    first.close()
    assert second.ready() == [{"type": "finish"}]
    with pytest.raises(LinkClosed, match="the peer closed the connection"):
        second.ready()


class Breaks:
    """A connection that is reset after the first read; a real reset would show as a plain end here."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self._sock = sock
        self._read = False

    def recv(self, size: int) -> bytes:
        if self._read:
            raise ConnectionResetError(104, "Connection reset by peer")
        self._read = True
        return self._sock.recv(size)

    def close(self) -> None:
        self._sock.close()


def test_messages_before_a_reset_are_returned_first(ends: tuple[TlsLink, TlsLink]) -> None:
    first, second = ends
    first.send({"type": "finish"})
    broken: Any = Breaks(second.sock)
    second.sock = broken
    assert second.ready() == [{"type": "finish"}]
    with pytest.raises(LinkClosed, match="Connection reset by peer"):
        second.ready()


def test_messages_before_the_end_are_returned_even_if_output_is_pending(ends: tuple[TlsLink, TlsLink]) -> None:
    first, second = ends
    while not second.interest() & selectors.EVENT_WRITE:
        second.send({"type": "x", "text": "x" * 100_000})
    first.send({"type": "finish"})
    first.close()
    assert second.ready() == [{"type": "finish"}]
    with pytest.raises(LinkClosed):
        second.ready()


# ---- a whole member


@pytest.fixture
def make_member(
    tmp_path: Path, folder: str, clock: Clock, captain: Captain, names: Names, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Member]]:
    previous_handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGCHLD)}
    monkeypatch.setattr(member, "Loop", lambda: clock)
    monkeypatch.setenv(amx.OVERRIDE, amx.ABSENT)  # the probe would start a process
    members: list[Member] = []

    def make(**limits: float) -> Member:
        (tmp_path / "plan.json").write_text(to_json(make_plan(1, **limits)))  # type: ignore[arg-type]
        names.port = captain.port
        options = Options(
            "run", "worker-host-0", str(tmp_path / "plan.json"), str(tmp_path), folder, f"{NAME}:{captain.port}",
            lease=LEASE, last_words=str(tmp_path / "last-words"),
        )  # fmt: skip
        members.append(Member(options, "a", 1))
        return members[-1]

    yield make
    for each in members:
        each._connection.hang_up()
    for number, handler in previous_handlers.items():
        signal.signal(number, handler)


def welcome(agent: Member, captain: Captain) -> Peer:
    agent.loop.until(lambda: captain.peers and captain.peers[0].received)  # type: ignore[attr-defined]
    captain.peers[0].send(WELCOME)
    agent.loop.until(lambda: agent._connection.joined)  # type: ignore[attr-defined]
    return captain.peers[0]


def last_words(tmp_path: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((tmp_path / "last-words").read_text())
    return record


def test_a_replaced_member_leaves_and_records_the_reason(
    make_member: Callable[..., Member], captain: Captain, clock: Clock, tmp_path: Path
) -> None:
    (tmp_path / "staging" / "worker-0").mkdir(parents=True)
    agent = make_member()
    peer = welcome(agent, captain)
    peer.send({"type": "finish", "status": "replaced", "reason": "another instance took this host's place"})
    clock.until(lambda: "left" in peer.kinds())
    assert agent.run() == LEAVING
    assert (tmp_path / "staging").exists()
    assert last_words(tmp_path) == {"status": "replaced", "reason": "another instance took this host's place"}


def test_a_member_whose_run_is_over_exits_successfully(
    make_member: Callable[..., Member], captain: Captain, clock: Clock, tmp_path: Path
) -> None:
    (tmp_path / "staging" / "worker-0").mkdir(parents=True)
    agent = make_member()
    peer = welcome(agent, captain)
    peer.send({"type": "finish", "status": "succeeded", "reason": ""})
    clock.until(lambda: "left" in peer.kinds())
    assert agent.run() == 0
    assert not (tmp_path / "staging").exists()
    assert last_words(tmp_path)["status"] == "succeeded"


def test_a_member_without_a_captain_records_why_it_left(
    make_member: Callable[..., Member], names: Names, captain: Captain, clock: Clock, tmp_path: Path
) -> None:
    names.block(NAME)
    agent = make_member(start=8.0)
    clock.until(lambda: names.queries)
    clock.pass_time(9.0)
    clock.until(lambda: not clock._running)
    assert agent.run() == 0
    reason = f"could not reach the captain for 8 s (limits.start): the name lookup of {NAME} has not finished"
    assert last_words(tmp_path) == {"status": "left", "reason": reason}


def test_a_member_that_leaves_during_a_lookup_does_not_rejoin(
    make_member: Callable[..., Member], names: Names, captain: Captain, clock: Clock, tmp_path: Path
) -> None:
    gate = names.block(NAME)
    agent = make_member(start=8.0)
    clock.until(lambda: names.queries)
    close_callbacks: list[Callable[[], None]] = []
    agent._upload.close = close_callbacks.append  # type: ignore[method-assign]  # its upload takes a while
    agent._on_sigterm()
    clock.until(lambda: close_callbacks)
    clock.pass_time(1.0)
    gate.set()
    clock.until(lambda: agent._connection._lookup.waiting() == 0.0)
    clock.settle()
    clock.pass_time(20.0)
    clock.settle()
    assert captain.peers == [] and len(close_callbacks) == 1
    close_callbacks[0]()
    assert agent.run() == LEAVING
    assert not (tmp_path / "last-words").exists()


def test_a_member_that_receives_nothing_for_a_lease_kills_its_tasks(
    make_member: Callable[..., Member], captain: Captain, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(spare, "start_cold", lambda *_: 5001)
    monkeypatch.setattr(os, "killpg", lambda *args: killed.append(args))
    agent = make_member()
    peer = welcome(agent, captain)
    start = {"type": "start", "generation": 1, "restarts": 0, "data": "", "restore": None, "tasks": {"worker-0": 1}}
    peer.send({**ROSTER, "roster": {"worker-0": "127.0.0.1:2000"}}, start)
    clock.until(lambda: "started" in peer.kinds())
    clock.pass_time(0.9 * LEASE - 0.1)
    assert killed == []
    clock.pass_time(0.6)
    assert killed == [(5001, signal.SIGKILL)]
    clock.until(lambda: "said" in peer.kinds())
    notice = next(message for message in peer.received if message["type"] == "said")
    assert notice["text"] == "worker-host-0 received no message from the captain for 10 s and ended its tasks"
    agent._tasks.child_ended(5001, signal.SIGKILL)
    clock.until(lambda: "ended" in peer.kinds())
