"""Snapshots in a store: whatever crashes, and whenever, committed snapshots are current and restored unchanged."""

from __future__ import annotations

import contextlib
import errno
import gc
import hashlib
import inspect
import json
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.agent.transfers import requests as req
from paceline.agent.transfers.porter import Porter
from paceline.storage import local_files, regular_files
from paceline.storage.snapshots import chain, manifest, repository
from paceline.storage.snapshots.chain import Record
from paceline.storage.snapshots.generation_records import KEPT as RECORDS_KEPT
from paceline.storage.snapshots.generation_records import Superseded
from paceline.storage.snapshots.manifest import Damaged, File, Manifest, Newer, Part, SnapshotId
from paceline.storage.snapshots.repository import SnapshotRepository, Unfit
from paceline.storage.snapshots.retention import to_delete
from paceline.storage.stores import folder
from paceline.storage.stores.folder import FolderStore
from paceline.storage.stores.protocol import StoreError, TransferCanceled
from support.stored import commit, written

RUN = "digits-3f9a"


@pytest.fixture
def snapshots(tmp_path: Path) -> SnapshotRepository:
    return SnapshotRepository(FolderStore(str(tmp_path / "store")), RUN)


def restore_newest(
    snapshots: SnapshotRepository, tmp_path: Path, warn: Callable[[str], None] = pytest.fail
) -> tuple[SnapshotId, Path] | None:
    """Restore the newest intact snapshot, as a new process does."""
    target = tmp_path / f"restored-{os.urandom(4).hex()}"
    for id in snapshots.inventory().current():
        try:
            snapshots.fetch(snapshots.manifest(id), str(target))
            return id, target
        except (Damaged, Newer) as error:
            warn(f"the snapshot of step {id.step} is skipped: {error}")
    return None


# ---- commit and restore


def test_a_committed_snapshot_is_restored_unchanged(snapshots: SnapshotRepository, tmp_path: Path) -> None:
    snapshots.begin(1, None)
    commit(snapshots, tmp_path, 10)
    commit(snapshots, tmp_path, 20)
    newest = restore_newest(snapshots, tmp_path)
    assert newest is not None and newest[0] == SnapshotId(20, 1)
    target = newest[1]
    assert sorted(str(path.relative_to(target)) for path in target.rglob("*")) == [
        "empty", "epoch", "variables", "variables/weights",
    ]  # fmt: skip
    assert (target / "variables" / "weights").read_bytes() == b"worker-0 20" * 1000


def test_a_snapshot_without_a_manifest_does_not_exist(snapshots: SnapshotRepository, tmp_path: Path) -> None:
    snapshots.begin(1, None)
    commit(snapshots, tmp_path, 10)
    snapshots.send(SnapshotId(20, 1), "worker-0", str(written(tmp_path, 20)))
    newest = restore_newest(snapshots, tmp_path)
    assert newest is not None and newest[0] == SnapshotId(10, 1)


def test_parts_of_several_tasks_become_one_folder_and_the_first_wins(
    snapshots: SnapshotRepository, tmp_path: Path
) -> None:
    snapshots.begin(1, None)
    for task in ("worker-0", "worker-1"):
        saved = written(tmp_path / "more", 10, task)
        (saved / f"shard-{task}").write_text(task)
    parts = [
        snapshots.send(SnapshotId(10, 1), task, f"{tmp_path}/more/{task}-step-10") for task in ("worker-0", "worker-1")
    ]
    snapshots.commit(Manifest(RUN, SnapshotId(10, 1), 2, tuple(parts)))
    newest = restore_newest(snapshots, tmp_path)
    assert newest is not None
    assert (newest[1] / "shard-worker-1").read_text() == "worker-1"
    assert (newest[1] / "variables" / "weights").read_bytes() == b"worker-0 10" * 1000


def test_a_snapshot_is_committed_once(snapshots: SnapshotRepository, tmp_path: Path) -> None:
    snapshots.begin(1, None)
    committed = commit(snapshots, tmp_path, 10)
    assert not snapshots.commit(Manifest(RUN, committed.id, 7, ()))
    assert snapshots.manifest(committed.id) == committed


