"""A real captain and a real member, against peers that send what they should not: none of it harms the run."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import signal
import socket
import ssl
import struct
import subprocess
import sys
import time
import uuid
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline import plan as plans
from paceline.agent.net.frames import Decoder, Message, WireError, encode, encode_packed
from paceline.agent.net.task_request import UNKNOWN, ask_captain
from paceline.agent.net.tls import SERVER_NAME, context
from paceline.agent.options import Options
from paceline.backends import certificates
from support import runs
from support.ports import free_port
from support.runs import eventually

pytestmark = pytest.mark.timeout(400)

RUN = "attack-0000"
LEASE_S = 8.0  # long enough for this process to be delayed between two of its messages
INTRODUCTION_S = 10.0
HOSTS = ("worker-host-0", "worker-host-1")
AGENT = runs.SOURCE / "paceline" / "agent" / "__main__.py"


def make_plan(command: list[str]) -> plans.Plan:
    role = plans.Role("worker", tuple(command), {}, plans.GROUP, True, True)
    hosts = tuple(plans.Host(f"worker-host-{i}", "worker", i, 0, 0, None, None, (f"worker-{i}",)) for i in (0, 1))
    tasks = tuple(plans.Task(f"worker-{i}", "worker", i, f"worker-host-{i}", 0, i) for i in (0, 1))
    restart, limits = plans.Restart(10, None, False), plans.Limits(60, None, 5)
    return plans.Plan(plans.VERSION, "attack", "none", "", "/", (role,), hosts, tasks, restart, limits)


class Agent:
    """One host's processes, started as a backend starts them."""

    def __init__(self, folder: Path, host: str, port: int, command: list[str] | None = None) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.port, self.tls = folder, port, folder / "tls"
        (folder / "plan.json").write_text(plans.to_json(make_plan(command or ["true"])))
        if not self.tls.exists():
            certificates.make(self.tls)
        paths = (str(folder / "plan.json"), str(folder), str(self.tls))
        options = Options(RUN, host, *paths, f"127.0.0.1:{port}", interpreter=sys.executable, lease=LEASE_S)
        self._log = (folder / "agents.log").open("ab")
        self.keeper = subprocess.Popen(
            [sys.executable, "-I", "-S", str(AGENT), options.to_json()], stdin=subprocess.DEVNULL, stdout=self._log,
            stderr=self._log, env={**os.environ, "PACELINE_HOME": str(folder)},
        )  # fmt: skip

    def log_tail(self) -> str:
        return (self.folder / "agents.log").read_text(errors="replace")[-3000:]

    @property
    def pid(self) -> int:
        """The pid of the agent itself."""
        keeper = psutil.Process(self.keeper.pid)
        return eventually("the agent", lambda: next((child.pid for child in keeper.children()), 0), more=self.log_tail)

    def events(self, *kinds: str) -> list[dict[str, Any]]:
        path = self.folder / "events.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [event for event in map(json.loads, lines) if event["event"] in kinds]

    def clean_up(self) -> None:
        until = time.monotonic() + runs.GONE_S
        self.keeper.kill()
        self.keeper.wait(runs.LIMIT_S)
        while (remaining := runs.processes(self.folder)) and time.monotonic() < until:
            for process in remaining:
                runs.kill(process.pid)
            time.sleep(0.02)
        self._log.close()


