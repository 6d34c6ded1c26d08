"""Messages on the wire: complete, bounded, and rejected if malformed."""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import fields, replace
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.agent.captain import events as ev
from paceline.agent.net import frames, messages
from paceline.agent.net.frames import Decoder, WireError, encode, encode_packed
from support.wire_examples import FROM_CAPTAIN, FROM_MEMBERS, JOINED

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)
MESSAGES = st.dictionaries(st.text(), VALUES).map(lambda fields: {**fields, "type": "x"})


@settings(max_examples=40)
@given(st.lists(MESSAGES, max_size=5), st.integers(1, 64), st.booleans())
def test_messages_survive_any_split(sent_messages: list[frames.Message], size: int, packed: bool) -> None:
    stream = b"".join((encode_packed if packed else encode)(message) for message in sent_messages)
    decoder = Decoder()
    received = []
    for start in range(0, len(stream), size):
        received += decoder.feed(stream[start : start + size])
    assert received == sent_messages


@given(st.binary(max_size=200))
def test_garbage_is_rejected_or_waits_for_more(data: bytes) -> None:
    try:
        Decoder(limit=1000).feed(data)
    except WireError:
        pass


def test_a_huge_message_is_rejected_before_it_is_received() -> None:
    with pytest.raises(WireError, match="over the limit"):
        Decoder().feed(struct.pack(">I", frames.LIMIT + 1))


def test_a_bomb_is_not_unpacked() -> None:
    bomb = zlib.compress(b" " * (frames.UNPACKED_LIMIT + 10), 9)
    with pytest.raises(WireError, match="decompresses to more"):
        Decoder().feed(struct.pack(">I", len(bomb) | 0x80000000) + bomb)


def test_only_members_accept_packed_messages() -> None:
    packed = frames.encode_packed({"type": "roster"})
    assert Decoder().feed(packed) == [{"type": "roster"}]
    with pytest.raises(WireError, match="packed"):
        Decoder(accepts_packed=False).feed(packed)


@pytest.mark.parametrize("payload", [b"[]", b"{}", b'{"type": 1}', b"nonsense", b"[" * 100_000, b"\xff"])
def test_an_invalid_message_is_rejected(payload: bytes) -> None:
    with pytest.raises(WireError):
        Decoder().feed(struct.pack(">I", len(payload)) + payload)


def transfer(message: frames.Message) -> frames.Message:
    return Decoder().feed(encode(message))[0]


@pytest.mark.parametrize("event", FROM_MEMBERS, ids=lambda event: type(event).__name__)
def test_a_message_of_a_member_arrives_unchanged(event: messages.MemberMessage) -> None:
    assert messages.read_member(transfer(messages.member_message(event)), "host") == event


@pytest.mark.parametrize("message", FROM_CAPTAIN, ids=lambda message: type(message).__name__)
def test_a_message_of_the_captain_arrives_unchanged(message: messages.CaptainMessage) -> None:
    assert messages.read_captain(transfer(messages.captain_message(message)), "host") == message


def test_a_join_arrives_unchanged_and_applies_only_to_its_own_host() -> None:
    message = transfer(messages.join_message("run", JOINED))
    assert messages.read_join(message, "run") == JOINED
    for name in ("held", "evaluated", "not_finite"):
        message[name][0]["host"] = "another"
    assert messages.read_join(message, "run") == JOINED


def test_every_type_of_both_directions_is_covered() -> None:
    assert {type(event) for event in FROM_MEMBERS} | {ev.MemberJoined} == set(get_args(messages.MemberMessage))
    assert {type(message) for message in FROM_CAPTAIN} == set(get_args(messages.CaptainMessage))


def test_an_unknown_kind_of_a_newer_peer_is_ignored() -> None:
    assert messages.read_member({"type": "novel"}, "host") is None
    assert messages.read_captain({"type": "novel"}, "host") is None


KINDS = [messages.member_message(event)["type"] for event in FROM_MEMBERS]
KINDS += [messages.captain_message(message)["type"] for message in FROM_CAPTAIN]


