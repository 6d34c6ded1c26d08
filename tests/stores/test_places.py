"""Snapshots at every kind of place: the same story on a folder and on each kind of bucket."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from paceline.storage import objects
from paceline.storage.folder import Folder
from paceline.storage.manifest import Damaged, Gone, Id, Manifest
from paceline.storage.objects import Objects
from paceline.storage.snapshots import Snapshots, Superseded
from paceline.storage.store import Store, StoreError, Unwanted
from support.stores.faults import Toxiproxy
from support.stores.servers import Store as Server

pytestmark = pytest.mark.timeout(180)

RUN = "digits-3f9a"
BIG = 20_000_000  # several pieces


def bucket(server: Server) -> Objects:
    return Objects(server.url, **server.config)


@pytest.fixture(params=["folder", "s3", "gcs", "azure"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "folder":
        return Folder(str(tmp_path / "place"))
    return bucket(request.getfixturevalue(request.param))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    folder = tmp_path / "saved"
    (folder / "variables").mkdir(parents=True)
    (folder / "variables" / "weights").write_bytes(os.urandom(BIG))
    (folder / "Schritt für ω 1").write_text("10")
    (folder / "empty").touch()
    return folder


def committed(snapshots: Snapshots, saved: Path, step: int, generation: int = 1) -> Manifest:
    id = Id(step, generation)
    made = Manifest(RUN, id, 1, (snapshots.send(id, "worker-0", str(saved)),))
    assert snapshots.commit(made)
    return made


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_what_is_sent_is_read_once(place: Store, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests are made on the way."""
    read = 0

    def counting(real: Any) -> Any:
        def act(*given: Any) -> Any:
            nonlocal read
            found = real(*given)
            read += found if isinstance(found, int) else len(found)
            return found

        return act

    for name in ("read", "readv"):
        monkeypatch.setattr(os, name, counting(getattr(os, name)))
    part = Snapshots(place, RUN).send(Id(1, 1), "worker-0", str(saved))
    assert read == sum(file.size for file in part.files) > BIG


def test_a_run_commits_goes_on_and_deletes(place: Store, saved: Path, tmp_path: Path) -> None:
    snapshots = Snapshots(place, RUN)
    assert snapshots.known().counted() == []
    snapshots.begin(1, None)
    made = committed(snapshots, saved, 10)
    assert not snapshots.commit(Manifest(RUN, Id(10, 1), 7, ())), "it was committed before"
    snapshots.send(Id(20, 1), "worker-0", str(saved))  # and its manifest never came
    snapshots.begin(2, Id(10, 1))
    with pytest.raises(Superseded):
        committed(snapshots, saved, 15)  # by who was presumed dead
    committed(snapshots, saved, 12, 2)
    again = Snapshots(place, RUN)
    assert again.known().counted() == [Id(12, 2), Id(10, 1)]
    assert again.manifest(Id(10, 1)) == made
    again.fetch(made, str(tmp_path / "restored"))
    assert contents(tmp_path / "restored") == contents(saved)
    again.delete(Id(12, 2))
    assert again.known().counted() == [Id(10, 1)]
    assert not place.names(f"{RUN}/step-12-g2/")
    assert place.folders(f"{RUN}/") == ["generations", "step-10-g1", "step-15-g1", "step-20-g1"]


def test_what_was_never_committed_is_swept_up_by_later_generations(place: Store, saved: Path, tmp_path: Path) -> None:
    snapshots = Snapshots(place, RUN)
    snapshots.begin(1, None)
    committed(snapshots, saved, 10)
    for id in (Id(20, 1), Id(20, 2)):
        snapshots.send(id, "worker-0", str(saved))
    for partial in [path.with_name(".weights.partial") for path in (tmp_path / "place").rglob("step-20-*/**/weights")]:
        partial.touch()  # of a crash
    snapshots.begin(2, Id(10, 1))
    snapshots.sweep(2)
    assert place.folders(f"{RUN}/") == ["generations", "step-10-g1", "step-20-g2"]
    snapshots.fetch(snapshots.manifest(Id(10, 1)), str(tmp_path / "restored"))


def test_of_many_captains_one_begins_a_generation(place: Store) -> None:
    together = threading.Barrier(8)

    def begin(_: int) -> bool:
        together.wait(30)
        try:
            Snapshots(place, RUN).begin(1, None)
            return True
        except Superseded:
            return False

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(begin, range(8))) == 1