def test_a_porter_checks_a_snapshot_in_the_store(snapshots: SnapshotRepository, tmp_path: Path) -> None:
    snapshots.begin(1, None)
    committed = commit(snapshots, tmp_path, 10)
    porter = Porter(snapshots, snapshots, lambda *_: None, lanes=())
    assert porter.execute(req.CheckSnapshot(committed.id)) == req.Done()
    weights = tmp_path / "store" / RUN / "step-10-g1" / "worker-0" / "variables" / "weights"
    content = weights.read_bytes()
    weights.write_bytes(b"x" * len(content))
    damaged = porter.execute(req.CheckSnapshot(committed.id))
    assert isinstance(damaged, req.Failure) and damaged.kind == req.DAMAGED and "its SHA-256 differs" in damaged.text
    weights.unlink()
    missing = porter.execute(req.CheckSnapshot(committed.id))
    assert isinstance(missing, req.Failure) and missing.kind == req.DAMAGED and "is missing" in missing.text
    (weights.parents[2] / "manifest.json").write_text('{"version": 999}')
    newer = porter.execute(req.CheckSnapshot(committed.id))
    assert isinstance(newer, req.Failure) and newer.kind == req.NEWER


def test_a_file_that_is_larger_than_its_manifest_says_does_not_fill_the_disk(
    snapshots: SnapshotRepository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots.begin(1, None)
    committed = commit(snapshots, tmp_path, 10)
    file = tmp_path / "store" / RUN / "step-10-g1" / "worker-0" / "variables" / "weights"
    with file.open("r+b") as stored:
        stored.truncate(1 << 40)  # without blocks
    monkeypatch.setattr(repository, "PIECE", 0)
    with pytest.raises(Damaged, match="it is larger than its manifest says"):
        snapshots.fetch(committed, str(tmp_path / "fetched"))
    assert not [path for path in tmp_path.iterdir() if "fetched" in path.name]


@pytest.mark.parametrize("damage", ["changed", "truncated", "gone", "no manifest", "a manifest of another"])
def test_a_damaged_snapshot_is_passed_over_with_the_name_of_its_file(
    snapshots: SnapshotRepository, tmp_path: Path, damage: str
) -> None:
    snapshots.begin(1, None)
    commit(snapshots, tmp_path, 10)
    commit(snapshots, tmp_path, 20)
    store = tmp_path / "store" / RUN
    file = store / "step-20-g1" / "worker-0" / "variables" / "weights"
    manifest_path = store / "step-20-g1" / "manifest.json"
    if damage == "changed":
        file.write_bytes(file.read_bytes()[:-1] + b"!")
    elif damage == "truncated":
        file.write_bytes(file.read_bytes()[:-1])
    elif damage == "gone":
        file.unlink()
    elif damage == "no manifest":
        manifest_path.write_bytes(manifest_path.read_bytes()[:-1])
    else:
        manifest_path.write_bytes((store / "step-10-g1" / "manifest.json").read_bytes())
    warnings: list[str] = []
    newest = restore_newest(snapshots, tmp_path, warnings.append)
    assert newest is not None and newest[0] == SnapshotId(10, 1)
    (text,) = warnings
    name = "step-20-g1/manifest.json" if "manifest" in damage else "variables/weights"
    assert text.startswith("the snapshot of step 20 is skipped: ") and name in text


def test_a_manifest_of_a_newer_version_is_skipped_with_a_warning(snapshots: SnapshotRepository, tmp_path: Path) -> None:
    snapshots.begin(1, None)
    commit(snapshots, tmp_path, 10)
    path = tmp_path / "store" / RUN / "step-10-g1" / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 2}))
    warnings: list[str] = []
    assert restore_newest(snapshots, tmp_path, warnings.append) is None
    assert "has format version 2, but this Paceline supports only version 1; use a newer Paceline" in warnings[0]


def test_names_with_spaces_and_unicode_are_kept(snapshots: SnapshotRepository, tmp_path: Path) -> None:
    saved = tmp_path / "saved here"
    saved.mkdir()
    (saved / "Gewichte für ω 1").write_text("x")
    snapshots.begin(1, None)
    part = snapshots.send(SnapshotId(1, 1), "worker-0", str(saved))
    snapshots.commit(Manifest(RUN, SnapshotId(1, 1), 1, (part,)))
    newest = restore_newest(snapshots, tmp_path)
    assert newest is not None and [path.name for path in newest[1].iterdir()] == ["Gewichte für ω 1"]


