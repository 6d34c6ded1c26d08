"""The program that reads snapshots in a pod, run on this machine: a real process, its pipes, and streams that break."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.backends.kubernetes.payload.agent_archive import agent_archive
from paceline.backends.kubernetes.runs import snapshot_reader
from paceline.storage.snapshots.manifest import Damaged, Manifest, SnapshotId
from paceline.storage.snapshots.repository import SnapshotRepository
from paceline.storage.stores.folder import FolderStore
from paceline.storage.stores.peer_client import PeerStore
from paceline.storage.stores.protocol import PIECE, StoreError, TransferCanceled
from support import committed
from support.committed import RUN

pytestmark = pytest.mark.timeout(300)
NEWEST = SnapshotId(40, 2)


class Pod:
    """Runs the command that a pod would run; its standard input and output are one socket."""

    def __init__(self, location: Path) -> None:
        self._location = location
        self.processes: list[subprocess.Popen[bytes]] = []

    def dial(self) -> socket.socket:
        archive = agent_archive()
        ours, theirs = socket.socketpair()
        command = snapshot_reader.command(str(self._location), RUN, len(archive))
        with theirs:
            self.processes.append(subprocess.Popen(command, stdin=theirs, stdout=theirs, cwd="/", env=_bare()))
        ours.sendall(archive)
        return ours


def _bare() -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "PYTHONPATH": "/nowhere"}


@pytest.fixture
def location(tmp_path: Path) -> Path:
    """Contains the snapshots of this run and of another."""
    folder = tmp_path / "place"
    committed.life(FolderStore(str(folder)), tmp_path / "scratch")
    committed.life(FolderStore(str(folder)), tmp_path / "other scratch", run="digits-0000")
    return folder


@pytest.fixture
def pod(location: Path) -> Iterator[Pod]:
    reader_pod = Pod(location)
    yield reader_pod
    assert [process.wait(120) for process in reader_pod.processes] == [0] * len(reader_pod.processes)


@pytest.fixture
def peer(pod: Pod) -> Iterator[PeerStore]:
    store = PeerStore(pod.dial, "claim://kept")
    yield store
    store.close()


def test_snapshots_in_a_pod_are_read_as_if_they_were_local(
    peer: PeerStore, pod: Pod, location: Path, tmp_path: Path
) -> None:
    remote, local = SnapshotRepository(peer, RUN), SnapshotRepository(FolderStore(str(location)), RUN)
    assert remote.inventory() == local.inventory()
    assert remote.manifest(NEWEST) == local.manifest(NEWEST)
    assert remote.fetch(remote.manifest(NEWEST), str(tmp_path / "got")) == local.manifest(NEWEST).size
    assert (tmp_path / "got" / "variables" / "weights").read_bytes() == committed.weights(40)
    with pytest.raises(Damaged, match=r"step-99-g2/manifest.json is missing"):
        remote.manifest(SnapshotId(99, 2))
    assert len(pod.processes) == 1


def test_every_byte_is_checked_in_the_pod(peer: PeerStore, location: Path) -> None:
    remote = SnapshotRepository(peer, RUN)
    (part,) = remote.manifest(NEWEST).parts
    pieces: list[int] = []
    for file in part.files:
        remote.check(NEWEST, part.task, file, lambda size: pieces.append(size) or True)  # type: ignore[func-returns-value]
    assert sum(pieces) == sum(file.size for file in part.files)
    weights = location / RUN / "step-40-g2" / "worker-0" / "variables" / "weights"
    weights.write_bytes(weights.read_bytes().replace(b"4", b"5", 1))
    step, changed = part.files
    remote.check(NEWEST, part.task, step)
    with pytest.raises(Damaged, match=r"step-40-g2/worker-0/variables/weights is damaged: its SHA-256 differs"):
        remote.check(NEWEST, part.task, changed)
    weights.unlink()
    with pytest.raises(Damaged, match="weights is missing"):
        remote.check(NEWEST, part.task, changed)


def test_only_snapshots_of_this_run_are_deleted(peer: PeerStore, location: Path) -> None:
    remote = SnapshotRepository(peer, RUN)
    remote.delete(SnapshotId(20, 2))
    assert [str(id) for id in SnapshotRepository(FolderStore(str(location)), RUN).inventory().current()] == [
        "step-40-g2",
        "step-10-g1",
    ]
    (location / RUN / "generations" / ".00000003.json.0123.partial").touch()  # as a crash leaves it
    remote.delete_all()
    assert [path.name for path in location.iterdir()] == ["digits-0000"]
    for name in ("digits-0000/step-40-g2/manifest.json", f"{RUN}/../digits-0000/step-40-g2/manifest.json"):
        with pytest.raises(StoreError):
            peer.delete(name)
    assert len(SnapshotRepository(FolderStore(str(location)), "digits-0000").inventory().committed) == 5


def test_the_target_of_a_symbolic_link_is_not_deleted(peer: PeerStore, location: Path) -> None:
    SnapshotRepository(FolderStore(str(location)), RUN).delete_all()
    (location / RUN).symlink_to("digits-0000")
    with pytest.raises(StoreError, match=f"{RUN} is a symbolic link there, and its target is not deleted"):
        SnapshotRepository(peer, RUN).delete_all()
    assert len(SnapshotRepository(FolderStore(str(location)), "digits-0000").inventory().committed) == 5


def test_snapshots_cannot_be_written_through_a_reader(peer: PeerStore, location: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(StoreError):
        peer.send(str(tmp_path / "file"), f"{RUN}/step-50-g2/worker-0/file", lambda _: True)
    assert not (location / RUN / "step-50-g2").exists()


def test_a_large_file_is_fetched_in_pieces_and_can_be_canceled(
    peer: PeerStore, pod: Pod, location: Path, tmp_path: Path
) -> None:
    data = os.urandom(2 * PIECE + 5)
    (location / RUN / "large").write_bytes(data)
    pieces = iter([True, False])
    with pytest.raises(TransferCanceled):
        peer.fetch(f"{RUN}/large", str(tmp_path / "half"), lambda _: next(pieces))
    assert peer.fetch(f"{RUN}/large", str(tmp_path / "whole"), lambda size: size <= PIECE)[0] == len(data)
    assert (tmp_path / "whole").read_bytes() == data
    assert len(pod.processes) == 2  # the canceled transfer has ended the first


def test_a_location_that_cannot_be_read_is_an_error_that_says_why(peer: PeerStore, location: Path) -> None:
    (location / RUN / "generations" / "00000003.json").mkdir()
    with pytest.raises(StoreError, match=r"cannot read .*/generations/00000003.json: Is a directory"):
        peer.read(f"{RUN}/generations/00000003.json", 100)


def test_an_image_without_python_is_reported(tmp_path: Path) -> None:
    result = subprocess.run(
        snapshot_reader.command("/", RUN, 5), env={"PATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.splitlines()[-1] == "there is no Python 3.9 or newer in its image"


# ---- streams that break


class Recorded:
    """A connection that records every byte from the pod."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.received = bytearray()
        self.settimeout, self.sendall, self.close = connection.settimeout, connection.sendall, connection.close

    def recv_into(self, buffer: memoryview, most: int) -> int:
        count = self._connection.recv_into(buffer, most)
        self.received += buffer[:count]
        return count


