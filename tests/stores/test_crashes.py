"""A crash at every request to a bucket: a restore gives exactly the last snapshot that was committed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from paceline.storage import objects
from paceline.storage.manifest import Id, Manifest
from paceline.storage.objects import Objects
from paceline.storage.snapshots import Snapshots
from paceline.storage.store import StoreError
from support.stores.refusing import Asked, Fault, proxy
from support.stores.servers import Store as Server

pytestmark = pytest.mark.timeout(180)

GONE = Fault(403, reaches="no")  # nobody asks again after that, and nobody hears


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    found = {}
    for step in (10, 20, 30):
        found[step] = tmp_path_factory.mktemp(f"step-{step}")
        (found[step] / "weights").write_bytes(f"{step}".encode() * 1000)
        (found[step] / "epoch").write_text(f"{step}")
    return found


def story(snapshots: Snapshots, saved: dict[int, Path]) -> Iterator[Id]:
    """What a run does; yields the snapshot from which it would go on, each time that may have changed."""
    for step, generation, parent in ((10, 1, None), (20, 2, Id(10, 1)), (30, 2, None)):
        id = Id(step, generation)
        if step < 30:
            snapshots.begin(generation, parent)
        part = snapshots.send(id, "worker-0", str(saved[step]))
        assert snapshots.commit(Manifest(snapshots.run, id, 1, (part,)))
        yield id
    snapshots.delete(Id(10, 1))
    snapshots.sweep(2)
    yield Id(30, 2)


def restored(snapshots: Snapshots, folder: Path) -> Id | None:
    """The newest that counts: none may be there that does not verify."""
    newest = next(iter(snapshots.known().counted()), None)
    if newest is not None:
        snapshots.fetch(snapshots.manifest(newest), str(folder))
        assert (folder / "epoch").read_text() == f"{newest.step}"
        assert (folder / "weights").read_text() == f"{newest.step}" * 1000
    return newest


KINDS = [("s3", "no"), ("s3", "half"), ("s3", "all"), ("gcs", "half"), ("azure", "all")]


@pytest.mark.parametrize(("store", "reaches"), KINDS, indirect=["store"])
def test_a_crash_at_any_request_loses_nothing_that_was_committed(
    store: Server,
    saved: dict[int, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    reaches: Literal["no", "half", "all"],
) -> None:
    """`reaches`: how much of the last request has reached the server."""
    monkeypatch.setattr(objects, "IN_PARTS", 1000)  # one of the files is larger
    near = Objects(store.url, **store.config)
    with proxy(store.port) as way:
        far = Objects(store.url, **store.through(way).config)
        expected = [None, *story(Snapshots(far, "whole"), saved)]
        at, survived = 0, False
        while not survived:
            at += 1
            run, reached = f"crash-{at}", 0

            def dying(asked: Asked, at: int = at) -> Fault | None:
                return None if asked.number < at else Fault(403, reaches) if asked.number == at else GONE

            with way.wrong(dying) as asked:
                try:
                    for _ in story(Snapshots(far, run), saved):
                        reached += 1
                    survived = len(asked) < at
                except StoreError:
                    assert len(asked) >= at
            found = restored(Snapshots(near, run), tmp_path / run)
            # What was under way may have been committed just before the end.
            assert found in expected[reached : reached + 2], (at, reached, found, asked[at - 1])
    assert at > 25