@pytest.mark.parametrize("kind", ["a link", "a pipe", "a line break"])
def test_entries_that_are_not_regular_files_are_rejected_by_name(
    snapshots: SnapshotRepository, tmp_path: Path, kind: str
) -> None:
    saved = written(tmp_path, 10)
    name = "two\nlines" if kind == "a line break" else "odd"
    if kind == "a link":
        (saved / name).symlink_to("/etc/passwd")
    elif kind == "a pipe":
        os.mkfifo(saved / name)
    else:
        (saved / name).touch()
    with pytest.raises(Unfit, match=r"odd|two"):
        snapshots.send(SnapshotId(10, 1), "worker-0", str(saved))


def test_a_canceled_transfer_leaves_nothing(snapshots: SnapshotRepository, tmp_path: Path) -> None:
    with pytest.raises(TransferCanceled):
        snapshots.send(SnapshotId(10, 1), "worker-0", str(written(tmp_path, 10)), lambda _: False)
    assert not [path for path in (tmp_path / "store").rglob("*") if path.is_file()]


def test_the_error_for_an_unwritable_location_names_it_and_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"cannot list .*/file/.*: Not a directory"):
        SnapshotRepository(FolderStore(str(tmp_path / "file")), RUN).begin(1, None)


# ---- ownership


def owned(tmp_path: Path, token: str) -> SnapshotRepository:
    """The snapshots as a new process of that run opens them."""
    return SnapshotRepository(FolderStore(str(tmp_path / "store")), RUN, token, "s3://training/digits")


@pytest.mark.parametrize("existing", ["its claim", "a generation", "a snapshot", "what an older version wrote"])
def test_a_second_run_with_the_same_id_changes_nothing(tmp_path: Path, existing: str) -> None:
    first = owned(tmp_path, "" if existing == "what an older version wrote" else "first")
    first.inventory()
    if existing != "its claim":
        first.begin(1, None)
    if existing == "a snapshot":
        commit(first, tmp_path, 10)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "store").rglob("*")}
    second = owned(tmp_path, "second")
    for operation in (second.claim, second.inventory, lambda: second.begin(2, None)):
        with pytest.raises(StoreError) as refused:
            operation()
        assert str(refused.value) == (
            "another run digits-3f9a already exists at s3://training/digits; choose another id (--run), "
            "start from that run (--set snapshots.from=s3://training/digits/digits-3f9a), or delete it "
            "(`paceline delete --snapshots s3://training/digits/digits-3f9a`)"
        )
        assert not refused.value.is_transient
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "store").rglob("*")} == before


def test_a_run_can_reopen_its_own_snapshots(tmp_path: Path) -> None:
    owned(tmp_path, "first").begin(1, None)
    commit(owned(tmp_path, "first"), tmp_path, 10)
    assert owned(tmp_path, "first").inventory().current() == [SnapshotId(10, 1)]
    assert owned(tmp_path, "first").begin(2, SnapshotId(10, 1), [SnapshotId(10, 1)]) == []
    assert sorted(owned(tmp_path, "").inventory().records) == [1, 2], "reading needs no claim"


def test_a_lost_location_is_claimed_again_despite_leftovers_of_members_and_crashes(tmp_path: Path) -> None:
    (tmp_path / "store" / RUN / "generations").mkdir(parents=True)
    (tmp_path / "store" / RUN / "generations" / ".00000000.json.0123.partial").touch()
    owned(tmp_path, "").send(SnapshotId(10, 1), "worker-0", str(written(tmp_path, 10)))
    assert owned(tmp_path, "first").inventory().generation == 0
    with pytest.raises(StoreError, match=r"another run .* already exists"):
        owned(tmp_path, "second").claim()


