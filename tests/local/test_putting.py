"""Putting a snapshot back into a folder that programs keep their own checkpoints in: old, new or none, never a mix."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.storage.putting import begin, tidy
from paceline.storage.snapshots import Unfit
from paceline.storage.store import Unwanted
from paceline.storage.taking import Taking

pytestmark = pytest.mark.timeout(60)

RUN = "digits-3f9a"
WHO = RUN, "worker-host-0"


class Host:
    """The folder, and what a host of the run does to it. Those of one machine share both."""

    def __init__(self, place: Path, own: Path | None = None, name: str = WHO[1]) -> None:
        self.place, self.own, self.who = place, own or place / "run", (RUN, name)
        self.folder = place / "work" / "ckpt"
        self.folder.parent.mkdir(exist_ok=True, parents=True)

    def snapshot(self, name: str, **files: str) -> Path:
        made = self.place / "restored" / name
        made.mkdir(parents=True)
        for path, text in files.items():
            (made / path).write_text(text)
        return made

    def begin(self, generation: int, source: Path | None = None, **more: Any) -> tuple[list[str], str]:
        source_text = "" if source is None else str(source)
        doubtful, kept = begin(str(self.folder), str(self.own), self.who, generation, source_text, **more)
        return sorted(doubtful), kept

    def tidy(self) -> None:
        tidy(str(self.folder), str(self.own), self.who)

    def write(self, **files: str) -> None:
        self.folder.mkdir(exist_ok=True)
        for path, text in files.items():
            (self.folder / path).write_text(text)

    def texts(self, folder: Path | None = None) -> dict[str, str] | None:
        """What is in the folder; None: there is none."""
        folder = folder or self.folder
        if not folder.exists():
            return None
        return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}

    def beside(self) -> list[str]:
        return sorted(path.name for path in self.folder.parent.iterdir())


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


@pytest.fixture
def elsewhere() -> Iterator[Path]:
    """On another file system."""
    made = Path("/dev/shm") / f"paceline-test-{os.getpid()}"
    yield made
    shutil.rmtree(made, ignore_errors=True)


@pytest.fixture(params=["same file system", "another"])
def own(request: pytest.FixtureRequest, tmp_path: Path, elsewhere: Path) -> Path:
    """The run's own folder."""
    return elsewhere if request.param == "another" else tmp_path / "run"


@pytest.fixture
def either(tmp_path: Path, own: Path) -> Host:
    return Host(tmp_path, own)


# ---- with a snapshot


def test_the_folder_is_what_the_snapshot_was(either: Host) -> None:
    either.begin(1)
    either.write(model="half", new="of a task that died")
    (either.folder / "below").mkdir()
    assert either.begin(2, either.snapshot("step-1-g1", model="whole")) == ([], "")
    assert either.texts() == {"model": "whole"}
    either.write(model="half again")
    assert either.begin(3, either.snapshot("step-2-g2", model="newer")) == ([], "")
    assert either.texts() == {"model": "newer"}
    either.tidy()
    assert either.beside() == ["ckpt"]
    assert not either.own.exists()


def test_it_is_made_where_it_was_lost(host: Host) -> None:
    """With the machine: nothing is known here of what the run has done before."""
    host.folder.parent.rmdir()
    assert host.begin(3, host.snapshot("step-2-g2", model="whole")) == ([], "")
    assert host.texts() == {"model": "whole"}


def test_what_was_there_before_the_run_is_kept(host: Host) -> None:
    """Somebody's own files, in a run that starts from another run's snapshot."""
    host.write(model="precious")
    kept = str(host.folder) + ".before-digits-3f9a"
    assert host.begin(1, host.snapshot("step-9-g1", model="given")) == ([], kept)
    assert host.texts() == {"model": "given"}
    assert host.begin(2, host.snapshot("step-10-g1", model="later")) == ([], "")
    host.tidy()
    assert host.texts(Path(kept)) == {"model": "precious"}
    host.write(model="precious, too")
    assert host.begin(1, host.snapshot("step-11-g1", model="given")) == ([], f"{kept}-2")