class Peer:
    """One connection of a member or a captain, which speaks the protocol."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        self.sock = sock
        self._decoder = Decoder()
        self._inbox: list[Message] = []

    def send(self, message: Message) -> None:
        self.sock.sendall(encode(message))

    def read(self, kind: str, limit: float = 60) -> Message:
        """The next message of that kind; others are dropped."""
        until = time.monotonic() + limit
        while True:
            while self._inbox:
                message = self._inbox.pop(0)
                if message["type"] == kind:
                    return message
            assert time.monotonic() < until, f"no {kind} within {limit:g} s"
            self.sock.settimeout(max(0.1, until - time.monotonic()))
            data = self.sock.recv(65536)
            assert data, f"the connection ended before {kind}"
            self._inbox += self._decoder.feed(data)

    def assert_closed(self, limit: float = INTRODUCTION_S - 1) -> None:
        """The other side closes the connection without sending a message."""
        self.sock.settimeout(limit)
        try:
            while data := self.sock.recv(65536):
                assert not self._decoder.feed(data), "the other side has answered"
        except TimeoutError:
            raise AssertionError(f"the connection is still open after {limit:g} s") from None
        except (OSError, WireError):
            pass

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.close()


def dial(port: int) -> socket.socket | None:
    try:
        return socket.create_connection(("127.0.0.1", port), timeout=10)
    except OSError:
        return None


def join(host_name: str, **overrides: Any) -> Message:
    """The first message of a member; `overrides` replace its fields."""
    task = host_name.replace("-host", "")
    message: Message = {
        "type": "join", "protocol": 1, "run": RUN, "host": host_name, "instance": uuid.uuid4().hex, "agent": 1,
        "replaces": True, "place": "", "generation": 0, "running": {}, "exits": [], "held": [],
        "offers": {task: f"127.0.0.1:{free_port()}"},
    }  # fmt: skip
    return {**message, **overrides}


class Captain(Agent):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "captain", free_port())

    def peer(self, tls: ssl.SSLContext | None = None) -> Peer:
        plain = eventually("the captain listens", lambda: dial(self.port), more=self.log_tail)
        assert plain is not None
        tls = tls or context(str(self.tls), "member", server=False)
        return Peer(tls.wrap_socket(plain, server_hostname=SERVER_NAME))

    def member(self, host: str, **overrides: Any) -> Peer:
        peer = self.peer()
        peer.send(join(host, **overrides))
        peer.read("welcome")
        return peer

    def still_leads(self, *members: Peer) -> None:
        """Two valid members form a generation, train and end the run; the captain is still the same process."""
        peers = list(members) or [self.member(host) for host in HOSTS]
        generations = set()
        for peer, host in zip(peers, HOSTS, strict=True):
            task = host.replace("-host", "")
            assert set(peer.read("roster")["roster"]) == {"worker-0", "worker-1"}
            start = peer.read("start")
            generations.add(start["generation"])
            attempt = start["tasks"][task]
            peer.send({"type": "started", "task": task, "attempt": attempt, "pid": 1, "warm": False})
            peer.send({"type": "beat", "n": 77, "tasks": {task: [3, 0.0, 0.0, {"loss": 0.5}]}, "memory": 0.1})
            assert peer.read("beat")["n"] == 77
            exit_fields = {
                "code": 0,
                "signal": None,
                "expected": False,
                "cause": "",
                "detail": "",
                "place": "",
                "age": 0.0,
            }
            peer.send({"type": "exited", "exit": {"task": task, "attempt": attempt, **exit_fields}})
        assert len(generations) == 1
        for peer in peers:
            assert peer.read("finish")["status"] == "succeeded"
            peer.send({"type": "left"})
        assert self.keeper.wait(60) == 0, self.log_tail()
        report = json.loads((self.folder / "report.json").read_text())
        assert (report["status"], report["steps"]) == ("succeeded", 3)
        assert not self.events("captain-returned"), self.log_tail()

        def strict(text: str) -> Any:
            raise AssertionError(f"{text} is not JSON")

        for line in (self.folder / "events.jsonl").read_text().splitlines():
            json.loads(line, parse_constant=strict)


@pytest.fixture
def captain(tmp_path: Path) -> Iterator[Captain]:
    started = Captain(tmp_path / "run")
    try:
        yield started
    finally:
        started.clean_up()


def careless() -> ssl.SSLContext:
    """A client that trusts any server."""
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    tls.check_hostname = False
    tls.verify_mode = ssl.CERT_NONE
    return tls


def with_certificate(folder: Path, name: str = "member") -> ssl.SSLContext:
    tls = careless()
    tls.load_cert_chain(folder / f"{name}.pem", folder / f"{name}.key")
    return tls


# ---- strangers


def assert_turned_away(captain: Captain, tls: ssl.SSLContext) -> None:
    """Its handshake fails, or its connection is closed without an answer."""
    try:
        peer = captain.peer(tls)
        with contextlib.suppress(OSError):
            peer.send(join(HOSTS[0]))
            peer.send({"type": "stop", "reason": "because"})
        peer.assert_closed()
    except (ssl.SSLError, ConnectionError):
        pass


def test_a_stranger_without_a_certificate_is_refused(captain: Captain) -> None:
    assert_turned_away(captain, careless())
    assert not captain.events("member-joined")
    captain.still_leads()


def test_a_certificate_of_another_run_is_refused(captain: Captain, tmp_path: Path) -> None:
    certificates.make(tmp_path / "other")
    for name in ("member", "captain"):
        assert_turned_away(captain, with_certificate(tmp_path / "other", name))
    assert not captain.events("member-joined")
    captain.still_leads()


def test_an_expired_certificate_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[Any] = []
    generate = certificates.ec.generate_private_key

    def same_authority(curve: Any) -> Any:
        keys.append(keys[0] if len(keys) == 3 else generate(curve))
        return keys[-1]

    monkeypatch.setattr(certificates.ec, "generate_private_key", same_authority)
    (tmp_path / "run").mkdir()
    certificates.make(tmp_path / "run" / "tls")
    certificates.make(tmp_path / "expired", valid=datetime.timedelta(minutes=-1))
    captain = Captain(tmp_path / "run")
    try:
        assert_turned_away(captain, with_certificate(tmp_path / "expired"))
        assert not captain.events("member-joined")
        captain.still_leads()
    finally:
        captain.clean_up()


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1:DeprecationWarning")
def test_an_old_protocol_is_refused(captain: Captain) -> None:
    old = context(str(captain.tls), "member", server=False)
    old.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    old.maximum_version = ssl.TLSVersion.TLSv1_1
    assert_turned_away(captain, old)
    captain.still_leads()


def test_plain_garbage_is_refused(captain: Captain) -> None:
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\0" * 100_000, os.urandom(100_000), encode(join(HOSTS[0]))):
        sock = eventually("the captain listens", lambda: dial(captain.port))
        assert sock is not None
        with sock, contextlib.suppress(OSError):
            sock.sendall(garbage)
            sock.settimeout(INTRODUCTION_S + 5)
            while sock.recv(65536):
                pass
    captain.still_leads()


# ---- data that is not a message


def bomb() -> bytes:
    packer = zlib.compressobj(9)
    zeros = b" " * (16 << 20)
    payload = b"".join([packer.compress(b'{"type": "join", "x": "'), *(packer.compress(zeros) for _ in range(32))])
    payload += packer.flush()
    return struct.pack(">I", len(payload) | 0x80000000) + payload


def frame(payload: bytes, length: int | None = None, packed: bool = False) -> bytes:
    header = len(payload) if length is None else length
    return struct.pack(">I", header | 0x80000000 if packed else header) + payload


NOT_A_MESSAGE: dict[str, Callable[[], bytes]] = {
    "garbage": lambda: os.urandom(200_000),
    "a huge length": lambda: frame(b"x" * 100_000, 0x7FFFFFFF),
    "a huge packed length": lambda: frame(b"x" * 100_000, 0xFFFFFFFF),
    "just over the limit": lambda: frame(b"", (8 << 20) + 1),
    "deep lists": lambda: frame(b'{"type": "join", "x": ' + b"[" * 500_000 + b"]" * 500_000 + b"}"),
    "deep objects": lambda: frame(b'{"type": "join", "x": ' + b'{"a":' * 300_000 + b"1" + b"}" * 300_000 + b"}"),
    "a huge number": lambda: frame(b'{"type": "join", "protocol": ' + b"9" * 1_000_000 + b"}"),
    "a bomb": bomb,
    "a truncated packed message": lambda: frame(zlib.compress(b'{"type": "join"}')[:-4], packed=True),
    "not JSON": lambda: frame(b"join"),
    "not UTF-8": lambda: frame(b'{"type": "\xff\xfe"}'),
    "not an object": lambda: frame(b'["join"]'),
    "no type": lambda: frame(b'{"kind": "join"}'),
    "a type that is not a string": lambda: frame(b'{"type": ["join"]}'),
    "an empty message": lambda: frame(b""),
}  # fmt: skip


@pytest.mark.parametrize("case", NOT_A_MESSAGE)
def test_an_invalid_message_ends_only_its_connection(captain: Captain, case: str) -> None:
    agent = captain.pid
    data = NOT_A_MESSAGE[case]()
    for joined in (False, True):
        peer = captain.member(HOSTS[0]) if joined else captain.peer()
        with contextlib.suppress(OSError):
            peer.sock.sendall(data)
        peer.assert_closed()
    with open(f"/proc/{agent}/status") as file:
        peak = next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))
    assert peak < 400 * 1024, f"the captain used {peak >> 10} MiB"
    captain.still_leads()


# ---- unexpected and invalid messages


@pytest.mark.parametrize(
    "message",
    [
        {"type": "beat", "n": 1, "tasks": {}},
        {"type": "exited", "exit": {}},
        {"type": "finish"},
        {"type": "nonsense"},
        join(HOSTS[0], run="attack-ffff"),
        join("worker-host-7"),
        join("captain"),
        join(HOSTS[0], protocol=2),
        join(HOSTS[0], host=["worker-host-0"]),
        join(HOSTS[0], host="x" * 1_000_000),
        join(HOSTS[0], running=[1]),
        join(HOSTS[0], running={"worker-0": "1"}),
        join(HOSTS[0], offers={"worker-0": 5}),
        join(HOSTS[0], exits={"worker-0": 1}),
        join(HOSTS[0], exits=[{"task": "worker-0"}]),
        join(HOSTS[0], held=["step-1"]),
        join(HOSTS[0], generation=2**60),
        join(HOSTS[0], generation=1.5),
    ],
    ids=lambda message: json.dumps({k: v for k, v in message.items() if k not in ("instance", "offers")})[:60],
)
def test_a_wrong_first_message_ends_the_connection(captain: Captain, message: Message) -> None:
    peer = captain.peer()
    peer.send(message)
    peer.assert_closed()
    assert not captain.events("member-joined")
    captain.still_leads()


EXIT = {"task": "worker-0", "attempt": 1, "code": 1, "signal": None, "expected": False, "cause": "signal", "detail": ""}


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


WRONG_MESSAGES: dict[str, list[Message]] = {
    "unknown types": [{"type": kind} for kind in ("", "join", "welcome", "start", "roster", "finish", "x" * 1000)],
    "exits of tasks that never ran": [
        {"type": "exited", "exit": {**EXIT, "place": "", "age": 0}},
        {"type": "exited", "exit": {**EXIT, "task": "worker-9", "place": "", "age": 0}},
        {"type": "ended", "tasks": {"worker-0": 1, "worker-9": 2}, "offers": {"worker-9": "127.0.0.1:1"}},
        {"type": "ended", "tasks": {}, "offers": {}, "stacks": {"worker-9": "x"}, "states": {"worker-9": "busy"}},
        {"type": "started", "task": "worker-1", "attempt": 4, "pid": 1, "warm": False},
        {"type": "started", "task": "worker-9", "attempt": 1, "pid": 1, "warm": False},
        {"type": "beat", "n": 1, "tasks": {"worker-1": [5, 0, 0, {}], "worker-9": [5, 0, 0, {}]}},
    ],
    "a start without fields": [{"type": "started"}],
    "an exit that is not an object": [{"type": "exited", "exit": "now"}],
    "a negative age": [{"type": "exited", "exit": {**EXIT, "place": "", "age": -1}}],
    "an infinite age": [{"type": "exited", "exit": {**EXIT, "place": "", "age": float("inf")}}],
    "invalid progress": [{"type": "beat", "n": 1, "tasks": {"worker-0": 5}}],
    "a step that is a string": [{"type": "beat", "n": 1, "tasks": {"worker-0": ["5", 0, 0, {}]}}],
    "a metric that is NaN": [{"type": "beat", "n": 1, "tasks": {"worker-0": [5, 0, 0, {"loss": float("nan")}]}}],
    "an infinite metric": [{"type": "beat", "n": 1, "tasks": {"worker-0": [5, 0, 0, {"loss": float("inf")}]}}],
    "a metric beyond floats": [{"type": "beat", "n": 1, "tasks": {"worker-0": [5, 0, 0, {"loss": 10**400}]}}],
    "memory beyond floats": [{"type": "beat", "n": 1, "tasks": {}, "memory": 10**400}],
    "memory that is NaN": [{"type": "beat", "n": 1, "tasks": {}, "memory": float("nan")}],
    "a step that is too large": [{"type": "beat", "n": 1, "tasks": {"worker-0": [10**400, 0, 0, {}]}}],
    "snapshots of tasks that never ran": [
        {"type": "saved", "task": "worker-9", "snapshot": [5, 1], "parts": 1, "metrics": {}, "versions": {}},
        {"type": "saved", "task": "worker-1", "snapshot": [5, 1], "parts": 1, "metrics": {}, "versions": {}},
        {"type": "stored", "task": "worker-0", "snapshot": [5, 1], "files": [], "at": 0},
        {"type": "stored", "task": "worker-9", "snapshot": [5, 7], "files": [["a", 1, "0" * 64]], "at": 0},
        {"type": "prepared", "snapshot": [5, 1]},
        {"type": "prepared", "snapshot": [5, 1], "error": {"kind": "damaged", "text": "x"}},
    ],
    "a path that leads out": [
        {"type": "stored", "task": "worker-0", "snapshot": [5, 1], "files": [["../a", 1, "0" * 64]], "at": 0}
    ],
    "invalid files": [{"type": "stored", "task": "worker-0", "snapshot": [5, 1], "files": [["a", 1]], "at": 0}],
    "an invalid error": [{"type": "prepared", "snapshot": [5, 1], "error": "x"}],
    "too many parts": [{"type": "saved", "task": "worker-0", "snapshot": [5, 1], "parts": 10**9}],
    "snapshot numbers that are too large": [
        {"type": "saved", "task": "worker-0", "snapshot": [-1, 10**400], "parts": 1}
    ],
    "half a character": [{"type": "said", "text": "\ud800 \x00 \x1b[31m"}, {"type": "leaving", "reason": "\udfff"}],
    "a number of beats that is a list": [{"type": "beat", "n": nested(200), "tasks": {}}],
}


@pytest.mark.parametrize("case", WRONG_MESSAGES)
def test_wrong_messages_of_a_member_do_no_harm(captain: Captain, case: str) -> None:
    """Sent before the generation and again during it; after that, valid members can still train."""
    agent = captain.pid
    for message in WRONG_MESSAGES[case]:
        peer = captain.member(HOSTS[0])
        with contextlib.suppress(OSError):
            peer.send(message)
            peer.send({"type": "beat", "n": 5, "tasks": {}})
        with contextlib.suppress(OSError, AssertionError):
            peer.read("beat", 1)
        peer.close()
    members = [captain.member(host) for host in HOSTS]
    assert captain.pid == agent, captain.log_tail()
    for peer, host in zip(members, HOSTS, strict=True):
        start = peer.read("start")
        assert start["generation"] == 1
        with contextlib.suppress(OSError):
            for message in WRONG_MESSAGES[case] if host == HOSTS[0] else ():
                if message["type"] not in ("exited", "ended"):  # those would be true now
                    peer.send(message)
        peer.close()
    captain_leads_again(captain)
    assert captain.pid == agent, captain.log_tail()


def captain_leads_again(captain: Captain, generations: tuple[int, ...] = (2,)) -> None:
    """Like still_leads, for hosts that were replaced during a generation: the next one has a higher number."""
    members = [captain.member(host) for host in HOSTS]
    generation = {peer.read("start")["generation"] for peer in members}
    assert len(generation) == 1 and generation <= {*generations}, captain.events("restart", "generation-formed")
    for peer in members:
        peer.send({"type": "beat", "n": 9, "tasks": {}})
        assert peer.read("beat")["n"] == 9

    def strict(text: str) -> Any:
        raise AssertionError(f"{text} is not JSON")

    for line in (captain.folder / "events.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=strict)


def test_lists_just_deep_enough_to_be_read(captain: Captain) -> None:
    """Data that can be decoded may be too deep to encode: the captain repeats a beat's number."""
    agent = captain.pid
    for depth in range(940, 1000, 2):
        peer = captain.member(HOSTS[0])
        with contextlib.suppress(OSError):
            peer.sock.sendall(frame(b'{"type":"beat","tasks":{},"n":' + b"[" * depth + b"]" * depth + b"}"))
        with contextlib.suppress(OSError, AssertionError, WireError):
            peer.read("beat", 0.2)
        peer.close()
    members = [captain.member(host) for host in HOSTS]
    assert captain.pid == agent, captain.log_tail()
    captain.still_leads(*members)