class Played:
    """Replays recorded bytes until they end."""

    def __init__(self, data: bytes) -> None:
        self._remaining = data

    def settimeout(self, seconds: float) -> None: ...

    def sendall(self, data: bytes | bytearray | memoryview) -> None: ...

    def close(self) -> None: ...

    def recv_into(self, buffer: memoryview, most: int) -> int:
        count = min(most, len(self._remaining))
        buffer[:count], self._remaining = self._remaining[:count], self._remaining[count:]
        return count


def get_newest(peer: PeerStore, folder: Path) -> None:
    remote = SnapshotRepository(peer, RUN)
    remote.fetch(remote.manifest(remote.inventory().current()[0]), str(folder))


@pytest.fixture
def recording(pod: Pod, location: Path, tmp_path: Path) -> bytes:
    """What a pod sends while a snapshot of two small files is fetched."""
    local = SnapshotRepository(FolderStore(str(location)), RUN)
    local.delete_all()
    local.begin(1, None)
    (tmp_path / "saved" / "deep").mkdir(parents=True)
    (tmp_path / "saved" / "deep" / "weights").write_bytes(b"some weights")
    (tmp_path / "saved" / "empty").touch()
    local.commit(
        Manifest(RUN, SnapshotId(7, 1), 1, (local.send(SnapshotId(7, 1), "worker-0", str(tmp_path / "saved")),))
    )
    connections: list[Recorded] = []

    def dial() -> Recorded:
        connections.append(Recorded(pod.dial()))
        return connections[-1]

    peer = PeerStore(dial, "claim://kept")
    get_newest(peer, tmp_path / "got")
    peer.close()
    return bytes(connections[0].received)


def test_a_stream_that_is_cut_at_any_byte_is_an_error_and_leaves_nothing(recording: bytes, tmp_path: Path) -> None:
    target = tmp_path / "here"
    target.mkdir()
    get_newest(PeerStore(lambda: Played(recording), "claim://kept"), target / "whole")
    assert (target / "whole" / "deep" / "weights").read_bytes() == b"some weights"
    shutil.rmtree(target / "whole")
    for length in range(len(recording)):
        cut = recording[:length]
        with pytest.raises(StoreError, match=r"cannot (read|list) .* at claim://kept: the connection was closed"):
            get_newest(PeerStore(lambda: Played(cut), "claim://kept"), target / "folder")  # noqa: B023
        assert list(target.iterdir()) == []


def test_wrong_bytes_of_a_file_are_an_error_and_leave_nothing(recording: bytes, tmp_path: Path) -> None:
    target = tmp_path / "here"
    target.mkdir()
    file_start = recording.rindex(b"}", 0, recording.index(b"some weights")) - len('{"there": true') - 4
    assert file_start > len(recording) / 2
    for position in range(file_start, len(recording)):
        wrong = recording[:position] + bytes([recording[position] ^ 1]) + recording[position + 1 :]
        with pytest.raises((StoreError, Damaged)):
            get_newest(PeerStore(lambda: Played(wrong), "claim://kept"), target / "folder")  # noqa: B023
        assert list(target.iterdir()) == []
