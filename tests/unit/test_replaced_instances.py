"""Instances of a host at the captain: one that was replaced is dismissed, and the captain does not keep all of them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.agent.captain import events as ev
from paceline.agent.captain.state_machine import Captain
from paceline.agent.captain_process import connections
from paceline.agent.net import messages
from paceline.agent.net.frames import Decoder, Message, WireError, encode
from paceline.agent.options import Options
from support.captain_connections import Clock
from support.worlds import LEASE, make_plan

HOST, RUN = "worker-host-0", "digits-3f9a"


class Link:
    """A TLS connection without a socket."""

    open = True

    def __init__(self, *_: Any, **__: Any) -> None:
        self.sent: list[Message] = []

    def interest(self) -> int:
        return 0

    def fileno(self) -> int:
        return -1

    def send_bytes(self, *frames: bytes) -> None:
        self.sent += Decoder().feed(b"".join(frames))

    def close(self) -> None: ...


class Members:
    def __init__(self) -> None:
        clock, captain = Clock(), Captain(make_plan(1), RUN, LEASE, 1000.0, 1000.0)
        options = Options(RUN, "captain", "", "", "", "127.0.0.1:1")
        self.connections = connections.Connections(
            options, captain, 1.0, clock, lambda event: [*captain.handle(event, clock.now())].clear()
        )

    def join(self, instance: str, generation: int = 0) -> list[str]:
        """The kinds of messages that the captain answers with."""
        return self.kinds(self.joining(instance, generation))

    def joining(self, instance: str, generation: int = 0, host: str = HOST) -> connections.Connection:
        connection = connections.Connection(self.connections, None)  # type: ignore[arg-type]
        self.connections.open.add(connection)
        joined = ev.MemberJoined(host, instance, 1, True, "", generation)
        (message,) = Decoder().feed(encode(messages.join_message(RUN, joined)))
        self.connections.receive(connection, message)
        return connection

    @staticmethod
    def kinds(connection: connections.Connection) -> list[str]:
        assert isinstance(connection.link, Link)
        return [str(each["type"]) for each in connection.link.sent]


@pytest.fixture
def members(monkeypatch: pytest.MonkeyPatch) -> Iterator[Members]:
    monkeypatch.setattr(connections, "TlsLink", Link)
    monkeypatch.setattr(connections, "context", lambda *_, **__: None)
    monkeypatch.setattr(connections, "Listener", lambda *_: SimpleNamespace())
    yield Members()
    signal.set_wakeup_fd(-1)  # set by the loop


def test_an_instance_that_was_replaced_is_dismissed(members: Members) -> None:
    assert members.join("first") == ["welcome"] and members.join("second") == ["welcome"]
    assert members.join("first") == ["finish"] and members.join("second") == ["welcome"]


def test_only_the_last_instances_of_a_host_are_remembered(members: Members) -> None:
    """A host may be replaced every hour, for months."""
    for number in range(3 * connections.INSTANCES_KEPT):
        assert members.join(str(number)) == ["welcome"]
    assert members.join(str(number - 1)) == ["finish"]
    assert len(members.connections._instances[HOST]) == connections.INSTANCES_KEPT


def test_members_of_a_new_run_wait_until_they_are_released(members: Members) -> None:
    members.connections.hold_joins()
    waiting = members.joining("first")
    assert members.kinds(waiting) == ["wait"]
    members.connections.release_joins()
    assert members.kinds(waiting) == ["wait", "welcome"]
    assert members.join("second") == ["welcome"]


def test_only_the_newest_join_of_a_host_waits(members: Members) -> None:
    members.connections.hold_joins()
    waiting = [members.joining("first") for _ in range(10)]
    assert [members.kinds(each) for each in waiting] == [["wait"]] * 10
    with pytest.raises(WireError, match="not part of this run"):
        members.joining("first", host="elsewhere")
    assert members.connections._held_joins is not None and len(members.connections._held_joins) == 1
    members.connections.release_joins()
    assert [members.kinds(each) for each in waiting] == [["wait"]] * 9 + [["wait", "welcome"]]


def test_no_member_waits_for_a_captain_that_replaces_another(members: Members) -> None:
    """Their tasks run, and would be ended with the lease."""
    members.connections.hold_joins()
    waiting = members.joining("first")
    assert members.join("second", generation=3) == ["welcome"]
    assert members.kinds(waiting) == ["wait", "welcome"]