def test_command_lines_of_other_versions_learn_why_a_request_is_not_carried_out(captain: Captain) -> None:
    for request in ({"type": "stacks", "tasks": "all"}, {"type": "scale"}, {"type": "pause", "within": "soon"}):
        peer = captain.peer()
        peer.send(request)
        assert peer.read("refused")["reason"].startswith("invalid request: ")
        peer.close()
    unknown = ask_captain(f"127.0.0.1:{captain.port}", str(captain.tls), "member", {"type": "added-later"}, 20.0)
    assert list(unknown) == [{"type": UNKNOWN}]


def test_one_member_cannot_speak_for_another(captain: Captain) -> None:
    members = [captain.member(host) for host in HOSTS]
    for peer in members:
        peer.read("start")
    claim = {**EXIT, "task": "worker-1", "code": 0, "cause": "", "place": "", "age": 0.0}
    members[0].send({"type": "exited", "exit": claim})
    members[0].send({"type": "beat", "n": 3, "tasks": {}})
    members[0].read("beat")
    assert not [event for event in captain.events("task-exited") if event["task"] == "worker-1"]


def test_a_member_that_ends_its_tasks_on_its_own_causes_a_restart(captain: Captain) -> None:
    """A member that lost its lease ends its tasks on its own and reports it: the group must not wait forever."""
    members = [captain.member(host) for host in HOSTS]
    for peer in members:
        peer.read("start")
    for number, peer in enumerate(members):
        offers = {f"worker-{number}": f"127.0.0.1:{free_port()}"}
        peer.send({"type": "ended", "tasks": {f"worker-{number}": 1}, "offers": offers})

    def check() -> bool:
        for peer in members:
            peer.send({"type": "beat", "n": 1, "tasks": {}})
        return len(captain.events("generation-formed")) == 2

    eventually("the next generation", check, more=lambda: str(captain.events("task-exited", "restart")))
    for peer in members:
        assert peer.read("start")["generation"] == 2


