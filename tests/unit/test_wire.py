"""Messages on the wire: complete, bounded, and rejected if malformed."""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import fields
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.agent.captain import events as ev
from paceline.agent.captain import instructions as ins
from paceline.agent.net import frames, messages
from paceline.agent.net.frames import Decoder, WireError, encode, encode_packed
from paceline.agent.profiles import ProfileTaken, TakeProfile
from paceline.agent.stacks import Frame, StacksTaken, TakeStacks, ThreadSamples
from paceline.agent.transfers import requests as req
from paceline.storage.snapshots.manifest import File, SnapshotId

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


SNAPSHOT = SnapshotId(20, 3)
SAVED = ev.PartSaved("host", "worker-0", SNAPSHOT, 2, {"loss": 0.5}, {"torch": "2"}, {"norm": "Infinity"})
NOT_FINITE = ev.MetricNotFinite("host", "worker-0", 3, "loss", "NaN", 25)
EVALUATED = ev.SnapshotEvaluated("host", "evaluator-0", SNAPSHOT, {"accuracy": 0.9})
EXIT = ev.TaskExit(
    "worker-0", 2, None, "SIGKILL", False, "signal", "died", "here", True, 0.5, 30.0, 2.0, "model.pt", False
)
FAILURE = req.Failure(req.STORE, "away", True)
RESOURCES = ev.HostResources(
    2.0**30, 2.0**33, 5.5, 0.0, {"worker-0": ev.TaskResources(1.5, 2.0**30, 2.0**30, 0.0, 7.0)},
    (ev.GpuResources(0.5, 1.0, 2.0),),
)  # fmt: skip
FROM_MEMBERS: list[messages.MemberMessage] = [
    ev.Heartbeat("host", 3, {"worker-0": ev.TaskProgress(7, 0.1, 0.2, {"loss": 0.5})}, 0.5, ("worker-0",)),
    ev.Heartbeat("host", 3, {}, resources=RESOURCES),
    ev.TaskStarted("host", "worker-0", 1, 100, True),
    ev.StartMeasured("host", "worker-0", 1, ev.StartTimes(2.5, 2.6, 2.7, 3.0, None, 4.5)),
    NOT_FINITE,
    ev.MetricNotFinite("host", "worker-0", 3, "loss", "-Infinity"),
    ev.SpareReady("host", 2.5),
    ev.TaskExited("host", EXIT),
    ev.TasksEnded("host", {"worker-0": 1}, {"worker-0": "h:1"}, {"worker-0": "busy"}, {"worker-0": "stack"}),
    SAVED,
    ev.PartStored("host", "worker-0", SNAPSHOT, (File("a/b", 3, "0" * 64),), None, 500, True),
    ev.PartStored("host", "worker-0", SNAPSHOT, error=FAILURE),
    ev.HostPrepared("host", None),
    ev.HostPrepared("host", SNAPSHOT, FAILURE),
    EVALUATED,
    ev.EvaluatorWaiting("host", "evaluator-0"),
    ev.IngestProgress("host", "there", "/data", "other-run", True, 3, 100),
    ev.HostLeaving("host", "SIGTERM"),
    ev.SaveRequested("host", "worker-0"),
    ev.AgreementReply("host", "worker-0", "yes", 1, 3, 40),
    ev.Notice("host", "the disk is full", True),
    ev.MemberLeft("host"),
    StacksTaken(
        "host",
        3,
        "worker-0",
        "",
        100,
        (Frame("train.py", 41, "step"),),
        ((0,),),
        (ThreadSamples(100, (0, 0), 0.1),),
        True,
    ),
    ProfileTaken(
        "host", 3, "worker-0", "it ended", 7, {"plugins/profile/2026_01_02_03_04_05/worker-0.xplane.pb": 9}, True
    ),
]
FROM_CAPTAIN: list[messages.CaptainMessage] = [
    messages.Welcome(10.0, 1.0),
    messages.Wait(),
    messages.HeartbeatReply(3),
    messages.Roster(2, {"worker-0": "h:1"}),
    messages.StartOnHost(2, 1, "/data", "step-20-g3", {"worker-0": 2}),
    TakeStacks(3, ("worker-0",), 10.0),
    TakeProfile(3, ("worker-0",), 20, 120.0, "2026_01_02_03_04_05"),
    ins.EndTasks("host", {"worker-0": 1}, ins.TERMINATE, 30.0),
    ins.DismissMember("host", "succeeded", ""),
    ins.StorePart("host", "worker-0", SNAPSHOT, True),
    ins.DropPart("host", "worker-0", SNAPSHOT),
    ins.PrepareHost("host", None, 2),
    ins.AnnounceCommit("host", SNAPSHOT),
    ins.EvaluateSnapshot("host", "evaluator-0", SNAPSHOT),
    ins.AcknowledgeEvaluation("host", SNAPSHOT),
    ins.AgreeOnStep("host", ("worker-0",), {"say": "at", "which": 1, "count": 12}),
    ins.ReleaseHost("host"),
]
JOINED = ev.MemberJoined(
    "host", "a", 2, True, "node", 3, {"worker-0": 1}, (EXIT,), {"worker-1": "h:1"}, (SAVED,),
    {"evaluator-0": None, "evaluator-1": SNAPSHOT}, (EVALUATED,), "/data", not_finite=(NOT_FINITE,),
)  # fmt: skip


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
