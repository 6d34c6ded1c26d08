"""A member's line to the captain: real sockets and real TLS, a clock that the test moves, and no name server."""

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

from paceline.agent import events as ev
from paceline.agent import line as module
from paceline.agent import link, lookup, member, messages, spare
from paceline.agent.line import Line
from paceline.agent.link import Link, LinkClosed, context
from paceline.agent.loop import Callback, Loop, Timer
from paceline.agent.member import Member
from paceline.agent.options import LEAVING, Options
from paceline.agent.wire import WireError, encode
from paceline.backends import certificates
from paceline.frameworks import amx
from paceline.plan import to_json
from support.worlds import make_plan

pytestmark = pytest.mark.timeout(60)
NAME = "captain.digits"
SOON = 30.0  # seconds that real sockets may take on a busy machine
LEASE, BEAT = 10.0, 1.0
WELCOME = {"type": "welcome", "lease": LEASE, "beat": BEAT}


class Clock(Loop):
    """The agent's loop with a clock that a test moves: what is ready is ready, and nothing else is due."""

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

    def until(self, happens: Callable[[], object], step: float = 0.0) -> None:
        """`step`: how far the clock moves at each look."""
        limit = time.monotonic() + SOON
        while not happens():
            assert time.monotonic() < limit, "it does not happen"
            self.once(0.02)
            self.time += step

    def settle(self) -> None:
        """Until nothing is ready any more."""
        while self._selector.select(0.0):
            self.once(0.0)


class Peer:
    """The captain's end of one connection."""

    def __init__(self, sock: socket.socket, tls: ssl.SSLContext, loop: Clock) -> None:
        self.link = Link(sock, tls, server=True)
        self.heard: list[dict[str, Any]] = []
        self.over = ""
        self._loop = loop
        self._watch()

    def _watch(self) -> None:
        self._loop.watch(self.link, self.link.interest(), self._ready)

    def _ready(self) -> None:
        try:
            self.heard += self.link.ready()
            self._watch()
        except LinkClosed as error:
            self.over = str(error)
            self.hang_up()

    def says(self, *words: dict[str, Any]) -> None:
        self.link.send_bytes(*map(encode, words))
        self._watch()

    def kinds(self) -> list[str]:
        return [message["type"] for message in self.heard]

    def hang_up(self) -> None:
        self._loop.unwatch(self.link)
        self.link.close()

    def reset(self) -> None:
        self.link.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.hang_up()


class Captain:
    """Listens, and takes who comes; says nothing by itself."""

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
        self.written: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.written.append(data)


class Names:
    """A name server that answers as the test says, and when it says so."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.port = 0  # of the captain; 0: the name has no address
        self.error: Exception = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        self.asked: list[str] = []
        self.gates: dict[str, threading.Event] = {}  # names that are not answered before
        self.always: Exception | None = None  # the answer to a name that every cluster has; None: it is found
        patch.setattr(socket, "getaddrinfo", self._answer)

    def holds(self, name: str) -> threading.Event:
        gate = self.gates[name] = threading.Event()
        return gate

    def is_down(self) -> None:
        self.port, self.error = 0, socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        self.always = self.error

    def is_up(self, port: int) -> None:
        self.port, self.always = port, None

    def _answer(self, host: str, port: int | None, *_: Any, **__: Any) -> list[Any]:
        self.asked.append(host)
        gate, error, there = self.gates.get(host), self.error, self.port
        always = self.always
        if gate is not None:
            assert gate.wait(SOON)
        if host == lookup.ALWAYS:
            if always is not None:
                raise always
            return []
        if not there:
            raise error
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", there))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("tls")
    certificates.make(made)
    return str(made)


@pytest.fixture
def clock() -> Iterator[Clock]:
    yield Clock()
    signal.set_wakeup_fd(-1)  # the loop's


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[Names]:
    made = Names(monkeypatch)
    yield made
    for gate in made.gates.values():
        gate.set()


@pytest.fixture
def captain(folder: str, clock: Clock) -> Iterator[Captain]:
    made = Captain(context(folder, "captain", server=True), clock)
    yield made
    made.close()


class Host:
    """A member, as far as its line knows it."""

    def __init__(self, folder: str, loop: Clock, address: str) -> None:
        self.loop, self.address = loop, address
        self.echo = Echo()
        self.generation = 3
        self.received: list[dict[str, Any]] = []
        self.refuses: Exception | None = None
        echo: Any = self.echo
        options = Options("run", "worker-host-0", "", "", folder, address, lease=LEASE)
        self.line = Line(options, loop, echo, self._join, lambda: {"tasks": {}, "memory": 0.5}, self._receive)

    def _join(self) -> ev.Joined:
        return ev.Joined("worker-host-0", "a", 1, True, "here", self.generation, offers={"worker-0": "127.0.0.1:2000"})

    def _receive(self, message: dict[str, Any]) -> None:
        if self.refuses is not None:
            raise self.refuses
        self.received.append(message)


@pytest.fixture
def host(folder: str, clock: Clock, captain: Captain) -> Iterator[Host]:
    made = Host(folder, clock, f"127.0.0.1:{captain.port}")
    yield made
    made.line.hang_up()


@pytest.fixture
def named(folder: str, clock: Clock, names: Names, captain: Captain) -> Iterator[Host]:
    """One that has the captain's name instead of its address."""
    names.port = captain.port
    made = Host(folder, clock, f"{NAME}:{captain.port}")
    yield made
    made.line.hang_up()


