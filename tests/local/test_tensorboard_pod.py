"""TensorBoard files, from a member's folder to the folder of TensorBoard's pod: real sockets, real TLS."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import ssl
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline import plan as plans
from paceline.agent.net.frames import Decoder, encode
from paceline.agent.net.loop import Loop
from paceline.agent.net.tls import BOARD_NAME, context
from paceline.agent.options import Options
from paceline.agent.tensorboard import file_sender, pod_agent, server
from paceline.agent.tensorboard.file_sender import FileSender
from paceline.agent.tensorboard.generation_notes import GenerationNotes, notes_path
from paceline.agent.tensorboard.pod_agent import TensorBoardPod
from paceline.agent.tensorboard.received_files import ReceivedFiles, Refusal, is_valid_path
from paceline.backends import certificates
from paceline.job import load_text, planning
from paceline.storage import tfrecord
from paceline.storage.tensorboard_event_files import last_cut, mark_cut
from support.ports import free_port

JOB = "{name: t, framework: none, command: [x], roles: {worker: {replicas: 2}}, kubernetes: {image: a/b}}"
EVENTS = "train/events.out.tfevents.1"


class Side:
    """The agent of TensorBoard's pod in this process, and members that send to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        certificates.make(folder / "tls")
        plan = planning.make_plan(
            load_text(JOB.replace("[x]", "[x], code: image"), "job.yaml", folder, cluster=True).job
        )
        (folder / "plan.json").write_text(plans.to_json(plan))
        self.address = f"127.0.0.1:{free_port()}"
        self.board: TensorBoardPod | None = None

    def options(self, host: str, folder: str) -> Options:
        (self.folder / folder).mkdir(exist_ok=True)
        arguments = (
            "t-0000",
            host,
            str(self.folder / "plan.json"),
            str(self.folder / folder),
            str(self.folder / "tls"),
            "",
        )
        return Options(*arguments, listen=self.address, tensorboard=self.address)

    def open(self) -> None:
        self.board = TensorBoardPod(self.options("tensorboard", "board"))
        self.thread = threading.Thread(target=self._run_loop, args=(self.board.loop,))
        self.thread.start()

    @staticmethod
    def _run_loop(loop: Loop) -> None:
        while loop._running:
            loop.once(0.02)

    def shut(self) -> None:
        if self.board is not None:
            assert self.thread.is_alive(), "no peer may crash it"
            self.board.loop.stop()
            self.thread.join()
            self.board._listener.close()
            for peer in list(self.board._peers):
                self.board.drop(peer)
            self.board = None

    def member(self, number: int) -> FileSender:
        sender = FileSender(self.options(f"worker-host-{number}", f"member-{number}"), warns=True)
        self.write(number, "", b"")
        return sender

    def write(self, number: int, path: str, data: bytes) -> None:
        folder = self.folder / f"member-{number}" / "tensorboard"
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(exist_ok=True)
        if path:
            with (folder / path).open("ab") as file:
                file.write(data)

    def files(self) -> dict[str, bytes]:
        top = self.folder / "board" / "tensorboard" / "shown"
        return {str(path.relative_to(top)): path.read_bytes() for path in top.rglob("*") if path.is_file()}


@pytest.fixture
def side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handlers: None) -> Iterator[Side]:
    monkeypatch.setattr(pod_agent, "with_tensorboard", lambda names: "")
    running = Side(tmp_path)
    running.open()
    yield running
    running.shut()


@pytest.fixture
def handlers() -> Iterator[None]:
    """Restores the signal handlers that an agent's loop replaces."""
    before = {number: signal.getsignal(number) for number in (signal.SIGCHLD, signal.SIGTERM)}
    yield
    signal.set_wakeup_fd(-1)
    for number, handler in before.items():
        signal.signal(number, handler)


def test_wrong_requests_end_only_their_connection(side: Side) -> None:
    tls = context(str(side.folder / "tls"), "member", server=False)
    host, _, port = side.address.rpartition(":")
    hello = {"type": "hello", "protocol": 1, "run": "t-0000", "host": "worker-host-1"}
    for request in (
        {"type": "begun", "after": [["x", 1, 2]]},
        {"type": "begun", "after": [[1, None, 2]]},
        {"type": "begun", "after": [[1, float("inf"), 2]]},
        {"type": "part", "path": "x" * 300, "at": 0, "data": "aGVsbG8="},
        {"type": "hold", "files": ["x" * 300, "\ud800", 5]},
    ):
        with tls.wrap_socket(socket.create_connection((host, int(port)), 60), server_hostname=BOARD_NAME) as link:
            link.sendall(encode(hello) + encode(request))
            decoder, replies = Decoder(), 0
            while replies < 2 and (data := link.recv(65536)):
                replies += len(decoder.feed(data))
    for _ in range(20):
        sock = socket.create_connection((host, int(port)), 60)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()
    member = side.member(0)
    side.write(0, EVENTS, b"one ")
    member.sweep()
    assert side.files()[EVENTS] == b"one "