# ---- joining again


def test_a_member_that_joins_twice_replaces_its_own_connection(captain: Captain) -> None:
    message = join(HOSTS[0])
    first = captain.peer()
    first.send(message)
    first.read("welcome")
    first.send(message)
    first.send({"type": "beat", "n": 4, "tasks": {}})
    assert first.read("beat")["n"] == 4
    second = captain.peer()
    second.send(message)
    second.read("welcome")
    first.assert_closed()
    captain.still_leads(second, captain.member(HOSTS[1]))


def test_a_member_that_reconnects_during_a_generation_keeps_its_task(captain: Captain) -> None:
    message = join(HOSTS[0])
    first = captain.peer()
    first.send(message)
    other = captain.member(HOSTS[1])
    attempt = first.read("start")["tasks"]["worker-0"]
    other.read("start")
    first.close()
    eventually("the loss is noticed", lambda: captain.events("member-lost"), more=captain.log_tail)
    again = captain.peer()
    again.send({**message, "generation": 1, "running": {"worker-0": attempt}, "offers": {}})
    again.read("welcome")
    for number, peer in enumerate((again, other)):
        exit_fields = {
            "task": f"worker-{number}",
            "attempt": 1,
            "code": 0,
            "signal": None,
            "cause": "",
            "detail": "",
            "place": "",
        }
        peer.send({"type": "exited", "exit": {**exit_fields, "age": 0.0}})
    for peer in (again, other):
        assert peer.read("finish")["status"] == "succeeded"
        peer.send({"type": "left"})
    assert captain.keeper.wait(60) == 0
    assert not captain.events("restart") and len(captain.events("generation-formed")) == 1


