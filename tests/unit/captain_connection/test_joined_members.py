"""A member's connection to the captain: joining, sending, the lease, receiving."""

from __future__ import annotations

import selectors
import socket
import ssl
from pathlib import Path
from typing import Any

import pytest

from paceline.agent.captain import events as ev
from paceline.agent.captain import instructions as ins
from paceline.agent.net import messages
from paceline.agent.net.tls import LinkClosed, TlsLink, context
from paceline.backends import certificates
from support.captain_connections import LEASE, ROSTER, WELCOME, Captain, Clock, Host, await_join, join

pytestmark = pytest.mark.timeout(60)


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
    beat = {"type": "beat", "n": 1, "tasks": {}, "memory": 0.5, "asking": [], "resources": None}
    assert peer.received[-1] == beat


# ---- receiving


def test_messages_that_are_not_about_the_connection_are_passed_on(host: Host, captain: Captain) -> None:
    peer = join(host, captain)
    finish = {"type": "finish", "status": "replaced", "reason": "why"}
    peer.send({"type": "wait"}, {"type": "beat", "n": 1}, {"type": "novel"}, ROSTER, finish)
    host.loop.until(lambda: len(host.received) == 2)
    assert host.received == [messages.Roster(1, {}), ins.DismissMember("worker-host-0", "replaced", "why")]


def test_a_message_in_many_pieces_is_reassembled(host: Host, captain: Captain) -> None:
    peer = join(host, captain)
    roster = {f"worker-{n}": f"{'x' * 100}:{n + 1}" for n in range(10_000)}
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
