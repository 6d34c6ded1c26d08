"""What tasks write for TensorBoard, from a member's folder to that of TensorBoard's pod: real sockets, real TLS."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline import plan as plans
from paceline.agent import board, sending, showing
from paceline.agent.board import Board
from paceline.agent.held import Held, Refusal, fit
from paceline.agent.link import BOARD_NAME, context
from paceline.agent.loop import Loop
from paceline.agent.options import Options
from paceline.agent.sending import Sending
from paceline.agent.wire import Decoder, encode
from paceline.agent.written import Notes, notes_path
from paceline.backends import certificates
from paceline.job import load_text
from paceline.runtime import tfrecord

JOB = "{name: t, framework: none, command: [x], roles: {worker: {replicas: 2}}, kubernetes: {image: a/b}}"
EVENTS = "train/events.out.tfevents.1"


class Side:
    """A companion in this process, and members that send to it."""

    def __init__(self, place: Path) -> None:
        self.place = place
        certificates.make(place / "tls")
        plan = plans.make(load_text(JOB.replace("[x]", "[x], code: image"), "job.yaml", place, cluster=True).job)
        (place / "plan.json").write_text(plans.to_json(plan))
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.address = f"127.0.0.1:{probe.getsockname()[1]}"
        self.board: Board | None = None

    def options(self, host: str, folder: str) -> Options:
        (self.place / folder).mkdir(exist_ok=True)
        given = ("t-0000", host, str(self.place / "plan.json"), str(self.place / folder), str(self.place / "tls"), "")
        return Options(*given, listen=self.address, tensorboard=self.address)

    def open(self) -> None:
        self.board = Board(self.options("tensorboard", "board"))
        self.thread = threading.Thread(target=self._turn, args=(self.board.loop,))
        self.thread.start()

    @staticmethod
    def _turn(loop: Loop) -> None:
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

    def member(self, number: int) -> Sending:
        made = Sending(self.options(f"worker-host-{number}", f"member-{number}"), speaks=True)
        self.write(number, "", b"")
        return made

    def write(self, number: int, path: str, data: bytes) -> None:
        folder = self.place / f"member-{number}" / "tensorboard"
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(exist_ok=True)
        if path:
            with (folder / path).open("ab") as file:
                file.write(data)

    def shown(self) -> dict[str, bytes]:
        top = self.place / "board" / "tensorboard" / "shown"
        return {str(path.relative_to(top)): path.read_bytes() for path in top.rglob("*") if path.is_file()}


@pytest.fixture
def side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handlers: None) -> Iterator[Side]:
    monkeypatch.setattr(board, "with_tensorboard", lambda names: "")
    made = Side(tmp_path)
    made.open()
    yield made
    made.shut()


@pytest.fixture
def handlers() -> Iterator[None]:
    """What an agent's loop takes over, given back."""
    before = {number: signal.getsignal(number) for number in (signal.SIGCHLD, signal.SIGTERM)}
    yield
    signal.set_wakeup_fd(-1)
    for number, handler in before.items():
        signal.signal(number, handler)


def test_what_is_new_is_appended_and_nothing_twice(side: Side) -> None:
    member = side.member(0)
    side.write(0, EVENTS, b"one ")
    member.sweep()
    side.write(0, EVENTS, b"two ")
    side.write(0, "eval/events.out.tfevents.2", os.urandom(3 * sending.PART + 17))
    member.sweep()
    member.sweep()
    there = (side.place / "member-0" / "tensorboard" / "eval" / "events.out.tfevents.2").read_bytes()
    assert side.shown() == {EVENTS: b"one two ", "eval/events.out.tfevents.2": there}


def test_a_receiver_that_restarts_goes_on_where_it_was(side: Side) -> None:
    member = side.member(0)
    side.write(0, EVENTS, b"before ")
    member.sweep()
    side.shut()
    side.write(0, EVENTS, b"meanwhile ")
    with pytest.raises(OSError):
        member.sweep()
    member._hang_up()
    side.open()
    member.sweep()
    assert side.shown() == {EVENTS: b"before meanwhile "}


def test_a_receiver_that_lost_everything_gets_everything_again(side: Side) -> None:
    member = side.member(0)
    side.write(0, EVENTS, b"before ")
    member.sweep()
    side.shut()
    shutil.rmtree(side.place / "board")
    side.open()
    member._hang_up()
    member.sweep()
    assert side.shown() == {EVENTS: b"before "}


def test_a_sender_that_restarts_repeats_nothing(side: Side) -> None:
    first = side.member(0)
    side.write(0, EVENTS, b"one ")
    first.sweep()
    first._hang_up()
    side.write(0, EVENTS, b"two ")
    side.member(0).sweep()
    assert side.shown() == {EVENTS: b"one two "}