def test_new_data_is_appended_and_nothing_is_sent_twice(side: Side) -> None:
    member = side.member(0)
    side.write(0, EVENTS, b"one ")
    member.sweep()
    side.write(0, EVENTS, b"two ")
    side.write(0, "eval/events.out.tfevents.2", os.urandom(3 * file_sender.PART_BYTES + 17))
    member.sweep()
    member.sweep()
    eval_data = (side.folder / "member-0" / "tensorboard" / "eval" / "events.out.tfevents.2").read_bytes()
    assert side.files() == {EVENTS: b"one two ", "eval/events.out.tfevents.2": eval_data}


def test_a_receiver_that_restarts_continues_where_it_was(side: Side) -> None:
    member = side.member(0)
    side.write(0, EVENTS, b"before ")
    member.sweep()
    side.shut()
    side.write(0, EVENTS, b"meanwhile ")
    with pytest.raises(OSError):
        member.sweep()
    member._disconnect()
    side.open()
    member.sweep()
    assert side.files() == {EVENTS: b"before meanwhile "}


def test_a_receiver_that_lost_everything_gets_everything_again(side: Side) -> None:
    member = side.member(0)
    side.write(0, EVENTS, b"before ")
    member.sweep()
    side.shut()
    shutil.rmtree(side.folder / "board")
    side.open()
    member._disconnect()
    member.sweep()
    assert side.files() == {EVENTS: b"before "}


def test_a_sender_that_restarts_repeats_nothing(side: Side) -> None:
    first = side.member(0)
    side.write(0, EVENTS, b"one ")
    first.sweep()
    first._disconnect()
    side.write(0, EVENTS, b"two ")
    side.member(0).sweep()
    assert side.files() == {EVENTS: b"one two "}


def test_a_replaced_file_is_replaced_at_the_receiver(side: Side) -> None:
    member = side.member(0)
    side.write(0, "checkpoint", b"a long first version")
    member.sweep()
    path = side.folder / "member-0" / "tensorboard" / "checkpoint"
    replacement = path.with_name("beside")
    for text in (b"short", b"of another inode but longer than before"):
        replacement.write_bytes(text)
        replacement.replace(path)
        member.sweep()
        assert side.files() == {"checkpoint": text}


def test_files_of_the_same_name_stay_apart(side: Side) -> None:
    for number in (0, 1):
        side.member(number)
        side.write(number, "checkpoint", b"of %d" % number)
        side.member(number).sweep()
    assert side.files() == {"checkpoint": b"of 0", "checkpoint.worker-host-1": b"of 1"}


def test_data_of_a_lost_host_and_of_its_successor_form_one_line(side: Side) -> None:
    def curve(number: int, *steps: int) -> bytes:
        file = f"train/events.out.tfevents.{number}"
        side.write(0, file, tfrecord.first(1.0) + b"".join(tfrecord.scalars(step, 1.0, {"a": 0.0}) for step in steps))
        return (side.folder / "member-0" / "tensorboard" / file).read_bytes()

    curve(1, 1, 2, 3, 4)
    side.member(0).sweep()
    shutil.rmtree(side.folder / "member-0")
    successor = side.member(0)
    GenerationNotes(notes_path(str(side.folder / "member-0"))).begin(2, (2, 4), list)
    successor.sweep()  # it has no files yet
    first = tfrecord.first(1.0)
    both = first + tfrecord.scalars(1, 1.0, {"a": 0.0}) + tfrecord.scalars(2, 1.0, {"a": 0.0})
    assert side.files() == {"train/events.out.tfevents.1": both}
    second = curve(2, 2, 3)
    successor._last_ping = 0.0
    successor.sweep()
    one = first + tfrecord.scalars(1, 1.0, {"a": 0.0})
    assert side.files() == {"train/events.out.tfevents.1": one, "train/events.out.tfevents.2": second}
    assert side.board is not None and side.board._files._bytes == len(one) + len(second)


