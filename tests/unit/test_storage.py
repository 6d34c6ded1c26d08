"""Snapshots at a place: what is committed counts and is restored whole, whatever dies, and whenever."""

from __future__ import annotations

import contextlib
import errno
import gc
import hashlib
import json
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.storage import chain, files, folder, manifest
from paceline.storage.chain import Record
from paceline.storage.folder import Folder
from paceline.storage.manifest import Damaged, File, Id, Manifest, Newer, Part
from paceline.storage.retention import to_delete
from paceline.storage.snapshots import Snapshots, Superseded, Unfit
from paceline.storage.store import StoreError, Unwanted
from support.stored import commit, written

RUN = "digits-3f9a"


@pytest.fixture
def snapshots(tmp_path: Path) -> Snapshots:
    return Snapshots(Folder(str(tmp_path / "store")), RUN)


def restored(snapshots: Snapshots, tmp_path: Path, warn: Callable[[str], None] = pytest.fail) -> tuple[Id, Path] | None:
    """The newest that verifies, as a new process finds it."""
    target = tmp_path / f"restored-{os.urandom(4).hex()}"
    for id in snapshots.known().counted():
        try:
            snapshots.fetch(snapshots.manifest(id), str(target))
            return id, target
        except (Damaged, Newer) as error:
            warn(f"the snapshot of step {id.step} is passed over: {error}")
    return None


# ---- commit and restore


def test_what_was_committed_is_restored_as_it_was(snapshots: Snapshots, tmp_path: Path) -> None:
    snapshots.begin(1, None)
    commit(snapshots, tmp_path, 10)
    commit(snapshots, tmp_path, 20)
    found = restored(snapshots, tmp_path)
    assert found is not None and found[0] == Id(20, 1)
    place = found[1]
    assert sorted(str(path.relative_to(place)) for path in place.rglob("*")) == [
        "empty", "epoch", "variables", "variables/weights",
    ]  # fmt: skip
    assert (place / "variables" / "weights").read_bytes() == b"worker-0 20" * 1000


def test_a_snapshot_without_a_manifest_does_not_exist(snapshots: Snapshots, tmp_path: Path) -> None:
    snapshots.begin(1, None)
    commit(snapshots, tmp_path, 10)
    snapshots.send(Id(20, 1), "worker-0", str(written(tmp_path, 20)))
    found = restored(snapshots, tmp_path)
    assert found is not None and found[0] == Id(10, 1)


def test_parts_of_several_tasks_are_one_folder_and_the_first_counts(snapshots: Snapshots, tmp_path: Path) -> None:
    snapshots.begin(1, None)
    for task in ("worker-0", "worker-1"):
        place = written(tmp_path / "more", 10, task)
        (place / f"shard-{task}").write_text(task)
    parts = [snapshots.send(Id(10, 1), task, f"{tmp_path}/more/{task}-step-10") for task in ("worker-0", "worker-1")]
    snapshots.commit(Manifest(RUN, Id(10, 1), 2, tuple(parts)))
    found = restored(snapshots, tmp_path)
    assert found is not None
    assert (found[1] / "shard-worker-1").read_text() == "worker-1"
    assert (found[1] / "variables" / "weights").read_bytes() == b"worker-0 10" * 1000


def test_a_snapshot_is_committed_once(snapshots: Snapshots, tmp_path: Path) -> None:
    snapshots.begin(1, None)
    made = commit(snapshots, tmp_path, 10)
    assert not snapshots.commit(Manifest(RUN, made.id, 7, ()))
    assert snapshots.manifest(made.id) == made


@pytest.mark.parametrize("how", ["changed", "truncated", "gone", "no manifest", "a manifest of another"])
def test_a_damaged_snapshot_is_passed_over_with_the_name_of_its_file(
    snapshots: Snapshots, tmp_path: Path, how: str
) -> None:
    snapshots.begin(1, None)
    commit(snapshots, tmp_path, 10)
    commit(snapshots, tmp_path, 20)
    store = tmp_path / "store" / RUN
    file = store / "step-20-g1" / "worker-0" / "variables" / "weights"
    description = store / "step-20-g1" / "manifest.json"
    if how == "changed":
        file.write_bytes(file.read_bytes()[:-1] + b"!")
    elif how == "truncated":
        file.write_bytes(file.read_bytes()[:-1])
    elif how == "gone":
        file.unlink()
    elif how == "no manifest":
        description.write_bytes(description.read_bytes()[:-1])
    else:
        description.write_bytes((store / "step-10-g1" / "manifest.json").read_bytes())
    told: list[str] = []
    found = restored(snapshots, tmp_path, told.append)
    assert found is not None and found[0] == Id(10, 1)
    (text,) = told
    name = "step-20-g1/manifest.json" if "manifest" in how else "variables/weights"
    assert text.startswith("the snapshot of step 20 is passed over: ") and name in text


