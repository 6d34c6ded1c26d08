"""A folder store served by another agent, over real sockets with real TLS."""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.agent.net.tls import SERVER_NAME, context
from paceline.backends import certificates
from paceline.storage.snapshots.manifest import Damaged, Manifest, SnapshotId
from paceline.storage.snapshots.repository import SnapshotRepository
from paceline.storage.stores.folder import FolderStore
from paceline.storage.stores.peer_client import Closed, PeerStore, Wire, over_tls
from paceline.storage.stores.peer_server import Server
from paceline.storage.stores.protocol import PIECE, StoreError, TransferCanceled

RUN = "digits-3f9a"
pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def tls(tmp_path: Path) -> str:
    certificates.make(tmp_path / "tls")
    return str(tmp_path / "tls")


@pytest.fixture
def server(tmp_path: Path, tls: str) -> Iterator[Server]:
    peer_server = Server(
        ("127.0.0.1", 0), context(tls, "captain", server=True), FolderStore(str(tmp_path / "store")), RUN
    )
    yield peer_server
    peer_server.close()


@pytest.fixture
def peer(server: Server, tls: str) -> PeerStore:
    return over_tls(("127.0.0.1", server.port), context(tls, "member", server=False), SERVER_NAME)


def always(_: int) -> bool:
    return True


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_sent_files_can_be_fetched(peer: PeerStore, tmp_path: Path) -> None:
    folder = tmp_path / "step-10"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "weights").write_bytes(os.urandom(2 * PIECE + 5))
    (folder / "empty").touch()
    part = SnapshotRepository(peer, RUN).send(SnapshotId(10, 1), "worker-0", str(folder))
    target = SnapshotRepository(FolderStore(str(tmp_path / "store")), RUN)
    target.begin(1, None)
    target.commit(Manifest(RUN, SnapshotId(10, 1), 1, (part,)))
    source = SnapshotRepository(peer, RUN)
    assert source.fetch(source.manifest(SnapshotId(10, 1)), str(tmp_path / "restored")) == 2 * PIECE + 5
    restored = tmp_path / "restored" / "deep" / "weights"
    assert restored.read_bytes() == (folder / "deep" / "weights").read_bytes()
    assert (tmp_path / "restored" / "empty").read_bytes() == b""


def test_missing_files_are_reported(peer: PeerStore, tmp_path: Path) -> None:
    assert peer.read(f"{RUN}/nothing", 100) is None
    with pytest.raises(KeyError):
        peer.fetch(f"{RUN}/nothing", str(tmp_path / "here"), always)
    assert not (tmp_path / "here").exists()
    with pytest.raises(Damaged, match="is missing"):
        SnapshotRepository(peer, RUN).manifest(SnapshotId(10, 1))


def test_a_canceled_transfer_leaves_nothing_and_the_next_one_works(peer: PeerStore, tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(os.urandom(3 * PIECE))
    pieces = iter([True, True, False])
    with pytest.raises(TransferCanceled):
        peer.send(str(tmp_path / "big"), f"{RUN}/big", lambda _: next(pieces))
    peer.send(str(tmp_path / "big"), f"{RUN}/whole", always)
    assert [path.name for path in files(tmp_path / "store") if path.suffix != ".partial"] == ["whole"]
    pieces = iter([True, False])
    with pytest.raises(TransferCanceled):
        peer.fetch(f"{RUN}/whole", str(tmp_path / "half"), lambda _: next(pieces))
    assert peer.fetch(f"{RUN}/whole", str(tmp_path / "all"), always)[0] == 3 * PIECE


def test_a_store_that_cannot_write_says_why(peer: PeerStore, tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file instead of the folder")
    (tmp_path / "small").write_bytes(b"x")
    with pytest.raises(StoreError, match=r"cannot write .*Not a directory"):
        peer.send(str(tmp_path / "small"), f"{RUN}/small", always)


@pytest.mark.parametrize("name", ["other-run/x", f"{RUN}/../x", f"{RUN}//x", "/etc/passwd", ""])
def test_names_outside_the_run_are_rejected(peer: PeerStore, name: str, tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(b"x")
    with pytest.raises(StoreError):
        peer.send(str(tmp_path / "small"), name, always)
    assert files(tmp_path / "store") == []


def test_clients_without_a_certificate_of_this_run_are_rejected(server: Server, tls: str, tmp_path: Path) -> None:
    certificates.make(tmp_path / "other")
    stranger = context(str(tmp_path / "other"), "member", server=False)
    stranger.load_verify_locations(f"{tls}/ca.pem")
    with pytest.raises(StoreError):
        over_tls(("127.0.0.1", server.port), stranger, SERVER_NAME).read(f"{RUN}/x", 100)
    anonymous = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anonymous.load_verify_locations(f"{tls}/ca.pem")
    with pytest.raises(StoreError):
        over_tls(("127.0.0.1", server.port), anonymous, SERVER_NAME).read(f"{RUN}/x", 100)


def test_a_client_reconnects_to_a_restarted_server(tls: str, tmp_path: Path) -> None:
    folder = FolderStore(str(tmp_path / "store"))
    folder.create(f"{RUN}/x", b"there")
    first = Server(("127.0.0.1", 0), context(tls, "captain", server=True), folder, RUN)
    peer = over_tls(("127.0.0.1", first.port), context(tls, "member", server=False), SERVER_NAME)
    first.close()
    with pytest.raises(StoreError, match=r"cannot read digits-3f9a/x at 127.0.0.1: Connection refused") as failed:
        peer.read(f"{RUN}/x", 100)
    assert failed.value.is_transient
    second = Server(("127.0.0.1", first.port), context(tls, "captain", server=True), folder, RUN)
    assert peer.read(f"{RUN}/x", 100) == b"there"
    second.close()


def test_a_client_that_sends_too_much_is_disconnected(server: Server, tls: str) -> None:
    sock = socket.create_connection(("127.0.0.1", server.port), 5)
    wire = Wire(context(tls, "member", server=False).wrap_socket(sock, server_hostname=SERVER_NAME))
    with pytest.raises(Closed):
        for _ in range(100):
            wire.write(b"x" * PIECE)
    wire.close()
