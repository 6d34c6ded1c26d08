"""Restoring a snapshot into a folder in which programs keep their own checkpoints: old, new or none, never a mix."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.storage.snapshots.repository import Unfit
from paceline.storage.stores.protocol import TransferCanceled
from paceline.storage.watched.capture import FolderCapture
from paceline.storage.watched.restore import begin, tidy

pytestmark = pytest.mark.timeout(300)

RUN = "digits-3f9a"
HOST_ID = RUN, "worker-host-0"


class Host:
    """The folder, and what a host of the run does to it. The hosts of one machine share both."""

    def __init__(self, parent: Path, own: Path | None = None, name: str = HOST_ID[1]) -> None:
        self.parent, self.own, self.id = parent, own or parent / "run", (RUN, name)
        self.folder = parent / "work" / "ckpt"
        self.folder.parent.mkdir(exist_ok=True, parents=True)

    def snapshot(self, name: str, **files: str) -> Path:
        folder = self.parent / "restored" / name
        folder.mkdir(parents=True)
        for path, text in files.items():
            (folder / path).write_text(text)
        return folder

    def begin(self, generation: int, source: Path | None = None, **options: Any) -> tuple[list[str], str]:
        source_text = "" if source is None else str(source)
        doubtful, backup = begin(str(self.folder), str(self.own), self.id, generation, source_text, **options)
        return sorted(doubtful), backup

    def tidy(self) -> None:
        tidy(str(self.folder), str(self.own), self.id)

    def write(self, **files: str) -> None:
        self.folder.mkdir(exist_ok=True)
        for path, text in files.items():
            (self.folder / path).write_text(text)

    def texts(self, folder: Path | None = None) -> dict[str, str] | None:
        """The contents of the folder; None if it does not exist."""
        folder = folder or self.folder
        if not folder.exists():
            return None
        return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}

    def siblings(self) -> list[str]:
        return sorted(path.name for path in self.folder.parent.iterdir())


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


@pytest.fixture
def elsewhere() -> Iterator[Path]:
    """On another file system."""
    path = Path("/dev/shm") / f"paceline-test-{os.getpid()}"
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(params=["same file system", "another"])
def own(request: pytest.FixtureRequest, tmp_path: Path, elsewhere: Path) -> Path:
    """The run's own folder."""
    return elsewhere if request.param == "another" else tmp_path / "run"


@pytest.fixture
def either(tmp_path: Path, own: Path) -> Host:
    return Host(tmp_path, own)


# ---- with a snapshot


def test_the_folder_is_equal_to_the_snapshot(either: Host) -> None:
    either.begin(1)
    either.write(model="half", new="of a task that died")
    (either.folder / "below").mkdir()
    assert either.begin(2, either.snapshot("step-1-g1", model="whole")) == ([], "")
    assert either.texts() == {"model": "whole"}
    either.write(model="half again")
    assert either.begin(3, either.snapshot("step-2-g2", model="newer")) == ([], "")
    assert either.texts() == {"model": "newer"}
    either.tidy()
    assert either.siblings() == ["ckpt"]
    assert not either.own.exists()


def test_a_lost_folder_is_recreated(host: Host) -> None:
    """It was lost with its machine: this one has no record of the run."""
    host.folder.parent.rmdir()
    assert host.begin(3, host.snapshot("step-2-g2", model="whole")) == ([], "")
    assert host.texts() == {"model": "whole"}


def test_files_from_before_the_run_are_kept(host: Host) -> None:
    """A user's own files, in a run that starts from another run's snapshot."""
    host.write(model="precious")
    backup = str(host.folder) + ".before-digits-3f9a"
    assert host.begin(1, host.snapshot("step-9-g1", model="given")) == ([], backup)
    assert host.texts() == {"model": "given"}
    assert host.begin(2, host.snapshot("step-10-g1", model="later")) == ([], "")
    host.tidy()
    assert host.texts(Path(backup)) == {"model": "precious"}
    host.write(model="precious, too")
    assert host.begin(1, host.snapshot("step-11-g1", model="given")) == ([], f"{backup}-2")


def test_files_from_before_the_run_are_kept_if_no_snapshot_contains_them(host: Host) -> None:
    host.write(own="of this host", both="x")
    host.begin(1)
    host.write(more="by a task")
    _, backup = host.begin(2, host.snapshot("step-1-g1", both="x"))
    assert host.texts(Path(backup)) == {"own": "of this host", "both": "x", "more": "by a task"}
    host.write(more="by a task")
    assert host.begin(3, host.snapshot("step-2-g1", both="x")) == ([], "")


