"""Messages on the wire: whole, bounded, refused when odd."""

from __future__ import annotations

import json
import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.agent import wire
from paceline.agent.messages import read_join, read_member
from paceline.agent.wire import Decoder, WireError, encode, encode_packed

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)
MESSAGES = st.dictionaries(st.text(), VALUES).map(lambda fields: {**fields, "type": "x"})


@given(st.lists(MESSAGES, max_size=5), st.integers(1, 64), st.booleans())
def test_messages_survive_any_cutting(messages: list[wire.Message], size: int, packed: bool) -> None:
    stream = b"".join((encode_packed if packed else encode)(message) for message in messages)
    decoder = Decoder()
    received = []
    for start in range(0, len(stream), size):
        received += decoder.feed(stream[start : start + size])
    assert received == messages


@given(st.binary(max_size=200))
def test_garbage_is_refused_or_waits_for_more(data: bytes) -> None:
    try:
        Decoder(limit=1000).feed(data)
    except WireError:
        pass


def test_a_huge_message_is_refused_before_it_comes() -> None:
    with pytest.raises(WireError, match="over the limit"):
        Decoder().feed(struct.pack(">I", wire.LIMIT + 1))


def test_a_bomb_is_not_unpacked() -> None:
    bomb = zlib.compress(b" " * (wire.UNPACKED_LIMIT + 10), 9)
    with pytest.raises(WireError, match="unpacks to more"):
        Decoder().feed(struct.pack(">I", len(bomb) | 0x80000000) + bomb)


@pytest.mark.parametrize("payload", [b"[]", b"{}", b'{"type": 1}', b"nonsense", b"[" * 100_000, b"\xff"])
def test_what_is_no_message_is_refused(payload: bytes) -> None:
    with pytest.raises(WireError):
        Decoder().feed(struct.pack(">I", len(payload)) + payload)


@given(st.sampled_from(["beat", "started", "exited", "ended", "leaving", "said", "left", "novel"]), MESSAGES)
def test_any_fields_are_an_event_or_an_error(kind: str, message: wire.Message) -> None:
    try:
        read_member({**message, "type": kind}, "worker-host-0")
    except WireError:
        pass


@given(MESSAGES)
def test_any_join_is_an_event_or_an_error(message: wire.Message) -> None:
    with pytest.raises(WireError):
        read_join({**message, "protocol": message.get("protocol", wire.PROTOCOL), "run": "run", "host": 3}, "run")


def test_another_protocol_or_run_is_refused() -> None:
    with pytest.raises(WireError, match="protocol"):
        read_join({"type": "join", "protocol": 99}, "run")
    with pytest.raises(WireError, match="this is run a"):
        read_join({"type": "join", "protocol": wire.PROTOCOL, "run": "b"}, "a")


def test_frames_are_plain_json() -> None:
    assert json.loads(encode({"type": "x"})[4:]) == {"type": "x"}
