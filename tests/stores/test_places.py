"""Snapshots in every kind of store: the same tests with a folder and with each kind of bucket."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from paceline.storage.snapshots.generation_records import Superseded
from paceline.storage.snapshots.manifest import Damaged, Gone, Manifest, SnapshotId
from paceline.storage.snapshots.repository import SnapshotRepository
from paceline.storage.stores import bucket as bucket_store
from paceline.storage.stores.bucket import BucketStore
from paceline.storage.stores.folder import FolderStore
from paceline.storage.stores.protocol import Store, StoreError, TransferCanceled
from support.stores.faults import Toxiproxy
from support.stores.servers import Store as Server

pytestmark = pytest.mark.timeout(400)

RUN = "digits-3f9a"
BIG = 20_000_000  # several pieces


def bucket(server: Server) -> BucketStore:
    return BucketStore(server.url, **server.config)


@pytest.fixture(params=["folder", "s3", "gcs", "azure"])
def snapshot_store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "folder":
        return FolderStore(str(tmp_path / "place"))
    return bucket(request.getfixturevalue(request.param))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    folder = tmp_path / "saved"
    (folder / "variables").mkdir(parents=True)
    (folder / "variables" / "weights").write_bytes(os.urandom(BIG))
    (folder / "Schritt für ω 1").write_text("10")
    (folder / "empty").touch()
    return folder


def committed(snapshots: SnapshotRepository, saved: Path, step: int, generation: int = 1) -> Manifest:
    id = SnapshotId(step, generation)
    manifest = Manifest(RUN, id, 1, (snapshots.send(id, "worker-0", str(saved)),))
    assert snapshots.commit(manifest)
    return manifest


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_sent_files_are_read_once(snapshot_store: Store, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests are computed on the way."""
    read = 0

    def counting(real: Any) -> Any:
        def call(*arguments: Any) -> Any:
            nonlocal read
            result = real(*arguments)
            read += result if isinstance(result, int) else len(result)
            return result

        return call

    for name in ("read", "readv"):
        monkeypatch.setattr(os, name, counting(getattr(os, name)))
    part = SnapshotRepository(snapshot_store, RUN).send(SnapshotId(1, 1), "worker-0", str(saved))
    assert read == sum(file.size for file in part.files) > BIG


def test_a_run_commits_resumes_and_deletes(snapshot_store: Store, saved: Path, tmp_path: Path) -> None:
    snapshots = SnapshotRepository(snapshot_store, RUN)
    assert snapshots.inventory().current() == []
    snapshots.begin(1, None)
    manifest = committed(snapshots, saved, 10)
    assert not snapshots.commit(Manifest(RUN, SnapshotId(10, 1), 7, ())), "it was committed before"
    snapshots.send(SnapshotId(20, 1), "worker-0", str(saved))  # its manifest is never written
    snapshots.begin(2, SnapshotId(10, 1))
    with pytest.raises(Superseded):
        committed(snapshots, saved, 15)  # by a generation that was presumed dead
    committed(snapshots, saved, 12, 2)
    again = SnapshotRepository(snapshot_store, RUN)
    assert again.inventory().current() == [SnapshotId(12, 2), SnapshotId(10, 1)]
    assert again.manifest(SnapshotId(10, 1)) == manifest
    again.fetch(manifest, str(tmp_path / "restored"))
    assert contents(tmp_path / "restored") == contents(saved)
    again.delete(SnapshotId(12, 2))
    assert again.inventory().current() == [SnapshotId(10, 1)]
    assert not snapshot_store.names(f"{RUN}/step-12-g2/")
    assert snapshot_store.folders(f"{RUN}/") == ["generations", "step-10-g1", "step-15-g1", "step-20-g1"]


def test_uncommitted_snapshots_are_deleted_by_later_generations(
    snapshot_store: Store, saved: Path, tmp_path: Path
) -> None:
    snapshots = SnapshotRepository(snapshot_store, RUN)
    snapshots.begin(1, None)
    committed(snapshots, saved, 10)
    for id in (SnapshotId(20, 1), SnapshotId(20, 2)):
        snapshots.send(id, "worker-0", str(saved))
    for partial in [path.with_name(".weights.partial") for path in (tmp_path / "place").rglob("step-20-*/**/weights")]:
        partial.touch()  # as after a crash
    snapshots.begin(2, SnapshotId(10, 1))
    snapshots.sweep(2)
    assert snapshot_store.folders(f"{RUN}/") == ["generations", "step-10-g1", "step-20-g2"]
    snapshots.fetch(snapshots.manifest(SnapshotId(10, 1)), str(tmp_path / "restored"))