def test_an_old_instance_is_dismissed_once_it_was_replaced(captain: Captain) -> None:
    old = join(HOSTS[0], replaces=False)
    first = captain.peer()
    first.send(old)
    first.read("welcome")
    new = captain.member(HOSTS[0])
    first.assert_closed()
    ghost = captain.peer()
    ghost.send({**old, "generation": 5, "running": {"worker-0": 1}})
    assert ghost.read("finish")["status"] == "replaced"
    ghost.send({"type": "exited", "exit": {**EXIT, "place": "", "age": 0.0}})
    captain.still_leads(new, captain.member(HOSTS[1]))


def test_the_next_generation_waits_for_the_lease_of_a_host_that_may_still_run(captain: Captain) -> None:
    """Another instance of a host joins, and the old one may not have ended: two groups must not train at once."""
    members = [captain.member(host, replaces=False) for host in HOSTS]
    for peer in members:
        peer.read("start")
    began = time.monotonic()
    members[1].send({"type": "beat", "n": 1, "tasks": {}})  # its lease starts here
    members[1].read("beat")
    members[1].close()
    replacement = captain.peer()
    replacement.send(join(HOSTS[1], replaces=False))
    replacement.read("wait")

    def lease_expired() -> bool:
        members[0].send({"type": "beat", "n": 1, "tasks": {}})
        return bool(captain.events("task-exited"))

    eventually("its lease has expired", lease_expired, more=captain.log_tail)
    end = members[0].read("end")
    assert end["tasks"] == {"worker-0": 1}
    offers = {"worker-0": f"127.0.0.1:{free_port()}"}
    members[0].send({"type": "ended", "tasks": end["tasks"], "offers": offers})
    replacement.read("welcome")
    assert replacement.read("start")["generation"] == 2
    assert time.monotonic() - began > LEASE_S - 1.5


