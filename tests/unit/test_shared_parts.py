"""Parts of snapshots that hosts have: linked into the folder to resume from, or fetched from another host over TLS."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.agent.net.tls import MEMBER_NAME, SERVER_NAME, context
from paceline.agent.transfers import requests as req
from paceline.agent.transfers.porter import Porter
from paceline.backends import certificates
from paceline.storage.snapshots import shared_parts
from paceline.storage.snapshots.manifest import Damaged, SnapshotId
from paceline.storage.snapshots.repository import SnapshotRepository
from paceline.storage.snapshots.shared_parts import SMALL, assemble
from paceline.storage.stores.folder import FolderStore
from paceline.storage.stores.peer_access import part_access
from paceline.storage.stores.peer_client import PeerStore, over_tls
from paceline.storage.stores.peer_server import Server
from paceline.storage.stores.protocol import PIECE, StoreError

ID = SnapshotId(10, 1)
pytestmark = pytest.mark.timeout(60)


def part(held: Path, task: str, **files: bytes) -> str:
    folder = held / task / str(ID)
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return str(folder)


def test_large_files_are_linked_and_small_ones_copied(tmp_path: Path) -> None:
    large, small = os.urandom(SMALL + 1), b"{}"
    folder = part(tmp_path / "held", "worker-0", weights=large, about=small)
    assert assemble([(folder, True)], str(tmp_path / "restored")) == len(large) + len(small)
    assert (tmp_path / "restored" / "weights").samefile(f"{folder}/weights")
    assert not (tmp_path / "restored" / "about").samefile(f"{folder}/about")
    assert (tmp_path / "restored" / "about").read_bytes() == small


def test_of_two_files_with_the_same_path_the_first_wins(tmp_path: Path) -> None:
    first = part(tmp_path / "held", "worker-0", about=b"first")
    second = part(tmp_path / "held", "worker-1", about=b"second", shard=b"1")
    assemble([(first, True), (second, True)], str(tmp_path / "restored"))
    assert {path.name: path.read_bytes() for path in (tmp_path / "restored").iterdir()} == {
        "about": b"first", "shard": b"1",
    }  # fmt: skip


def test_a_program_that_deletes_or_replaces_its_files_does_no_harm(tmp_path: Path) -> None:
    folder = part(tmp_path / "held", "worker-0", weights=bytes(SMALL + 1))
    assemble([(folder, True)], str(tmp_path / "restored"))
    (tmp_path / "restored" / "weights").unlink()
    (tmp_path / "restored" / "weights").write_bytes(b"other")
    shared_parts.verify(folder)
    assert Path(folder, "weights").read_bytes() == bytes(SMALL + 1)


def test_a_file_that_a_program_has_changed_is_detected(tmp_path: Path) -> None:
    folder = part(tmp_path / "held", "worker-0", weights=bytes(SMALL + 1))
    assemble([(folder, True)], str(tmp_path / "restored"))
    with (tmp_path / "restored" / "weights").open("r+b") as file:
        file.write(b"changed")
    with pytest.raises(Damaged, match="was changed after it was saved: a program must not change files in PACELINE_RE"):
        shared_parts.verify(folder)
    with pytest.raises(Damaged, match="was changed"):
        assemble([(folder, True)], str(tmp_path / "again"))
    assert not (tmp_path / "again").exists() and not list(tmp_path.glob(".*partial"))


def test_a_small_file_that_was_changed_after_it_was_sent_is_detected(tmp_path: Path) -> None:
    folder = part(tmp_path / "held", "worker-0", about=b"{}")
    shared_parts.sign(folder)  # when it is sent
    Path(folder, "about").write_bytes(b"other")
    with pytest.raises(Damaged, match="about was changed"):
        assemble([(folder, True)], str(tmp_path / "restored"))


def test_a_missing_part_is_damage(tmp_path: Path) -> None:
    with pytest.raises(Damaged, match="is missing"):
        assemble([(str(tmp_path / "nothing"), True)], str(tmp_path / "restored"))
    assert not (tmp_path / "restored").exists()


def test_without_hard_links_files_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    folder = part(tmp_path / "held", "worker-0", weights=bytes(SMALL + 1))
    assemble([(folder, True)], str(tmp_path / "restored"))
    assert not (tmp_path / "restored" / "weights").samefile(f"{folder}/weights")


# ---- in memory: another folder takes its place here


def in_memory(tmp_path: Path, *tasks: str) -> req.Answer:
    """Builds the folder to resume from out of these parts, wherever they are."""
    repository = SnapshotRepository(FolderStore(str(tmp_path / "store")), "run")
    held = str(tmp_path / "memory" / "held"), str(tmp_path / "held")
    restored = str(tmp_path / "restored" / str(ID)), str(tmp_path / "memory" / "restored" / str(ID))
    request = req.LinkSnapshot(ID, restored[0], held, dict.fromkeys(tasks, ""), restored[1])
    return Porter(repository, repository, lambda *_: None, lanes=()).execute(request)


def test_parts_in_memory_are_linked_there(tmp_path: Path) -> None:
    folder = part(tmp_path / "memory" / "held", "worker-0", weights=bytes(SMALL + 1), about=b"{}")
    assert in_memory(tmp_path, "worker-0") == req.SnapshotFetched(SMALL + 3, 0)
    restored = tmp_path / "restored" / str(ID)
    assert restored.readlink() == tmp_path / "memory" / "restored" / str(ID)
    assert (restored / "weights").samefile(f"{folder}/weights") and (restored / "about").read_bytes() == b"{}"


def test_parts_in_memory_and_on_disk_are_joined_on_disk(tmp_path: Path) -> None:
    part(tmp_path / "memory" / "held", "worker-0", first=bytes(SMALL + 1))
    part(tmp_path / "held", "worker-1", second=bytes(SMALL + 2))
    assert in_memory(tmp_path, "worker-0", "worker-1") == req.SnapshotFetched(2 * SMALL + 3, 0)
    restored = tmp_path / "restored" / str(ID)
    assert not restored.is_symlink() and sorted(path.name for path in restored.iterdir()) == ["first", "second"]
    assert not (tmp_path / "memory" / "restored").exists()


def test_without_room_for_small_files_in_memory_they_are_copied_to_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shared_parts.copy

    def full(source: str, target: str, *more: object, **options: bool) -> object:
        if target.startswith(str(tmp_path / "memory")):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), target)
        return copy(source, target, *more, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(shared_parts, "copy", full)
    part(tmp_path / "memory" / "held", "worker-0", weights=bytes(SMALL + 1), about=b"{}")
    assert in_memory(tmp_path, "worker-0") == req.SnapshotFetched(SMALL + 3, 0)
    restored = tmp_path / "restored" / str(ID)
    assert not restored.is_symlink() and (restored / "about").read_bytes() == b"{}"
    assert list((tmp_path / "memory" / "restored").iterdir()) == []


def test_a_folder_that_tasks_resume_from_moves_to_disk_at_once(tmp_path: Path) -> None:
    part(tmp_path / "memory" / "held", "worker-0", weights=bytes(SMALL + 1), about=b"{}")
    in_memory(tmp_path, "worker-0")
    restored = tmp_path / "restored" / str(ID)
    with (restored / "weights").open("rb") as opened:
        shared_parts.move_to_disk(str(restored))
        assert opened.read() == bytes(SMALL + 1)
    assert (restored / "weights").read_bytes() == bytes(SMALL + 1) and (restored / "about").read_bytes() == b"{}"
    assert restored.readlink().parent == restored.parent
    assert list((tmp_path / "memory" / "restored").iterdir()) == []
    assert sorted(path.name for path in restored.parent.iterdir()) == sorted([restored.name, restored.readlink().name])


def test_a_folder_that_cannot_be_copied_stays_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part(tmp_path / "memory" / "held", "worker-0", weights=bytes(SMALL + 1))
    in_memory(tmp_path, "worker-0")
    restored = tmp_path / "restored" / str(ID)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shared_parts, "copy", full)
    with pytest.raises(OSError, match="No space left"):
        shared_parts.move_to_disk(str(restored))
    assert (restored / "weights").read_bytes() == bytes(SMALL + 1)
    assert [path.name for path in restored.parent.iterdir()] == [restored.name]


# ---- from another host


@pytest.fixture
def tls(tmp_path: Path) -> str:
    certificates.make(tmp_path / "tls")
    return str(tmp_path / "tls")


@pytest.fixture
def neighbor(tmp_path: Path, tls: str) -> Iterator[str]:
    """The address of a host that has the part of worker-1, and a file of two pieces in it."""
    part(tmp_path / "neighbor", "worker-1", weights=bytes(range(256)) * (PIECE // 128), about=b"second")
    folders = [str(tmp_path / "neighbor-memory"), str(tmp_path / "neighbor")]
    server = Server(
        ("127.0.0.1", 0), context(tls, "member", server=True), shared_parts.PartsStore(folders), part_access
    )
    yield f"127.0.0.1:{server.port}"
    server.close()


def dial(tls: str, address: str, name: str = MEMBER_NAME) -> PeerStore:
    host, _, port = address.partition(":")
    return over_tls((host, int(port)), context(tls, "member", server=False), name)


def link(tmp_path: Path, tls: str, sources: dict[str, str]) -> req.Answer:
    repository = SnapshotRepository(FolderStore(str(tmp_path / "store")), "run")
    porter = Porter(repository, repository, lambda *_: None, lanes=(), peer=lambda address: dial(tls, address))
    return porter.execute(req.LinkSnapshot(ID, str(tmp_path / "restored"), (str(tmp_path / "held"),), sources))


def test_a_host_gets_the_parts_that_it_lacks_from_its_neighbor(tmp_path: Path, tls: str, neighbor: str) -> None:
    part(tmp_path / "held", "worker-0", shard=bytes(SMALL + 1), about=b"first")
    answer = link(tmp_path, tls, {"worker-0": "", "worker-1": neighbor})
    assert isinstance(answer, req.SnapshotFetched) and answer.received == 2 * PIECE + len(b"second")
    restored = tmp_path / "restored"
    assert (restored / "weights").read_bytes() == bytes(range(256)) * (PIECE // 128)
    assert (restored / "about").read_bytes() == b"first" and (restored / "shard").exists()
    assert [path.name for path in tmp_path.glob("*partial")] == []


def test_a_host_gets_parts_that_its_neighbor_has_in_memory(tmp_path: Path, tls: str, neighbor: str) -> None:
    """Its own parts may be in memory: what it fetches is on disk, and so is the folder to resume from."""
    part(tmp_path / "neighbor-memory", "worker-2", shard=bytes(SMALL + 1))
    answer = link(tmp_path, tls, {"worker-1": neighbor, "worker-2": neighbor})
    assert isinstance(answer, req.SnapshotFetched) and answer.received == 2 * PIECE + len(b"second") + SMALL + 1
    assert sorted(path.name for path in (tmp_path / "restored").iterdir()) == ["about", "shard", "weights"]


def test_a_part_that_the_neighbor_no_longer_has_is_damage(tmp_path: Path, tls: str, neighbor: str) -> None:
    answer = link(tmp_path, tls, {"worker-2": neighbor})
    assert isinstance(answer, req.Failure) and answer.kind == req.DAMAGED and "does not have worker-2" in answer.text
    assert not (tmp_path / "restored").exists()


def test_a_neighbor_that_does_not_answer_is_a_failure_that_may_pass(tmp_path: Path, tls: str) -> None:
    answer = link(tmp_path, tls, {"worker-1": "127.0.0.1:1"})
    assert isinstance(answer, req.Failure) and answer.kind == req.STORE and answer.passing


def test_a_member_cannot_pose_as_the_captain(tls: str, neighbor: str) -> None:
    with pytest.raises(StoreError, match="match"):
        dial(tls, neighbor, SERVER_NAME).names(f"worker-1/{ID}/")


@pytest.mark.parametrize(
    ("verb", "name"),
    [
        ("send", f"worker-1/{ID}/weights"),
        ("delete", f"worker-1/{ID}/weights"),
        ("clear", f"worker-1/{ID}/"),
        ("names", "worker-1/"),
        ("names", ""),
        ("fetch", f"worker-1/{ID}/../../tls/member.key"),
        ("fetch", f"../worker-1/{ID}/weights"),
        ("fetch", f"worker-1/.{ID}.shared"),
        ("read", f"worker-1/{ID}/weights"),
        ("digest", f"worker-1/{ID}/weights"),
    ],
)
def test_members_may_only_list_and_fetch_parts(verb: str, name: str) -> None:
    with pytest.raises(StoreError, match="is not allowed"):
        part_access(verb, name)


def test_members_may_list_and_fetch_parts() -> None:
    part_access("names", f"worker-1/{ID}/")
    part_access("fetch", f"worker-1/{ID}/deep/weights")