def test_a_manifest_of_a_newer_version_is_passed_over_and_said(snapshots: Snapshots, tmp_path: Path) -> None:
    snapshots.begin(1, None)
    commit(snapshots, tmp_path, 10)
    path = tmp_path / "store" / RUN / "step-10-g1" / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 2}))
    told: list[str] = []
    assert restored(snapshots, tmp_path, told.append) is None
    assert "has version 2, and this Paceline knows version 1" in told[0]


def test_names_with_spaces_and_unicode_are_kept(snapshots: Snapshots, tmp_path: Path) -> None:
    place = tmp_path / "saved here"
    place.mkdir()
    (place / "Gewichte für ω 1").write_text("x")
    snapshots.begin(1, None)
    part = snapshots.send(Id(1, 1), "worker-0", str(place))
    snapshots.commit(Manifest(RUN, Id(1, 1), 1, (part,)))
    found = restored(snapshots, tmp_path)
    assert found is not None and [path.name for path in found[1].iterdir()] == ["Gewichte für ω 1"]


@pytest.mark.parametrize("how", ["a link", "a pipe", "a line break"])
def test_what_is_no_file_is_refused_by_name(snapshots: Snapshots, tmp_path: Path, how: str) -> None:
    place = written(tmp_path, 10)
    name = "two\nlines" if how == "a line break" else "odd"
    if how == "a link":
        (place / name).symlink_to("/etc/passwd")
    elif how == "a pipe":
        os.mkfifo(place / name)
    else:
        (place / name).touch()
    with pytest.raises(Unfit, match=r"odd|two"):
        snapshots.send(Id(10, 1), "worker-0", str(place))


def test_a_transfer_that_is_not_wanted_any_more_leaves_nothing(snapshots: Snapshots, tmp_path: Path) -> None:
    with pytest.raises(Unwanted):
        snapshots.send(Id(10, 1), "worker-0", str(written(tmp_path, 10)), lambda _: False)
    assert not [path for path in (tmp_path / "store").rglob("*") if path.is_file()]


def test_a_place_that_cannot_be_written_says_which_and_why(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"cannot list .*/file/.*: Not a directory"):
        Snapshots(Folder(str(tmp_path / "file")), RUN).begin(1, None)


# ---- whose they are


def owned(tmp_path: Path, token: str) -> Snapshots:
    """As a new process of that run has them."""
    return Snapshots(Folder(str(tmp_path / "store")), RUN, token, "s3://training/digits")


@pytest.mark.parametrize("left", ["its claim", "a generation", "a snapshot", "what an older version wrote"])
def test_a_second_run_of_the_same_id_touches_nothing(tmp_path: Path, left: str) -> None:
    first = owned(tmp_path, "" if left == "what an older version wrote" else "first")
    first.known()
    if left != "its claim":
        first.begin(1, None)
    if left == "a snapshot":
        commit(first, tmp_path, 10)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "store").rglob("*")}
    second = owned(tmp_path, "second")
    for does in (second.claim, second.known, lambda: second.begin(2, None)):
        with pytest.raises(StoreError) as refused:
            does()
        assert str(refused.value) == (
            "there is another run digits-3f9a at s3://training/digits: choose another id (--run), start from that one "
            "(--set snapshots.from=s3://training/digits/digits-3f9a), or delete it "
            "(`paceline delete --snapshots s3://training/digits/digits-3f9a`)"
        )
        assert not refused.value.passing
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "store").rglob("*")} == before


def test_a_run_comes_back_to_what_is_its_own(tmp_path: Path) -> None:
    owned(tmp_path, "first").begin(1, None)
    commit(owned(tmp_path, "first"), tmp_path, 10)
    assert owned(tmp_path, "first").known().counted() == [Id(10, 1)]
    assert owned(tmp_path, "first").begin(2, Id(10, 1), [Id(10, 1)]) == []
    assert sorted(owned(tmp_path, "").known().records) == [1, 2], "who only reads asks nobody"


