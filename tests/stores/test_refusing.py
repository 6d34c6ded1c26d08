"""Buckets whose server refuses, is overloaded, loses responses or cuts them off: nothing partial is ever committed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.storage.snapshots.manifest import Manifest, SnapshotId
from paceline.storage.snapshots.repository import SnapshotRepository
from paceline.storage.stores.bucket import BucketStore
from paceline.storage.stores.protocol import StoreError
from support.stores.refusing import Asked, Fault, Proxy, proxy
from support.stores.servers import Store as Server

pytestmark = pytest.mark.timeout(400)

RUN = "digits-3f9a"
PARTS = 9_000_000  # bytes that go in two parts


@pytest.fixture
def server_proxy(store: Server) -> Iterator[Proxy]:
    with proxy(store.port) as running:
        yield running


@pytest.fixture
def snapshots(store: Server, server_proxy: Proxy) -> SnapshotRepository:
    far = store.through(server_proxy)
    return SnapshotRepository(BucketStore(far.url, **far.config), RUN)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    folder = tmp_path / "saved"
    folder.mkdir()
    (folder / "weights").write_bytes(os.urandom(PARTS))
    (folder / "epoch").write_text("10")
    return folder


def sent(snapshots: SnapshotRepository, saved: Path, step: int) -> Manifest:
    return Manifest(RUN, SnapshotId(step, 1), 1, (snapshots.send(SnapshotId(step, 1), "worker-0", str(saved)),))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def send_with_retry(snapshots: SnapshotRepository, saved: Path, step: int) -> Manifest:
    """Like runs, retries after a transient error."""
    try:
        return sent(snapshots, saved, step)
    except StoreError as error:
        assert error.is_transient, error
        return sent(snapshots, saved, step)


def first(fault: Fault) -> Callable[[Asked], Fault | None]:
    """The fault for the first try of each request."""
    return lambda request: fault if request.again == 0 else None


BUSY = Fault(503, reaches="no")
LOST = Fault(503)  # the server has done it


@pytest.mark.parametrize("fault", [BUSY, LOST], ids=["refused", "lost"])
def test_a_server_that_is_too_busy_once_for_every_request_does_no_harm(
    server_proxy: Proxy, snapshots: SnapshotRepository, saved: Path, tmp_path: Path, fault: Fault
) -> None:
    with server_proxy.wrong(first(fault)) as requests:
        snapshots.begin(1, None)
        assert snapshots.commit(send_with_retry(snapshots, saved, 10))
        snapshots.fetch(snapshots.manifest(SnapshotId(10, 1)), str(tmp_path / "restored"))
    assert len({each.path for each in requests}) >= 9 and any(each.again for each in requests)
    assert contents(tmp_path / "restored") == contents(saved)


def test_a_server_that_stays_too_busy_is_a_transient_error(s3: Server) -> None:
    with proxy(s3.port) as server_proxy, server_proxy.wrong(lambda _: BUSY), pytest.raises(StoreError) as failed:
        SnapshotRepository(BucketStore(s3.url, patience=4.0, **s3.through(server_proxy).config), RUN).begin(1, None)
    reason = "the server is overloaded or unavailable: it returned 503 (SlowDown)"
    assert str(failed.value) == f"cannot list {s3.url}/{RUN}/generations/: {reason}" and failed.value.is_transient


def test_an_interrupted_response_is_continued_where_it_stopped(
    server_proxy: Proxy, snapshots: SnapshotRepository, saved: Path, tmp_path: Path
) -> None:
    snapshots.begin(1, None)
    assert snapshots.commit(sent(snapshots, saved, 10))

    def broken(request: Asked) -> Fault | None:
        return Fault(half=True) if request.again < 3 else None

    with server_proxy.wrong(broken) as requests:
        snapshots.fetch(snapshots.manifest(SnapshotId(10, 1)), str(tmp_path / "restored"))
    assert len([each for each in requests if each.path.endswith("weights")]) == 4
    assert contents(tmp_path / "restored") == contents(saved)
    with server_proxy.wrong(broken), pytest.raises(StoreError) as failed:
        snapshots.inventory()
    assert failed.value.is_transient and str(failed.value).startswith("cannot list ")


REFUSED = Fault(403, reaches="no")


@pytest.mark.parametrize("file", ["weights", "epoch", "manifest"])
def test_a_snapshot_refused_in_the_middle_is_not_committed_and_the_next_one_is(
    server_proxy: Proxy, snapshots: SnapshotRepository, saved: Path, tmp_path: Path, file: str
) -> None:
    snapshots.begin(1, None)
    assert snapshots.commit(sent(snapshots, saved, 10))
    (saved / "epoch").write_text("20")

    def refused(request: Asked) -> Fault | None:
        second = "partNumber=2" in request.path or "comp=blocklist" in request.path  # one part has been stored
        matches = second if file == "weights" else file in request.path
        return REFUSED if request.method == "PUT" and matches else None

    with server_proxy.wrong(refused), pytest.raises(StoreError) as failed:
        snapshots.commit(sent(snapshots, saved, 20))
    assert str(failed.value).startswith("cannot write ") and f"/{RUN}/step-20-g1/" in str(failed.value)
    reason = "the credentials are not accepted, or lack the permission to write there (AccessDenied)"
    remedy = "grant the permission, or use other credentials"
    assert str(failed.value).endswith(f": {reason}; {remedy}") and not failed.value.is_transient
    assert snapshots.inventory().committed == {SnapshotId(10, 1)}
    assert snapshots.commit(sent(snapshots, saved, 30))
    assert snapshots.inventory().current() == [SnapshotId(30, 1), SnapshotId(10, 1)]
    snapshots.fetch(snapshots.manifest(SnapshotId(30, 1)), str(tmp_path / "restored"))
    assert contents(tmp_path / "restored") == contents(saved)


def test_a_read_only_client_can_restore_and_gets_an_error_when_it_writes(
    s3: Server, saved: Path, tmp_path: Path
) -> None:
    snapshots = SnapshotRepository(BucketStore(s3.url, **s3.config), RUN)
    snapshots.begin(1, None)
    assert snapshots.commit(sent(snapshots, saved, 10))
    reading = SnapshotRepository(BucketStore(s3.url, **s3.reader().config), RUN)
    reading.fetch(reading.manifest(SnapshotId(10, 1)), str(tmp_path / "restored"))
    assert contents(tmp_path / "restored") == contents(saved)
    for write in (lambda: reading.begin(2, SnapshotId(10, 1)), lambda: sent(reading, saved, 20)):
        with pytest.raises(
            StoreError, match=r"lack the permission to write there.*; grant the permission, or"
        ) as failed:
            write()
        assert str(failed.value).startswith(f"cannot write {s3.url}/{RUN}/") and not failed.value.is_transient
    with pytest.raises(StoreError, match="lack the permission to delete there") as failed:
        reading.delete(SnapshotId(10, 1))
    assert not failed.value.is_transient
    assert snapshots.inventory().current() == [SnapshotId(10, 1)]


def test_a_restore_refused_in_the_middle_leaves_nothing_and_can_be_repeated(
    server_proxy: Proxy, snapshots: SnapshotRepository, saved: Path, tmp_path: Path
) -> None:
    manifest = sent(snapshots, saved, 10)
    with (
        server_proxy.wrong(lambda request: Fault(half=True) if request.number == 1 else REFUSED),
        pytest.raises(StoreError) as failed,
    ):
        snapshots.fetch(manifest, str(tmp_path / "restored"))
    assert "lack the permission to read there" in str(failed.value) and [*tmp_path.iterdir()] == [saved]
    snapshots.fetch(manifest, str(tmp_path / "restored"))
    assert contents(tmp_path / "restored") == contents(saved)


# ---- servers without conditional writes


def test_a_server_that_overwrites_existing_names_is_detected_by_the_first_record(gcs: Server) -> None:
    with proxy(gcs.port) as server_proxy:
        far = gcs.through(server_proxy)
        with server_proxy.wrong(lambda _: Fault(unconditional=True)), pytest.raises(StoreError) as failed:
            SnapshotRepository(BucketStore(far.url, **far.config), RUN).begin(1, None)
    assert str(failed.value).startswith(f"{gcs.url}: its server overwrites objects despite If-None-Match")
    assert "use a server that supports conditional writes (If-None-Match)" in str(failed.value)
    assert not failed.value.is_transient


def test_a_server_without_conditional_writes_is_a_permanent_error(s3: Server) -> None:
    with proxy(s3.port) as server_proxy:
        far = s3.through(server_proxy)
        with (
            server_proxy.wrong(lambda request: Fault(501, reaches="no") if request.conditional else None),
            pytest.raises(
                StoreError, match=r"\(NotImplemented\); use a server that supports conditional writes"
            ) as failed,
        ):
            SnapshotRepository(BucketStore(far.url, patience=4.0, **far.config), RUN).begin(1, None)
    assert str(failed.value).startswith(f"cannot write {s3.url}/{RUN}/generations/") and not failed.value.is_transient


def test_conditional_writes_are_tested_once_per_server(
    store: Server, server_proxy: Proxy, snapshots: SnapshotRepository
) -> None:
    with server_proxy.wrong(lambda _: None) as requests:
        snapshots.begin(1, None)
        snapshots.begin(2, None)
    assert [each.again for each in requests if each.conditional] == [0, 1, 0]
