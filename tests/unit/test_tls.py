"""A TLS connection between agents: what one peer sends does not keep an agent from serving others."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from paceline.agent.net.frames import Message, WireError, encode, encode_packed
from paceline.agent.net.tls import SERVER_NAME, TlsLink, context
from paceline.backends import certificates

pytestmark = pytest.mark.timeout(60)
BEAT: Message = {"type": "beat", "n": 1, "tasks": {}}


@contextmanager
def receiving(folder: Path, data: bytes) -> Iterator[TlsLink]:
    """The captain's end of a connection on which a member sends this."""
    certificates.make(folder)
    ours, theirs = socket.socketpair()

    def send() -> None:
        with context(str(folder), "member", server=False).wrap_socket(theirs, server_hostname=SERVER_NAME) as member:
            member.sendall(data)
            member.settimeout(30)
            member.recv(1)  # until the captain closes the connection

    thread = threading.Thread(target=send)
    thread.start()
    link = TlsLink(ours, context(str(folder), "captain", server=True), server=True)
    try:
        yield link
    finally:
        link.close()
        thread.join(30)


def read(link: TlsLink) -> list[Message]:
    """What the next turns deliver, until there is something."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        select.select([link], [], [], 30)
        if messages := link.ready():
            return messages
    raise AssertionError("nothing was received")


def test_a_flood_of_messages_is_read_in_turns(tmp_path: Path) -> None:
    count, turns = 50_000, 0
    with receiving(tmp_path, encode(BEAT) * count) as link:
        while count:
            messages = read(link)
            assert len(messages) < 3000 and messages[0] == BEAT
            count, turns = count - len(messages), turns + 1
    assert turns > 10


def test_a_bomb_is_refused(tmp_path: Path) -> None:
    with receiving(tmp_path, encode_packed(BEAT)) as link, pytest.raises(WireError, match="packed"):
        read(link)