def test_links_and_pipes_are_not_sent(side: Side, tmp_path: Path) -> None:
    member = side.member(0)
    folder = side.folder / "member-0" / "tensorboard"
    (tmp_path / "secret").write_text("not for others")
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "circle").symlink_to(folder, target_is_directory=True)
    os.mkfifo(folder / "pipe")
    side.write(0, EVENTS, b"one")
    member.sweep()
    assert side.files() == {EVENTS: b"one"}


def test_remaining_data_is_sent_at_the_end_and_an_unreachable_receiver_blocks_nothing(
    side: Side, capsys: pytest.CaptureFixture[str]
) -> None:
    member = side.member(0)
    side.write(0, EVENTS, b"the last")
    member.start()
    member.close(60)
    assert side.files() == {EVENTS: b"the last"}
    assert capsys.readouterr().out == ""
    side.shut()
    late = side.member(1)
    side.write(1, EVENTS, b"lost")
    late.start()
    late.close(0.3)
    assert list(late.notices()) == []
    assert capsys.readouterr().out.startswith("paceline: could not send the last TensorBoard data")


def test_an_unreachable_receiver_is_reported_once(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_sender, "WARN_AFTER_S", 0.0)
    member = side.member(0)
    side.write(0, EVENTS, b"one")
    side.shut()
    assert not member._try_sweep() and not member._try_sweep()
    assert [text.partition(" (")[0] for text in member.notices()] == [f"TensorBoard at {side.address} does not respond"]


def test_an_image_without_tensorboard_is_reported_once_by_one_member(side: Side) -> None:
    members = [side.member(number) for number in (0, 1)]
    for number, member in enumerate(members):
        side.write(number, EVENTS, b"one")
        member.sweep()
        member.sweep()
    notices = [text for member in members for text in member.notices()]
    assert notices == [
        "TensorBoard is not installed in the image a/b; set tensorboard.image to an image that contains it"
    ]


def test_a_tensorboard_that_dies_is_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], handlers: None
) -> None:
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/starts\nexit 3\n')
    program.chmod(0o755)
    monkeypatch.setattr(pod_agent, "with_tensorboard", lambda names: str(program))
    monkeypatch.setattr(server, "MIN_DELAY_S", 0.01)
    side = Side(tmp_path)
    pod = TensorBoardPod(side.options("tensorboard", "board"))
    until = pod.loop.now() + 60
    while pod.loop.now() < until and not (
        (tmp_path / "starts").exists() and (tmp_path / "starts").read_text().count("--logdir") > 2
    ):
        pod.loop.once(0.05)
    pod._listener.close()
    assert pod.loop.now() < until
    assert "TensorBoard in a/b ended (exit code 3) and is being restarted" in capsys.readouterr().out


def test_a_tensorboard_that_uses_too_much_memory_or_has_read_deleted_data_is_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handlers: None
) -> None:
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/starts\nexec sleep 60\n')
    program.chmod(0o755)
    monkeypatch.setattr(server, "CHECK_S", 0.02)
    monkeypatch.setattr(server, "MIN_DELAY_S", 0.01)
    folder = tmp_path / "shown"
    folder.mkdir()
    events, messages = folder / "events.out.tfevents.1", list[str]()
    events.write_bytes(b"1234")
    loop = Loop()

    def starts(count: int) -> None:
        until = loop.now() + 60
        while not ((tmp_path / "starts").exists() and (tmp_path / "starts").read_text().count("--logdir") == count):
            assert loop.now() < until
            loop.once(0.02)

    tensorboard = server.TensorBoardServer(loop, str(program), str(folder), ("127.0.0.1", 1), 1 << 40, messages.append)
    starts(1)
    events.write_bytes(b"12345")
    loop.once(0.05)
    events.write_bytes(b"123")
    starts(2)
    (folder / "events.out.tfevents.2").write_bytes(b"12")  # longer before, and not checked since
    mark_cut(str(folder))
    starts(3)
    assert messages == []
    tensorboard._memory, until = 0, loop.now() + 60
    while not messages:
        assert loop.now() < until
        loop.once(0.02)
    tensorboard._memory = 1 << 40  # before the next check, which would end the next one, too
    starts(4)
    assert messages == ["it used more memory than tensorboard.memory allows, 0 MiB"]
    tensorboard.close()
    while tensorboard._pid:
        loop.once(0.02)