def test_what_was_sent_of_a_snapshot_can_be_deleted_unless_it_is_committed(
    snapshot_store: Store, saved: Path, tmp_path: Path
) -> None:
    snapshots = SnapshotRepository(snapshot_store, RUN)
    snapshots.begin(1, None)
    committed(snapshots, saved, 10)
    snapshots.send(SnapshotId(20, 1), "worker-0", str(saved))
    for step in (10, 20, 30):
        snapshots.delete_uncommitted(SnapshotId(step, 1), 1)
    assert snapshot_store.folders(f"{RUN}/") == ["generations", "step-10-g1"]
    snapshots.fetch(snapshots.manifest(SnapshotId(10, 1)), str(tmp_path / "restored"))
    snapshots.begin(2, SnapshotId(10, 1))
    snapshots.send(SnapshotId(20, 1), "worker-0", str(saved))
    with pytest.raises(Superseded):
        snapshots.delete_uncommitted(SnapshotId(20, 1), 1)
    assert "step-20-g1" in snapshot_store.folders(f"{RUN}/")


def test_only_one_of_many_captains_begins_a_generation(snapshot_store: Store) -> None:
    together = threading.Barrier(8)

    def begin(_: int) -> bool:
        together.wait(120)
        try:
            SnapshotRepository(snapshot_store, RUN).begin(1, None)
            return True
        except Superseded:
            return False

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(begin, range(8))) == 1


def test_files_changed_after_the_commit_are_not_restored(snapshot_store: Store, saved: Path, tmp_path: Path) -> None:
    snapshots = SnapshotRepository(snapshot_store, RUN)
    manifest = committed(snapshots, saved, 10)
    name = f"{RUN}/step-10-g1/worker-0/variables/weights"
    (tmp_path / "other").write_bytes(b"other")
    snapshot_store.send_all([(str(tmp_path / "other"), name)], lambda _: True, {})
    with pytest.raises(Damaged, match=rf"{name} is damaged: it has 5 bytes instead of {BIG}"):
        snapshots.fetch(manifest, str(tmp_path / "restored"))
    snapshot_store.delete(name)
    with pytest.raises(Damaged, match=f"{name} is missing"):
        snapshots.fetch(manifest, str(tmp_path / "restored"))
    assert not list(tmp_path.glob("*restored*"))


