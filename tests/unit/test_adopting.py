"""The snapshot that a run starts from: copied once, complete and verified, or refused; the source is only read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.plan import Plan
from paceline.plan import Snapshots as Settings
from paceline.storage.snapshots import origin
from paceline.storage.snapshots.manifest import Damaged, SnapshotId
from paceline.storage.snapshots.origin import adopt, find
from paceline.storage.snapshots.repository import SnapshotRepository
from paceline.storage.stores.folder import FolderStore
from paceline.storage.stores.protocol import StoreError
from support.stored import commit, written
from support.worlds import LEASE, World, make_plan, up


@pytest.fixture
def own(tmp_path: Path) -> SnapshotRepository:
    return SnapshotRepository(FolderStore(str(tmp_path / "own")), "second-1")


@pytest.fixture
def other_run(tmp_path: Path) -> Path:
    """The snapshots of another run: steps 10 and 20, in two parts each."""
    source = SnapshotRepository(FolderStore(str(tmp_path / "place")), "first-1")
    source.begin(1, None)
    for step in (10, 20):
        commit(source, tmp_path, step, 1, "worker-0", "worker-1")
    return tmp_path / "place" / "first-1"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_newest_snapshot_of_another_run_becomes_the_first_of_this_run(
    own: SnapshotRepository, other_run: Path, tmp_path: Path
) -> None:
    source_files = contents(other_run)
    adopted = adopt(own, str(other_run), str(tmp_path / "scratch"))
    assert (adopted.id, adopted.origin, adopted.passed) == (SnapshotId(20, 0), f"{other_run}/step-20-g1", ())
    assert own.inventory().current() == [SnapshotId(20, 0)]
    manifest = own.manifest(SnapshotId(20, 0))
    assert (manifest.run, manifest.origin, manifest.size) == ("second-1", f"{other_run}/step-20-g1", adopted.size)
    own.fetch(manifest, str(tmp_path / "restored"))
    assert contents(tmp_path / "restored")["epoch"] == b"20"
    assert contents(other_run) == source_files


def test_snapshots_that_the_run_commits_come_after_the_adopted_one(
    own: SnapshotRepository, other_run: Path, tmp_path: Path
) -> None:
    adopt(own, str(other_run), "")
    own.begin(1, SnapshotId(20, 0))
    commit(own, tmp_path / "more", 5)  # a program may restart its step count
    assert own.inventory().current() == [SnapshotId(5, 1), SnapshotId(20, 0)]


def test_a_snapshot_given_by_name_is_adopted(own: SnapshotRepository, other_run: Path) -> None:
    assert adopt(own, f"{other_run}/step-10-g1", "").id == SnapshotId(10, 0)


def test_a_damaged_snapshot_is_skipped_for_an_older_one_unless_it_was_named(
    own: SnapshotRepository, other_run: Path
) -> None:
    (other_run / "step-20-g1" / "worker-1" / "epoch").write_text("21")
    with pytest.raises(Damaged, match="step-20-g1/worker-1/epoch is damaged"):
        adopt(own, f"{other_run}/step-20-g1", "")
    assert own.inventory().committed == frozenset()
    adopted = adopt(own, str(other_run), "")
    assert adopted.id == SnapshotId(10, 0)
    assert "step 20 is skipped" in adopted.passed[0] and "step-20-g1/worker-1/epoch is damaged" in adopted.passed[0]


def test_a_snapshot_in_a_volume_is_reported_by_its_claim_address(
    own: SnapshotRepository, other_run: Path, tmp_path: Path
) -> None:
    claim = "claim://kept/of digits/first-1"
    (other_run / "step-20-g1" / "worker-1" / "epoch").write_text("21")
    adopted = adopt(own, str(other_run), "", called=claim)
    assert (adopted.origin, own.manifest(adopted.id).origin) == (f"{claim}/step-10-g1", f"{claim}/step-10-g1")
    assert adopted.passed == (f"the snapshot of step 20 is skipped: {claim}/step-20-g1/worker-1/epoch is damaged",)
    assert adopt(own, f"{other_run}/step-10-g1", "", called=f"{claim}/step-10-g1").origin == f"{claim}/step-10-g1"
    with pytest.raises(StoreError, match="the folder claim://kept/second-1 to start from does not exist"):
        adopt(own, str(tmp_path / "place" / "second-1"), "", called="claim://kept/second-1")


def test_an_error_says_that_all_snapshots_are_damaged(own: SnapshotRepository, other_run: Path) -> None:
    for file in other_run.glob("step-*/worker-0/epoch"):
        file.unlink()
    with pytest.raises(Damaged, match=r"no snapshot at .* can be read: .*/worker-0/epoch is missing"):
        adopt(own, str(other_run), "")


def test_any_folder_can_be_adopted(own: SnapshotRepository, tmp_path: Path) -> None:
    folder = written(tmp_path, 7).rename(tmp_path / "step-7")
    assert adopt(own, str(folder), "").id == SnapshotId(7, 0)
    own.fetch(own.manifest(SnapshotId(7, 0)), str(tmp_path / "restored"))
    assert contents(tmp_path / "restored") == contents(folder)
    other = written(tmp_path, 8)
    assert adopt(SnapshotRepository(FolderStore(str(tmp_path / "other")), "third-1"), str(other), "").id == SnapshotId(
        0, 0
    )


def test_a_folder_is_adopted_only_once(own: SnapshotRepository, tmp_path: Path) -> None:
    """A captain that returns must not mix files of two moments under one manifest."""
    folder = written(tmp_path, 7)
    adopt(own, str(folder), "")
    (folder / "epoch").write_text("changed")
    assert adopt(own, str(folder), "").id == SnapshotId(0, 0)
    own.fetch(own.manifest(SnapshotId(0, 0)), str(tmp_path / "restored"))
    assert contents(tmp_path / "restored")["epoch"] == b"7"


@pytest.mark.parametrize(
    ("create", "message"),
    [
        (lambda folder: None, "does not exist"),
        (lambda folder: folder.mkdir(), "is empty"),
        (lambda folder: folder.write_text("weights"), "does not exist"),
        (
            lambda folder: (folder / "run-1" / "generations").mkdir(parents=True),
            "contains runs but is not one: run-1; use",
        ),
        (lambda folder: (folder / "generations").mkdir(parents=True), "no snapshot to start from"),
    ],
)
def test_an_origin_that_is_not_a_snapshot_is_refused(
    own: SnapshotRepository, tmp_path: Path, create: object, message: str
) -> None:
    create(tmp_path / "given")  # type: ignore[operator]
    with pytest.raises(StoreError, match=message):
        adopt(own, str(tmp_path / "given"), "")
    assert own.inventory().committed == frozenset()


def test_an_address_in_a_bucket_is_split_into_location_and_run() -> None:
    assert find("s3://training/digits/digits-3f9a") == origin.Origin(
        "s3://training/digits/digits-3f9a", "s3://training/digits", "digits-3f9a"
    )


# ---- the captain


def a_plan(other_run: Path) -> Plan:
    return replace(make_plan(2), snapshots=Settings(origin=str(other_run)))


def restored(world: World) -> list[str | None]:
    return [fields["restore"] for kind, _, fields in world.events if kind == "generation-formed"]


def test_generations_start_from_the_adopted_snapshot_until_there_is_a_newer_one(other_run: Path) -> None:
    world = up(a_plan(other_run))
    assert restored(world) == ["step-20-g0"]
    assert world.last("committed")["origin"] == f"{other_run}/step-20-g1"
    world.exit("worker-1", "signal")
    world.deliver_all()
    assert restored(world) == ["step-20-g0"] * 2
    world.save("worker-0", 21)
    world.deliver_all()
    world.exit("worker-1", "signal")
    world.deliver_all()
    assert restored(world) == ["step-20-g0", "step-20-g0", "step-21-g2"]


def test_the_origin_is_adopted_again_if_the_store_was_lost(other_run: Path) -> None:
    world = up(a_plan(other_run), serves="")
    world.place_is_lost()
    world.restart_captain(with_notes=False)
    world.join_all()
    world.deliver_all()
    assert {process.generation for _, process in world.running()} == {1}
    world.exit("worker-1", "signal")
    world.deliver_all()
    world.pass_time(LEASE + 2)
    world.deliver_all()
    assert restored(world) == ["step-20-g0", "step-20-g0"]


def test_no_task_starts_if_no_snapshot_can_be_adopted(other_run: Path) -> None:
    for manifest in other_run.glob("step-*/manifest.json"):
        manifest.write_text("{}")
    world = World(a_plan(other_run))
    world.join_all()
    world.deliver_all()
    assert (world.over.status, world.over.cause) == ("failed", "store")  # type: ignore[union-attr]
    assert "can be read" in world.over.reason and world.started == []  # type: ignore[union-attr]


def test_training_does_not_start_from_scratch_if_the_copy_is_damaged(other_run: Path) -> None:
    world = up(a_plan(other_run))
    world.place.damaged.add(SnapshotId(20, 0))
    world.exit("worker-1", "signal")
    world.deliver_all()
    assert world.over is not None and "(snapshots.from) can be read" in world.over.reason
