"""The program that reads snapshots in a pod, on this machine: a real process and its pipes, and streams that break."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.backends.kubernetes import reach
from paceline.backends.kubernetes.archive import agent_archive
from paceline.storage.folder import Folder
from paceline.storage.manifest import Damaged, Id, Manifest
from paceline.storage.peer import Peer
from paceline.storage.snapshots import Snapshots
from paceline.storage.store import PIECE, StoreError, Unwanted
from support import committed
from support.committed import RUN

pytestmark = pytest.mark.timeout(60)
NEWEST = Id(40, 2)


class Pod:
    """Runs what a pod would be told to run; its standard input and output are one socket."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self.processes: list[subprocess.Popen[bytes]] = []

    def dial(self) -> socket.socket:
        archive = agent_archive()
        ours, theirs = socket.socketpair()
        command = reach.command(str(self._place), RUN, len(archive))
        with theirs:
            self.processes.append(subprocess.Popen(command, stdin=theirs, stdout=theirs, cwd="/", env=_bare()))
        ours.sendall(archive)
        return ours


def _bare() -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "PYTHONPATH": "/nowhere"}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """With the snapshots of a run, and with those of another."""
    found = tmp_path / "place"
    committed.life(Folder(str(found)), tmp_path / "scratch")
    committed.life(Folder(str(found)), tmp_path / "other scratch", run="digits-0000")
    return found


@pytest.fixture
def pod(place: Path) -> Iterator[Pod]:
    made = Pod(place)
    yield made
    assert [process.wait(30) for process in made.processes] == [0] * len(made.processes)


@pytest.fixture
def peer(pod: Pod) -> Iterator[Peer]:
    made = Peer(pod.dial, "claim://kept")
    yield made
    made.close()


def test_what_a_pod_has_is_read_as_if_it_were_here(peer: Peer, pod: Pod, place: Path, tmp_path: Path) -> None:
    there, here = Snapshots(peer, RUN), Snapshots(Folder(str(place)), RUN)
    assert there.known() == here.known()
    assert there.manifest(NEWEST) == here.manifest(NEWEST)
    assert there.fetch(there.manifest(NEWEST), str(tmp_path / "got")) == here.manifest(NEWEST).size
    assert (tmp_path / "got" / "variables" / "weights").read_bytes() == committed.weights(40)
    with pytest.raises(Damaged, match=r"step-99-g2/manifest.json is gone"):
        there.manifest(Id(99, 2))
    assert len(pod.processes) == 1


def test_every_byte_is_read_where_it_is(peer: Peer, place: Path) -> None:
    there = Snapshots(peer, RUN)
    (part,) = there.manifest(NEWEST).parts
    pieces: list[int] = []
    for file in part.files:
        there.check(NEWEST, part.task, file, lambda size: pieces.append(size) or True)  # type: ignore[func-returns-value]
    assert sum(pieces) == sum(file.size for file in part.files)
    weights = place / RUN / "step-40-g2" / "worker-0" / "variables" / "weights"
    weights.write_bytes(weights.read_bytes().replace(b"4", b"5", 1))
    step, changed = part.files
    there.check(NEWEST, part.task, step)
    with pytest.raises(Damaged, match=r"step-40-g2/worker-0/variables/weights is damaged: its digest is another"):
        there.check(NEWEST, part.task, changed)
    weights.unlink()
    with pytest.raises(Damaged, match="weights is gone"):
        there.check(NEWEST, part.task, changed)


def test_what_is_deleted_is_of_this_run(peer: Peer, place: Path) -> None:
    there = Snapshots(peer, RUN)
    there.delete(Id(20, 2))
    assert [str(id) for id in Snapshots(Folder(str(place)), RUN).known().counted()] == ["step-40-g2", "step-10-g1"]
    (place / RUN / "generations" / ".00000003.json.0123.partial").touch()  # as a crash leaves it
    there.delete_all()
    assert [path.name for path in place.iterdir()] == ["digits-0000"]
    for name in ("digits-0000/step-40-g2/manifest.json", f"{RUN}/../digits-0000/step-40-g2/manifest.json"):
        with pytest.raises(StoreError):
            peer.delete(name)
    assert len(Snapshots(Folder(str(place)), "digits-0000").known().committed) == 5


def test_what_a_link_leads_to_is_not_deleted(peer: Peer, place: Path) -> None:
    Snapshots(Folder(str(place)), RUN).delete_all()
    (place / RUN).symlink_to("digits-0000")
    with pytest.raises(StoreError, match=f"{RUN} is a link there: what it leads to is not deleted"):
        Snapshots(peer, RUN).delete_all()
    assert len(Snapshots(Folder(str(place)), "digits-0000").known().committed) == 5