def test_also_where_it_is_in_no_snapshot_as_other_hosts_take_none(host: Host) -> None:
    host.write(own="of this host", both="x")
    host.begin(1)
    host.write(more="by a task")
    _, kept = host.begin(2, host.snapshot("step-1-g1", both="x"))
    assert host.texts(Path(kept)) == {"own": "of this host", "both": "x", "more": "by a task"}
    host.write(more="by a task")
    assert host.begin(3, host.snapshot("step-2-g1", both="x")) == ([], "")


def test_files_are_as_old_as_they_were_in_the_order_in_which_they_were_written(host: Host, tmp_path: Path) -> None:
    """Programs look for the newest by time."""
    host.begin(1)
    for number, name in enumerate(["ckpt-9", "ckpt-10", "ckpt-8"]):
        host.write(**{name: name})
        os.utime(host.folder / name, (1_700_000_000 + number, 1_700_000_000 + number))
    (host.folder / "latest").symlink_to("ckpt-8")
    before = {path.name: path.stat().st_mtime_ns for path in host.folder.iterdir()}
    taking = Taking(str(host.folder), str(tmp_path / "own"), str(tmp_path / "tasks"))
    assert taking.take(str(tmp_path / "step-1-g1"), {})
    host.begin(2, tmp_path / "step-1-g1")
    assert {path.name: path.stat().st_mtime_ns for path in host.folder.iterdir()} == before
    assert (host.folder / "latest").readlink() == Path("ckpt-8")
    made = [(host.folder / name).lstat().st_ctime_ns for name in ("ckpt-9", "ckpt-10", "ckpt-8", "latest")]
    assert made == sorted(made)
    taking.begin(restored=True, doubtful={})
    assert not taking.take(str(tmp_path / "again"), {})  # it is what was taken


@pytest.mark.parametrize("about", ["[]", "{", '{"watched": 3}', '{"watched": {"times": {"model": "x"}, "links": []}}'])
def test_what_another_program_says_of_a_snapshot_does_no_harm(host: Host, about: str) -> None:
    host.begin(1, host.snapshot("step-1-g1", model="whole", **{"paceline.json": about}))
    assert host.texts() == {"model": "whole"}


def test_no_link_leads_out_of_the_folder(host: Host) -> None:
    about = '{"watched": {"links": {"a": "/etc", "b": "../..", "c": "d/../../x", "../d": "e", "f": "model"}}}'
    host.begin(1, host.snapshot("step-1-g1", model="whole", **{"paceline.json": about}))
    assert sorted(path.name for path in host.folder.iterdir()) == ["f", "model"]


def test_a_folder_by_another_name(host: Host, tmp_path: Path) -> None:
    """It stays where it is, on a disk for such things."""
    disk = tmp_path / "disk"
    disk.mkdir()
    host.folder.symlink_to(disk / "ckpt")
    host.begin(1)
    (disk / "ckpt").mkdir()
    host.write(model="half")
    host.begin(2, host.snapshot("step-1-g1", model="whole"))
    assert host.folder.is_symlink() and host.texts(disk / "ckpt") == {"model": "whole"}
    assert list(disk.iterdir()) == [disk / "ckpt"]


# ---- without one


def test_the_first_generation_finds_what_is_there(host: Host) -> None:
    host.write(model="of an earlier day")
    assert host.begin(1) == ([], "")
    assert host.texts() == {"model": "of an earlier day"}


def test_what_a_generation_left_that_no_snapshot_has_is_put_aside(either: Host) -> None:
    """It may be half of a file, which the next would fall over, and which must not be taken."""
    either.begin(1)
    either.write(model="half")
    assert either.begin(2) == ([], "")
    assert either.texts() is None
    either.write(model="half")
    assert either.begin(3) == ([], "")
    assert either.texts() is None
    either.tidy()
    assert either.beside() == []


def test_but_not_where_something_was_there_before(host: Host) -> None:
    """Then it stays, and what is not as it was is in doubt."""
    host.write(old="whole", model="of an earlier day")
    host.begin(1)
    host.write(model="half", new="half")
    assert host.begin(2) == (["model", "new"], "")
    assert host.texts() == {"old": "whole", "model": "half", "new": "half"}


def test_a_host_that_is_new_to_the_run_finds_what_is_there(host: Host) -> None:
    host.write(model="from the image")
    assert host.begin(7) == ([], "")
    assert host.texts() == {"model": "from the image"}


