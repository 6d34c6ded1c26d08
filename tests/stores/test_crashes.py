"""A crash at every request to a bucket: a restore returns exactly the last committed snapshot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from paceline.storage.snapshots.manifest import Manifest, SnapshotId
from paceline.storage.snapshots.repository import SnapshotRepository
from paceline.storage.stores import bucket
from paceline.storage.stores.bucket import BucketStore
from paceline.storage.stores.protocol import StoreError
from support.stores.refusing import Asked, Fault, proxy
from support.stores.servers import Store as Server

pytestmark = [pytest.mark.timeout(400), pytest.mark.xdist_group("crashes")]

AFTER_CRASH = Fault(403, reaches="no")  # it is not retried, and does not reach the server


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folders = {}
    for step in (10, 20, 30):
        folders[step] = tmp_path_factory.mktemp(f"step-{step}")
        (folders[step] / "weights").write_bytes(f"{step}".encode() * 1000)
        (folders[step] / "epoch").write_text(f"{step}")
    return folders


def story(snapshots: SnapshotRepository, saved: dict[int, Path]) -> Iterator[SnapshotId]:
    """What a run does; yields the snapshot from which it would resume, each time that may have changed."""
    for step, generation, parent in ((10, 1, None), (20, 2, SnapshotId(10, 1)), (30, 2, None)):
        id = SnapshotId(step, generation)
        if step < 30:
            snapshots.begin(generation, parent)
        part = snapshots.send(id, "worker-0", str(saved[step]))
        assert snapshots.commit(Manifest(snapshots.run, id, 1, (part,)))
        yield id
    snapshots.delete(SnapshotId(10, 1))
    snapshots.sweep(2)
    yield SnapshotId(30, 2)


def restored(snapshots: SnapshotRepository, folder: Path) -> SnapshotId | None:
    """The newest current snapshot, which must be valid."""
    newest = next(iter(snapshots.inventory().current()), None)
    if newest is not None:
        snapshots.fetch(snapshots.manifest(newest), str(folder))
        assert (folder / "epoch").read_text() == f"{newest.step}"
        assert (folder / "weights").read_text() == f"{newest.step}" * 1000
    return newest


KINDS = [("s3", "no"), ("s3", "half"), ("s3", "all"), ("gcs", "half"), ("azure", "all")]


@pytest.mark.parametrize(("store", "reaches"), KINDS, indirect=["store"])
def test_a_crash_at_any_request_loses_no_committed_snapshot(
    store: Server,
    saved: dict[int, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    reaches: Literal["no", "half", "all"],
) -> None:
    """`reaches`: how much of the last request has reached the server."""
    monkeypatch.setattr(bucket, "IN_PARTS", 1000)  # one of the files is larger
    near = BucketStore(store.url, **store.config)
    with proxy(store.port) as server_proxy:
        far = BucketStore(store.url, **store.through(server_proxy).config)
        expected = [None, *story(SnapshotRepository(far, "whole"), saved)]
        crash_at, survived = 0, False
        while not survived:
            crash_at += 1
            run, reached = f"crash-{crash_at}", 0

            def dying(request: Asked, at: int = crash_at) -> Fault | None:
                return None if request.number < at else Fault(403, reaches) if request.number == at else AFTER_CRASH

            with server_proxy.wrong(dying) as requests:
                try:
                    for _ in story(SnapshotRepository(far, run), saved):
                        reached += 1
                    survived = len(requests) < crash_at
                except StoreError:
                    assert len(requests) >= crash_at
            newest = restored(SnapshotRepository(near, run), tmp_path / run)
            # A snapshot may have been committed just before the crash.
            assert newest in expected[reached : reached + 2], (crash_at, reached, newest, requests[crash_at - 1])
    assert crash_at > 25
