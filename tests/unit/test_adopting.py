"""What a run starts from: copied once, whole and verified, or refused; what was given is only read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.plan import Plan
from paceline.plan import Snapshots as Settings
from paceline.storage import origin
from paceline.storage.folder import Folder
from paceline.storage.manifest import Damaged, Id
from paceline.storage.origin import adopt, find
from paceline.storage.snapshots import Snapshots
from paceline.storage.store import StoreError
from support.stored import commit, written
from support.worlds import LEASE, World, make_plan, up


@pytest.fixture
def own(tmp_path: Path) -> Snapshots:
    return Snapshots(Folder(str(tmp_path / "own")), "second-1")


@pytest.fixture
def before(tmp_path: Path) -> Path:
    """The snapshots of another run: of step 10 and 20, in two parts each."""
    source = Snapshots(Folder(str(tmp_path / "place")), "first-1")
    source.begin(1, None)
    for step in (10, 20):
        commit(source, tmp_path, step, 1, "worker-0", "worker-1")
    return tmp_path / "place" / "first-1"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_newest_of_a_run_becomes_the_first_of_this_one(own: Snapshots, before: Path, tmp_path: Path) -> None:
    given = contents(before)
    found = adopt(own, str(before), str(tmp_path / "scratch"))
    assert (found.id, found.origin, found.passed) == (Id(20, 0), f"{before}/step-20-g1", ())
    assert own.known().counted() == [Id(20, 0)]
    made = own.manifest(Id(20, 0))
    assert (made.run, made.origin, made.size) == ("second-1", f"{before}/step-20-g1", found.size)
    own.fetch(made, str(tmp_path / "restored"))
    assert contents(tmp_path / "restored")["epoch"] == b"20"
    assert contents(before) == given


def test_what_the_run_commits_itself_comes_after_it(own: Snapshots, before: Path, tmp_path: Path) -> None:
    adopt(own, str(before), "")
    own.begin(1, Id(20, 0))
    commit(own, tmp_path / "more", 5)  # a program may count its steps anew
    assert own.known().counted() == [Id(5, 1), Id(20, 0)]


def test_one_that_is_named_is_taken(own: Snapshots, before: Path) -> None:
    assert adopt(own, f"{before}/step-10-g1", "").id == Id(10, 0)


def test_a_damaged_one_is_passed_over_for_an_older_one_unless_it_was_named(own: Snapshots, before: Path) -> None:
    (before / "step-20-g1" / "worker-1" / "epoch").write_text("21")
    with pytest.raises(Damaged, match="step-20-g1/worker-1/epoch is damaged"):
        adopt(own, f"{before}/step-20-g1", "")
    assert own.known().committed == frozenset()
    found = adopt(own, str(before), "")
    assert found.id == Id(10, 0)
    assert "step 20 is passed over" in found.passed[0] and "step-20-g1/worker-1/epoch is damaged" in found.passed[0]


def test_in_a_volume_it_is_called_as_people_call_it(own: Snapshots, before: Path, tmp_path: Path) -> None:
    claim = "claim://kept/of digits/first-1"
    (before / "step-20-g1" / "worker-1" / "epoch").write_text("21")
    found = adopt(own, str(before), "", called=claim)
    assert (found.origin, own.manifest(found.id).origin) == (f"{claim}/step-10-g1", f"{claim}/step-10-g1")
    assert found.passed == (f"the snapshot of step 20 is passed over: {claim}/step-20-g1/worker-1/epoch is damaged",)
    assert adopt(own, f"{before}/step-10-g1", "", called=f"{claim}/step-10-g1").origin == f"{claim}/step-10-g1"
    with pytest.raises(StoreError, match="there is no folder claim://kept/second-1 to start from"):
        adopt(own, str(tmp_path / "place" / "second-1"), "", called="claim://kept/second-1")


def test_where_all_are_damaged_it_says_so(own: Snapshots, before: Path) -> None:
    for file in before.glob("step-*/worker-0/epoch"):
        file.unlink()
    with pytest.raises(Damaged, match=r"no snapshot at .* can be read: .*/worker-0/epoch is gone"):
        adopt(own, str(before), "")


def test_any_folder_will_do(own: Snapshots, tmp_path: Path) -> None:
    folder = written(tmp_path, 7).rename(tmp_path / "step-7")
    assert adopt(own, str(folder), "").id == Id(7, 0)
    own.fetch(own.manifest(Id(7, 0)), str(tmp_path / "restored"))
    assert contents(tmp_path / "restored") == contents(folder)
    other = written(tmp_path, 8)
    assert adopt(Snapshots(Folder(str(tmp_path / "other")), "third-1"), str(other), "").id == Id(0, 0)


def test_what_was_taken_once_is_not_taken_again(own: Snapshots, tmp_path: Path) -> None:
    """A captain that returns must not mix files of two moments under one manifest."""
    folder = written(tmp_path, 7)
    adopt(own, str(folder), "")
    (folder / "epoch").write_text("changed")
    assert adopt(own, str(folder), "").id == Id(0, 0)
    own.fetch(own.manifest(Id(0, 0)), str(tmp_path / "restored"))
    assert contents(tmp_path / "restored")["epoch"] == b"7"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda folder: None, "there is no folder"),
        (lambda folder: folder.mkdir(), "is empty"),
        (lambda folder: folder.write_text("weights"), "there is no folder"),
        (lambda folder: (folder / "run-1" / "generations").mkdir(parents=True), "holds runs and is none: run-1; write"),
        (lambda folder: (folder / "generations").mkdir(parents=True), "there is no snapshot to start from"),
    ],
)
def test_what_is_none_is_refused(own: Snapshots, tmp_path: Path, make: object, says: str) -> None:
    make(tmp_path / "given")  # type: ignore[operator]
    with pytest.raises(StoreError, match=says):
        adopt(own, str(tmp_path / "given"), "")
    assert own.known().committed == frozenset()


def test_where_a_bucket_leads() -> None:
    assert find("s3://training/digits/digits-3f9a") == origin.Origin(
        "s3://training/digits/digits-3f9a", "s3://training/digits", "digits-3f9a"
    )


# ---- the captain's part


def a_plan(before: Path) -> Plan:
    return replace(make_plan(2), snapshots=Settings(origin=str(before)))


def restored(world: World) -> list[str | None]:
    return [fields["restore"] for kind, _, fields in world.events if kind == "generation-formed"]


def test_the_first_generation_begins_from_it_and_so_does_the_next_until_there_is_a_newer_one(before: Path) -> None:
    world = up(a_plan(before))
    assert restored(world) == ["step-20-g0"]
    assert world.last("committed")["origin"] == f"{before}/step-20-g1"
    world.exit("worker-1", "signal")
    world.deliver_all()
    assert restored(world) == ["step-20-g0"] * 2
    world.save("worker-0", 21)
    world.deliver_all()
    world.exit("worker-1", "signal")
    world.deliver_all()
    assert restored(world) == ["step-20-g0", "step-20-g0", "step-21-g2"]


def test_a_place_that_was_lost_gets_it_again(before: Path) -> None:
    world = up(a_plan(before), copies=True)
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


def test_without_it_no_task_is_started(before: Path) -> None:
    for manifest in before.glob("step-*/manifest.json"):
        manifest.write_text("{}")
    world = World(a_plan(before))
    world.join_all()
    world.deliver_all()
    assert (world.over.status, world.over.cause) == ("failed", "store")  # type: ignore[union-attr]
    assert "can be read" in world.over.reason and world.started == []  # type: ignore[union-attr]


def test_where_the_copy_is_damaged_training_does_not_begin_from_nothing(before: Path) -> None:
    world = up(a_plan(before))
    world.place.damaged.add(Id(20, 0))
    world.exit("worker-1", "signal")
    world.deliver_all()
    assert world.over is not None and "which the run starts from, can be read" in world.over.reason