def asks_in(host: Host, captain: Captain, number: int = 0) -> Peer:
    """Once its join is there."""
    host.loop.until(lambda: len(captain.peers) > number and captain.peers[number].heard)
    assert captain.peers[number].kinds() == ["join"]
    return captain.peers[number]


def joined(host: Host, captain: Captain, number: int = 0) -> Peer:
    if not number:
        host.line.dial()
    peer = asks_in(host, captain, number)
    peer.says(WELCOME)
    host.loop.until(lambda: host.line.joined)
    peer.heard.clear()
    return peer


# ---- joining


def test_a_member_says_who_it_is_and_is_in_once_it_is_welcome(host: Host, captain: Captain) -> None:
    host.line.dial()
    peer = asks_in(host, captain)
    said = messages.read_join(peer.heard[0], "run")
    assert (said.host, said.generation, said.offers) == ("worker-host-0", 3, {"worker-0": "127.0.0.1:2000"})
    assert not host.line.joined
    peer.says({"type": "welcome", "lease": 40.0, "beat": 4.0})
    host.loop.until(lambda: host.line.joined)
    assert (host.line.lease, host.line.beat_every) == (40.0, 4.0)
    assert host.received == []


def test_both_ends_show_certificates_of_the_run(host: Host, captain: Captain) -> None:
    peer = joined(host, captain)
    shown = peer.link.sock.getpeercert()
    assert shown is not None and (("commonName", "member"),) in shown["subject"]


def test_a_captain_of_another_run_is_told_nothing(host: Host, clock: Clock, tmp_path: Path, captain: Captain) -> None:
    certificates.make(tmp_path)
    captain._tls = context(str(tmp_path), "captain", server=True)
    host.line.dial()
    clock.until(lambda: captain.peers and captain.peers[0].over)
    clock.settle()
    assert captain.peers[0].heard == [] and not host.line.joined
    clock.pass_time(31.0)
    assert "certificate verify failed" in host.line.alone(30.0).lower().replace("_", " ")


@pytest.mark.parametrize("name", ["member", "tensorboard"])
def test_who_is_of_the_run_is_no_captain_by_that(
    host: Host, clock: Clock, folder: str, captain: Captain, name: str
) -> None:
    captain._tls = context(folder, name, server=True)
    host.line.dial()
    clock.until(lambda: captain.peers and captain.peers[0].over)
    assert captain.peers[0].heard == []


def test_a_member_without_a_certificate_is_not_heard(captain: Captain, clock: Clock, folder: str) -> None:
    tls = ssl.create_default_context(cafile=f"{folder}/ca.pem")
    stranger = Link(socket.create_connection(("127.0.0.1", captain.port)), tls, server=False)
    stranger.send({"type": "join"})
    over: list[str] = []

    def ready() -> None:
        try:
            stranger.ready()
            clock.watch(stranger, stranger.interest(), ready)
        except LinkClosed as error:
            over.append(str(error))
            clock.unwatch(stranger)

    clock.watch(stranger, stranger.interest(), ready)
    clock.until(lambda: over and captain.peers[0].over)
    stranger.close()
    assert captain.peers[0].heard == []


# ---- what is said