def test_a_place_that_was_lost_is_claimed_anew_whatever_members_and_crashes_have_left_there(tmp_path: Path) -> None:
    (tmp_path / "store" / RUN / "generations").mkdir(parents=True)
    (tmp_path / "store" / RUN / "generations" / ".00000000.json.0123.partial").touch()
    owned(tmp_path, "").send(Id(10, 1), "worker-0", str(written(tmp_path, 10)))
    assert owned(tmp_path, "first").known().generation == 0
    with pytest.raises(StoreError, match="there is another run"):
        owned(tmp_path, "second").claim()


def test_of_two_that_claim_at_once_one_has_it(tmp_path: Path) -> None:
    had: list[str] = []

    def claim(token: str) -> None:
        with contextlib.suppress(StoreError):
            owned(tmp_path, token).claim()
            had.append(token)

    threads = [threading.Thread(target=claim, args=(token,)) for token in ("first", "second") * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(had) == 4 and len(set(had)) == 1


# ---- generations


def test_a_writer_that_was_presumed_dead_cannot_add_to_the_chain(snapshots: Snapshots, tmp_path: Path) -> None:
    snapshots.begin(1, None)
    commit(snapshots, tmp_path, 10)
    snapshots.begin(2, Id(10, 1))
    with pytest.raises(Superseded, match="there is a later generation than 1"):
        commit(snapshots, tmp_path, 20)  # of the first generation, which the second has never seen
    found = restored(snapshots, tmp_path)
    assert found is not None and found[0] == Id(10, 1)
    commit(snapshots, tmp_path, 20, 2)
    found = restored(snapshots, tmp_path)
    assert found is not None and found[0] == Id(20, 2)
    assert snapshots.known().counted() == [Id(20, 2), Id(10, 1)]


def test_what_was_committed_between_the_choice_and_the_record_is_not_lost(snapshots: Snapshots, tmp_path: Path) -> None:
    """Its writer was told that it is committed, so the generation that missed it gives way to one that begins there."""
    snapshots.begin(1, None)
    commit(snapshots, tmp_path, 10)
    seen = snapshots.known().counted()
    commit(snapshots, tmp_path, 20)
    late = snapshots.begin(2, Id(10, 1), seen)
    assert late == [Id(20, 1), Id(10, 1)]
    assert snapshots.begin(3, late[0], late) == []
    assert snapshots.known().counted() == [Id(20, 1), Id(10, 1)]


def test_a_generation_is_begun_by_one_captain(snapshots: Snapshots) -> None:
    snapshots.begin(1, None)
    with pytest.raises(Superseded, match="generation 1 has been begun by another captain"):
        snapshots.begin(1, None)
    snapshots.begin(3, None)
    with pytest.raises(Superseded, match="there is a later generation than 2"):
        snapshots.begin(2, None)


History = tuple[dict[int, Record], set[Id], list[Id]]


@st.composite
def histories(draw: st.DrawFn) -> History:
    """Generations one after the other, each from a snapshot that counted, with writers that go on after their end;
    and what counts at the end, as told by who was there."""
    records: dict[int, Record] = {}
    committed: set[Id] = set()
    lineage: list[Id] = []  # what counts, oldest first
    for generation in range(1, draw(st.integers(1, 6)) + 1):
        keep = draw(st.integers(0, len(lineage)))
        lineage = lineage[:keep]
        parent = lineage[-1] if lineage else None
        records[generation] = Record(generation, parent)
        step = parent.step if parent else 0
        for _ in range(draw(st.integers(0, 3))):
            step += draw(st.integers(1, 3))
            lineage.append(Id(step, generation))
            committed.add(lineage[-1])
        for earlier in range(1, generation):
            if draw(st.booleans()):
                last = max((each.step for each in committed if each.generation == earlier), default=0)
                begun = max(
                    (r.parent.step for r in records.values() if r.parent and r.parent.generation == earlier), default=0
                )
                committed.add(Id(max(last, begun) + 1, earlier))
    return records, committed, lineage


@given(histories())
def test_what_counts_is_what_the_newest_generation_has_seen(
    history: tuple[dict[int, Record], set[Id], list[Id]],
) -> None:
    records, committed, lineage = history
    assert chain.counted(records, committed) == lineage[::-1]


@given(st.binary(max_size=200))
def test_any_bytes_are_a_manifest_or_an_error(data: bytes) -> None:
    for parse in (manifest.parse, chain.parse):
        with pytest.raises((Damaged, Newer)):
            parse(data, "name")


PATHS = ["/etc/passwd", "../up", "a/../b", "a//b", "", ".", "a\0b", "a\nb"]


@pytest.mark.parametrize("path", PATHS)
def test_a_manifest_cannot_lead_outside_its_folder(path: str) -> None:
    made = Manifest(RUN, Id(1, 1), 1, (Part("worker-0", (File(path, 1, "0" * 64),)),))
    with pytest.raises(Damaged, match="none below its folder"):
        manifest.parse(made.to_bytes(), "name")


def test_a_file_cannot_be_a_folder_too() -> None:
    files = (File("a", 1, "0" * 64), File("a/b", 1, "0" * 64))
    with pytest.raises(Damaged, match="as a file and as a folder"):
        manifest.parse(Manifest(RUN, Id(1, 1), 1, (Part("worker-0", files),)).to_bytes(), "name")


def test_more_files_than_a_manifest_may_name_are_not_sent(
    snapshots: Snapshots, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "MOST_BYTES", 300)
    with pytest.raises(Unfit, match=r"^its 3 files take 1 MiB in a manifest, which may have"):
        snapshots.send(Id(1, 1), "worker-0", str(written(tmp_path, 1)))
    assert not (tmp_path / "store").exists()


# ---- retention


def test_the_newest_and_the_best_stay(snapshots: Snapshots, tmp_path: Path) -> None:
    ids = [Id(step, 1) for step in (40, 30, 20, 10)]
    metrics = dict(zip(ids, (0.4, 0.3, 0.9, 0.2), strict=True))
    assert to_delete(ids, ids, 2, {}, lowest=True) == [Id(20, 1), Id(10, 1)]
    assert to_delete(ids, ids, 2, metrics, lowest=True) == [Id(20, 1)]
    assert to_delete(ids, ids, 2, metrics, lowest=False) == [Id(10, 1)]


def test_deleting_a_snapshot_leaves_nothing_of_it_and_all_else(snapshots: Snapshots, tmp_path: Path) -> None:
    snapshots.begin(1, None)
    commit(snapshots, tmp_path, 10)
    commit(snapshots, tmp_path, 20)
    foreign = tmp_path / "store" / RUN / "notes.txt"
    foreign.write_text("mine")
    snapshots.delete(Id(20, 1))
    assert foreign.read_text() == "mine"
    assert sorted(path.name for path in (tmp_path / "store" / RUN).iterdir()) == [
        "generations", "notes.txt", "step-10-g1",
    ]  # fmt: skip
    found = restored(snapshots, tmp_path)
    assert found is not None and found[0] == Id(10, 1)


# ---- a file system that cannot


class Linkless:
    """The module os, on a file system without hard links."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def link(self, source: str, target: str) -> None:
        raise OSError(self._number, os.strerror(self._number), source, None, target)


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_hard_links_is_no_place(
    snapshots: Snapshots, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(folder, "os", Linkless(number))
    with pytest.raises(
        StoreError, match=f"{tmp_path}/store cannot be used: its file system has no hard links"
    ) as failed:
        snapshots.begin(1, None)
    assert not failed.value.passing and not [path for path in (tmp_path / "store").rglob("*") if path.is_file()]


# ---- a crash at any call


class Crash(BaseException):
    """The machine loses its power."""


class Dying:
    """The module os, until it dies at a given call: nothing is done after that, by any thread, and what was not synced
    is lost: of files what was written, of folders the names."""

    CALLS = ("open", "write", "fsync", "link", "unlink", "mkdir", "rename", "close", "rmdir")

    def __init__(self, at: int) -> None:
        self.calls, self._at = 0, at
        self._open: dict[int, str] = {}  # descriptors
        self._written: dict[int, int] = {}  # files that are not on the disk as they are; and descriptors of our own
        self._named: list[tuple[str, str]] = []  # by a folder that is not on the disk as it is: what, and how before
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        return self._dying(name, real) if name in self.CALLS else real

    def syncfs(self, fd: int) -> None:
        self._dying("syncfs", lambda fd: None)(fd)

    def _dying(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*words: Any) -> Any:
            with self._lock:
                self.calls += 1
                if self.calls < self._at:
                    self._note_before(name, words)
                    done = real(*words)
                    if name == "open":
                        self._open[done] = words[0]
                    return done
                if name == "write" and self.calls == self._at:
                    real(words[0], words[1][: len(words[1]) // 2])
                raise Crash

        return call

    def _note_before(self, name: str, words: Any) -> None:
        if name == "close":
            del self._open[words[0]]
        elif name == "write":
            file = os.fstat(words[0]).st_ino
            if file not in self._written:
                self._written[file] = os.dup(words[0])
        elif name == "fsync":
            self._on_disk(os.fstat(words[0]).st_ino)
            folder = Path(self._open[words[0]])
            self._named = [each for each in self._named if Path(each[0]).parent != folder]
        elif name == "syncfs":
            for file in list(self._written):
                self._on_disk(file)
            self._named = []
        elif name in ("rename", "link"):
            self._named.append((words[1], words[0]))

    def _on_disk(self, file: int) -> None:
        if file in self._written:
            os.close(self._written.pop(file))

    def lose_what_was_not_synced(self) -> None:
        for new, old in reversed(self._named):
            with contextlib.suppress(FileNotFoundError):  # deleted since
                Path(new).replace(old)
        for fd in self._written.values():
            os.ftruncate(fd, os.fstat(fd).st_size // 2)
        for fd in (*self._open, *self._written.values()):  # what the process had open when it died, too
            os.close(fd)


def descriptors() -> int:
    gc.collect()  # what tests before this one have left open is closed now, not in the middle of this one
    return len(list(Path("/proc/self/fd").iterdir()))


def story(snapshots: Snapshots, tmp_path: Path) -> Iterator[Id | None]:
    """What a run does; yields the snapshot from which it would go on, each time that has changed."""
    snapshots.begin(1, None)
    for step in (10, 20):
        commit(snapshots, tmp_path, step)
        yield Id(step, 1)
    snapshots.begin(2, Id(20, 1))
    commit(snapshots, tmp_path, 30, 2)
    yield Id(30, 2)
    snapshots.delete(Id(10, 1))
    yield Id(30, 2)
    snapshots.begin(3, Id(30, 2))
    commit(snapshots, tmp_path, 40, 3, "worker-0", "worker-1")
    yield Id(40, 3)


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """Hundreds of crashes: on a disk, thousands of syncs."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.mark.parametrize("synced", ["file by file", "all at once"])
def test_a_crash_at_any_call_loses_nothing_that_was_committed(
    in_memory: Path, monkeypatch: pytest.MonkeyPatch, synced: str
) -> None:
    monkeypatch.setattr(folder, "SMALL", 1000)  # one of the files is not
    if synced == "all at once":
        monkeypatch.setattr(folder, "MANY", 2)
        monkeypatch.setattr(files, "SYNCED_WHOLE", ("tmpfs",))
    expected = [None, *story(Snapshots(Folder(str(in_memory / "whole" / "store")), RUN), in_memory / "whole")]
    at, survived, before = 0, False, descriptors()
    while not survived:
        at += 1
        place = in_memory / f"crash-{at}"
        dying = Dying(at)
        snapshots = Snapshots(Folder(str(place / "store")), RUN)
        reached = 0
        with monkeypatch.context() as patch:
            patch.setattr(folder, "os", dying)
            patch.setattr(files, "os", dying)
            patch.setattr(files, "syncfs", dying.syncfs)
            try:
                for _ in story(snapshots, place):
                    reached += 1
                survived = True
            except Crash:
                pass
        dying.lose_what_was_not_synced()
        after = restored(Snapshots(Folder(str(place / "store")), RUN), place)
        found = after[0] if after else None
        # What was under way may have been committed just before the end.
        assert found in expected[reached : reached + 2], (at, reached, found)
        if after:
            step = after[0].step
            weights = (after[1] / "variables" / "weights").read_bytes()
            assert hashlib.sha256(weights).digest() == hashlib.sha256(f"worker-0 {step}".encode() * 1000).digest()
    assert at > 150 and at == dying.calls + 1 and descriptors() == before
