"""A folder store served by another agent, over real sockets with real TLS."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.agent.net.tls import SERVER_NAME, context
from paceline.backends import certificates
from paceline.storage.snapshots.manifest import Damaged, Manifest, SnapshotId
from paceline.storage.snapshots.repository import SnapshotRepository
from paceline.storage.stores import peer_server
from paceline.storage.stores.folder import FolderStore
from paceline.storage.stores.peer_access import MemberAccess
from paceline.storage.stores.peer_client import Closed, PeerStore, Wire, over_tls
from paceline.storage.stores.peer_server import Server
from paceline.storage.stores.protocol import PIECE, StoreError, TransferCanceled
from support.ports import free_port

RUN = "digits-3f9a"
PART = f"{RUN}/step-10-g1"
pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def tls(tmp_path: Path) -> str:
    certificates.make(tmp_path / "tls")
    return str(tmp_path / "tls")


@pytest.fixture
def server(tmp_path: Path, tls: str) -> Iterator[Server]:
    folder = FolderStore(str(tmp_path / "store"))
    access = MemberAccess(RUN, f"{RUN}/obstore.zip", has=folder.has)
    started = Server(("127.0.0.1", 0), context(tls, "captain", server=True), folder, access)
    yield started
    started.close()


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
    assert peer.read(f"{PART}/manifest.json", 100) is None
    with pytest.raises(KeyError):
        peer.fetch(f"{PART}/worker-0/nothing", str(tmp_path / "here"), always)
    assert not (tmp_path / "here").exists()
    with pytest.raises(Damaged, match="is missing"):
        SnapshotRepository(peer, RUN).manifest(SnapshotId(10, 1))


def test_a_canceled_transfer_leaves_nothing_and_the_next_one_works(peer: PeerStore, tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(os.urandom(3 * PIECE))
    pieces = iter([True, True, False])
    with pytest.raises(TransferCanceled):
        peer.send(str(tmp_path / "big"), f"{PART}/worker-0/big", lambda _: next(pieces))
    peer.send(str(tmp_path / "big"), f"{PART}/worker-0/whole", always)
    assert [path.name for path in files(tmp_path / "store") if path.suffix != ".partial"] == ["whole"]
    pieces = iter([True, False])
    with pytest.raises(TransferCanceled):
        peer.fetch(f"{PART}/worker-0/whole", str(tmp_path / "half"), lambda _: next(pieces))
    assert peer.fetch(f"{PART}/worker-0/whole", str(tmp_path / "all"), always)[0] == 3 * PIECE


def test_a_store_that_cannot_write_says_why(peer: PeerStore, tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file instead of the folder")
    (tmp_path / "small").write_bytes(b"x")
    with pytest.raises(StoreError, match=r"cannot write .*Not a directory"):
        peer.send(str(tmp_path / "small"), f"{PART}/worker-0/small", always)


NOT_FOR_MEMBERS = (
    f"{RUN}/generations/00000099.json", f"{PART}/manifest.json", f"{PART}/manifest.json/x", f"{PART}/evaluation.json",
    f"{PART}/x", f"{RUN}/obstore.zip", f"{RUN}/step-5-g0/worker-0/x", f"{RUN}/step-05-g1/worker-0/x", f"{RUN}/x",
    f"{RUN}/logs/captain/20260101T000000.000Z-00000000/00000001", f"{RUN}/logs/worker-host-0/00000001",
    f"{RUN}/compiled/captain", f"{RUN}/compiled/worker-host-0/x", f"{RUN}/compiled/../worker-host-0",
    f"{RUN}/logs/worker-host-0/../00000001", f"{RUN}/tensorboard/worker-host-0/x", f"{RUN}/", RUN, "", ".", "/",
    "other-run/step-10-g1/worker-0/x", f"/{PART}/worker-0/x", "/etc/passwd", f"{PART}/worker-0/", f"{PART}/worker-0",
    f"{PART}/worker-0/../../x", f"{PART}/worker-0//x", f"{PART}/worker-0/./x", f"{PART}/../{PART}/worker-0/x",
    f"{PART}/worker-0/a\0b", f"{PART}/worker-0/a\nb", f"{PART}/worker-0/" + "x" * 1025, f"{PART}/boss-0/x",
    f"{PART}/worker-x/x", f"{PART}/worker-0/\ud800",
)  # fmt: skip


@pytest.mark.parametrize("name", NOT_FOR_MEMBERS)
def test_members_store_only_parts_of_snapshots_and_logs(peer: PeerStore, name: str, tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(b"x")
    with pytest.raises(StoreError, match="is not allowed: of digits-3f9a, members may send only") as refused:
        peer.send(str(tmp_path / "small"), name, always)
    assert not refused.value.is_transient and not files(tmp_path / "store")
    peer.send(str(tmp_path / "small"), f"{PART}/worker-0/x", always)  # the same connection is still good


def test_members_read_only_snapshots(peer: PeerStore, tmp_path: Path) -> None:
    store = FolderStore(str(tmp_path / "store"))
    for name in (f"{RUN}/generations/00000001.json", f"{PART}/evaluation.json", f"{PART}/manifest.json", "other/x"):
        store.create(name, b"there")
        if not name.endswith("manifest.json"):
            with pytest.raises(StoreError, match="is not allowed"):
                peer.read(name, 100)
        with pytest.raises(StoreError, match="is not allowed"):
            peer.fetch(name, str(tmp_path / "fetched"), always)
    assert peer.read(f"{PART}/manifest.json", 100) == b"there"
    store.create(f"{RUN}/obstore.zip", b"there")
    assert peer.fetch(f"{RUN}/obstore.zip", str(tmp_path / "obstore.zip"), always)[0] == 5
    calls: tuple[Callable[[str], object], ...] = (
        peer.delete, peer.clear, peer.has, peer.names, peer.folders, lambda name: peer.digest(name, always)
    )  # fmt: skip
    for call in calls:
        with pytest.raises(StoreError, match="is not allowed: members may only send, read and fetch"):
            call(f"{PART}/")
    assert len(files(tmp_path / "store")) == 5


def test_members_store_logs(peer: PeerStore, tmp_path: Path) -> None:
    (tmp_path / "piece").write_bytes(b"{}")
    name = f"{RUN}/logs/evaluator-host-0/20261117T121405.123Z-0a1b2c3d/00000001"
    peer.send(str(tmp_path / "piece"), name, always)
    peer.send(str(tmp_path / "piece"), name, always)
    assert [str(path.relative_to(tmp_path / "store")) for path in files(tmp_path / "store")] == [name]


def test_members_store_and_fetch_compiled_code(peer: PeerStore, tmp_path: Path) -> None:
    (tmp_path / "code").write_bytes(b"signed")
    name = f"{RUN}/compiled/worker-host-12"
    peer.send(str(tmp_path / "code"), name, always)
    assert peer.fetch(name, str(tmp_path / "fetched"), always)[0] == 6
    with pytest.raises(KeyError):
        peer.fetch(f"{RUN}/compiled/worker-host-3", str(tmp_path / "other"), always)


def test_the_parts_of_a_committed_snapshot_do_not_change(peer: PeerStore, tmp_path: Path) -> None:
    (tmp_path / "small").write_bytes(b"x")
    peer.send(str(tmp_path / "small"), f"{PART}/worker-0/x", always)
    FolderStore(str(tmp_path / "store")).create(f"{PART}/manifest.json", b"{}")
    (tmp_path / "small").write_bytes(b"other")
    with pytest.raises(StoreError, match="its snapshot is committed"):
        peer.send(str(tmp_path / "small"), f"{PART}/worker-0/x", always)
    assert (tmp_path / "store" / f"{PART}/worker-0/x").read_bytes() == b"x"


def test_a_captain_with_snapshots_in_a_bucket_serves_only_the_library() -> None:
    access = MemberAccess(RUN, f"{RUN}/obstore.zip", snapshots=False)
    access("fetch", f"{RUN}/obstore.zip")
    for verb, name in (("send", f"{PART}/worker-0/x"), ("read", f"{PART}/manifest.json"), ("fetch", f"{PART}/ps-0/x")):
        with pytest.raises(StoreError, match="is not allowed"):
            access(verb, name)


def dial(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), 30)


def test_silent_connections_make_room_for_members(
    server: Server, peer: PeerStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_server, "STRANGERS", 5)
    monkeypatch.setattr(peer_server, "CONNECT_S", 60.0)
    silent = [dial(server) for _ in range(8)]
    assert peer.read(f"{PART}/manifest.json", 100) is None
    for sock in silent[:3]:
        sock.settimeout(30)
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1) == b"", "the oldest is closed"
    for sock in silent:
        sock.close()


def test_a_handshake_that_never_ends_is_ended(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the peer sends a byte now and then."""
    monkeypatch.setattr(peer_server, "CONNECT_S", 0.5)
    with dial(server) as slow:
        hello = b"\x16\x03\x01\x40\x00" + bytes(1000)  # the head of a long first message
        until = time.monotonic() + 60
        slow.settimeout(0.1)
        with contextlib.suppress(ConnectionError):
            for byte in hello:
                assert time.monotonic() < until, "it is still open"
                slow.sendall(bytes([byte]))
                with contextlib.suppress(TimeoutError):
                    if slow.recv(1) == b"":
                        return


