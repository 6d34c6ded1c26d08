"""Parts of snapshots that hosts have: linked into the folder to resume from, or fetched from another host over TLS."""

from __future__ import annotations

import errno
import itertools
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.agent.net.tls import MEMBER_NAME, SERVER_NAME, context
from paceline.agent.transfers import porter as porter_module
from paceline.agent.transfers import requests as req
from paceline.agent.transfers.porter import Porter, PorterSettings
from paceline.backends import certificates
from paceline.storage.snapshots import fetched_parts, parts_from_hosts, shared_parts
from paceline.storage.snapshots.fetched_parts import FetchedParts
from paceline.storage.snapshots.manifest import FILE_BYTES, Damaged, SnapshotId
from paceline.storage.snapshots.repository import SnapshotRepository, always
from paceline.storage.snapshots.shared_parts import SMALL, assemble
from paceline.storage.stores.folder import FolderStore
from paceline.storage.stores.peer_access import part_access
from paceline.storage.stores.peer_client import PeerStore, over_tls
from paceline.storage.stores.peer_server import Server
from paceline.storage.stores.protocol import PIECE, StoreError, TransferCanceled
from support.runs import eventually

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
    assert assemble([folder], str(tmp_path / "restored")) == len(large) + len(small)
    assert (tmp_path / "restored" / "weights").samefile(f"{folder}/weights")
    assert not (tmp_path / "restored" / "about").samefile(f"{folder}/about")
    assert (tmp_path / "restored" / "about").read_bytes() == small


def test_of_two_files_with_the_same_path_the_first_wins(tmp_path: Path) -> None:
    first = part(tmp_path / "held", "worker-0", about=b"first")
    second = part(tmp_path / "held", "worker-1", about=b"second", shard=b"1")
    assemble([first, second], str(tmp_path / "restored"))
    assert {path.name: path.read_bytes() for path in (tmp_path / "restored").iterdir()} == {
        "about": b"first", "shard": b"1",
    }  # fmt: skip


def test_a_program_that_deletes_or_replaces_its_files_does_no_harm(tmp_path: Path) -> None:
    folder = part(tmp_path / "held", "worker-0", weights=bytes(SMALL + 1))
    assemble([folder], str(tmp_path / "restored"))
    (tmp_path / "restored" / "weights").unlink()
    (tmp_path / "restored" / "weights").write_bytes(b"other")
    shared_parts.verify(folder)
    assert Path(folder, "weights").read_bytes() == bytes(SMALL + 1)


def test_a_file_that_a_program_has_changed_is_detected(tmp_path: Path) -> None:
    folder = part(tmp_path / "held", "worker-0", weights=bytes(SMALL + 1))
    assemble([folder], str(tmp_path / "restored"))
    with (tmp_path / "restored" / "weights").open("r+b") as file:
        file.write(b"changed")
    with pytest.raises(Damaged, match="was changed after it was saved: a program must not change files in PACELINE_RE"):
        shared_parts.verify(folder)
    with pytest.raises(Damaged, match="was changed"):
        assemble([folder], str(tmp_path / "again"))
    assert not (tmp_path / "again").exists() and not list(tmp_path.glob(".*partial"))


def test_a_small_file_that_was_changed_after_it_was_sent_is_detected(tmp_path: Path) -> None:
    folder = part(tmp_path / "held", "worker-0", about=b"{}")
    shared_parts.sign(folder)  # when it is sent
    Path(folder, "about").write_bytes(b"other")
    with pytest.raises(Damaged, match="about was changed"):
        assemble([folder], str(tmp_path / "restored"))


def test_a_missing_part_is_damage(tmp_path: Path) -> None:
    with pytest.raises(Damaged, match="is missing"):
        assemble([str(tmp_path / "nothing")], str(tmp_path / "restored"))
    assert not (tmp_path / "restored").exists()


