"""Buckets whose server refuses, is too busy, loses answers or breaks them off: nothing half counts as committed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.storage.manifest import Id, Manifest
from paceline.storage.objects import Objects
from paceline.storage.snapshots import Snapshots
from paceline.storage.store import StoreError
from support.stores.refusing import Asked, Fault, Proxy, proxy
from support.stores.servers import Store as Server

pytestmark = pytest.mark.timeout(180)

RUN = "digits-3f9a"
PARTS = 9_000_000  # bytes that go in two parts


@pytest.fixture
def way(store: Server) -> Iterator[Proxy]:
    with proxy(store.port) as found:
        yield found


@pytest.fixture
def snapshots(store: Server, way: Proxy) -> Snapshots:
    far = store.through(way)
    return Snapshots(Objects(far.url, **far.config), RUN)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    folder = tmp_path / "saved"
    folder.mkdir()
    (folder / "weights").write_bytes(os.urandom(PARTS))
    (folder / "epoch").write_text("10")
    return folder


def sent(snapshots: Snapshots, saved: Path, step: int) -> Manifest:
    return Manifest(RUN, Id(step, 1), 1, (snapshots.send(Id(step, 1), "worker-0", str(saved)),))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def persistently(snapshots: Snapshots, saved: Path, step: int) -> Manifest:
    """As runs do it, where the trouble is passing."""
    try:
        return sent(snapshots, saved, step)
    except StoreError as error:
        assert error.passing, error
        return sent(snapshots, saved, step)


def first(fault: Fault) -> Callable[[Asked], Fault | None]:
    """Of each request the first try."""
    return lambda asked: fault if asked.again == 0 else None


BUSY = Fault(503, reaches="no")
LOST = Fault(503)  # the server has done it


@pytest.mark.parametrize("fault", [BUSY, LOST], ids=["refused", "lost"])
def test_a_server_that_is_too_busy_for_every_request_once_costs_nothing(
    way: Proxy, snapshots: Snapshots, saved: Path, tmp_path: Path, fault: Fault
) -> None:
    with way.wrong(first(fault)) as asked:
        snapshots.begin(1, None)
        assert snapshots.commit(persistently(snapshots, saved, 10))
        snapshots.fetch(snapshots.manifest(Id(10, 1)), str(tmp_path / "restored"))
    assert len({each.path for each in asked}) >= 9 and any(each.again for each in asked)
    assert contents(tmp_path / "restored") == contents(saved)


def test_a_server_that_stays_too_busy_is_passing_trouble(s3: Server) -> None:
    with proxy(s3.port) as way, way.wrong(lambda _: BUSY), pytest.raises(StoreError) as failed:
        Snapshots(Objects(s3.url, patience=1.0, **s3.through(way).config), RUN).begin(1, None)
    why = "the server is too busy, or away: it answers 503 (SlowDown)"
    assert str(failed.value) == f"cannot list {s3.url}/{RUN}/generations/: {why}" and failed.value.passing


def test_what_is_broken_off_is_asked_for_from_there_on(
    way: Proxy, snapshots: Snapshots, saved: Path, tmp_path: Path
) -> None:
    snapshots.begin(1, None)
    assert snapshots.commit(sent(snapshots, saved, 10))

    def broken(asked: Asked) -> Fault | None:
        return Fault(half=True) if asked.again < 3 else None

    with way.wrong(broken) as asked:
        snapshots.fetch(snapshots.manifest(Id(10, 1)), str(tmp_path / "restored"))
    assert len([each for each in asked if each.path.endswith("weights")]) == 4
    assert contents(tmp_path / "restored") == contents(saved)
    with way.wrong(broken), pytest.raises(StoreError) as failed:
        snapshots.known()
    assert failed.value.passing and str(failed.value).startswith("cannot list ")


REFUSED = Fault(403, reaches="no")


@pytest.mark.parametrize("what", ["weights", "epoch", "manifest"])
def test_a_snapshot_that_is_refused_in_the_middle_is_not_there_and_the_next_one_is(
    way: Proxy, snapshots: Snapshots, saved: Path, tmp_path: Path, what: str
) -> None:
    snapshots.begin(1, None)
    assert snapshots.commit(sent(snapshots, saved, 10))
    (saved / "epoch").write_text("20")

    def refused(asked: Asked) -> Fault | None:
        second = "partNumber=2" in asked.path or "comp=blocklist" in asked.path  # one part is there
        wanted = second if what == "weights" else what in asked.path
        return REFUSED if asked.method == "PUT" and wanted else None

    with way.wrong(refused), pytest.raises(StoreError) as failed:
        snapshots.commit(sent(snapshots, saved, 20))
    assert str(failed.value).startswith("cannot write ") and f"/{RUN}/step-20-g1/" in str(failed.value)
    why = "the credentials are not accepted, or lack the right to write there: grant it, or use others"
    assert str(failed.value).endswith(f": {why} (AccessDenied)") and not failed.value.passing
    assert snapshots.known().committed == {Id(10, 1)}
    assert snapshots.commit(sent(snapshots, saved, 30))
    assert snapshots.known().counted() == [Id(30, 1), Id(10, 1)]
    snapshots.fetch(snapshots.manifest(Id(30, 1)), str(tmp_path / "restored"))
    assert contents(tmp_path / "restored") == contents(saved)


def test_who_may_only_read_restores_and_is_told_that_it_cannot_write(s3: Server, saved: Path, tmp_path: Path) -> None:
    snapshots = Snapshots(Objects(s3.url, **s3.config), RUN)
    snapshots.begin(1, None)
    assert snapshots.commit(sent(snapshots, saved, 10))
    reading = Snapshots(Objects(s3.url, **s3.reader().config), RUN)
    reading.fetch(reading.manifest(Id(10, 1)), str(tmp_path / "restored"))
    assert contents(tmp_path / "restored") == contents(saved)
    for write in (lambda: reading.begin(2, Id(10, 1)), lambda: sent(reading, saved, 20)):
        with pytest.raises(StoreError, match="lack the right to write there: grant it, or use others") as failed:
            write()
        assert str(failed.value).startswith(f"cannot write {s3.url}/{RUN}/") and not failed.value.passing
    with pytest.raises(StoreError, match="lack the right to delete there") as failed:
        reading.delete(Id(10, 1))
    assert not failed.value.passing
    assert snapshots.known().counted() == [Id(10, 1)]


def test_a_restore_that_is_refused_in_the_middle_leaves_nothing_and_can_be_asked_for_again(
    way: Proxy, snapshots: Snapshots, saved: Path, tmp_path: Path
) -> None:
    made = sent(snapshots, saved, 10)
    with (
        way.wrong(lambda asked: Fault(half=True) if asked.number == 1 else REFUSED),
        pytest.raises(StoreError) as failed,
    ):
        snapshots.fetch(made, str(tmp_path / "restored"))
    assert "lack the right to read there" in str(failed.value) and [*tmp_path.iterdir()] == [saved]
    snapshots.fetch(made, str(tmp_path / "restored"))
    assert contents(tmp_path / "restored") == contents(saved)


# ---- stores that cannot create


def test_a_server_that_lets_a_name_be_taken_twice_is_found_out_by_the_first_record(gcs: Server) -> None:
    with proxy(gcs.port) as way:
        far = gcs.through(way)
        with way.wrong(lambda _: Fault(unconditional=True)), pytest.raises(StoreError) as failed:
            Snapshots(Objects(far.url, **far.config), RUN).begin(1, None)
    assert str(failed.value).startswith(f"{gcs.url} cannot be used: its server lets a name be created that is taken")
    assert "it takes one that knows conditional writes (If-None-Match)" in str(failed.value)
    assert not failed.value.passing


def test_a_server_that_knows_no_conditional_writes_says_so_and_is_no_passing_trouble(s3: Server) -> None:
    with proxy(s3.port) as way:
        far = s3.through(way)
        with (
            way.wrong(lambda asked: Fault(501, reaches="no") if asked.conditional else None),
            pytest.raises(
                StoreError, match=r"it takes one that knows conditional writes .*\(NotImplemented\)"
            ) as failed,
        ):
            Snapshots(Objects(far.url, patience=1.0, **far.config), RUN).begin(1, None)
    assert str(failed.value).startswith(f"cannot write {s3.url}/{RUN}/generations/") and not failed.value.passing


def test_whether_a_server_refuses_names_is_asked_once(store: Server, way: Proxy, snapshots: Snapshots) -> None:
    with way.wrong(lambda _: None) as asked:
        snapshots.begin(1, None)
        snapshots.begin(2, None)
    assert [each.again for each in asked if each.conditional] == [0, 1, 0]
