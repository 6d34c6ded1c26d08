"""Requests to a captain that does not know them, because an older version of Paceline has started the run."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.agent.net import task_request
from paceline.agent.net.frames import Decoder, Message, encode
from paceline.agent.net.tls import context
from paceline.backends import certificates
from paceline.backends.kubernetes.runs import task_request as cluster_request
from paceline.client.diagnosis import task_requests
from paceline.client.diagnosis.task_requests import NoReply, OlderCaptain
from paceline.view.files.run_folders import Run

pytestmark = pytest.mark.timeout(60)
STACKS: Message = {"type": "stacks", "tasks": [], "seconds": 0.0}
SAME: Message = {"type": "stacks-taken", "task": "worker-0"}


@contextmanager
def captain(tls: Path, *connections: list[Message]) -> Iterator[Callable[[], list[Message]]]:
    """Sends these replies on each of so many connections, closes it, and then no longer listens. Yields a function that
    sends the request and returns its replies."""
    certificates.make(tls)
    server = context(str(tls), "captain", server=True)
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        for number, replies in enumerate(connections, 1):
            plain, _ = listener.accept()
            with server.wrap_socket(plain, server_side=True) as sock:
                decoder, received = Decoder(), []
                while not received:
                    received = [*decoder.feed(sock.recv(65536))]
                assert received == [STACKS]
                if number == len(connections):
                    listener.close()  # before the connection: the next attempt must not reach it
                with suppress(OSError):
                    sock.sendall(b"".join(map(encode, replies)))

    address = f"127.0.0.1:{listener.getsockname()[1]}"
    thread = threading.Thread(target=serve, daemon=True)
    with closing(listener):
        thread.start()
        yield lambda: list(task_request.ask_captain(address, str(tls), "member", STACKS, 60.0))
        thread.join(30)
        assert not thread.is_alive(), "fewer requests than connections"


def test_a_captain_that_closes_each_connection_does_not_know_the_request(tmp_path: Path) -> None:
    with captain(tmp_path, [], []) as ask:
        assert ask() == [{"type": task_request.UNKNOWN}]


def test_a_captain_that_has_just_ended_may_know_the_request(tmp_path: Path) -> None:
    with captain(tmp_path, []) as ask:
        assert ask() == []


def test_a_captain_that_was_replaced_meanwhile_replies(tmp_path: Path) -> None:
    replies = [SAME, {"type": "stacks-end"}]
    with captain(tmp_path, [], replies) as ask:
        assert ask() == replies


def test_a_request_whose_replies_are_incomplete_is_not_repeated(tmp_path: Path) -> None:
    with captain(tmp_path, [SAME]) as ask:
        assert ask() == [SAME]


@pytest.mark.parametrize(
    ("error", "replies"),
    [
        ("/usr/bin/python3: No module named paceline.agent.net.task_request", [{"type": task_request.UNKNOWN}]),
        ("/usr/bin/python3: No module named paceline", []),
        ("the program was killed: its pod may have been deleted", []),
    ],
)
def test_the_agent_in_a_pod_may_have_no_program_for_requests(
    monkeypatch: pytest.MonkeyPatch, error: str, replies: list[Message]
) -> None:
    class Program:
        def __init__(self, *_: object) -> None: ...

        def settimeout(self, _: float) -> None: ...

        def close(self) -> None: ...

        def recv_into(self, *_: object) -> int:
            raise ConnectionError(error)

    running = SimpleNamespace(cluster=None, captain_pod=lambda: "old-1-abcde", close=lambda: None)
    monkeypatch.setattr(cluster_request, "reopen", lambda _: running)
    monkeypatch.setattr(cluster_request, "Program", Program)
    assert list(cluster_request.ask_captain(Path("old-1"), STACKS, 1.0)) == replies


@pytest.mark.parametrize(
    ("kind", "action"),
    [
        ("stacks", "show what tasks are doing"),
        ("profile", "profile tasks"),
        ("scale", "change the number of hosts"),
        ("pause", "pause and resume runs"),
        ("resume", "pause and resume runs"),
    ],
)
def test_the_user_is_told_what_the_older_version_cannot_do(
    monkeypatch: pytest.MonkeyPatch, kind: str, action: str
) -> None:
    unknown: list[Message] = [{"type": task_request.UNKNOWN}]
    with asked(monkeypatch, unknown) as run, pytest.raises(OlderCaptain) as raised:
        list(task_requests.ask(run, {"type": kind}, 1.0))
    assert str(raised.value) == (
        f"old-1 was started by an older version of Paceline, which cannot {action}; "
        "stop it with `client.get('old-1').stop()` and start a new run from its snapshots (snapshots.from)"
    )


def test_a_captain_that_does_not_reply_may_be_restarting(monkeypatch: pytest.MonkeyPatch) -> None:
    message = "the captain of old-1 did not reply; it may be restarting: try again"
    with asked(monkeypatch, []) as run, pytest.raises(NoReply, match=message) as raised:
        list(task_requests.ask(run, STACKS, 1.0))
    assert not isinstance(raised.value, OlderCaptain)


@contextmanager
def asked(monkeypatch: pytest.MonkeyPatch, replies: list[Message]) -> Iterator[Run]:
    def messages(*_: Any) -> Iterator[Message]:
        return iter(replies)

    with monkeypatch.context() as patch:
        patch.setattr(task_requests, "is_running", lambda _: True)
        patch.setattr(task_requests, "_messages", messages)
        yield Run("old-1", Path("old-1"))