@given(st.sampled_from(KINDS), MESSAGES)
def test_any_fields_are_a_message_or_an_error(kind: str, message: frames.Message) -> None:
    for read in (messages.read_member, messages.read_captain):
        try:
            read({**message, "type": kind}, "host")
        except WireError:
            pass


@given(st.sampled_from([*FROM_MEMBERS, *FROM_CAPTAIN, JOINED]), st.data())
def test_a_field_of_another_type_is_an_error_or_the_same_type(message: Any, data: st.DataObject) -> None:
    """The receiver can rely on the declared types."""
    if isinstance(message, ev.MemberJoined):
        plain, read = messages.join_message("run", message), lambda plain, _: messages.read_join(plain, "run")
    elif message in FROM_MEMBERS:
        plain, read = messages.member_message(message), messages.read_member
    else:
        plain, read = messages.captain_message(message), messages.read_captain
    name = data.draw(st.sampled_from(sorted(plain)))
    if name == "type":
        return
    plain[name] = data.draw(VALUES)
    try:
        received = read(plain, "host")
    except WireError:
        return
    assert type(received) is type(message)
    for each in fields(message):
        before, after = getattr(message, each.name), getattr(received, each.name)
        if before is not None and after is not None and not isinstance(before, (float, int)):
            assert isinstance(after, type(before)), (name, before, after)


@given(MESSAGES)
def test_any_join_is_an_event_or_an_error(message: frames.Message) -> None:
    with pytest.raises(WireError):
        messages.read_join(
            {**message, "protocol": message.get("protocol", frames.PROTOCOL), "run": "run", "host": 3}, "run"
        )


@pytest.mark.parametrize(
    "address",
    ["", "h", ":1", "h:", "h:0", "h:65536", "h:-1", "h:1\0", "h\n:1", "\ud800:1", "h:\u0661", "h" * 256 + ":1"],
)
def test_an_address_that_cannot_be_one_is_rejected(address: str) -> None:
    """It would become part of the environment of tasks on other hosts."""
    ended = {"type": "ended", "tasks": {}, "offers": {"worker-0": address}}
    with pytest.raises(WireError, match="not host:port"):
        messages.read_member(ended, "host")
    with pytest.raises(WireError, match="not host:port"):
        messages.read_join({**messages.join_message("run", JOINED), "offers": ended["offers"]}, "run")
    with pytest.raises(WireError, match="not host:port"):
        messages.read_captain({"type": "roster", "generation": 1, "roster": ended["offers"]}, "host")


@pytest.mark.parametrize("serves", ["", "folder", "10.0.0.1:7000", "[fd00::1]:7000"])
def test_a_host_may_serve_its_snapshots_to_others(serves: str) -> None:
    assert messages.read_join(messages.join_message("run", replace(JOINED, serves=serves)), "run").serves == serves


@pytest.mark.parametrize("serves", ["garbage", "host:port", "h:99999999", ":1", "\ud800:5", "x" * 70000 + ":1"])
def test_an_address_that_cannot_serve_snapshots_is_rejected(serves: str) -> None:
    with pytest.raises(WireError, match="serves: not"):
        messages.read_join(messages.join_message("run", replace(JOINED, serves=serves)), "run")


def test_a_size_that_no_file_can_have_is_rejected() -> None:
    """The sum of such sizes could not be written to an event."""
    stored = {"type": "stored", "task": "worker-0", "snapshot": [20, 3], "files": [["a", int("9" * 4300), "0" * 64]]}
    with pytest.raises(WireError, match="'a' is not a valid file of a snapshot"):
        messages.read_member(stored, "host")


def test_another_protocol_or_run_is_rejected() -> None:
    with pytest.raises(WireError, match="protocol"):
        messages.read_join({"type": "join", "protocol": 99}, "run")
    with pytest.raises(WireError, match="this captain belongs to run a"):
        messages.read_join({"type": "join", "protocol": frames.PROTOCOL, "run": "b"}, "a")


def test_frames_are_plain_json() -> None:
    assert json.loads(encode({"type": "x"})[4:]) == {"type": "x"}