def test_what_is_said_before_the_welcome_waits_for_it_and_beats_do_not(host: Host, captain: Captain) -> None:
    host.line.dial()
    peer = asks_in(host, captain)
    host.line.send({"type": "save", "task": "worker-0"})
    host.line.beat()
    host.line.said("hello", True)
    host.loop.settle()
    assert peer.kinds() == ["join"]
    peer.says(WELCOME)
    host.loop.until(lambda: len(peer.heard) == 3)
    assert peer.heard[1:] == [
        {"type": "save", "task": "worker-0"}, {"type": "said", "text": "hello", "warning": True},
    ]  # fmt: skip


def test_what_is_said_without_a_connection_is_lost_as_joining_tells_it_all(host: Host, captain: Captain) -> None:
    host.line.send({"type": "save", "task": "worker-0"})
    peer = joined(host, captain)
    host.line.send({"type": "save", "task": "worker-1"})
    host.loop.until(lambda: peer.heard)
    assert peer.heard == [{"type": "save", "task": "worker-1"}]


def test_but_what_people_should_read_is_kept_up_to_a_limit(host: Host, captain: Captain) -> None:
    for number in range(150):
        host.line.said(f"{number} " + "x" * 3000)
    peer = joined(host, captain)
    host.loop.until(lambda: len(peer.heard) == 100)
    host.line.said("the last")
    host.loop.until(lambda: len(peer.heard) == 101)
    assert [said["text"].split()[0] for said in peer.heard] == [*map(str, range(100)), "the"]
    assert len(peer.heard[0]["text"]) == 2000


def test_it_is_said_once_only(host: Host, captain: Captain) -> None:
    host.line.said("hello")
    peer = joined(host, captain)
    host.loop.until(lambda: peer.heard)
    peer.hang_up()
    host.loop.until(lambda: not host.line.joined)
    host.loop.pass_time(0.06)
    again = joined(host, captain, 1)
    host.line.said("and again")
    host.loop.until(lambda: again.heard)
    assert [said["text"] for said in again.heard] == ["and again"]


# ---- the lease


def test_the_lease_counts_from_when_the_member_asked(host: Host, captain: Captain, clock: Clock) -> None:
    host.line.dial()
    peer = asks_in(host, captain)
    clock.pass_time(0.5)
    peer.says(WELCOME)
    clock.until(lambda: host.line.joined)
    assert host.line.left() == pytest.approx(0.9 * LEASE - 0.5)
    clock.pass_time(4.0)
    host.line.beat()
    clock.until(lambda: "beat" in peer.kinds())
    clock.pass_time(2.0)
    assert host.line.left() == pytest.approx(0.9 * LEASE - 6.5)
    peer.says({"type": "beat", "n": peer.heard[-1]["n"]})
    clock.until(lambda: host.line.left() > 5.0)
    assert host.line.left() == pytest.approx(0.9 * LEASE - 2.0)


def test_an_answer_that_is_late_does_not_shorten_the_lease(host: Host, captain: Captain, clock: Clock) -> None:
    peer = joined(host, captain)
    for _ in range(2):
        clock.pass_time(1.0)
        host.line.beat()
    clock.until(lambda: len(peer.heard) == 2)
    first, second = (message["n"] for message in peer.heard)
    peer.says({"type": "beat", "n": second}, {"type": "beat", "n": first}, {"type": "roster", "roster": {}})
    clock.until(lambda: host.received)
    assert host.line.left() == pytest.approx(0.9 * LEASE)


def test_a_beat_that_nobody_sent_gives_no_lease(host: Host, captain: Captain, clock: Clock) -> None:
    peer = joined(host, captain)
    clock.pass_time(1.0)
    peer.says({"type": "beat", "n": 77}, {"type": "beat"}, {"type": "roster", "roster": {}})
    clock.until(lambda: host.received)
    assert host.line.left() == pytest.approx(0.9 * LEASE - 1.0)


def test_who_has_waited_for_its_welcome_beats_at_once(host: Host, captain: Captain, clock: Clock) -> None:
    """Its lease is older than a beat by then."""
    host.line.dial()
    peer = asks_in(host, captain)
    clock.pass_time(2.0)
    peer.says(WELCOME)
    clock.until(lambda: "beat" in peer.kinds())
    assert peer.heard[-1] == {"type": "beat", "n": 1, "tasks": {}, "memory": 0.5}


# ---- what is heard