def test_a_host_that_reconnects_comes_before_an_instance_that_waits_to_replace_it(captain: Captain) -> None:
    message = join(HOSTS[0], replaces=False)
    first = captain.peer()
    first.send(message)
    other = captain.member(HOSTS[1])
    attempt = first.read("start")["tasks"]["worker-0"]
    waiting = captain.peer()
    waiting.send(join(HOSTS[0], replaces=False))
    waiting.read("wait")
    again = captain.peer()  # before the captain knows that the first connection has ended
    again.send({**message, "generation": 1, "running": {"worker-0": attempt}, "offers": {}})
    again.read("welcome")
    again.close()
    eventually("the loss is noticed", lambda: captain.events("member-lost"), more=captain.log_tail)
    third = captain.peer()
    third.send({**message, "generation": 1, "running": {"worker-0": attempt}, "offers": {}})
    third.read("welcome")
    for number, peer in enumerate((third, other)):
        exit_fields = {**EXIT, "task": f"worker-{number}", "code": 0, "cause": "", "place": "", "age": 0.0}
        peer.send({"type": "exited", "exit": exit_fields})
    for peer in (third, other):
        assert peer.read("finish")["status"] == "succeeded"
        peer.send({"type": "left"})
    assert waiting.read("finish")["status"] == "succeeded"
    assert captain.keeper.wait(60) == 0 and not captain.events("restart")


def test_the_training_instance_comes_before_one_that_joined_a_returned_captain_first(captain: Captain) -> None:
    message = join(HOSTS[0], replaces=False)
    first = captain.peer()
    first.send(message)
    captain.member(HOSTS[1], replaces=False).read("start")
    attempt = first.read("start")["tasks"]["worker-0"]
    os.kill(captain.pid, signal.SIGKILL)
    eventually("the captain returns", lambda: captain.events("captain-returned"), more=captain.log_tail)
    early = captain.member(HOSTS[0], replaces=False)
    first = captain.peer()
    first.send({**message, "generation": 1, "running": {"worker-0": attempt}, "offers": {}})
    first.read("welcome")
    early.assert_closed()
    again = captain.peer()
    again.send(join(HOSTS[0], replaces=False))
    again.read("wait")


def test_a_replacement_waits_until_the_current_instance_has_left(captain: Captain) -> None:
    """It trains, or its tasks have their grace; once it has reported how they ended, its lease does not matter."""
    members = [captain.member(host, replaces=False) for host in HOSTS]
    for peer in members:
        peer.read("start")
    replacement = captain.peer()
    replacement.send(join(HOSTS[1], replaces=False))
    members[1].send({"type": "leaving", "reason": "SIGTERM"})
    members[1].send({"type": "beat", "n": 5, "tasks": {}})
    assert members[1].read("beat")["n"] == 5
    assert len(captain.events("member-joined")) == 2 and not captain.events("restart")
    exit_fields = {**EXIT, "task": "worker-1", "attempt": 1, "cause": "preempted", "place": "", "age": 0.0}
    members[1].send({"type": "exited", "exit": exit_fields})
    members[1].send({"type": "left"})
    members[1].close()
    replacement.read("welcome")
    end = members[0].read("end")
    offers = {"worker-0": f"127.0.0.1:{free_port()}"}
    members[0].send({"type": "ended", "tasks": end["tasks"], "offers": offers})
    assert replacement.read("start")["generation"] == 2
    assert [each["cause"] for each in captain.events("restart")] == ["preempted"]


# ---- slow and many