def test_nobody_commits_this_way(peer: Peer, place: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(StoreError):
        peer.send(str(tmp_path / "file"), f"{RUN}/step-50-g2/worker-0/file", lambda _: True)
    assert not (place / RUN / "step-50-g2").exists()


def test_a_large_file_comes_in_pieces_and_can_be_given_up(peer: Peer, pod: Pod, place: Path, tmp_path: Path) -> None:
    data = os.urandom(2 * PIECE + 5)
    (place / RUN / "large").write_bytes(data)
    pieces = iter([True, False])
    with pytest.raises(Unwanted):
        peer.fetch(f"{RUN}/large", str(tmp_path / "half"), lambda _: next(pieces))
    assert peer.fetch(f"{RUN}/large", str(tmp_path / "whole"), lambda size: size <= PIECE)[0] == len(data)
    assert (tmp_path / "whole").read_bytes() == data
    assert len(pod.processes) == 2  # what was given up has ended the first


def test_a_place_that_cannot_be_read_says_why(peer: Peer, place: Path) -> None:
    (place / RUN / "generations" / "00000003.json").mkdir()
    with pytest.raises(StoreError, match=r"cannot read .*/generations/00000003.json: Is a directory"):
        peer.read(f"{RUN}/generations/00000003.json", 100)


def test_an_image_without_python_says_so(tmp_path: Path) -> None:
    done = subprocess.run(reach.command("/", RUN, 5), env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1] == "there is no Python 3.9 or newer in its image"


# ---- streams that break


class Recorded:
    """Everything that came from the pod, byte for byte."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self.came = bytearray()
        self.settimeout, self.sendall, self.close = line.settimeout, line.sendall, line.close

    def recv_into(self, buffer: memoryview, most: int) -> int:
        count = self._line.recv_into(buffer, most)
        self.came += buffer[:count]
        return count


class Played:
    """That again, as long as it lasts."""

    def __init__(self, data: bytes) -> None:
        self._left = data

    def settimeout(self, seconds: float) -> None: ...

    def sendall(self, data: bytes | bytearray | memoryview) -> None: ...

    def close(self) -> None: ...

    def recv_into(self, buffer: memoryview, most: int) -> int:
        count = min(most, len(self._left))
        buffer[:count], self._left = self._left[:count], self._left[count:]
        return count


def get_newest(peer: Peer, folder: Path) -> None:
    there = Snapshots(peer, RUN)
    there.fetch(there.manifest(there.known().counted()[0]), str(folder))


@pytest.fixture
def came(pod: Pod, place: Path, tmp_path: Path) -> bytes:
    """What a pod says while a snapshot of two small files is fetched."""
    here = Snapshots(Folder(str(place)), RUN)
    here.delete_all()
    here.begin(1, None)
    (tmp_path / "saved" / "deep").mkdir(parents=True)
    (tmp_path / "saved" / "deep" / "weights").write_bytes(b"some weights")
    (tmp_path / "saved" / "empty").touch()
    here.commit(Manifest(RUN, Id(7, 1), 1, (here.send(Id(7, 1), "worker-0", str(tmp_path / "saved")),)))
    lines: list[Recorded] = []

    def dial() -> Recorded:
        lines.append(Recorded(pod.dial()))
        return lines[-1]

    peer = Peer(dial, "claim://kept")
    get_newest(peer, tmp_path / "got")
    peer.close()
    return bytes(lines[0].came)


def test_a_stream_that_is_cut_at_any_byte_is_an_error_and_leaves_nothing(came: bytes, tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    get_newest(Peer(lambda: Played(came), "claim://kept"), here / "whole")
    assert (here / "whole" / "deep" / "weights").read_bytes() == b"some weights"
    shutil.rmtree(here / "whole")
    for length in range(len(came)):
        cut = came[:length]
        with pytest.raises(StoreError, match=r"cannot (read|list) .* at claim://kept: the connection ended"):
            get_newest(Peer(lambda: Played(cut), "claim://kept"), here / "folder")  # noqa: B023
        assert list(here.iterdir()) == []


def test_wrong_bytes_of_a_file_are_an_error_and_leave_nothing(came: bytes, tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    begins = came.rindex(b"}", 0, came.index(b"some weights")) - len('{"there": true') - 4
    assert begins > len(came) / 2
    for position in range(begins, len(came)):
        wrong = came[:position] + bytes([came[position] ^ 1]) + came[position + 1 :]
        with pytest.raises((StoreError, Damaged)):
            get_newest(Peer(lambda: Played(wrong), "claim://kept"), here / "folder")  # noqa: B023
        assert list(here.iterdir()) == []
