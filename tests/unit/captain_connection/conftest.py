"""A captain, and members that connect to it."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from paceline.agent.net.tls import context
from paceline.backends import certificates
from support.captain_connections import NAME, Captain, Clock, Host, Names


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