def test_only_one_of_two_concurrent_claims_succeeds(tmp_path: Path) -> None:
    winners: list[str] = []

    def claim(token: str) -> None:
        with contextlib.suppress(StoreError):
            owned(tmp_path, token).claim()
            winners.append(token)

    threads = [threading.Thread(target=claim, args=(token,)) for token in ("first", "second") * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(winners) == 4 and len(set(winners)) == 1


# ---- generations


def test_a_writer_that_was_presumed_dead_cannot_add_to_the_chain(snapshots: SnapshotRepository, tmp_path: Path) -> None:
    snapshots.begin(1, None)
    commit(snapshots, tmp_path, 10)
    snapshots.begin(2, SnapshotId(10, 1))
    with pytest.raises(Superseded, match="a generation later than 1 exists"):
        commit(snapshots, tmp_path, 20)  # in generation 1, after generation 2 has started
    newest = restore_newest(snapshots, tmp_path)
    assert newest is not None and newest[0] == SnapshotId(10, 1)
    commit(snapshots, tmp_path, 20, 2)
    newest = restore_newest(snapshots, tmp_path)
    assert newest is not None and newest[0] == SnapshotId(20, 2)
    assert snapshots.inventory().current() == [SnapshotId(20, 2), SnapshotId(10, 1)]


def test_a_snapshot_committed_while_the_next_generation_begins_is_not_lost(
    snapshots: SnapshotRepository, tmp_path: Path
) -> None:
    """Its writer knows that it is committed, so the generation that missed it is replaced by one that starts there."""
    snapshots.begin(1, None)
    commit(snapshots, tmp_path, 10)
    current_ids = snapshots.inventory().current()
    commit(snapshots, tmp_path, 20)
    missed = snapshots.begin(2, SnapshotId(10, 1), current_ids)
    assert missed == [SnapshotId(20, 1), SnapshotId(10, 1)]
    assert snapshots.begin(3, missed[0], missed) == []
    assert snapshots.inventory().current() == [SnapshotId(20, 1), SnapshotId(10, 1)]


def test_only_one_captain_can_start_a_generation(snapshots: SnapshotRepository) -> None:
    snapshots.begin(1, None)
    with pytest.raises(Superseded, match="another captain has started generation 1"):
        snapshots.begin(1, None)
    snapshots.begin(3, None)
    with pytest.raises(Superseded, match="a generation later than 2 exists"):
        snapshots.begin(2, None)


@pytest.mark.parametrize("stray", [".nfs0001", ".DS_Store", "notes.txt", "old/00000009.json", "zz", "00000001.json~"])
def test_other_files_beside_the_records_are_ignored(snapshots: SnapshotRepository, tmp_path: Path, stray: str) -> None:
    path = tmp_path / "store" / RUN / "generations" / stray
    path.parent.mkdir(parents=True)
    path.write_text("not a record")
    assert not snapshots.taken()
    snapshots.begin(1, None)
    commit(snapshots, tmp_path, 10)
    assert snapshots.inventory().generation == 1
    assert snapshots.inventory().current() == [SnapshotId(10, 1)]
    assert path.exists()


def test_records_of_generations_older_than_all_snapshots_are_deleted(
    snapshots: SnapshotRepository, tmp_path: Path
) -> None:
    """A captain that restarts reads all records, and a run may have thousands of generations."""
    parent: SnapshotId | None = None
    last = 3 * RECORDS_KEPT
    for generation in range(1, last + 1):
        snapshots.begin(generation, parent)
        snapshots.sweep(generation, parent)
        before, parent = parent, commit(snapshots, tmp_path, 10 * generation, generation).id
        if before is not None:
            snapshots.delete(before)
    kept = SnapshotRepository(FolderStore(str(tmp_path / "store")), RUN).inventory()
    assert sorted(kept.records) == [*range(last - RECORDS_KEPT, last + 1)]
    assert kept.current() == [parent] and snapshots.inventory().records == kept.records
    with pytest.raises(Superseded):
        snapshots.begin(5, None)  # its record was deleted


def test_the_chain_keeps_the_records_between_its_oldest_snapshot_and_the_newest(tmp_path: Path) -> None:
    """The best snapshot may be old. The run is still that of its token."""
    snapshots = SnapshotRepository(FolderStore(str(tmp_path / "store")), RUN, "token")
    oldest = SnapshotId(30, 3)
    parent: SnapshotId | None = None
    for generation in range(1, 2 * RECORDS_KEPT):
        snapshots.begin(generation, parent)
        snapshots.sweep(generation, parent)
        before, parent = parent, commit(snapshots, tmp_path, 10 * generation, generation).id
        if before is not None and before != oldest:
            snapshots.delete(before)
    contents = snapshots.inventory()
    assert min(contents.records) == oldest.generation and contents.current() == [parent, oldest]
    with pytest.raises(StoreError, match="already exists"):
        SnapshotRepository(FolderStore(str(tmp_path / "store")), RUN, "another").inventory()


def test_a_captain_that_was_frozen_deletes_nothing(snapshots: SnapshotRepository, tmp_path: Path) -> None:
    """It decided to delete step 10 in generation 1. In the meantime, another captain resumed from that snapshot."""
    snapshots.begin(1, None)
    commit(snapshots, tmp_path, 10)
    commit(snapshots, tmp_path, 20)
    snapshots.begin(2, SnapshotId(10, 1), [SnapshotId(20, 1), SnapshotId(10, 1)])
    with pytest.raises(Superseded, match="a generation later than 1 exists"):
        snapshots.delete(SnapshotId(10, 1), generation=1)
    assert snapshots.inventory().current() == [SnapshotId(10, 1)]
    snapshots.delete(SnapshotId(20, 1), generation=2)
    assert not snapshots.has(SnapshotId(20, 1))


History = tuple[dict[int, Record], set[SnapshotId], list[SnapshotId]]


@st.composite
def histories(draw: st.DrawFn) -> History:
    """Successive generations, each from a snapshot that was current, with writers that continue after their end;
    and the snapshots that are current at the end."""
    records: dict[int, Record] = {}
    committed: set[SnapshotId] = set()
    lineage: list[SnapshotId] = []  # current snapshots, oldest first
    for generation in range(1, draw(st.integers(1, 6)) + 1):
        keep = draw(st.integers(0, len(lineage)))
        lineage = lineage[:keep]
        parent = lineage[-1] if lineage else None
        records[generation] = Record(generation, parent)
        step = parent.step if parent else 0
        for _ in range(draw(st.integers(0, 3))):
            step += draw(st.integers(1, 3))
            lineage.append(SnapshotId(step, generation))
            committed.add(lineage[-1])
        for ended in range(1, generation):
            if draw(st.booleans()):
                last = max((each.step for each in committed if each.generation == ended), default=0)
                restored_from = max(
                    (r.parent.step for r in records.values() if r.parent and r.parent.generation == ended), default=0
                )
                committed.add(SnapshotId(max(last, restored_from) + 1, ended))
    return records, committed, lineage


@given(histories())
def test_current_snapshots_are_those_on_the_chain_of_the_newest_generation(
    history: tuple[dict[int, Record], set[SnapshotId], list[SnapshotId]],
) -> None:
    records, committed, lineage = history
    assert chain.current(records, committed) == lineage[::-1]


@given(st.binary(max_size=200))
def test_any_bytes_are_a_manifest_or_an_error(data: bytes) -> None:
    for parse in (manifest.parse, chain.parse):
        with pytest.raises((Damaged, Newer)):
            parse(data, "name")


PATHS = ["/etc/passwd", "../up", "a/../b", "a//b", "", ".", "a\0b", "a\nb"]


@pytest.mark.parametrize("path", PATHS)
def test_a_manifest_cannot_name_files_outside_its_folder(path: str) -> None:
    outside = Manifest(RUN, SnapshotId(1, 1), 1, (Part("worker-0", (File(path, 1, "0" * 64),)),))
    with pytest.raises(Damaged, match="not below its folder"):
        manifest.parse(outside.to_bytes(), "name")


def test_a_file_cannot_be_a_folder_too() -> None:
    files = (File("a", 1, "0" * 64), File("a/b", 1, "0" * 64))
    with pytest.raises(Damaged, match="both as a file and as a folder"):
        manifest.parse(Manifest(RUN, SnapshotId(1, 1), 1, (Part("worker-0", files),)).to_bytes(), "name")


def test_more_files_than_a_manifest_may_name_are_not_sent(
    snapshots: SnapshotRepository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "MOST_BYTES", 300)
    with pytest.raises(Unfit, match=r"^its 3 files take 1 MiB in the manifest, and the limit is"):
        snapshots.send(SnapshotId(1, 1), "worker-0", str(written(tmp_path, 1)))
    assert not (tmp_path / "store").exists()


# ---- retention


def test_the_newest_and_the_best_are_kept(snapshots: SnapshotRepository, tmp_path: Path) -> None:
    ids = [SnapshotId(step, 1) for step in (40, 30, 20, 10)]
    metrics = dict(zip(ids, (0.4, 0.3, 0.9, 0.2), strict=True))
    assert to_delete(ids, ids, 2, {}, lowest=True) == [SnapshotId(20, 1), SnapshotId(10, 1)]
    assert to_delete(ids, ids, 2, metrics, lowest=True) == [SnapshotId(20, 1)]
    assert to_delete(ids, ids, 2, metrics, lowest=False) == [SnapshotId(10, 1)]


def test_deleting_a_snapshot_leaves_nothing_of_it_and_keeps_everything_else(
    snapshots: SnapshotRepository, tmp_path: Path
) -> None:
    snapshots.begin(1, None)
    commit(snapshots, tmp_path, 10)
    commit(snapshots, tmp_path, 20)
    foreign = tmp_path / "store" / RUN / "notes.txt"
    foreign.write_text("mine")
    snapshots.delete(SnapshotId(20, 1))
    assert foreign.read_text() == "mine"
    assert sorted(path.name for path in (tmp_path / "store" / RUN).iterdir()) == [
        "generations", "notes.txt", "step-10-g1",
    ]  # fmt: skip
    newest = restore_newest(snapshots, tmp_path)
    assert newest is not None and newest[0] == SnapshotId(10, 1)


# ---- a file system without hard links


class OsWithoutLinks:
    """The module os, on a file system without hard links."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def link(self, source: str, target: str) -> None:
        raise OSError(self._number, os.strerror(self._number), source, None, target)


@pytest.mark.parametrize("error_number", [errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_hard_links_is_rejected(
    snapshots: SnapshotRepository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error_number: int
) -> None:
    monkeypatch.setattr(folder, "os", OsWithoutLinks(error_number))
    with pytest.raises(StoreError, match=f"{tmp_path}/store: its file system does not support hard links") as failed:
        snapshots.begin(1, None)
    assert not failed.value.is_transient and not [path for path in (tmp_path / "store").rglob("*") if path.is_file()]


# ---- a crash at any call


class Crash(BaseException):
    """The machine loses power."""


class CrashingOs:
    """The module os, until it crashes at a given call. After that no thread does anything, and what was not synced is
    lost: the contents of files, the names in folders."""

    CALLS = ("open", "write", "fsync", "link", "unlink", "mkdir", "rename", "close", "rmdir")

    def __init__(self, at: int) -> None:
        self.calls, self._at = 0, at
        self._open: dict[int, str] = {}  # descriptors
        self._unsynced: dict[int, int] = {}  # unsynced files (inodes), each with a descriptor of our own
        self._unsynced_names: list[tuple[str, str]] = []  # new and old names in unsynced folders
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        return self._guarded(name, real) if name in self.CALLS else real

    def syncfs(self, fd: int) -> None:
        self._guarded("syncfs", lambda fd: None)(fd)

    def _guarded(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with self._lock:
                self.calls += 1
                if self.calls < self._at:
                    self._record(name, args)
                    result = real(*args)
                    if name == "open":
                        self._open[result] = args[0]
                    return result
                if name == "write" and self.calls == self._at:
                    real(args[0], args[1][: len(args[1]) // 2])
                raise Crash

        return call

    def _record(self, name: str, args: Any) -> None:
        if name == "close":
            del self._open[args[0]]
        elif name == "write":
            file = os.fstat(args[0]).st_ino
            if file not in self._unsynced:
                self._unsynced[file] = os.dup(args[0])
        elif name == "fsync":
            self._mark_synced(os.fstat(args[0]).st_ino)
            folder = Path(self._open[args[0]])
            self._unsynced_names = [each for each in self._unsynced_names if Path(each[0]).parent != folder]
        elif name == "syncfs":
            for file in list(self._unsynced):
                self._mark_synced(file)
            self._unsynced_names = []
        elif name in ("rename", "link"):
            self._unsynced_names.append((args[1], args[0]))

    def _mark_synced(self, file: int) -> None:
        if file in self._unsynced:
            os.close(self._unsynced.pop(file))

    def lose_unsynced_data(self) -> None:
        for new, old in reversed(self._unsynced_names):
            with contextlib.suppress(FileNotFoundError):  # deleted since
                Path(new).replace(old)
        for fd in self._unsynced.values():
            os.ftruncate(fd, os.fstat(fd).st_size // 2)
        for fd in (*self._open, *self._unsynced.values()):  # including those that the process had open
            os.close(fd)


def count_descriptors() -> int:
    gc.collect()  # closes now what earlier tests left open, not during this test
    return len(list(Path("/proc/self/fd").iterdir()))


def story(snapshots: SnapshotRepository, tmp_path: Path) -> Iterator[SnapshotId | None]:
    """The life of a run; yields the snapshot from which it would resume, after each change."""
    snapshots.begin(1, None)
    for step in (10, 20):
        commit(snapshots, tmp_path, step)
        yield SnapshotId(step, 1)
    snapshots.begin(2, SnapshotId(20, 1))
    commit(snapshots, tmp_path, 30, 2)
    yield SnapshotId(30, 2)
    snapshots.delete(SnapshotId(10, 1))
    yield SnapshotId(30, 2)
    snapshots.begin(3, SnapshotId(30, 2))
    commit(snapshots, tmp_path, 40, 3, "worker-0", "worker-1")
    yield SnapshotId(40, 3)


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A folder in memory: on a disk, hundreds of crashes take thousands of syncs."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.mark.parametrize("synced", ["file by file", "all at once"])
def test_a_crash_at_any_call_loses_nothing_that_was_committed(
    in_memory: Path, monkeypatch: pytest.MonkeyPatch, synced: str
) -> None:
    monkeypatch.setattr(folder, "SMALL", 1000)  # one of the files is larger
    if synced == "all at once":
        monkeypatch.setattr(folder, "MANY", 2)
        monkeypatch.setattr(local_files, "SYNCED_WHOLE", ("tmpfs",))
    expected = [
        None,
        *story(SnapshotRepository(FolderStore(str(in_memory / "whole" / "store")), RUN), in_memory / "whole"),
    ]
    at, survived, before = 0, False, count_descriptors()
    while not survived:
        at += 1
        root = in_memory / f"crash-{at}"
        crashing = CrashingOs(at)
        snapshots = SnapshotRepository(FolderStore(str(root / "store")), RUN)
        reached = 0
        with monkeypatch.context() as patch:
            patch.setattr(folder, "os", crashing)
            patch.setattr(local_files, "os", crashing)
            patch.setattr(regular_files, "os", crashing)
            patch.setattr(local_files, "syncfs", crashing.syncfs)
            try:
                for _ in story(snapshots, root):
                    reached += 1
                survived = True
            except Crash:
                pass
        crashing.lose_unsynced_data()
        newest = restore_newest(SnapshotRepository(FolderStore(str(root / "store")), RUN), root)
        snapshot = newest[0] if newest else None
        # The snapshot in progress may have been committed just before the crash.
        assert snapshot in expected[reached : reached + 2], (at, reached, snapshot)
        if newest:
            step = newest[0].step
            weights = (newest[1] / "variables" / "weights").read_bytes()
            assert hashlib.sha256(weights).digest() == hashlib.sha256(f"worker-0 {step}".encode() * 1000).digest()
    assert at > 150 and at == crashing.calls + 1 and count_descriptors() == before


# ---- folders that tasks wrote


def test_folders_of_any_depth_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be more levels than Python can recurse, and a path can have only 4096 bytes."""
    outside, top = tmp_path / "outside", tmp_path / "top"
    outside.mkdir()
    (outside / "file").touch()
    for name in ("one", "other"):
        folder = top / name
        folder.mkdir(parents=True)
        monkeypatch.chdir(folder)
        for _ in range(80):
            Path("d" * 100).mkdir()
            os.chdir("d" * 100)
        Path("file").touch()
        Path("link").symlink_to(outside)
    monkeypatch.chdir(tmp_path)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 60)
    try:
        local_files.remove_tree(str(top))
    finally:
        sys.setrecursionlimit(limit)
    assert list(tmp_path.iterdir()) == [outside] and (outside / "file").exists()
    with pytest.raises(FileNotFoundError):
        local_files.remove_tree(str(top))
    local_files.remove_tree(str(top), ignore_errors=True)
    top.symlink_to(outside)
    local_files.remove_tree(str(top), ignore_errors=True)
    assert (outside / "file").exists()
