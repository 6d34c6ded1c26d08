"""The limits of the model server: clients that send too much, or too slowly, do not keep others from answers."""

from __future__ import annotations

import socket
import threading

import pytest

from paceline.serve import listening
from paceline.serve.app import Limits
from paceline.serve.connections import ConnectionLimits, LimitedProtocol
from paceline.serve.memory import Memory, OutOfMemory
from paceline.serve.signatures import Arrays
from support.in_process_server import ANSWER, BODY, head, is_closed, response, running
from support.runs import eventually

START = b"POST /v1/models/toy:predict HTTP/1.1\r\nHost: localhost\r\n"


@pytest.mark.parametrize(
    "start",
    [
        b"GET /",
        START + b"X-One: ",
        START + b"X-",
        START + b"Transfer-Encoding: chunked\r\n\r\n1\r\n \r\n0\r\nX-Trailer: ",
        START + b"Transfer-Encoding: chunked\r\n\r\n1;",
    ],
    ids=["the path", "a header", "a name", "a trailer", "an extension of a chunk"],
)
def test_headers_are_limited_in_size(start: bytes) -> None:
    with running() as server:
        attacker, sent = server.connect(start), 0
        with pytest.raises(OSError):  # the server closes the connection
            for _ in range(1000):
                attacker.sendall(b"a" * 65536)
                sent += 65536
        assert sent < 16 * 1024 * 1024  # most of it in buffers of the system
        assert server.predict().endswith(ANSWER)


def test_too_large_headers_are_answered_with_the_limit() -> None:
    with running() as server:
        many = b"".join(b"X-%d: 1\r\n" % number for number in range(10000))
        assert b"HTTP/1.1 431 " in (reply := response(server.connect(START + many + b"\r\n")))
        assert reply.endswith(b'"request line and headers have more than 65536 bytes, which is the limit"}')
        large = b"X-Large: " + b"a" * 60000 + b"\r\n"
        assert response(server.connect(START + large + b"Content-Length: 23\r\n\r\n" + BODY)).endswith(ANSWER)


def test_requests_that_do_not_end_are_closed() -> None:
    limits = ConnectionLimits(head_seconds=3.0, seconds=4.0)
    with running(Limits(seconds=4.0), limits) as server:
        healthy = server.connect()
        assert server.predict(connection=healthy).endswith(ANSWER)
        in_head, in_body = server.connect(START), server.connect(head(100) + b"{")
        empty, blank, early = server.connect(), server.connect(b"\r\n"), server.connect(head(1 << 40))
        assert b"413" in response(early)  # an answer before the body is complete
        assert server.predict(connection=healthy).endswith(ANSWER)
        assert response(in_head).endswith(b'{"error": "the request was not complete within 3 s"}')
        assert response(in_body).endswith(b'{"error":"the request was not complete within 4 s"}')
        for each in (in_head, in_body, empty, blank, early):
            assert is_closed(each)
        assert server.predict(connection=healthy).endswith(ANSWER)
        assert server.open_connections() == 1


def test_a_client_that_does_not_take_its_response_is_disconnected() -> None:
    rows = 20000
    body = b'{"instances": [' + b",".join([b"[1,2]"] * rows) + b"]}"

    def large(inputs: Arrays) -> Arrays:
        return {"y": inputs["x"].repeat(100, axis=1)}

    limits = Limits(large=1 << 40, seconds=20)
    with running(limits, ConnectionLimits(seconds=5.0), large) as server:
        attacker = server.connect(receive_buffer=4096)
        attacker.sendall(head(len(body)) + body)
        eventually("the response waits", lambda: server.app._memory.used > 1 << 20)
        assert server.predict().startswith(b"HTTP/1.1 200")
        eventually("its memory is free again", lambda: server.app._memory.used == 0)
        eventually("it is disconnected", lambda: server.open_connections() <= 1)


@pytest.mark.parametrize("part", [b"", START, head(100) + b"{"], ids=["no request", "headers", "a body"])
def test_half_sent_requests_make_room_for_others(part: bytes) -> None:
    with running(connection_limits=ConnectionLimits(connections=20)) as server:
        healthy = server.connect()
        assert server.predict(connection=healthy).endswith(ANSWER)
        attackers = []
        for number in range(60):
            attackers.append(server.connect(part))
            if number % 10 == 0:
                # The second request is sent when all that connected earlier have been accepted.
                assert server.predict(connection=server.connect()).endswith(ANSWER)
                assert server.predict(connection=healthy).endswith(ANSWER)
                assert server.open_connections() <= 20
        assert is_closed(attackers[0])