def test_files_keep_their_times_and_the_order_in_which_they_were_written(host: Host, tmp_path: Path) -> None:
    """Programs look for the newest file by time."""
    host.begin(1)
    for number, name in enumerate(["ckpt-9", "ckpt-10", "ckpt-8"]):
        host.write(**{name: name})
        os.utime(host.folder / name, (1_700_000_000 + number, 1_700_000_000 + number))
    (host.folder / "latest").symlink_to("ckpt-8")
    before = {path.name: path.stat().st_mtime_ns for path in host.folder.iterdir()}
    capture = FolderCapture(str(host.folder), str(tmp_path / "own"), str(tmp_path / "tasks"))
    assert capture.take(str(tmp_path / "step-1-g1"), {})
    host.begin(2, tmp_path / "step-1-g1")
    assert {path.name: path.stat().st_mtime_ns for path in host.folder.iterdir()} == before
    assert (host.folder / "latest").readlink() == Path("ckpt-8")
    change_times = [(host.folder / name).lstat().st_ctime_ns for name in ("ckpt-9", "ckpt-10", "ckpt-8", "latest")]
    assert change_times == sorted(change_times)
    capture.begin(restored=True, doubtful={})
    assert not capture.take(str(tmp_path / "again"), {})  # it is equal to the capture


@pytest.mark.parametrize("about", ["[]", "{", '{"watched": 3}', '{"watched": {"times": {"model": "x"}, "links": []}}'])
def test_invalid_metadata_of_a_snapshot_does_no_harm(host: Host, about: str) -> None:
    host.begin(1, host.snapshot("step-1-g1", model="whole", **{"paceline.json": about}))
    assert host.texts() == {"model": "whole"}


def test_no_link_leads_out_of_the_folder(host: Host) -> None:
    about = '{"watched": {"links": {"a": "/etc", "b": "../..", "c": "d/../../x", "../d": "e", "f": "model"}}}'
    host.begin(1, host.snapshot("step-1-g1", model="whole", **{"paceline.json": about}))
    assert sorted(path.name for path in host.folder.iterdir()) == ["f", "model"]


def test_a_folder_that_is_a_symbolic_link(host: Host, tmp_path: Path) -> None:
    """The target stays in place, on a disk for such data."""
    disk = tmp_path / "disk"
    disk.mkdir()
    host.folder.symlink_to(disk / "ckpt")
    host.begin(1)
    (disk / "ckpt").mkdir()
    host.write(model="half")
    host.begin(2, host.snapshot("step-1-g1", model="whole"))
    assert host.folder.is_symlink() and host.texts(disk / "ckpt") == {"model": "whole"}
    assert list(disk.iterdir()) == [disk / "ckpt"]


# ---- without a snapshot


def test_the_first_generation_finds_existing_files(host: Host) -> None:
    host.write(model="of an earlier day")
    assert host.begin(1) == ([], "")
    assert host.texts() == {"model": "of an earlier day"}


def test_files_of_a_generation_that_no_snapshot_contains_are_moved_aside(either: Host) -> None:
    """They may be incomplete: the next generation must neither read nor capture them."""
    either.begin(1)
    either.write(model="half")
    assert either.begin(2) == ([], "")
    assert either.texts() is None
    either.write(model="half")
    assert either.begin(3) == ([], "")
    assert either.texts() is None
    either.tidy()
    assert either.siblings() == []


def test_files_are_not_moved_aside_if_some_existed_before_the_run(host: Host) -> None:
    """Then all files stay, and those that have changed are doubtful."""
    host.write(old="whole", model="of an earlier day")
    host.begin(1)
    host.write(model="half", new="half")
    assert host.begin(2) == (["model", "new"], "")
    assert host.texts() == {"old": "whole", "model": "half", "new": "half"}


def test_a_host_that_is_new_to_the_run_finds_existing_files(host: Host) -> None:
    host.write(model="from the image")
    assert host.begin(7) == ([], "")
    assert host.texts() == {"model": "from the image"}


def test_special_files_do_not_prevent_a_start(host: Host) -> None:
    host.write(model="x")
    os.mkfifo(host.folder / "pipe")
    host.begin(1)
    host.begin(2)
    host.begin(3, host.snapshot("step-1-g1", model="whole"))
    assert host.texts() == {"model": "whole"}