def test_what_was_changed_after_the_commit_is_not_restored(place: Store, saved: Path, tmp_path: Path) -> None:
    snapshots = Snapshots(place, RUN)
    made = committed(snapshots, saved, 10)
    name = f"{RUN}/step-10-g1/worker-0/variables/weights"
    (tmp_path / "other").write_bytes(b"other")
    place.send_all([(str(tmp_path / "other"), name)], lambda _: True, {})
    with pytest.raises(Damaged, match=rf"{name} is damaged: it has 5 bytes instead of {BIG}"):
        snapshots.fetch(made, str(tmp_path / "restored"))
    place.delete(name)
    with pytest.raises(Damaged, match=f"{name} is gone"):
        snapshots.fetch(made, str(tmp_path / "restored"))
    assert not list(tmp_path.glob("*restored*"))


def test_a_file_of_many_parts_is_restored(
    place: Store, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots = Snapshots(place, RUN)
    made = committed(snapshots, saved, 10)
    monkeypatch.setattr(objects, "WHOLE", BIG - 1)
    monkeypatch.setattr(objects, "PART", 1 << 20)  # many more than are fetched at once
    snapshots.fetch(made, str(tmp_path / "restored"))
    assert contents(tmp_path / "restored") == contents(saved)
    pieces = iter([True] * 50)
    with pytest.raises(Unwanted):
        snapshots.fetch(made, str(tmp_path / "given-up"), lambda _: next(pieces, False))
    name = f"{RUN}/step-10-g1/worker-0/variables/weights"
    (tmp_path / "other").write_bytes(bytes(BIG))
    place.send_all([(str(tmp_path / "other"), name)], lambda _: True, {})
    with pytest.raises(Damaged, match=f"{name} is damaged: its digest is another"):
        snapshots.fetch(made, str(tmp_path / "damaged"))
    assert {path.name for path in tmp_path.iterdir()} <= {"saved", "restored", "other", "place"}


def test_a_transfer_can_be_given_up(place: Store, saved: Path, tmp_path: Path) -> None:
    snapshots = Snapshots(place, RUN)
    made = committed(snapshots, saved, 10)
    with pytest.raises(Unwanted):
        snapshots.send(Id(20, 1), "worker-0", str(saved), lambda _: False)
    assert not [name for name in place.names(f"{RUN}/step-20-g1/") if "weights" in name]
    with pytest.raises(Unwanted):
        snapshots.fetch(made, str(tmp_path / "restored"), lambda _: False)
    assert not list(tmp_path.glob("*restored*"))


def test_every_byte_can_be_checked_where_it_is(place: Store, saved: Path, tmp_path: Path) -> None:
    snapshots = Snapshots(place, RUN)
    made = committed(snapshots, saved, 10)
    [part] = made.parts
    weights = next(file for file in part.files if file.path == "variables/weights")
    seen: list[int] = []
    for file in part.files:
        snapshots.check(made.id, "worker-0", file, lambda data: seen.append(data) is None)
    assert sum(seen) == made.size
    name = f"{RUN}/step-10-g1/worker-0/variables/weights"
    (tmp_path / "other").write_bytes(bytes(BIG))
    place.send_all([(str(tmp_path / "other"), name)], lambda _: True, {})
    with pytest.raises(Damaged, match=f"{name} is damaged: its digest is another"):
        snapshots.check(made.id, "worker-0", weights)
    place.delete(name)
    with pytest.raises(Gone, match=f"{name} is gone"):
        snapshots.check(made.id, "worker-0", weights)


def test_all_of_a_run_is_deleted_and_nothing_else(place: Store, saved: Path) -> None:
    for run in (RUN, f"{RUN}b"):
        snapshots = Snapshots(place, run)
        snapshots.begin(1, None)
        snapshots.send(Id(20, 1), "worker-0", str(saved))  # never committed
        assert snapshots.commit(Manifest(run, Id(10, 1), 1, (snapshots.send(Id(10, 1), "worker-0", str(saved)),)))
    assert place.create(f"{RUN}/notes/of-a-person", b"mine")
    left = [name for name in place.names("") if name.startswith(f"{RUN}b/")]
    Snapshots(place, RUN).delete_all()
    assert place.names("") == [f"{RUN}/notes/of-a-person", *left] and len(left) == 8


# ---- buckets that cannot be used


def test_a_bucket_that_is_not_there_is_named(store: Server) -> None:
    with pytest.raises(StoreError, match=r"cannot list .*://nowhere-to-be-found/.*: there is no such bucket") as failed:
        Snapshots(bucket(store.bucket("nowhere-to-be-found")), RUN).begin(1, None)
    assert not failed.value.passing


def test_wrong_credentials_are_said_and_are_no_passing_trouble(store: Server) -> None:
    with pytest.raises(StoreError) as failed:
        Snapshots(bucket(store.stranger()), RUN).begin(1, None)
    assert ": the credentials are not accepted" in str(failed.value) and not failed.value.passing


def test_a_store_that_is_away_is_passing_trouble(
    store: Server, toxiproxy: Toxiproxy, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "RETRY_S", 2.0)
    link = toxiproxy.link(store.port)
    snapshots = Snapshots(bucket(store.through(link)), RUN)
    with link.down(), pytest.raises(StoreError) as failed:
        snapshots.begin(1, None)
    assert failed.value.passing and str(failed.value).endswith(f": no answer from {link.endpoint}")
    snapshots.begin(1, None)


def test_settings_that_are_missing_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(StoreError, match=r"az://container cannot be used: .*Account must be specified"):
        Objects("az://container")


def test_a_connection_that_breaks_in_the_middle_costs_nothing(
    store: Server, toxiproxy: Toxiproxy, saved: Path, tmp_path: Path
) -> None:
    """It goes on where it broke off, also more often than one request is tried again."""
    link = toxiproxy.link(store.port)
    snapshots = Snapshots(bucket(store.through(link)), RUN)
    snapshots.begin(1, None)
    made = committed(snapshots, saved, 10)
    with link.cut(2_000_000):
        snapshots.fetch(made, str(tmp_path / "restored"))
    assert contents(tmp_path / "restored") == contents(saved)


def test_a_connection_that_brings_nothing_ends_a_restore(
    s3: Server, toxiproxy: Toxiproxy, saved: Path, tmp_path: Path
) -> None:
    link = toxiproxy.link(s3.port)
    snapshots = Snapshots(bucket(s3.through(link)), RUN)
    made = committed(snapshots, saved, 10)
    with link.reset(), pytest.raises(StoreError) as failed:
        snapshots.fetch(made, str(tmp_path / "restored"))
    assert failed.value.passing and not list(tmp_path.glob("*restored*"))


def test_after_an_error_what_was_sent_is_not_sent_again(s3: Server, toxiproxy: Toxiproxy, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    saved.mkdir()
    for number in range(8):
        (saved / f"small-{number}").write_bytes(os.urandom(50_000))
    (saved / "large").write_bytes(os.urandom(3_000_000))
    link = toxiproxy.link(s3.port)
    place = bucket(s3.through(link))
    snapshots = Snapshots(place, RUN)
    snapshots.begin(1, None)
    with link.cut(1_000_000, "upstream"), pytest.raises(StoreError) as failed:
        snapshots.send(Id(10, 1), "worker-0", str(saved))
    assert failed.value.passing
    below = f"{RUN}/step-10-g1/worker-0/"
    (saved / "small-0").write_bytes(os.urandom(50_000))  # no program does that
    place.delete(f"{below}small-1")
    there = {name.removeprefix(below) for name in place.names(below)} - {"small-0"}
    assert there and "large" not in there
    asked: list[int] = []
    part = snapshots.send(Id(10, 1), "worker-0", str(saved), lambda size: asked.append(size) is None)
    assert sum(asked) == sum(path.stat().st_size for path in saved.iterdir() if path.name not in there)
    made = Manifest(RUN, Id(10, 1), 1, (part,))
    assert snapshots.commit(made)
    snapshots.fetch(made, str(tmp_path / "restored"))
    assert contents(tmp_path / "restored") == contents(saved)
    asked.clear()
    snapshots.send(Id(10, 1), "worker-0", str(saved), lambda size: asked.append(size) is None)
    assert sum(asked) == made.size, "whoever asks for what was sent has lost it"