def test_what_is_not_about_the_line_is_passed_on(host: Host, captain: Captain) -> None:
    peer = joined(host, captain)
    told = [{"type": "roster", "roster": {}}, {"type": "finish", "status": "replaced"}, {"type": "novel"}]
    peer.says({"type": "wait"}, {"type": "beat", "n": 1}, *told)
    host.loop.until(lambda: len(host.received) == 3)
    assert host.received == told


def test_a_message_in_many_pieces_is_one(host: Host, captain: Captain) -> None:
    peer = joined(host, captain)
    roster = {f"worker-{n}": "x" * 100 for n in range(10_000)}
    peer.says({"type": "roster", "roster": roster})
    host.loop.until(lambda: host.received)
    assert host.received[0]["roster"] == roster


def test_a_captain_that_is_not_understood_is_told_so_and_joined_again(host: Host, captain: Captain) -> None:
    peer = joined(host, captain)
    host.refuses = KeyError("generation")
    peer.says({"type": "start"})
    host.loop.until(lambda: not host.line.joined)
    host.loop.until(lambda: peer.over)
    [said] = peer.heard
    assert said["text"] == "worker-host-0 did not understand the captain: KeyError('generation')" and said["warning"]
    host.loop.pass_time(0.06)
    joined(host, captain, 1)