def test_odd_things_are_no_reason_not_to_begin(host: Host) -> None:
    host.write(model="x")
    os.mkfifo(host.folder / "pipe")
    host.begin(1)
    host.begin(2)
    host.begin(3, host.snapshot("step-1-g1", model="whole"))
    assert host.texts() == {"model": "whole"}


# ---- what cannot be


def test_an_older_generation_comes_too_late(host: Host) -> None:
    host.begin(5, host.snapshot("step-2-g4", model="newer"))
    with pytest.raises(Unwanted, match="generation 5 has begun here"):
        host.begin(4, host.snapshot("step-1-g1", model="older"))
    assert host.texts() == {"model": "newer"}


def test_a_folder_with_the_code_in_it_is_never_replaced(host: Host) -> None:
    code = host.folder / "code"
    code.mkdir(parents=True)
    with pytest.raises(Unfit, match=f"ckpt holds more than checkpoints, as {code} is in it"):
        host.begin(1, host.snapshot("step-1-g1", model="x"), inner=[str(code)])
    assert code.is_dir()
    host.begin(1, inner=[str(host.folder) + "-2"])


def test_a_mount_cannot_be_replaced(tmp_path: Path) -> None:
    with pytest.raises(Unfit, match="/dev/shm is where something is mounted"):
        begin("/dev/shm", str(tmp_path / "own"), WHO, 1, "")


# ---- crashes, and many at once


def crash(host: Host, source: Path | None, at: int) -> bool:
    """Begins generation 2 in a process that is gone at its `at`th call of the system; false where it got through."""
    pid = os.fork()
    if pid == 0:
        left = at

        def count(event: str, _: Any) -> None:
            nonlocal left
            if event.startswith(("os.", "open", "shutil.", "fcntl.")):
                left -= 1
                if left == 0:
                    os._exit(9)

        sys.addaudithook(count)
        host.begin(2, source)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9


@pytest.mark.parametrize("restores", [True, False], ids=["snapshot", "none"])
def test_a_crash_at_any_moment_leaves_the_old_or_the_new_or_none(tmp_path: Path, restores: bool, own: Path) -> None:
    left = []
    for at in range(1, 1000):
        host = Host(tmp_path / str(at), own / str(at))
        host.begin(1)
        old, new = {"a": "old", "b": "old"}, {"b": "new", "c": "new"}
        host.write(**old)
        source = host.snapshot("step-1-g1", **new) if restores else None
        crashed = crash(host, source, at)
        left.append(host.texts())
        assert left[-1] in (old, new, None)
        host.begin(3, source)
        assert host.texts() == (new if restores else None)
        host.tidy()
        assert host.beside() == (["ckpt"] if restores else [])
        if not crashed:
            break
    assert len(left) > 10 and left[0] == old and None in left
    assert left[-1] == (new if restores else None)


def test_nor_is_what_was_there_before_the_run_lost_by_one(tmp_path: Path) -> None:
    for at in range(1, 1000):
        host = Host(tmp_path / str(at))
        host.write(model="precious")
        source = host.snapshot("step-1-g1", model="given")
        crashed = crash(host, source, at)
        host.begin(3, source)
        host.tidy()
        assert [host.texts(host.folder.parent / name) for name in host.beside()] == [
            {"model": "given"},
            {"model": "precious"},
        ]
        if not crashed:
            break
    assert at > 20


def test_the_hosts_of_a_machine_do_it_once(host: Host) -> None:
    source = host.snapshot("step-1-g1", model="whole")
    host.write(model="precious")
    with multiprocessing.get_context("fork").Pool(4) as pool:
        done = pool.starmap(host.begin, [(1, source)] * 8)
    assert sorted(kept for _, kept in done) == [""] * 7 + [f"{host.folder}.before-{RUN}"]
    host.write(model="half")
    assert host.begin(1, source) == ([], "")
    assert host.texts() == {"model": "half"}


def test_hosts_that_share_a_volume_and_nothing_else(tmp_path: Path, own: Path) -> None:
    """Each replaces it, before any task starts; whoever is last, it is the snapshot."""
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
    assert hosts[0].beside() == ["ckpt"]