def test_a_file_that_is_replaced_is_replaced_there(side: Side) -> None:
    member = side.member(0)
    side.write(0, "checkpoint", b"a long first version")
    member.sweep()
    path = side.place / "member-0" / "tensorboard" / "checkpoint"
    beside = path.with_name("beside")
    for text in (b"short", b"of another inode but longer than before"):
        beside.write_bytes(text)
        beside.replace(path)
        member.sweep()
        assert side.shown() == {"checkpoint": text}


def test_files_of_the_same_name_stay_apart(side: Side) -> None:
    for number in (0, 1):
        side.member(number)
        side.write(number, "checkpoint", b"of %d" % number)
        side.member(number).sweep()
    assert side.shown() == {"checkpoint": b"of 0", "checkpoint.worker-host-1": b"of 1"}


def test_what_a_lost_host_left_is_in_one_line_with_what_its_successor_writes(side: Side) -> None:
    def curve(number: int, *steps: int) -> bytes:
        file = f"train/events.out.tfevents.{number}"
        side.write(0, file, tfrecord.first(1.0) + b"".join(tfrecord.scalars(step, 1.0, {"a": 0.0}) for step in steps))
        return (side.place / "member-0" / "tensorboard" / file).read_bytes()

    curve(1, 1, 2, 3, 4)
    side.member(0).sweep()
    shutil.rmtree(side.place / "member-0")
    successor = side.member(0)
    Notes(notes_path(str(side.place / "member-0"))).begin(2, (2, 4), list)
    successor.sweep()  # it has nothing yet
    first = tfrecord.first(1.0)
    both = first + tfrecord.scalars(1, 1.0, {"a": 0.0}) + tfrecord.scalars(2, 1.0, {"a": 0.0})
    assert side.shown() == {"train/events.out.tfevents.1": both}
    second = curve(2, 2, 3)
    successor._begun = 0.0
    successor.sweep()
    one = first + tfrecord.scalars(1, 1.0, {"a": 0.0})
    assert side.shown() == {"train/events.out.tfevents.1": one, "train/events.out.tfevents.2": second}
    assert side.board is not None and side.board._held._bytes == len(one) + len(second)


def test_links_and_pipes_are_not_sent(side: Side, tmp_path: Path) -> None:
    member = side.member(0)
    folder = side.place / "member-0" / "tensorboard"
    (tmp_path / "secret").write_text("not for others")
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "circle").symlink_to(folder, target_is_directory=True)
    os.mkfifo(folder / "pipe")
    side.write(0, EVENTS, b"one")
    member.sweep()
    assert side.shown() == {EVENTS: b"one"}


def test_what_is_left_is_sent_at_the_end_and_a_companion_that_is_away_holds_nobody_up(
    side: Side, capsys: pytest.CaptureFixture[str]
) -> None:
    member = side.member(0)
    side.write(0, EVENTS, b"the last")
    member.start()
    member.close(10)
    assert side.shown() == {EVENTS: b"the last"}
    assert capsys.readouterr().out == ""
    side.shut()
    late = side.member(1)
    side.write(1, EVENTS, b"lost")
    late.start()
    late.close(0.3)
    assert list(late.said()) == []
    assert capsys.readouterr().out.startswith("paceline: what tasks wrote last for TensorBoard was not sent")


def test_a_companion_that_stays_away_is_said_once(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "AWAY_S", 0.0)
    member = side.member(0)
    side.write(0, EVENTS, b"one")
    side.shut()
    assert not member._attempt() and not member._attempt()
    assert [text.partition(" (")[0] for text in member.said()] == [f"TensorBoard does not answer at {side.address}"]


def test_an_image_without_tensorboard_is_said_by_one_member_once(side: Side) -> None:
    members = [side.member(number) for number in (0, 1)]
    for number, member in enumerate(members):
        side.write(number, EVENTS, b"one")
        member.sweep()
        member.sweep()
    said = [text for member in members for text in member.said()]
    assert said == ["the image a/b has no tensorboard: set tensorboard.image to one that has"]


def test_a_tensorboard_that_dies_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], handlers: None
) -> None:
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/starts\nexit 3\n')
    program.chmod(0o755)
    monkeypatch.setattr(board, "with_tensorboard", lambda names: str(program))
    monkeypatch.setattr(showing, "SOON_S", 0.01)
    side = Side(tmp_path)
    made = Board(side.options("tensorboard", "board"))
    until = made.loop.now() + 20
    while made.loop.now() < until and not (
        (tmp_path / "starts").exists() and (tmp_path / "starts").read_text().count("--logdir") > 2
    ):
        made.loop.once(0.05)
    made._listener.close()
    assert made.loop.now() < until
    assert "TensorBoard in a/b ended (exit code 3) and is started again" in capsys.readouterr().out