class Stranger:
    """A client with a certificate of the run that sends any message."""

    def __init__(self, side: Side, tls: ssl.SSLContext | None = None) -> None:
        host, _, port = side.address.partition(":")
        tls_context = tls or context(str(side.folder / "tls"), "member", server=False)
        plain = socket.create_connection((host, int(port)), 60)
        self._sock = tls_context.wrap_socket(plain, server_hostname=BOARD_NAME)

    def request(self, **message: Any) -> dict[str, Any] | None:
        """The reply; None if the connection is closed."""
        self._sock.sendall(encode(message))
        try:
            data = self._sock.recv(65536)
        except OSError:
            return None
        return Decoder().feed(data)[0] if data else None


HELLO = {"type": "hello", "protocol": 1, "run": "t-0000", "host": "worker-host-0"}
BAD_PATHS = ["../a", "/etc/passwd", "a/../../b", "a//b", "./a", "", "a/.", "a\0b", "a/" * 40, "a" * 2000, "\ud800"]


@pytest.mark.parametrize("path", BAD_PATHS)
def test_a_path_that_leads_elsewhere_is_refused(path: str, side: Side) -> None:
    stranger = Stranger(side)
    assert stranger.request(**HELLO)
    answer = stranger.request(type="part", path=path, at=0, data="aGVsbG8=")
    assert answer and "the path must be relative" in answer["refused"]
    reply = stranger.request(type="hold", files=[path])
    assert reply and reply["sizes"] == {} and not is_valid_path(path)
    assert side.files() == {}


@pytest.mark.parametrize(
    "message",
    [
        {**HELLO, "run": "other"},
        {**HELLO, "host": "../../x"},
        {**HELLO, "host": ["worker-host-0"]},
        {"type": "part", "path": "a", "at": 0, "data": ""},
        {"type": "else"},
    ],
    ids=["another run", "a host that is a path", "no name", "no hello", "unknown request"],
)
def test_a_wrong_first_message_closes_the_connection(message: dict[str, Any], side: Side) -> None:
    assert Stranger(side).request(**message) is None


@pytest.mark.parametrize("part", [{"at": -1}, {"at": True}, {"data": "a"}, {"data": 1}, {"path": 1}])
def test_an_invalid_part_ends_the_connection(part: dict[str, Any], side: Side) -> None:
    stranger = Stranger(side)
    assert stranger.request(**HELLO)
    assert stranger.request(**{"type": "part", "path": "a", "at": 0, "data": "aGk=", **part}) is None
    assert side.files() == {}


def test_only_certificates_of_the_run_are_accepted(side: Side, tmp_path: Path) -> None:
    certificates.make(tmp_path / "other")
    other = context(str(tmp_path / "other"), "member", server=False)
    with pytest.raises(ssl.SSLError):
        Stranger(side, other)
    assert json.loads((side.folder / "plan.json").read_text())  # and the pod still answers
    assert Stranger(side).request(**HELLO)


def test_received_files_are_limited(tmp_path: Path) -> None:
    received = ReceivedFiles(str(tmp_path), most_bytes=10, most_files=2)
    assert received.append("h", "a", 0, b"12345") == 5
    assert received.append("h", "b", 0, b"12345") == 5
    with pytest.raises(Refusal, match="the limit of 2 files is reached"):
        received.append("h", "c", 0, b"")
    with pytest.raises(Refusal, match="the limit of"):
        received.append("h", "a", 5, b"6")
    assert received.append("h", "a", 0, b"abc", anew=True) == 3
    again = ReceivedFiles(str(tmp_path), most_bytes=10, most_files=2)
    assert again.append("h", "a", 3, b"de") == 5
    with pytest.raises(Refusal):
        again.append("h", "a", 5, b"6")


def test_a_part_is_appended_only_at_the_end_of_the_file(tmp_path: Path) -> None:
    received = ReceivedFiles(str(tmp_path))
    assert received.append("h", "a", 0, b"12345") == 5
    assert received.append("h", "a", 0, b"again") == 5
    assert received.append("h", "a", 9, b"too far") == 5
    assert received.append("h", "a", 5, b"6") == 6
    assert (tmp_path / "shown" / "a").read_bytes() == b"123456"


def test_a_replaced_file_is_marked_if_tensorboard_reads_it(tmp_path: Path) -> None:
    received = ReceivedFiles(str(tmp_path))
    for path, marked in (("checkpoints/last.json", False), (EVENTS, True)):
        received.append("h", path, 0, b"12345")
        before = last_cut(received.shown)
        assert received.append("h", path, 0, b"abc", anew=True) == 3
        assert (last_cut(received.shown) != before) is marked
