"""One TLS connection between two ends."""

from __future__ import annotations

import selectors
import socket
import ssl
import struct
from collections.abc import Iterator
from typing import Any

import pytest

from paceline.agent.net import tls as links
from paceline.agent.net.frames import WireError
from paceline.agent.net.tls import LinkClosed, TlsLink, context

pytestmark = pytest.mark.timeout(60)


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