def test_clients_that_take_no_responses_make_room_for_others() -> None:
    with running(connection_limits=ConnectionLimits(connections=3)) as server:
        requests = 1000 * b"GET /v1/models/toy HTTP/1.1\r\nHost: localhost\r\n\r\n"
        for _ in range(3):
            server.connect(requests, receive_buffer=1)

        def are_stuck() -> bool:
            connections = [each for each in server.server.server_state.connections if isinstance(each, LimitedProtocol)]
            return len(connections) == 3 and all(each._unsent is not None for each in connections)

        eventually("the clients are stuck", are_stuck)
        assert server.predict().endswith(ANSWER)


def test_if_all_connections_are_in_use_others_are_refused() -> None:
    release = threading.Event()

    def slow(inputs: Arrays) -> Arrays:
        assert release.wait(30)
        return {"y": inputs["x"]}

    with running(connection_limits=ConnectionLimits(connections=2), call=slow) as server:
        busy = [server.connect(head(len(BODY)) + BODY) for _ in range(2)]
        eventually("both are answered", lambda: len(server.server.server_state.tasks) == 2)
        refused = response(server.connect())
        assert b"HTTP/1.1 503 " in refused and b"the server has 2 connections, its limit; try again later" in refused
        release.set()
        assert all(response(each).endswith(ANSWER) for each in busy)


def test_large_requests_are_limited_in_memory_and_small_ones_still_answered() -> None:
    size = 1 << 20
    with running(Limits(memory=3 * size)) as server:
        half_sent = [server.connect(head(2 * size), b" " * size) for _ in range(2)]
        eventually("they are counted", lambda: server.app._memory.used >= 1.8 * size)
        refused = server.predict(b" " * (2 * size))
        assert b"HTTP/1.1 503 " in refused and b"the limit is 3145728; try again later" in refused
        assert server.predict().endswith(ANSWER)
        for each in half_sent:
            each.close()
        eventually("the memory is free again", lambda: server.app._memory.used == 0)


def test_bytes_that_exist_already_are_counted_and_not_refused() -> None:
    memory = Memory(1 << 20)
    first, second = memory.reserve(), memory.reserve()
    first.add(1 << 19)
    first.add(1 << 20, is_limited=False)
    second.add(1000)
    with pytest.raises(OutOfMemory):
        second.add(1 << 17)
    first.release()
    second.release()
    assert memory.used == 0


def test_on_loopback_only_requests_for_this_machine_are_answered() -> None:
    with running() as server:
        port = server.port
        for host in ("localhost", "LOCALHOST:1", f"127.0.0.1:{port}", f"[::1]:{port}", "localhost."):
            assert server.predict(host=host).endswith(ANSWER), host
        for host in (
            "evil.example",
            f"evil.example:{port}",
            "127.0.0.1.evil.example",
            "localhost:80@evil",
            "",
            "[::2]",
        ):
            reply = server.predict(host=host)
            assert b"HTTP/1.1 421 " in reply and b"only for 127.0.0.1, [::1], localhost" in reply, host
        twice = START + b"Host: localhost\r\nContent-Length: 0\r\n\r\n"
        assert b"HTTP/1.1 421 " in response(server.connect(twice))


@pytest.mark.parametrize("host", ["::1", "::", ""])
def test_ipv6_addresses_can_be_bound(host: str) -> None:
    with running(host=host) as server:
        families = ["::1"] if host == "::1" else ["::1", "127.0.0.1"]
        for server.host in families:
            assert server.predict(host="[::1]").endswith(ANSWER)
            expected = b"421 " if host == "::1" else ANSWER
            assert expected in server.predict(host="serving.example")


def test_all_addresses_are_those_of_ipv4_if_there_is_no_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_ipv6(*args: object, **options: object) -> socket.socket:
        if options.get("family") == socket.AF_INET6:
            raise OSError(97, "Address family not supported by protocol")
        return original(*args, **options)  # type: ignore[arg-type]

    original = socket.create_server
    monkeypatch.setattr(socket, "create_server", no_ipv6)
    with listening.listen("", 0) as listener:
        assert listener.getsockname()[0] == "0.0.0.0"
    with pytest.raises(OSError):
        listening.listen("::", 0)


def test_many_small_requests_in_one_piece_are_all_answered() -> None:
    with running() as server:
        connection = server.connect((head(len(BODY)) + BODY) * 1000)
        connection.sendall(START + b"Connection: close\r\nContent-Length: 23\r\n\r\n" + BODY)
        replies = b""
        while part := connection.recv(1 << 16):
            replies += part
        assert replies.count(ANSWER) == 1001