@pytest.mark.parametrize("frame", [b"\0\0\0\2[]", b"\xff\xff\xff\xff", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_garbage_ends_the_connection_and_another_is_made(host: Host, captain: Captain, frame: bytes) -> None:
    peer = joined(host, captain)
    peer.link.send_bytes(frame)
    host.loop.until(lambda: peer.over)
    assert not host.line.joined
    host.loop.pass_time(0.06)
    joined(host, captain, 1)


def test_a_port_that_speaks_no_tls_is_dialled_again(host: Host, captain: Captain, clock: Clock) -> None:
    clock.unwatch(captain.listener)
    host.line.dial()
    plain, _ = captain.listener.accept()
    plain.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
    clock.until(lambda: clock.waits.count(0.05))
    plain.close()
    clock.watch(captain.listener, selectors.EVENT_READ, captain._accept)
    clock.pass_time(0.06)
    peer = asks_in(host, captain)
    peer.says(WELCOME)
    clock.until(lambda: host.line.joined)


@pytest.mark.parametrize("odd", [{}, {"lease": "long", "beat": 1.0}, {"lease": 10.0}, {"lease": 10.0, "beat": None}])
def test_a_welcome_that_makes_no_sense_is_none(host: Host, captain: Captain, clock: Clock, odd: dict[str, Any]) -> None:
    """So a member that hears nothing else leaves in the end, and does not dial as fast as it can."""
    host.line.dial()
    for number in range(3):
        peer = asks_in(host, captain, number)
        peer.says({"type": "welcome", **odd})
        clock.until(lambda peer=peer: peer.over)
        assert not host.line.joined
        clock.pass_time(10.0)
    assert clock.waits.count(0.05) == 1
    assert "not understood" in host.line.alone(25.0)


# ---- dialling again


def test_a_captain_that_hangs_up_is_dialled_again_and_told_how_things_are_now(host: Host, captain: Captain) -> None:
    peer = joined(host, captain)
    peer.hang_up()
    host.loop.until(lambda: not host.line.joined)
    host.generation = 4
    host.line.said("in between")
    host.loop.pass_time(0.06)
    again = asks_in(host, captain, 1)
    assert again.heard[0]["generation"] == 4
    again.says(WELCOME)
    host.loop.until(lambda: len(again.heard) > 1)
    assert again.heard[1]["text"] == "in between"


def test_what_a_captain_said_before_it_went_is_heard(host: Host, captain: Captain) -> None:
    peer = joined(host, captain)
    peer.says({"type": "finish", "status": "succeeded"})
    peer.reset()
    host.loop.until(lambda: not host.line.joined)
    assert [message["type"] for message in host.received] == ["finish"]


def test_dialling_takes_longer_each_time_up_to_a_second(host: Host, captain: Captain, clock: Clock) -> None:
    captain.close()
    clock.waits.clear()
    host.line.dial()
    for number in range(1, 12):
        clock.until(lambda number=number: len([wait for wait in clock.waits if wait <= 1.0]) == number)
        clock.pass_time(1.0)
    waits = [wait for wait in clock.waits if wait <= 1.0]
    assert waits[:3] == pytest.approx([0.05, 0.075, 0.1125]) and waits[9:11] == [1.0, 1.0]
    assert waits == sorted(waits)


def test_after_a_welcome_it_begins_anew(host: Host, captain: Captain, clock: Clock) -> None:
    captain.close()
    host.line.dial()
    for number in range(1, 6):
        clock.pass_time(1.0)
        clock.until(lambda number=number: len([wait for wait in clock.waits if wait <= 1.0]) == number)
    returned = Captain(captain._tls, clock, captain.port)
    clock.pass_time(1.0)
    peer = asks_in(host, returned)
    peer.says(WELCOME)
    clock.until(lambda: host.line.joined)
    clock.waits.clear()
    peer.hang_up()
    clock.until(lambda: not host.line.joined)
    assert clock.waits == [0.05]
    returned.close()


def test_a_captain_that_says_nothing_is_dialled_again(host: Host, captain: Captain, clock: Clock) -> None:
    host.line.dial()
    first = asks_in(host, captain)
    clock.pass_time(module.DIAL_LIMIT - 1.0)
    clock.settle()
    assert not first.over
    clock.pass_time(2.0)
    clock.until(lambda: first.over)
    asks_in(host, captain, 1)
    clock.pass_time(5.0)
    assert host.line.alone(10.0).endswith(f"127.0.0.1:{captain.port}: no answer for 10 s")


def test_one_that_has_welcomed_is_not(host: Host, captain: Captain, clock: Clock) -> None:
    peer = joined(host, captain)
    clock.pass_time(10 * module.DIAL_LIMIT)
    clock.settle()
    assert not peer.over and host.line.joined and len(captain.peers) == 1


def test_who_has_hung_up_dials_no_more(host: Host, captain: Captain, clock: Clock) -> None:
    peer = joined(host, captain)
    host.line.hang_up()
    clock.until(lambda: peer.over)
    clock.pass_time(100.0)
    clock.settle()
    assert len(captain.peers) == 1 and not host.line.joined and host.line.alone(1.0) == ""


def test_who_hangs_up_while_it_waits_to_dial_does_not(host: Host, captain: Captain, clock: Clock) -> None:
    peer = joined(host, captain)
    peer.hang_up()
    clock.until(lambda: not host.line.joined)
    host.line.hang_up()
    clock.pass_time(100.0)
    clock.settle()
    assert len(captain.peers) == 1


# ---- the captain's name


def test_a_captain_is_dialled_by_its_name(named: Host, names: Names, captain: Captain) -> None:
    joined(named, captain)
    assert names.asked == [NAME]


def test_a_name_that_is_not_there_yet_is_looked_up_again(
    named: Host, names: Names, captain: Captain, clock: Clock
) -> None:
    names.port = 0
    named.line.dial()
    for number in range(1, 4):
        clock.until(lambda number=number: len(clock.waits) == number)
        assert names.asked == [NAME] * number
        clock.pass_time(1.0)
    names.port = captain.port
    clock.until(lambda: len(clock.waits) > 3)
    clock.pass_time(1.0)
    asks_in(named, captain)


def test_a_name_server_that_hangs_holds_nothing_up(named: Host, names: Names, captain: Captain, clock: Clock) -> None:
    gate = names.holds(NAME)
    named.line.dial()
    clock.until(lambda: names.asked)
    clock.pass_time(20.0)
    named.line.dial()  # its answer is for this call, too
    named.line.said("hello")
    assert names.asked == [NAME] and captain.peers == []
    gate.set()
    asks_in(named, captain)
    assert names.asked == [NAME]


def test_who_hangs_up_while_the_name_is_looked_up_does_not_dial(
    named: Host, names: Names, captain: Captain, clock: Clock
) -> None:
    gate = names.holds(NAME)
    named.line.dial()
    clock.until(lambda: names.asked)
    named.line.hang_up()
    clock.pass_time(1.0)
    gate.set()
    clock.until(lambda: named.line._lookup.waiting() == 0.0)
    clock.settle()
    clock.pass_time(100.0)
    clock.settle()
    assert captain.peers == [] and names.asked == [NAME]


@pytest.mark.parametrize("error", [UnicodeError("label empty or too long"), ValueError("embedded null character")])
def test_what_cannot_be_a_name_has_no_address(named: Host, names: Names, clock: Clock, error: Exception) -> None:
    names.port, names.error = 0, error
    named.line.dial()
    clock.until(lambda: clock.waits == [0.05])
    clock.pass_time(10.0)
    clock.until(lambda: len(clock.waits) == 2)
    assert named.line.alone(5.0).endswith(f"(limits.start): {named.address}: the name is not found")


def test_where_no_thread_can_be_made_it_is_tried_again(
    named: Host, captain: Captain, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        named.line.dial()
    clock.pass_time(0.06)
    asks_in(named, captain)


# ---- without a captain


def asking() -> list[threading.Thread]:
    """Those that look up a name, or whether any name server answers."""
    return [thread for thread in threading.enumerate() if thread.name.endswith("(_ask)")]


def test_a_member_without_a_captain_leaves_after_its_limit(host: Host, captain: Captain, clock: Clock) -> None:
    captain.close()
    host.line.dial()
    clock.until(lambda: clock.waits)
    clock.pass_time(8.0)
    assert host.line.alone(8.0) == ""
    clock.pass_time(0.1)
    clock.settle()
    reason = f"left, without a captain for 8 s (limits.start): 127.0.0.1:{captain.port}: Connection refused"
    assert host.line.alone(8.0) == reason
    assert host.echo.written == []


def test_one_that_is_in_does_not_and_counts_from_when_it_lost_it(host: Host, captain: Captain, clock: Clock) -> None:
    peer = joined(host, captain)
    clock.pass_time(100.0)
    assert host.line.alone(8.0) == ""
    peer.hang_up()
    captain.close()
    clock.until(lambda: not host.line.joined)
    clock.pass_time(7.9)
    assert host.line.alone(8.0) == ""
    clock.pass_time(0.2)
    assert host.line.alone(8.0) != ""


def test_one_that_has_to_wait_for_another_instance_of_its_host_does_not(
    host: Host, captain: Captain, clock: Clock
) -> None:
    host.line.dial()
    clock.pass_time(7.0)
    peer = asks_in(host, captain)
    peer.says({"type": "wait"})
    clock.until(lambda: host.line._alone_since == clock.time)
    clock.pass_time(2.0)
    assert host.line.alone(8.0) == "" and not host.line.joined
    peer.says(WELCOME)
    clock.until(lambda: host.line.joined)


def test_a_name_server_that_does_not_answer_is_blamed_and_that_is_said_once(
    named: Host, names: Names, clock: Clock
) -> None:
    names.is_down()
    named.line.dial()
    clock.until(lambda: named.line._lookup.unanswered)
    assert named.line.alone(8.0) == "" and named.echo.written == []
    clock.pass_time(module.UNANSWERED + 0.1)
    assert named.line.alone(8.0) == "" and named.line.alone(8.0) == ""
    because = f"no name server answers, so the captain is not found ({NAME}): is the DNS up?"
    assert named.echo.written == [f"paceline: {because}\n".encode()]
    clock.pass_time(8.0)
    assert named.line.alone(8.0) == f"left, without a captain for 8 s (limits.start): {because}"
    assert len(named.echo.written) == 1


def test_it_is_not_blamed_once_it_has_answered(named: Host, names: Names, captain: Captain, clock: Clock) -> None:
    names.is_down()
    named.line.dial()
    clock.until(lambda: named.line._lookup.unanswered)
    clock.pass_time(module.UNANSWERED + 0.1)
    assert named.line.alone(8.0) == "" and named.echo.written
    names.is_up(captain.port)
    captain.close()
    clock.until(lambda: named.line.alone(8.0).endswith(f"(limits.start): {named.address}: Connection refused"), 1.0)
    assert len(named.echo.written) == 1


def test_a_late_word_about_it_does_not_count_once_a_name_was_found(
    named: Host, names: Names, captain: Captain, clock: Clock
) -> None:
    """Whether any name server answers is asked after a failure, and that may take longer than the next lookup."""
    names.is_down()
    late = names.holds(lookup.ALWAYS)
    named.line.dial()
    clock.until(lambda: lookup.ALWAYS in names.asked)
    names.is_up(captain.port)
    clock.until(lambda: captain.peers, 1.0)
    threads = asking()
    late.set()
    for thread in threads:
        thread.join(SOON)
    assert threads and not named.line._lookup.unanswered


def test_a_name_that_servers_outside_should_know_is_no_trouble_of_the_clusters_own(
    named: Host, names: Names, clock: Clock
) -> None:
    names.is_down()
    names.always = None
    named.line.dial()
    clock.until(lambda: lookup.ALWAYS in names.asked and clock.waits)
    for thread in asking():
        thread.join(SOON)
    clock.pass_time(10.0)
    assert named.line.alone(8.0).endswith(f"(limits.start): {named.address}: the name is not found")
    assert named.echo.written == []


def test_a_lookup_that_takes_that_long_is_the_reason(named: Host, names: Names, clock: Clock) -> None:
    names.holds(NAME)
    named.line.dial()
    clock.until(lambda: names.asked)
    clock.pass_time(10.0)
    assert named.line.alone(8.0) == f"left, without a captain for 8 s (limits.start): {NAME} is still being looked up"


# ---- one connection


@pytest.fixture
def ends(folder: str) -> Iterator[tuple[Link, Link]]:
    ours, theirs = socket.socketpair()
    first = Link(ours, context(folder, "member", server=False), server=False)
    second = Link(theirs, context(folder, "captain", server=True), server=True)
    while not (first.open and second.open):
        first.ready()
        second.ready()
    yield first, second
    first.close()
    second.close()


def test_messages_wait_for_the_handshake(folder: str) -> None:
    ours, theirs = socket.socketpair()
    first = Link(ours, context(folder, "member", server=False), server=False)
    second = Link(theirs, context(folder, "captain", server=True), server=True)
    first.send({"type": "early"})
    heard: list[Any] = []
    while not heard:
        assert first.ready() == []
        heard = second.ready()
    assert heard == [{"type": "early"}]
    first.close()
    second.close()


def test_a_peer_that_reads_slowly_gets_all_of_it(ends: tuple[Link, Link], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "OUTBOX_LIMIT", 8_000_000)  # less than all of it, more than waits at any time
    first, second = ends
    sent = [{"type": "x", "text": str(number) * 100_000} for number in range(30)]
    for _ in range(2):
        for message in sent:
            first.send(message)
        assert first.interest() & selectors.EVENT_WRITE
        heard: list[Any] = []
        while len(heard) < len(sent):
            first.ready()
            heard += second.ready()
        assert heard == sent and first.interest() == selectors.EVENT_READ


def test_a_peer_that_never_reads_is_given_up(ends: tuple[Link, Link], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "OUTBOX_LIMIT", 1_000_000)
    with pytest.raises(LinkClosed, match="the peer does not read"):
        for _ in range(100):
            ends[0].send({"type": "x", "text": "x" * 100_000})


def test_a_message_over_the_limit_is_refused(folder: str, ends: tuple[Link, Link]) -> None:
    ends[0].send_bytes(struct.pack(">I", 5 << 20))
    with pytest.raises(WireError, match="over the limit"):
        ends[1].ready()


def test_what_came_before_the_end_is_given_before_that(ends: tuple[Link, Link]) -> None:
    first, second = ends
    first.send({"type": "finish"})
    first.close()
    assert second.ready() == [{"type": "finish"}]
    with pytest.raises(LinkClosed, match="the peer has gone"):
        second.ready()


class Breaks:
    """A connection that is reset once it was read from; a real reset shows as a plain end here."""

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


def test_also_where_that_is_a_reset(ends: tuple[Link, Link]) -> None:
    first, second = ends
    first.send({"type": "finish"})
    broken: Any = Breaks(second.sock)
    second.sock = broken
    assert second.ready() == [{"type": "finish"}]
    with pytest.raises(LinkClosed, match="Connection reset by peer"):
        second.ready()


def test_also_where_there_is_something_left_to_say(ends: tuple[Link, Link]) -> None:
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
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGCHLD)}
    monkeypatch.setattr(member, "Loop", lambda: clock)
    monkeypatch.setenv(amx.OVERRIDE, amx.ABSENT)  # its probe is a process
    made: list[Member] = []

    def make(**limits: float) -> Member:
        (tmp_path / "plan.json").write_text(to_json(make_plan(1, **limits)))  # type: ignore[arg-type]
        names.port = captain.port
        options = Options(
            "run", "worker-host-0", str(tmp_path / "plan.json"), str(tmp_path), folder, f"{NAME}:{captain.port}",
            lease=LEASE, last_words=str(tmp_path / "last-words"),
        )  # fmt: skip
        made.append(Member(options, "a", 1))
        return made[-1]

    yield make
    for each in made:
        each._line.hang_up()
    for number, handler in before.items():
        signal.signal(number, handler)


def welcomed(made: Member, captain: Captain) -> Peer:
    made.loop.until(lambda: captain.peers and captain.peers[0].heard)  # type: ignore[attr-defined]
    captain.peers[0].says(WELCOME)
    made.loop.until(lambda: made._line.joined)  # type: ignore[attr-defined]
    return captain.peers[0]


def last_words(tmp_path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((tmp_path / "last-words").read_text())
    return found


def test_a_member_that_another_instance_has_replaced_goes_and_says_so(
    make_member: Callable[..., Member], captain: Captain, clock: Clock, tmp_path: Path
) -> None:
    (tmp_path / "staging" / "worker-0").mkdir(parents=True)
    made = make_member()
    peer = welcomed(made, captain)
    peer.says({"type": "finish", "status": "replaced", "reason": "another instance took this host's place"})
    clock.until(lambda: "left" in peer.kinds())
    assert made.run() == LEAVING
    assert (tmp_path / "staging").exists()
    assert last_words(tmp_path) == {"status": "replaced", "reason": "another instance took this host's place"}


def test_a_member_whose_run_is_over_ends_well(
    make_member: Callable[..., Member], captain: Captain, clock: Clock, tmp_path: Path
) -> None:
    (tmp_path / "staging" / "worker-0").mkdir(parents=True)
    made = make_member()
    peer = welcomed(made, captain)
    peer.says({"type": "finish", "status": "succeeded", "reason": ""})
    clock.until(lambda: "left" in peer.kinds())
    assert made.run() == 0
    assert not (tmp_path / "staging").exists()
    assert last_words(tmp_path)["status"] == "succeeded"


def test_a_member_without_a_captain_says_why_it_left(
    make_member: Callable[..., Member], names: Names, captain: Captain, clock: Clock, tmp_path: Path
) -> None:
    names.holds(NAME)
    made = make_member(start=8.0)
    clock.until(lambda: names.asked)
    clock.pass_time(9.0)
    clock.until(lambda: not clock._running)
    assert made.run() == 0
    reason = f"left, without a captain for 8 s (limits.start): {NAME} is still being looked up"
    assert last_words(tmp_path) == {"status": "left", "reason": reason}


def test_a_member_that_leaves_while_the_name_is_looked_up_does_not_come_back(
    make_member: Callable[..., Member], names: Names, captain: Captain, clock: Clock, tmp_path: Path
) -> None:
    gate = names.holds(NAME)
    made = make_member(start=8.0)
    clock.until(lambda: names.asked)
    kept: list[Callable[[], None]] = []
    made._keeping.close = kept.append  # type: ignore[method-assign]  # what it keeps takes a while
    made._told_to_go()
    clock.until(lambda: kept)
    clock.pass_time(1.0)
    gate.set()
    clock.until(lambda: made._line._lookup.waiting() == 0.0)
    clock.settle()
    clock.pass_time(20.0)
    clock.settle()
    assert captain.peers == [] and len(kept) == 1
    kept[0]()
    assert made.run() == LEAVING
    assert not (tmp_path / "last-words").exists()


def test_a_member_that_hears_nothing_for_a_lease_ends_its_tasks(
    make_member: Callable[..., Member], captain: Captain, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(spare, "start_cold", lambda *_: 5001)
    monkeypatch.setattr(os, "killpg", lambda *words: killed.append(words))
    made = make_member()
    peer = welcomed(made, captain)
    start = {"type": "start", "generation": 1, "restarts": 0, "data": "", "restore": None, "tasks": {"worker-0": 1}}
    peer.says({"type": "roster", "roster": {"worker-0": "127.0.0.1:2000"}}, start)
    clock.until(lambda: "started" in peer.kinds())
    clock.pass_time(0.9 * LEASE - 0.1)
    assert killed == []
    clock.pass_time(0.6)
    assert killed == [(5001, signal.SIGKILL)]
    clock.until(lambda: "said" in peer.kinds())
    said = next(message for message in peer.heard if message["type"] == "said")
    assert said["text"] == "worker-host-0 heard nothing from the captain for 10 s and ended its tasks"
    made._tasks.child_ended(5001, signal.SIGKILL)
    clock.until(lambda: "ended" in peer.kinds())