def test_one_that_takes_too_much_memory_or_has_read_what_is_gone_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handlers: None
) -> None:
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/starts\nexec sleep 60\n')
    program.chmod(0o755)
    monkeypatch.setattr(showing, "LOOK_S", 0.02)
    monkeypatch.setattr(showing, "SOON_S", 0.01)
    folder = tmp_path / "shown"
    folder.mkdir()
    events, said = folder / "events.out.tfevents.1", list[str]()
    events.write_bytes(b"1234")
    loop = Loop()

    def starts(count: int) -> None:
        until = loop.now() + 20
        while not ((tmp_path / "starts").exists() and (tmp_path / "starts").read_text().count("--logdir") == count):
            assert loop.now() < until
            loop.once(0.02)

    made = showing.Showing(loop, str(program), str(folder), ("127.0.0.1", 1), 1 << 40, said.append)
    starts(1)
    events.write_bytes(b"12345")
    loop.once(0.05)
    events.write_bytes(b"123")
    starts(2)
    assert said == []
    made._memory = 0
    starts(3)
    assert said == ["it used more than 0 MiB, which is tensorboard.memory"]
    made.close()
    while made._pid:
        loop.once(0.02)


class Stranger:
    """Somebody with a certificate of the run who says what they like."""

    def __init__(self, side: Side, tls: ssl.SSLContext | None = None) -> None:
        host, _, port = side.address.partition(":")
        made = tls or context(str(side.place / "tls"), "member", server=False)
        plain = socket.create_connection((host, int(port)), 5)
        self._sock = made.wrap_socket(plain, server_hostname=BOARD_NAME)

    def ask(self, **words: Any) -> dict[str, Any] | None:
        """None where it hangs up."""
        self._sock.sendall(encode(words))
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
    assert stranger.ask(**HELLO)
    answer = stranger.ask(type="part", path=path, at=0, data="aGVsbG8=")
    assert answer and "its path is not one" in answer["refused"]
    asked = stranger.ask(type="hold", files=[path])
    assert asked and asked["sizes"] == {} and not fit(path)
    assert side.shown() == {}


@pytest.mark.parametrize(
    "message",
    [
        {**HELLO, "run": "other"},
        {**HELLO, "host": "../../x"},
        {**HELLO, "host": ["worker-host-0"]},
        {"type": "part", "path": "a", "at": 0, "data": ""},
        {"type": "else"},
    ],
    ids=["another run", "a host that is a path", "no name", "no hello", "no such question"],
)
def test_who_does_not_belong_here_is_hung_up_on(message: dict[str, Any], side: Side) -> None:
    assert Stranger(side).ask(**message) is None


@pytest.mark.parametrize("part", [{"at": -1}, {"at": True}, {"data": "a"}, {"data": 1}, {"path": 1}])
def test_a_part_that_makes_no_sense_ends_the_connection(part: dict[str, Any], side: Side) -> None:
    stranger = Stranger(side)
    assert stranger.ask(**HELLO)
    assert stranger.ask(**{"type": "part", "path": "a", "at": 0, "data": "aGk=", **part}) is None
    assert side.shown() == {}


def test_only_certificates_of_the_run_are_let_in(side: Side, tmp_path: Path) -> None:
    certificates.make(tmp_path / "other")
    other = context(str(tmp_path / "other"), "member", server=False)
    with pytest.raises(ssl.SSLError):
        Stranger(side, other)
    assert json.loads((side.place / "plan.json").read_text())  # and the companion still answers
    assert Stranger(side).ask(**HELLO)


def test_there_is_a_limit_to_what_is_kept(tmp_path: Path) -> None:
    held = Held(str(tmp_path), most_bytes=10, most_files=2)
    assert held.append("h", "a", 0, b"12345") == 5
    assert held.append("h", "b", 0, b"12345") == 5
    with pytest.raises(Refusal, match="more than 2 files"):
        held.append("h", "c", 0, b"")
    with pytest.raises(Refusal, match="are not kept"):
        held.append("h", "a", 5, b"6")
    assert held.append("h", "a", 0, b"abc", anew=True) == 3
    again = Held(str(tmp_path), most_bytes=10, most_files=2)
    assert again.append("h", "a", 3, b"de") == 5
    with pytest.raises(Refusal):
        again.append("h", "a", 5, b"6")


def test_a_part_is_taken_only_where_the_file_ends(tmp_path: Path) -> None:
    held = Held(str(tmp_path))
    assert held.append("h", "a", 0, b"12345") == 5
    assert held.append("h", "a", 0, b"again") == 5
    assert held.append("h", "a", 9, b"too far") == 5
    assert held.append("h", "a", 5, b"6") == 6
    assert (tmp_path / "shown" / "a").read_bytes() == b"123456"