def test_a_file_of_many_parts_is_restored(
    snapshot_store: Store, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots = SnapshotRepository(snapshot_store, RUN)
    manifest = committed(snapshots, saved, 10)
    monkeypatch.setattr(bucket_store, "WHOLE", BIG - 1)
    monkeypatch.setattr(bucket_store, "PART", 1 << 20)  # many more than are fetched at once
    snapshots.fetch(manifest, str(tmp_path / "restored"))
    assert contents(tmp_path / "restored") == contents(saved)
    pieces = iter([True] * 50)
    with pytest.raises(TransferCanceled):
        snapshots.fetch(manifest, str(tmp_path / "given-up"), lambda _: next(pieces, False))
    name = f"{RUN}/step-10-g1/worker-0/variables/weights"
    (tmp_path / "other").write_bytes(bytes(BIG))
    snapshot_store.send_all([(str(tmp_path / "other"), name)], lambda _: True, {})
    with pytest.raises(Damaged, match=f"{name} is damaged: its SHA-256 differs"):
        snapshots.fetch(manifest, str(tmp_path / "damaged"))
    assert {path.name for path in tmp_path.iterdir()} <= {"saved", "restored", "other", "place"}


def test_a_transfer_can_be_canceled(snapshot_store: Store, saved: Path, tmp_path: Path) -> None:
    snapshots = SnapshotRepository(snapshot_store, RUN)
    manifest = committed(snapshots, saved, 10)
    with pytest.raises(TransferCanceled):
        snapshots.send(SnapshotId(20, 1), "worker-0", str(saved), lambda _: False)
    assert not [name for name in snapshot_store.names(f"{RUN}/step-20-g1/") if "weights" in name]
    with pytest.raises(TransferCanceled):
        snapshots.fetch(manifest, str(tmp_path / "restored"), lambda _: False)
    assert not list(tmp_path.glob("*restored*"))


def test_every_byte_can_be_checked_in_the_store(snapshot_store: Store, saved: Path, tmp_path: Path) -> None:
    snapshots = SnapshotRepository(snapshot_store, RUN)
    manifest = committed(snapshots, saved, 10)
    [part] = manifest.parts
    weights = next(file for file in part.files if file.path == "variables/weights")
    sizes: list[int] = []
    for file in part.files:
        snapshots.check(manifest.id, "worker-0", file, lambda data: sizes.append(data) is None)
    assert sum(sizes) == manifest.size
    name = f"{RUN}/step-10-g1/worker-0/variables/weights"
    (tmp_path / "other").write_bytes(bytes(BIG))
    snapshot_store.send_all([(str(tmp_path / "other"), name)], lambda _: True, {})
    with pytest.raises(Damaged, match=f"{name} is damaged: its SHA-256 differs"):
        snapshots.check(manifest.id, "worker-0", weights)
    snapshot_store.delete(name)
    with pytest.raises(Gone, match=f"{name} is missing"):
        snapshots.check(manifest.id, "worker-0", weights)


def test_all_of_a_run_is_deleted_and_nothing_else(snapshot_store: Store, saved: Path) -> None:
    for run in (RUN, f"{RUN}b"):
        snapshots = SnapshotRepository(snapshot_store, run)
        snapshots.begin(1, None)
        snapshots.send(SnapshotId(20, 1), "worker-0", str(saved))  # never committed
        assert snapshots.commit(
            Manifest(run, SnapshotId(10, 1), 1, (snapshots.send(SnapshotId(10, 1), "worker-0", str(saved)),))
        )
    assert snapshot_store.create(f"{RUN}/notes/of-a-person", b"mine")
    other_names = [name for name in snapshot_store.names("") if name.startswith(f"{RUN}b/")]
    SnapshotRepository(snapshot_store, RUN).delete_all()
    assert snapshot_store.names("") == [f"{RUN}/notes/of-a-person", *other_names] and len(other_names) == 8


# ---- buckets that cannot be used


def test_a_missing_bucket_is_named(store: Server) -> None:
    with pytest.raises(
        StoreError, match=r"cannot list .*://nowhere-to-be-found/.*: the bucket does not exist"
    ) as failed:
        SnapshotRepository(bucket(store.bucket("nowhere-to-be-found")), RUN).begin(1, None)
    assert not failed.value.is_transient


def test_wrong_credentials_are_reported_as_a_permanent_error(store: Server) -> None:
    with pytest.raises(StoreError) as failed:
        SnapshotRepository(bucket(store.stranger()), RUN).begin(1, None)
    assert ": the credentials are not accepted" in str(failed.value) and not failed.value.is_transient


def test_an_unreachable_store_is_a_transient_error(
    store: Server, toxiproxy: Toxiproxy, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_store, "RETRY_S", 2.0)
    link = toxiproxy.link(store.port)
    snapshots = SnapshotRepository(bucket(store.through(link)), RUN)
    with link.down(), pytest.raises(StoreError) as failed:
        snapshots.begin(1, None)
    assert failed.value.is_transient and str(failed.value).endswith(f": no response from {link.endpoint}")
    snapshots.begin(1, None)


def test_missing_settings_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(StoreError, match=r"cannot open az://container: .*Account must be specified"):
        BucketStore("az://container")


def test_a_restore_survives_connections_that_break_in_the_middle(
    store: Server, toxiproxy: Toxiproxy, saved: Path, tmp_path: Path
) -> None:
    """It continues where it stopped, even more often than one request is retried."""
    link = toxiproxy.link(store.port)
    snapshots = SnapshotRepository(bucket(store.through(link)), RUN)
    snapshots.begin(1, None)
    manifest = committed(snapshots, saved, 10)
    with link.cut(2_000_000):
        snapshots.fetch(manifest, str(tmp_path / "restored"))
    assert contents(tmp_path / "restored") == contents(saved)


def test_connections_that_transfer_nothing_end_a_restore(
    s3: Server, toxiproxy: Toxiproxy, saved: Path, tmp_path: Path
) -> None:
    link = toxiproxy.link(s3.port)
    snapshots = SnapshotRepository(bucket(s3.through(link)), RUN)
    manifest = committed(snapshots, saved, 10)
    with link.reset(), pytest.raises(StoreError) as failed:
        snapshots.fetch(manifest, str(tmp_path / "restored"))
    assert failed.value.is_transient and not list(tmp_path.glob("*restored*"))


def test_after_an_error_files_that_were_sent_are_not_sent_again(
    s3: Server, toxiproxy: Toxiproxy, tmp_path: Path
) -> None:
    saved = tmp_path / "saved"
    saved.mkdir()
    for number in range(8):
        (saved / f"small-{number}").write_bytes(os.urandom(50_000))
    (saved / "large").write_bytes(os.urandom(3_000_000))
    link = toxiproxy.link(s3.port)
    snapshot_store = bucket(s3.through(link))
    snapshots = SnapshotRepository(snapshot_store, RUN)
    snapshots.begin(1, None)
    with link.cut(1_000_000, "upstream"), pytest.raises(StoreError) as failed:
        snapshots.send(SnapshotId(10, 1), "worker-0", str(saved))
    assert failed.value.is_transient
    prefix = f"{RUN}/step-10-g1/worker-0/"
    (saved / "small-0").write_bytes(os.urandom(50_000))  # no program does that
    snapshot_store.delete(f"{prefix}small-1")
    already_sent = {name.removeprefix(prefix) for name in snapshot_store.names(prefix)} - {"small-0"}
    assert already_sent and "large" not in already_sent
    sizes: list[int] = []
    part = snapshots.send(SnapshotId(10, 1), "worker-0", str(saved), lambda size: sizes.append(size) is None)
    assert sum(sizes) == sum(path.stat().st_size for path in saved.iterdir() if path.name not in already_sent)
    manifest = Manifest(RUN, SnapshotId(10, 1), 1, (part,))
    assert snapshots.commit(manifest)
    snapshots.fetch(manifest, str(tmp_path / "restored"))
    assert contents(tmp_path / "restored") == contents(saved)
    sizes.clear()
    snapshots.send(SnapshotId(10, 1), "worker-0", str(saved), lambda size: sizes.append(size) is None)
    assert sum(sizes) == manifest.size, "after a complete transfer, everything is sent again"
