"""A folder that another agent has: real sockets, real TLS."""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.agent.link import SERVER_NAME, context
from paceline.backends import certificates
from paceline.storage.folder import Folder
from paceline.storage.manifest import Damaged, Id, Manifest
from paceline.storage.peer import Closed, Peer, Wire, over_tls
from paceline.storage.serving import Server
from paceline.storage.snapshots import Snapshots
from paceline.storage.store import PIECE, StoreError, Unwanted

RUN = "digits-3f9a"
pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def tls(tmp_path: Path) -> str:
    certificates.make(tmp_path / "tls")
    return str(tmp_path / "tls")


@pytest.fixture
def server(tmp_path: Path, tls: str) -> Iterator[Server]:
    made = Server(("127.0.0.1", 0), context(tls, "captain", server=True), Folder(str(tmp_path / "place")), RUN)
    yield made
    made.close()


@pytest.fixture
def peer(server: Server, tls: str) -> Peer:
    return over_tls(("127.0.0.1", server.port), context(tls, "member", server=False), SERVER_NAME)


def always(_: int) -> bool:
    return True


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_what_is_sent_is_there_and_can_be_fetched(peer: Peer, tmp_path: Path) -> None:
    folder = tmp_path / "step-10"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "weights").write_bytes(os.urandom(2 * PIECE + 5))
    (folder / "empty").touch()
    part = Snapshots(peer, RUN).send(Id(10, 1), "worker-0", str(folder))
    there = Snapshots(Folder(str(tmp_path / "place")), RUN)
    there.begin(1, None)
    there.commit(Manifest(RUN, Id(10, 1), 1, (part,)))
    elsewhere = Snapshots(peer, RUN)
    assert elsewhere.fetch(elsewhere.manifest(Id(10, 1)), str(tmp_path / "restored")) == 2 * PIECE + 5
    restored = tmp_path / "restored" / "deep" / "weights"
    assert restored.read_bytes() == (folder / "deep" / "weights").read_bytes()
    assert (tmp_path / "restored" / "empty").read_bytes() == b""


def test_what_is_not_there_is_told(peer: Peer, tmp_path: Path) -> None:
    assert peer.read(f"{RUN}/nothing", 100) is None
    with pytest.raises(KeyError):
        peer.fetch(f"{RUN}/nothing", str(tmp_path / "here"), always)
    assert not (tmp_path / "here").exists()
    with pytest.raises(Damaged, match="is gone"):
        Snapshots(peer, RUN).manifest(Id(10, 1))


def test_a_transfer_that_is_given_up_leaves_nothing_and_the_next_one_works(peer: Peer, tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(os.urandom(3 * PIECE))
    pieces = iter([True, True, False])
    with pytest.raises(Unwanted):
        peer.send(str(tmp_path / "big"), f"{RUN}/big", lambda _: next(pieces))
    peer.send(str(tmp_path / "big"), f"{RUN}/whole", always)
    assert [path.name for path in files(tmp_path / "place") if path.suffix != ".partial"] == ["whole"]
    pieces = iter([True, False])
    with pytest.raises(Unwanted):
        peer.fetch(f"{RUN}/whole", str(tmp_path / "half"), lambda _: next(pieces))
    assert peer.fetch(f"{RUN}/whole", str(tmp_path / "all"), always)[0] == 3 * PIECE


def test_a_place_that_cannot_take_it_says_why(peer: Peer, tmp_path: Path) -> None:
    (tmp_path / "place").write_text("a file, where the folder should be")
    (tmp_path / "small").write_bytes(b"x")
    with pytest.raises(StoreError, match=r"cannot write .*Not a directory"):
        peer.send(str(tmp_path / "small"), f"{RUN}/small", always)


@pytest.mark.parametrize("name", ["other-run/x", f"{RUN}/../x", f"{RUN}//x", "/etc/passwd", ""])
def test_names_of_others_are_not_taken(peer: Peer, name: str, tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(b"x")
    with pytest.raises(StoreError):
        peer.send(str(tmp_path / "small"), name, always)
    assert files(tmp_path / "place") == []


def test_nobody_without_a_certificate_of_this_run_is_served(server: Server, tls: str, tmp_path: Path) -> None:
    certificates.make(tmp_path / "other")
    stranger = context(str(tmp_path / "other"), "member", server=False)
    stranger.load_verify_locations(f"{tls}/ca.pem")
    with pytest.raises(StoreError):
        over_tls(("127.0.0.1", server.port), stranger, SERVER_NAME).read(f"{RUN}/x", 100)
    nobody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    nobody.load_verify_locations(f"{tls}/ca.pem")
    with pytest.raises(StoreError):
        over_tls(("127.0.0.1", server.port), nobody, SERVER_NAME).read(f"{RUN}/x", 100)


def test_a_server_that_goes_and_comes_is_found_again(tls: str, tmp_path: Path) -> None:
    folder = Folder(str(tmp_path / "place"))
    folder.create(f"{RUN}/x", b"there")
    first = Server(("127.0.0.1", 0), context(tls, "captain", server=True), folder, RUN)
    peer = over_tls(("127.0.0.1", first.port), context(tls, "member", server=False), SERVER_NAME)
    first.close()
    with pytest.raises(StoreError, match=r"cannot read digits-3f9a/x at 127.0.0.1: Connection refused") as failed:
        peer.read(f"{RUN}/x", 100)
    assert failed.value.passing
    second = Server(("127.0.0.1", first.port), context(tls, "captain", server=True), folder, RUN)
    assert peer.read(f"{RUN}/x", 100) == b"there"
    second.close()


def test_one_who_says_too_much_is_cut_off(server: Server, tls: str) -> None:
    sock = socket.create_connection(("127.0.0.1", server.port), 5)
    wire = Wire(context(tls, "member", server=False).wrap_socket(sock, server_hostname=SERVER_NAME))
    with pytest.raises(Closed):
        for _ in range(100):
            wire.write(b"x" * PIECE)
    wire.close()