# ---- what is refused


def test_an_older_generation_is_refused(host: Host) -> None:
    host.begin(5, host.snapshot("step-2-g4", model="newer"))
    with pytest.raises(TransferCanceled, match="generation 5 has already started here"):
        host.begin(4, host.snapshot("step-1-g1", model="older"))
    assert host.texts() == {"model": "newer"}


def test_a_folder_with_the_code_in_it_is_never_replaced(host: Host) -> None:
    code = host.folder / "code"
    code.mkdir(parents=True)
    with pytest.raises(Unfit, match=f"ckpt contains more than checkpoints: {code} is in it"):
        host.begin(1, host.snapshot("step-1-g1", model="x"), inner=[str(code)])
    assert code.is_dir()
    host.begin(1, inner=[str(host.folder) + "-2"])


def test_a_mount_cannot_be_replaced(tmp_path: Path) -> None:
    with pytest.raises(Unfit, match="/dev/shm is a mount point"):
        begin("/dev/shm", str(tmp_path / "own"), HOST_ID, 1, "")


# ---- crashes, and many at once


def crash(host: Host, source: Path | None, at: int) -> bool:
    """Begins generation 2 in a process that exits at its `at`th system call; False if it finished before."""
    pid = os.fork()
    if pid == 0:
        remaining = at

        def count(event: str, _: Any) -> None:
            nonlocal remaining
            if event.startswith(("os.", "open", "shutil.", "fcntl.")):
                remaining -= 1
                if remaining == 0:
                    os._exit(9)

        sys.addaudithook(count)
        host.begin(2, source)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9


@pytest.mark.parametrize("restores", [True, False], ids=["snapshot", "none"])
def test_a_crash_at_any_moment_leaves_the_old_or_the_new_or_none(tmp_path: Path, restores: bool, own: Path) -> None:
    contents = []
    for at in range(1, 1000):
        host = Host(tmp_path / str(at), own / str(at))
        host.begin(1)
        old, new = {"a": "old", "b": "old"}, {"b": "new", "c": "new"}
        host.write(**old)
        source = host.snapshot("step-1-g1", **new) if restores else None
        crashed = crash(host, source, at)
        contents.append(host.texts())
        assert contents[-1] in (old, new, None)
        host.begin(3, source)
        assert host.texts() == (new if restores else None)
        host.tidy()
        assert host.siblings() == (["ckpt"] if restores else [])
        if not crashed:
            break
    assert len(contents) > 10 and contents[0] == old and None in contents
    assert contents[-1] == (new if restores else None)


def test_a_crash_does_not_lose_files_from_before_the_run(tmp_path: Path) -> None:
    for at in range(1, 1000):
        host = Host(tmp_path / str(at))
        host.write(model="precious")
        source = host.snapshot("step-1-g1", model="given")
        crashed = crash(host, source, at)
        host.begin(3, source)
        host.tidy()
        assert [host.texts(host.folder.parent / name) for name in host.siblings()] == [
            {"model": "given"},
            {"model": "precious"},
        ]
        if not crashed:
            break
    assert at > 20


def test_the_hosts_of_one_machine_restore_once(host: Host) -> None:
    source = host.snapshot("step-1-g1", model="whole")
    host.write(model="precious")
    with multiprocessing.get_context("fork").Pool(4) as pool:
        results = pool.starmap(host.begin, [(1, source)] * 8)
    assert sorted(backup for _, backup in results) == [""] * 7 + [f"{host.folder}.before-{RUN}"]
    host.write(model="half")
    assert host.begin(1, source) == ([], "")
    assert host.texts() == {"model": "half"}


def test_hosts_that_share_a_volume_and_nothing_else(tmp_path: Path, own: Path) -> None:
    """Each replaces the folder before any task starts; whichever is last, it is equal to the snapshot."""
    hosts = [Host(tmp_path, own / str(number), f"worker-host-{number}") for number in range(4)]
    source = hosts[0].snapshot("step-1-g1", **{f"file-{number}": "x" * 10_000 for number in range(20)})
    for host in hosts:
        host.begin(1)
    hosts[0].write(model="half")
    with multiprocessing.get_context("fork").Pool(4) as pool:
        for generation in range(2, 12):
            pool.starmap(Host.begin, [(host, generation, source) for host in hosts])
            assert hosts[0].texts() == hosts[0].texts(source)
    for host in hosts:
        host.tidy()
    assert hosts[0].siblings() == ["ckpt"]