def test_a_slow_sender_is_dropped_in_time_and_others_do_not_wait(captain: Captain) -> None:
    silent = [eventually("the captain listens", lambda: dial(captain.port)) for _ in range(3)]
    began = time.monotonic()
    slow, member = captain.peer(), captain.member(HOSTS[0])
    data = encode(join(HOSTS[1]))
    half = encode({"type": "beat", "n": 1, "tasks": {}})
    closed_after: dict[str, float] = {}
    position = 0
    until = began + 6 * INTRODUCTION_S
    while len(closed_after) < 2 and time.monotonic() < until:
        for name, peer, bytes_ in (("slow", slow, data), ("member", member, half)):
            if name not in closed_after:
                try:
                    peer.sock.sendall(
                        bytes_[position % (len(bytes_) - 1) : position % (len(bytes_) - 1) + 1]
                        if position < len(bytes_) - 1
                        else b""
                    )
                    peer.sock.settimeout(0.05)
                    if peer.sock.recv(65536) == b"":
                        closed_after[name] = time.monotonic() - began
                except TimeoutError:
                    pass
                except OSError:
                    closed_after[name] = time.monotonic() - began
        position += 1
    assert LEASE_S - 1 < closed_after["member"] < LEASE_S + 15
    assert INTRODUCTION_S - 1 < closed_after["slow"] < INTRODUCTION_S + 15
    for sock in silent:
        assert sock is not None
        sock.settimeout(20)
        with contextlib.suppress(ConnectionError):
            assert sock.recv(1) == b""
        sock.close()
    captain.still_leads()


def test_a_peer_that_does_not_read_does_no_harm(captain: Captain) -> None:
    deaf = captain.member(HOSTS[0])
    deaf.sock.settimeout(2)
    beats = 1000 * encode({"type": "beat", "n": 2**53, "tasks": {}})
    with contextlib.suppress(OSError):
        for _ in range(20):
            deaf.sock.sendall(beats)
    good = captain.member(HOSTS[1])
    good.send({"type": "beat", "n": 8, "tasks": {}})
    assert good.read("beat")["n"] == 8
    with open(f"/proc/{captain.pid}/status") as file:
        peak = next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))
    assert peak < 600 * 1024
    deaf.close()
    good.close()
    captain_leads_again(captain, generations=(1, 2))


def test_connections_that_are_reset_do_no_harm(captain: Captain) -> None:
    """As port scanners and health checks do; before and after the captain accepts them."""
    members = [captain.member(host) for host in HOSTS]
    agent = captain.pid
    for number in range(200):
        sock = eventually("the captain listens", lambda: dial(captain.port), more=captain.log_tail)
        assert sock is not None
        if number % 4 == 0:
            sock.sendall(b"GET /healthz HTTP/1.1\r\n")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()
    assert captain.pid == agent, captain.log_tail()
    captain.still_leads(*members)


def test_thousands_of_half_open_connections_keep_no_member_out(captain: Captain) -> None:
    agent = captain.pid
    with contextlib.ExitStack() as stack:
        for _ in range(5000):
            sock = eventually("the captain listens", lambda: dial(captain.port), more=captain.log_tail)
            assert sock is not None
            stack.enter_context(sock)
        members = [captain.member(host) for host in HOSTS]
        assert psutil.Process(agent).num_fds() < 2000, "it keeps only the newest"
        assert captain.pid == agent, captain.log_tail()
        captain.still_leads(*members)


def test_200_idle_connections_do_no_harm(captain: Captain) -> None:
    idle = [captain.peer() for _ in range(100)]
    plain = [eventually("the captain listens", lambda: dial(captain.port)) for _ in range(100)]
    began = time.monotonic()
    members = [captain.member(host) for host in HOSTS]
    for peer in members:
        assert peer.read("start")["generation"] == 1
    assert time.monotonic() - began < INTRODUCTION_S - 1  # by then the captain would have dropped them
    for peer in idle:
        peer.close()
    for sock in plain:
        assert sock is not None
        sock.close()


# ---- a member, and captains it should not follow


class FakeCaptain:
    def __init__(self, tls: ssl.SSLContext, port: int) -> None:
        self.listener = socket.create_server(("127.0.0.1", port))
        self.listener.settimeout(60)
        self._tls = tls

    def accept(self) -> tuple[Peer, Message]:
        """The next connection, and how its member introduces itself."""
        plain, _ = self.listener.accept()
        plain.settimeout(60)
        peer = Peer(self._tls.wrap_socket(plain, server_side=True))
        return peer, peer.read("join")

    def assert_refused(self, times: int = 3) -> None:
        """Every client leaves during the handshake or right after it, without a message, and tries again."""
        for _ in range(times):
            try:
                self.accept()
            except TimeoutError:
                raise AssertionError("no client connects") from None
            except (OSError, AssertionError):
                continue
            raise AssertionError("a member has joined")


SLEEPS = ["sleep", "1000"]


@pytest.fixture
def member(tmp_path: Path) -> Iterator[Agent]:
    started = Agent(tmp_path / "run", HOSTS[0], free_port(), SLEEPS)
    try:
        yield started
    finally:
        started.clean_up()


def welcome(peer: Peer) -> None:
    peer.send({"type": "welcome", "lease": LEASE_S, "beat": 0.2})


def begin(peer: Peer, attempt: int = 1) -> int:
    """Makes the member start its task; returns the pid."""
    welcome(peer)
    roster = {"worker-0": "127.0.0.1:20001", "worker-1": "127.0.0.1:20002"}
    peer.sock.sendall(encode_packed({"type": "roster", "generation": 1, "roster": roster}))
    peer.send(
        {"type": "start", "generation": 1, "restarts": 0, "restore": None, "data": "", "tasks": {"worker-0": attempt}}
    )
    started = peer.read("started")
    assert (started["task"], started["attempt"]) == ("worker-0", attempt)
    return int(started["pid"])