def test_without_hard_links_files_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    folder = part(tmp_path / "held", "worker-0", weights=bytes(SMALL + 1))
    assemble([folder], str(tmp_path / "restored"))
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
    fetched = FetchedParts(str(tmp_path / "fetched"), lambda address: dial(tls, address))
    porter = Porter(repository, repository, lambda *_: None, lanes=(), fetched=fetched)
    return porter.execute(req.LinkSnapshot(ID, str(tmp_path / "restored"), (str(tmp_path / "held"),), sources))


def test_a_host_gets_the_parts_that_it_lacks_from_its_neighbor(tmp_path: Path, tls: str, neighbor: str) -> None:
    part(tmp_path / "held", "worker-0", shard=bytes(SMALL + 1), about=b"first")
    answer = link(tmp_path, tls, {"worker-0": "", "worker-1": neighbor})
    assert isinstance(answer, req.SnapshotFetched) and answer.received == 2 * PIECE + len(b"second")
    restored = tmp_path / "restored"
    assert (restored / "weights").read_bytes() == bytes(range(256)) * (PIECE // 128)
    assert (restored / "about").read_bytes() == b"first" and (restored / "shard").exists()
    assert sorted(path.name for path in (tmp_path / "fetched").iterdir()) == ["worker-1"]


@pytest.mark.parametrize("address", ["garbage", "host:port", "127.0.0.1:99999999", "a..b:80"])
def test_an_address_that_cannot_be_used_is_a_passing_failure(tmp_path: Path, tls: str, address: str) -> None:
    """The store may have the snapshot."""
    settings = PorterSettings("", "run", tls=tls)
    fetched = FetchedParts(str(tmp_path / "fetched"), lambda address: porter_module._member(settings, address))
    repository = SnapshotRepository(FolderStore(str(tmp_path / "store")), "run")
    porter = Porter(repository, repository, lambda *_: None, lanes=(), fetched=fetched)
    answer = porter.execute(req.LinkSnapshot(ID, str(tmp_path / "restored"), ("/held",), {"worker-1": address}))
    assert isinstance(answer, req.Failure) and (answer.kind, answer.passing) == (req.STORE, True)


@pytest.mark.parametrize("most", [3, 64])
def test_a_large_file_is_fetched_in_ranges(
    tmp_path: Path, tls: str, neighbor: str, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Their size is larger if there would be too many."""
    monkeypatch.setattr(parts_from_hosts, "RANGE", 1_000_003)
    monkeypatch.setattr(parts_from_hosts, "MOST_RANGES", most)
    content = random.Random(0).randbytes(5_000_000)
    part(tmp_path / "neighbor", "worker-2", weights=content, empty=b"")
    assert isinstance(link(tmp_path, tls, {"worker-2": neighbor}), req.SnapshotFetched)
    assert (tmp_path / "restored" / "weights").read_bytes() == content
    assert (tmp_path / "restored" / "empty").read_bytes() == b""


@pytest.mark.parametrize("start", [1 << 62, (1 << 63) - 1, 1 << 63, -1, "0", None])
def test_a_request_that_cannot_be_answered_leaves_no_open_file(tls: str, neighbor: str, start: Any) -> None:
    before = len([*Path("/proc/self/fd").iterdir()])
    for _ in range(3):
        store = dial(tls, neighbor)
        with (
            pytest.raises(StoreError, match="the connection was closed"),
            store._request("fetch", f"worker-1/{ID}/weights", start=start, size=10) as wire,
        ):
            wire.read_object(1000)
        store.close()
    eventually("all are closed", lambda: len([*Path("/proc/self/fd").iterdir()]) <= before)


def test_a_neighbor_that_sends_more_than_was_requested_is_a_failure(
    tmp_path: Path, tls: str, neighbor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = lambda *_: nullcontext(itertools.repeat(b"x" * 1000))  # noqa: E731
    monkeypatch.setattr(shared_parts.PartsStore, "give", endless)
    answer = link(tmp_path, tls, {"worker-1": neighbor})
    assert isinstance(answer, req.Failure) and "received more than was requested" in answer.text


@pytest.mark.parametrize(
    "sizes", [{"a": 1, "a/b": 1}, {"x" * 300: 1}, {"weights": (1 << 60) - 1}], ids=["file and folder", "name", "size"]
)
def test_files_that_no_file_system_allows_are_damage(
    tmp_path: Path, tls: str, neighbor: str, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int]
) -> None:
    """Not a failure of this host, which would be tried again."""
    listed = {f"worker-1/{ID}/{name}": size for name, size in sizes.items()}
    monkeypatch.setattr(shared_parts.PartsStore, "sizes", lambda *_: listed)
    answer = link(tmp_path, tls, {"worker-1": neighbor})
    assert isinstance(answer, req.Failure) and answer.kind == req.DAMAGED, answer


def test_a_file_that_becomes_shorter_meanwhile_is_damage(
    tmp_path: Path, tls: str, neighbor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = shared_parts.PartsStore.sizes
    longer = lambda store, prefix: {name: size + 1 for name, size in sizes(store, prefix).items()}  # noqa: E731
    monkeypatch.setattr(shared_parts.PartsStore, "sizes", longer)
    answer = link(tmp_path, tls, {"worker-1": neighbor})
    assert isinstance(answer, req.Failure) and answer.kind == req.DAMAGED and "has become shorter" in answer.text
    assert not (tmp_path / "restored").exists()


@pytest.mark.parametrize("name", [f"worker-1/{ID}/../../escape", "elsewhere", f"worker-1/{ID}//etc/passwd"])
def test_a_neighbor_cannot_choose_where_its_files_are_written(
    tmp_path: Path, tls: str, neighbor: str, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(shared_parts.PartsStore, "sizes", lambda *_: {name: 1})
    answer = link(tmp_path, tls, {"worker-1": neighbor})
    assert isinstance(answer, req.Failure) and answer.kind == req.DAMAGED and "which is not valid" in answer.text


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


# ---- in advance


def in_advance(tmp_path: Path, tls: str, neighbor: str) -> FetchedParts:
    fetched = FetchedParts(str(tmp_path / "fetched"), lambda address: dial(tls, address))
    assert fetched.fetch_in_advance({"worker-1": neighbor}, ID, always) == 2 * PIECE + len(b"second")
    return fetched


def test_parts_that_were_fetched_in_advance_are_linked_at_a_restart(tmp_path: Path, tls: str, neighbor: str) -> None:
    in_advance(tmp_path, tls, neighbor)
    answer = link(tmp_path, tls, {"worker-1": neighbor})
    assert isinstance(answer, req.SnapshotFetched) and answer.received == 0
    part = tmp_path / "fetched" / "worker-1" / str(ID)
    assert (tmp_path / "restored" / "weights").samefile(part / "weights")
    (tmp_path / "restored").rename(tmp_path / "earlier")
    answer = link(tmp_path, tls, {"worker-1": neighbor})
    assert isinstance(answer, req.SnapshotFetched) and answer.received == 0, "the next restart uses them, too"


def test_parts_that_a_program_has_changed_are_fetched_again(tmp_path: Path, tls: str, neighbor: str) -> None:
    in_advance(tmp_path, tls, neighbor)
    link(tmp_path, tls, {"worker-1": neighbor})
    (tmp_path / "restored" / "weights").write_bytes(b"changed in place")
    (tmp_path / "restored").rename(tmp_path / "earlier")
    answer = link(tmp_path, tls, {"worker-1": neighbor})
    assert isinstance(answer, req.SnapshotFetched) and answer.received == 2 * PIECE + len(b"second")
    assert (tmp_path / "restored" / "weights").stat().st_size == 2 * PIECE


def test_a_restart_continues_a_fetch_that_is_under_way(
    tmp_path: Path, tls: str, neighbor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts_from_hosts, "RANGE", PIECE // 2)
    monkeypatch.setattr(fetched_parts, "HANDOVER_S", 60.0)
    fetched = FetchedParts(str(tmp_path / "fetched"), lambda address: dial(tls, address))
    is_under_way, answers = threading.Event(), []

    def has_two_ranges(_: int) -> bool:
        """After two ranges it waits until the restart has asked."""
        pieces.append(None)
        if len(pieces) == 3:
            is_under_way.set()
            eventually("the restart asks", fetched._is_needed.is_set)
        return True

    def prefetch() -> None:
        with pytest.raises(TransferCanceled):
            fetched.fetch_in_advance({"worker-1": neighbor}, ID, has_two_ranges)

    pieces: list[None] = []
    thread = threading.Thread(target=prefetch)
    thread.start()
    assert is_under_way.wait(60)
    answers.append(fetched.fetch({"worker-1": neighbor}, ID, always))
    thread.join()
    total = 2 * PIECE + len(b"second")
    assert PIECE <= answers[0] < total, "not everything, and what was fetched is not fetched again"
    content = Path(fetched.part("worker-1", ID), "weights").read_bytes()
    assert content == bytes(range(256)) * (PIECE // 128)
    assert sorted(path.name for path in (tmp_path / "fetched").iterdir()) == ["worker-1"]


def test_a_restart_does_not_wait_for_a_host_that_does_not_answer(
    tmp_path: Path, tls: str, neighbor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fetch in advance may be stuck at a host that is lost."""
    monkeypatch.setattr(fetched_parts, "HANDOVER_S", 0.05)
    fetched = FetchedParts(str(tmp_path / "fetched"), lambda address: dial(tls, address))
    with fetched._lock:
        assert fetched.fetch({"worker-1": neighbor}, ID, always) == 2 * PIECE + len(b"second")


def test_only_the_parts_of_one_snapshot_are_kept(tmp_path: Path, tls: str, neighbor: str) -> None:
    fetched = in_advance(tmp_path, tls, neighbor)
    link(tmp_path, tls, {"worker-1": neighbor})
    later = SnapshotId(20, 1)
    shutil.copytree(tmp_path / "neighbor" / "worker-1" / str(ID), tmp_path / "neighbor" / "worker-1" / str(later))
    fetched.fetch_in_advance({"worker-1": neighbor}, later, always)
    assert {path.name for path in (tmp_path / "fetched" / "worker-1").iterdir()} == {str(later), f".{later}.shared"}
    assert (tmp_path / "restored" / "weights").stat().st_size == 2 * PIECE, "tasks may still read it"


def test_a_part_whose_deletion_was_interrupted_is_fetched_again(tmp_path: Path, tls: str, neighbor: str) -> None:
    fetched = FetchedParts(str(tmp_path / "fetched"), lambda address: dial(tls, address))
    received = fetched.fetch_in_advance({"worker-1": neighbor}, ID, always)
    part = Path(fetched.part("worker-1", ID))
    (part.parent / f".{ID}.shared").unlink()
    next(path for path in part.rglob("*") if path.is_file()).unlink()
    assert fetched.fetch({"worker-1": neighbor}, ID, always) == received


def test_a_part_that_is_deleted_before_it_is_linked_is_no_damage(
    tmp_path: Path, tls: str, neighbor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart that did not wait for a fetch in advance may lose a part to the next one. The snapshot is intact: the
    restart must try again, not resume from an older one."""
    fetch = FetchedParts.fetch

    def fetch_and_lose(fetched: FetchedParts, *args: Any) -> int:
        received = fetch(fetched, *args)
        fetched._keep_only(SnapshotId(20, 1), "")
        return received

    monkeypatch.setattr(FetchedParts, "fetch", fetch_and_lose)
    answer = link(tmp_path, tls, {"worker-1": neighbor})
    assert isinstance(answer, req.Failure) and (answer.kind, answer.passing) == (req.HERE, True)
    assert "parts of another host were deleted while they were fetched" in answer.text
    monkeypatch.undo()
    assert isinstance(link(tmp_path, tls, {"worker-1": neighbor}), req.SnapshotFetched)


@pytest.mark.parametrize(("free", "blocks"), [(3 * PIECE, 4 * PIECE), (10 * PIECE, 60 * PIECE)])
def test_a_fetch_in_advance_leaves_room_for_another_snapshot_and_a_share_of_the_disk(
    tmp_path: Path, tls: str, neighbor: str, monkeypatch: pytest.MonkeyPatch, free: int, blocks: int
) -> None:
    room = SimpleNamespace(f_bavail=free, f_blocks=blocks, f_frsize=1)
    monkeypatch.setattr(os, "statvfs", lambda _: room)
    fetched = FetchedParts(str(tmp_path / "fetched"), lambda address: dial(tls, address))
    with pytest.raises(OSError, match="too little room"):
        fetched.fetch_in_advance({"worker-1": neighbor}, ID, always)
    assert [*(tmp_path / "fetched").iterdir()] == []
    assert fetched.fetch({"worker-1": neighbor}, ID, always), "a restart needs it"


def disk_with(free: Iterable[int]) -> Callable[[str], Any]:
    free = iter(free)
    return lambda _: SimpleNamespace(f_bavail=next(free), f_blocks=4 * PIECE, f_frsize=1)


def test_a_restart_does_not_fetch_more_than_the_disk_has_room_for(
    tmp_path: Path, tls: str, neighbor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetched_parts, "DELETED_WITHIN_S", 0.0)
    monkeypatch.setattr(os, "statvfs", disk_with(itertools.repeat(PIECE + 1)))
    answer = link(tmp_path, tls, {"worker-1": neighbor})
    assert isinstance(answer, req.Failure) and (answer.kind, answer.passing) == (req.HERE, True)
    sizes = f"it has {2 * PIECE >> 20} MiB, and {PIECE >> 20} MiB are free"
    assert f"too little room to fetch the snapshot: {sizes}" in answer.text
    assert not any(files for _, _, files in os.walk(tmp_path / "fetched"))


def test_a_restart_waits_for_the_room_of_files_that_are_being_deleted(
    tmp_path: Path, tls: str, neighbor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetched_parts, "DELETED_WITHIN_S", 60.0)
    monkeypatch.setattr(os, "statvfs", disk_with(itertools.chain([0, PIECE], itertools.repeat(3 * PIECE))))
    assert isinstance(link(tmp_path, tls, {"worker-1": neighbor}), req.SnapshotFetched)


def test_a_neighbor_cannot_list_more_files_than_a_manifest_has_room_for(
    tmp_path: Path, tls: str, neighbor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts_from_hosts, "MOST_BYTES", 3 * (FILE_BYTES + 2))
    answers = []
    for count in (4, 3):
        names = {f"worker-1/{ID}/f{number}": 0 for number in range(count)}
        monkeypatch.setattr(shared_parts.PartsStore, "sizes", lambda *_, names=names: names)
        answers.append(link(tmp_path, tls, {"worker-1": neighbor}))
    too_many, most = answers
    assert isinstance(too_many, req.Failure) and too_many.kind == req.DAMAGED
    assert "lists 4 files: more than a manifest can list" in too_many.text
    assert isinstance(most, req.SnapshotFetched)


def test_a_member_cannot_pose_as_the_captain(tls: str, neighbor: str) -> None:
    with pytest.raises(StoreError, match="match"):
        dial(tls, neighbor, SERVER_NAME).sizes(f"worker-1/{ID}/")


@pytest.mark.parametrize(
    ("verb", "name"),
    [
        ("send", f"worker-1/{ID}/weights"),
        ("delete", f"worker-1/{ID}/weights"),
        ("clear", f"worker-1/{ID}/"),
        ("sizes", "worker-1/"),
        ("sizes", ""),
        ("names", f"worker-1/{ID}/"),
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
    part_access("sizes", f"worker-1/{ID}/")
    part_access("fetch", f"worker-1/{ID}/deep/weights")