def test_the_server_survives_resets_and_a_lack_of_threads(
    server: Server, peer: PeerStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(50):
        sock = dial(server)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()
    refusals = iter([True, True])
    start = threading.Thread.start

    def sometimes(thread: threading.Thread) -> None:
        if next(refusals, False):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", sometimes)
    for _ in range(2):
        with dial(server) as sock:
            sock.settimeout(30)
            with contextlib.suppress(ConnectionResetError):
                assert sock.recv(1) == b""
    assert peer.read(f"{PART}/manifest.json", 100) is None


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
    folder.create(f"{PART}/manifest.json", b"there")
    first = Server(("127.0.0.1", free_port()), context(tls, "captain", server=True), folder, MemberAccess(RUN))
    peer = over_tls(("127.0.0.1", first.port), context(tls, "member", server=False), SERVER_NAME)
    first.close()
    refused = r"cannot read digits-3f9a/step-10-g1/manifest.json at 127.0.0.1: Connection refused"
    with pytest.raises(StoreError, match=refused) as failed:
        peer.read(f"{PART}/manifest.json", 100)
    assert failed.value.is_transient
    second = Server(("127.0.0.1", first.port), context(tls, "captain", server=True), folder, MemberAccess(RUN))
    assert peer.read(f"{PART}/manifest.json", 100) == b"there"
    second.close()


def test_a_client_that_sends_too_much_is_disconnected(server: Server, tls: str) -> None:
    sock = socket.create_connection(("127.0.0.1", server.port), 30)
    wire = Wire(context(tls, "member", server=False).wrap_socket(sock, server_hostname=SERVER_NAME))
    with pytest.raises(Closed):
        for _ in range(100):
            wire.write(b"x" * PIECE)
    wire.close()


REPLIES = [
    b"{", b"[]", b"null", b"7", b'"found"', b"[" * 100_000, b"\xff\xfe", b"{}", b'{"there": true}', b'{"error": [[]]}',
    b'{"found": 5}', b'{"found": "abc"}', b'{"found": [1]}', b'{"found": {"a": 1}}', b'{"found": [["a"]]}',
    b'{"there": true, "size": Infinity, "sha256": []}', b'{"there": true, "size": NaN}', b'{"read": Infinity}',
    b'{"there": true, "size": ' + b"9" * 5000 + b"}", b'{"read": "x"}',
]  # fmt: skip


class Hostile:
    """The other end of a connection that answers every request like this, then ends."""

    def __init__(self, reply: bytes) -> None:
        self._data = struct.pack(">I", len(reply)) + reply

    def settimeout(self, seconds: float) -> None:
        pass

    def sendall(self, data: bytes | bytearray | memoryview) -> None:
        pass

    def recv_into(self, buffer: memoryview, most: int) -> int:
        count = min(most, len(self._data))
        buffer[:count], self._data = self._data[:count], self._data[count:]
        return count

    def close(self) -> None:
        pass


@pytest.mark.parametrize("reply", REPLIES, ids=lambda reply: reply[:40].decode("latin-1"))
def test_whatever_a_peer_answers_is_an_error_of_the_store(tmp_path: Path, reply: bytes) -> None:
    """The pod of another user may run any program."""
    peer = PeerStore(lambda: Hostile(reply), "a pod")
    for number, call in enumerate(
        (
            lambda: peer.read("a", 100),
            lambda: peer.has("a"),
            lambda: peer.names("a/"),
            lambda: peer.folders("a/"),
            lambda: peer.digest("a", always),
            lambda: peer.fetch("a", str(tmp_path / "fetched"), always),
        )
    ):
        with contextlib.suppress(StoreError, KeyError):
            result = call()
            assert number < 2 or (number < 4 and isinstance(result, list) and all(isinstance(x, str) for x in result))
        (tmp_path / "fetched").unlink(missing_ok=True)