def fake_captain(member: Agent) -> FakeCaptain:
    return FakeCaptain(context(str(member.tls), "captain", server=True), member.port)


def test_a_captain_with_a_wrong_certificate_is_refused(member: Agent, tmp_path: Path) -> None:
    certificates.make(tmp_path / "other")
    wrong = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    wrong.load_cert_chain(tmp_path / "other" / "captain.pem", tmp_path / "other" / "captain.key")
    fake = FakeCaptain(wrong, member.port)
    with fake.listener:
        fake.assert_refused()


def test_a_member_that_claims_to_be_the_captain_is_refused(member: Agent) -> None:
    """A certificate of this run is not enough: it must be the captain's."""
    wrong = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    wrong.load_cert_chain(member.tls / "member.pem", member.tls / "member.key")
    fake = FakeCaptain(wrong, member.port)
    with fake.listener:
        fake.assert_refused()


def test_an_expired_captain_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    certificates.make(tmp_path / "run" / "tls", valid=datetime.timedelta(minutes=-1))
    member = Agent(tmp_path / "run", HOSTS[0], free_port(), SLEEPS)
    try:
        careless_server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        careless_server.load_cert_chain(member.tls / "captain.pem", member.tls / "captain.key")
        fake = FakeCaptain(careless_server, member.port)
        with fake.listener:
            fake.assert_refused()
    finally:
        member.clean_up()


def test_a_member_whose_captain_vanishes_reconnects_and_keeps_its_task(member: Agent) -> None:
    fake = fake_captain(member)
    with fake.listener:
        peer, _ = fake.accept()
        pid = begin(peer)
        peer.close()
        again, joined = fake.accept()
        assert (joined["running"], joined["generation"], joined["run"]) == ({"worker-0": 1}, 1, RUN)
        welcome(again)
        assert again.read("beat")["tasks"].keys() == {"worker-0"}
        assert runs.alive(pid)
        # Without an answer to its beats, the lease expires.
        eventually("the member ends its task on its own", lambda: not runs.alive(pid), more=member.log_tail)


def test_events_between_join_and_welcome_are_reported_after_the_welcome(member: Agent) -> None:
    fake = fake_captain(member)
    with fake.listener:
        peer, _ = fake.accept()
        pid = begin(peer)
        peer.close()
        again, joined = fake.accept()
        assert (joined["running"], joined["held"]) == ({"worker-0": 1}, [])
        (member.folder / "staging" / "worker-0" / "g1" / "step-5").mkdir()
        runs.kill(pid)
        eventually("the member has noticed its end", lambda: not psutil.pid_exists(pid), more=member.log_tail)
        held_copy = member.folder / "held" / "worker-0" / "step-5-g1"
        eventually("the member has taken the snapshot", held_copy.exists, more=member.log_tail)
        welcome(again)
        assert again.read("saved")["snapshot"] == [5, 1]
        exit = again.read("exited")["exit"]
        assert (exit["task"], exit["signal"]) == ("worker-0", "SIGKILL")


def test_a_member_without_an_answer_ends_its_task_after_the_lease(member: Agent) -> None:
    fake = fake_captain(member)
    peer, _ = fake.accept()
    began = time.monotonic()  # its lease counts from its join, which may have been read later
    pid = begin(peer)
    peer.close()
    fake.listener.close()
    eventually("the member ends its task on its own", lambda: not runs.alive(pid), more=member.log_tail)
    assert LEASE_S / 2 < time.monotonic() - began < LEASE_S + 20


@pytest.mark.parametrize(
    "message",
    [
        {"type": "start"},
        {"type": "start", "generation": "x", "restarts": 0, "restore": None, "data": "", "tasks": {}},
        {"type": "start", "generation": 1, "restarts": 0, "restore": None, "data": "", "tasks": {"worker-9": 1}},
        {"type": "roster"},
        {"type": "roster", "generation": 1, "roster": {}},
        {"type": "end", "tasks": {"worker-9": 3}, "how": "kill", "grace": 0},
        {"type": "end"},
        {"type": "end", "tasks": [], "how": "kill", "grace": 0},
        {"type": "welcome"},
        {"type": "welcome", "lease": "long", "beat": 1},
        {"type": "beat", "n": "many"},
        {"type": "beat", "n": [1]},
        {"type": "nonsense"},
    ],
    ids=json.dumps,
)
def test_wrong_messages_of_a_captain_do_not_harm_a_task(member: Agent, message: Message) -> None:
    """The member continues or reconnects; its task keeps running."""
    fake = fake_captain(member)
    with fake.listener:
        peer, _ = fake.accept()
        agent = member.pid
        pid = begin(peer)
        peer.send(message)
        try:
            first = peer.read("beat")["n"]
            peer.send({"type": "beat", "n": first})
            while peer.read("beat")["n"] < first + 3:
                pass
        except (OSError, AssertionError):
            _, joined = fake.accept()
            assert joined["running"] == {"worker-0": 1}, member.log_tail()
        assert runs.alive(pid), member.log_tail()
        assert member.pid == agent, member.log_tail()
