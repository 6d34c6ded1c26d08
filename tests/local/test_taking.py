"""Taking a folder that programs keep their own checkpoints in: whole or not at all, whoever writes to it meanwhile."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline.agent.porter import Porter
from paceline.storage import watched
from paceline.storage.folder import Folder as Files
from paceline.storage.snapshots import Snapshots, Unfit
from paceline.storage.store import Unwanted
from paceline.storage.taking import REST, RESTLESS, Taking
from paceline.storage.watched import Later

pytestmark = pytest.mark.timeout(60)

LEADER = "worker-0"


class Folder:
    """One that is watched, and what is taken of it."""

    def __init__(self, place: Path, own: Path) -> None:
        self.path, self.tasks, self.own = place / "ckpt", place / "tasks", own
        self.path.mkdir()
        self.tasks.mkdir()
        self.runs(LEADER, os.getpid())
        self.taking = Taking(str(self.path), str(own), str(self.tasks))
        self._count = 0

    def runs(self, task: str, pid: int) -> None:
        (self.tasks / task).write_text(str(pid))

    def write(self, name: str, text: str) -> Path:
        path = self.path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text)
        return path

    def once(self, leader: str = LEADER, metrics: dict[str, float] | None = None) -> Path | None:
        self._count += 1
        to = self.own / f"taken-{self._count}"
        return to if self.taking.take(str(to), metrics or {}, leader) else None

    def take(self, leader: str = LEADER, metrics: dict[str, float] | None = None) -> Path:
        """What it is once it is at rest."""
        until = time.monotonic() + 60
        while True:
            try:
                if (taken := self.once(leader, metrics)) is not None:
                    return taken
            except Later:
                pass
            assert time.monotonic() < until
            time.sleep(0.02)


def refused(folder: Folder, leader: str = LEADER) -> str:
    """Why it is not taken, also once it has rested for longer than it has to."""
    until = 0.0
    while True:
        rested = 0 < until < time.monotonic()
        with pytest.raises(Later) as later:
            folder.once(leader)
        if rested:
            return str(later.value)
        until = until or time.monotonic() + 2 * REST


def texts(folder: Path) -> dict[str, str]:
    found = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}
    del found["paceline.json"]
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path, tmp_path / "own")


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """On another file system than the folder, as a run's own often is."""
    made = Path("/dev/shm") / f"paceline-test-{os.getpid()}"
    yield made
    subprocess.run(["rm", "-rf", str(made)], check=True)


# ---- what is taken


def test_what_is_there_is_taken_once_it_rests(folder: Folder) -> None:
    folder.write("model.pt", "one")
    folder.write("logs/old/notes", "more")
    began = time.monotonic()
    with pytest.raises(Later, match="just now"):
        folder.once()
    assert texts(folder.take()) == {"model.pt": "one", "logs/old/notes": "more"}
    assert time.monotonic() - began >= REST * 0.9
    assert folder.once() is None
    folder.write("model.pt", "two")
    assert texts(folder.take()) == {"model.pt": "two", "logs/old/notes": "more"}


def test_a_folder_that_is_empty_or_not_there_is_not_taken(folder: Folder) -> None:
    (folder.path / "empty").mkdir()
    assert folder.once("") is None
    (folder.path / "empty").rmdir()
    folder.path.rmdir()
    assert folder.once("") is None
    folder.path.mkdir()
    folder.write("model.pt", "one")
    folder.take("")
    (folder.path / "model.pt").unlink()
    assert folder.once("") is None


def test_a_file_is_copied_once_and_never_shared_with_the_program(folder: Folder) -> None:
    kept, changed = folder.write("kept.pt", "as it was"), folder.write("changed.pt", "one")
    first = folder.take("")
    with changed.open("r+") as file:
        file.write("two")
    second = folder.take("")
    assert (first / "kept.pt").samefile(second / "kept.pt")
    assert not (first / "kept.pt").samefile(kept)
    assert texts(first) == {"kept.pt": "as it was", "changed.pt": "one"}
    assert texts(second) == {"kept.pt": "as it was", "changed.pt": "two"}
    with kept.open("r+") as file:
        file.write("AS IT")
    assert texts(folder.take(""))["kept.pt"] == "AS IT was"
    assert texts(first)["kept.pt"] == texts(second)["kept.pt"] == "as it was"


def test_only_what_the_newest_has_is_kept_beside(folder: Folder) -> None:
    for number in range(3):
        folder.write(f"ckpt-{number}", str(number))
        (folder.path / f"ckpt-{number - 1}").unlink(missing_ok=True)
        folder.take("")
    assert [path.read_text() for path in folder.own.iterdir() if path.is_file()] == ["2"]


def test_also_where_the_copies_are_on_another_file_system(tmp_path: Path, elsewhere: Path) -> None:
    folder = Folder(tmp_path, elsewhere)
    data = os.urandom(20_000_000)
    (folder.path / "model.pt").write_bytes(data)
    assert (folder.take("") / "model.pt").read_bytes() == data
    to = tmp_path / "taken"  # where no file there can be linked to
    folder.write("more", "more")
    while not folder.taking.take(str(to), {}):
        pass
    assert (to / "model.pt").read_bytes() == data


def test_metrics_and_times_are_written_down(folder: Folder) -> None:
    path = folder.write("model.pt", "one")
    about = json.loads((folder.take("", {"loss": 0.5}) / "paceline.json").read_text())
    assert about == {
        "metrics": {"loss": 0.5},
        "watched": {"times": {"model.pt": path.stat().st_mtime_ns}, "links": {}},
    }


def test_what_tensorboard_reads_may_grow_all_the_time(folder: Folder) -> None:
    folder.write("model.pt", "one")
    with (folder.path / "events.out.tfevents.1.host").open("w") as log:
        log.write("first ")
        log.flush()
        taken = folder.take()
        assert texts(taken) == {"model.pt": "one", "events.out.tfevents.1.host": "first "}
        log.write("second")
        log.flush()
        assert folder.once() is None
        folder.write("model.pt", "two")
        assert texts(folder.take())["events.out.tfevents.1.host"] == "first second"
    assert texts(taken)["events.out.tfevents.1.host"] == "first "


# ---- what is not


def test_a_file_that_is_open_for_writing_is_not_taken(folder: Folder) -> None:
    path = folder.write("model.pt", "whole")
    with path.open("r+"):
        for leader in (LEADER, ""):
            words = refused(folder, leader)
            assert "model.pt is open for writing by " in words and f"({os.getpid()})" in words
    with path.open():  # for reading
        assert texts(folder.take()) == {"model.pt": "whole"}


def test_nor_one_that_is_mapped_for_writing(folder: Folder) -> None:
    path = folder.write("model.pt", "whole")
    libc = ctypes.CDLL(None)  # mmap.mmap keeps the file open
    libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 4]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    with path.open("r+") as file:
        mapped = libc.mmap(None, 5, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, file.fileno(), 0)
    with pytest.raises(Later, match=r"model\.pt is open for writing"):
        folder.once("")
    ctypes.memmove(mapped, b"WHOLE", 5)
    libc.munmap(mapped, 5)
    with path.open() as file:
        mapped = libc.mmap(None, 5, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
    assert texts(folder.take("")) == {"model.pt": "WHOLE"}
    libc.munmap(mapped, 5)


def test_nor_while_another_process_has_it_open(folder: Folder) -> None:
    """By another name, even."""
    path = folder.write("model.pt", "whole")
    code = "import sys; file = open(sys.argv[1], 'a'); print('open', flush=True); sys.stdin.read()"
    other = folder.path / "again"
    other.hardlink_to(path)
    with subprocess.Popen(
        [sys.executable, "-c", code, str(other)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout and process.stdout.readline() == b"open\n"
        other.unlink()
        with pytest.raises(Later, match=rf"open for writing by .*\({process.pid}\)"):
            folder.once("")
        process.kill()
    folder.take("")


@pytest.mark.parametrize("name", ["a", "b", "new"])
def test_what_changes_while_it_is_copied_is_not_taken(folder: Folder, name: str) -> None:
    folder.write("a", "one")
    folder.write("b", "one")
    asked = []

    def wanted(_: int) -> bool:
        asked.append(1)
        if len(asked) == 2:  # one file is copied, and the other is about to be
            folder.write(name, "two")
        return True

    with pytest.raises(Later, match="changed while it was copied"):
        folder.taking.take(str(folder.own / "to"), {}, "", wanted)
    assert not (folder.own / "to").exists()
    assert texts(folder.take("")) == {"a": "one", "b": "one", name: "two"}


REWRITER = """
import os, sys, time
path, size, rest = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
number = 0
while True:
    number += 1
    with open(path, "r+b" if os.path.exists(path) else "wb", buffering=0) as file:
        for _ in range(4):
            file.write(bytes([number % 256]) * (size // 4))
            time.sleep(0.01)
    time.sleep(rest)
"""


def test_a_file_that_is_rewritten_in_place_is_never_torn(folder: Folder) -> None:
    """Looked at without a pause, while a program writes over and over; the copies are checked byte by byte."""
    size, words = 4_000_000, ("4000000", "0.3")  # time enough for a copy and a look at all processes
    with subprocess.Popen([sys.executable, "-c", REWRITER, str(folder.path / "model.pt"), *words]) as process:
        folder.runs(LEADER, process.pid)
        try:
            seen = {bytes((folder.take("") / "model.pt").read_bytes()) for _ in range(8)}
        finally:
            process.kill()
    assert all(len(data) == size and len(set(data)) == 1 for data in seen)
    assert len(seen) > 1


def test_a_folder_that_never_rests_is_taken_in_a_pause(folder: Folder) -> None:
    with subprocess.Popen([sys.executable, "-c", REWRITER, str(folder.path / "model.pt"), "4000", "0.15"]) as process:
        folder.runs(LEADER, process.pid)
        try:
            began = time.monotonic()
            data = (folder.take() / "model.pt").read_bytes()
            assert time.monotonic() - began >= RESTLESS * 0.9
        finally:
            process.kill()
    assert len(data) == 4000 and len(set(data)) == 1


HALF = """
import os, sys, time
file = open(sys.argv[1], "w")
file.write("half")
file.flush()
print("half", flush=True)
time.sleep(3600)
"""


def half_written(path: Path) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", HALF, str(path)], stdout=subprocess.PIPE)
    assert process.stdout and process.stdout.readline() == b"half\n"
    return process


@pytest.mark.parametrize("task", [LEADER, "worker-1"])
@pytest.mark.parametrize("reaped", [True, False])
def test_nothing_is_taken_of_what_a_task_left_that_died(folder: Folder, task: str, reaped: bool) -> None:
    folder.write("model.pt", "whole")
    with half_written(folder.path / "half.pt") as process:
        folder.runs(task, process.pid)
        refused(folder)
        process.kill()
        if reaped:
            process.wait()
        else:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(Later, match=f"{task} has died"):
            folder.once()


def test_killed_while_it_is_looked_at(folder: Folder) -> None:
    """In a write that stalls, so that only the death can give it away: what is taken is never half."""
    folder.write("model.pt", "whole")
    for number in range(10):
        with half_written(folder.path / "half.pt") as process:
            folder.runs(LEADER, process.pid)
            killer = threading.Timer(number * 0.005, process.kill)
            killer.start()
            for _ in range(4):
                with pytest.raises(Later):
                    folder.once("")
            killer.join()


def test_nor_by_a_porter_that_came_after_the_one_that_was_told(folder: Folder, tmp_path: Path) -> None:
    known = watched.signature(folder.write("model.pt", "ha").stat())
    snapshots = Snapshots(Files(str(tmp_path / "place")), "run")
    words = {"folder": str(folder.path), "own": str(tmp_path / "own"), "copies": str(tmp_path / "copies")}
    request = {"do": "take", **words, "to": str(tmp_path / "to"), "metrics": {}, "leader": "", "id": 0}
    answer = Porter(snapshots, snapshots, lambda _: None, lanes=()).done(
        {**request, "doubtful": {"model.pt": list(known)}}, 0
    )
    assert answer["error"]["kind"] == "unfit" and "was written by a task that died" in answer["error"]["text"]


def test_what_a_task_left_that_died_is_not_taken_later_either(folder: Folder) -> None:
    folder.write("old.pt", "whole")
    path = folder.write("model.pt", "ha")
    known = path.stat()
    sign = (known.st_dev, known.st_ino, known.st_size, known.st_mtime_ns, known.st_ctime_ns)
    folder.taking.begin(restored=False, doubtful={"model.pt": sign})
    with pytest.raises(Unfit, match=r"'model.pt' was written by a task that died"):
        folder.once("")
    folder.write("model.pt", "whole")
    assert texts(folder.take("")) == {"old.pt": "whole", "model.pt": "whole"}


def test_a_task_that_ended_well_is_not_missed(folder: Folder) -> None:
    folder.write("model.pt", "one")
    process = subprocess.Popen(["true"])
    process.wait()
    folder.runs("worker-1", process.pid)
    with pytest.raises(Later, match="worker-1 has died"):
        folder.once("")
    (folder.tasks / "worker-1").unlink()
    folder.take("")


def test_without_its_leader_nothing_is_taken(folder: Folder) -> None:
    folder.write("model.pt", "one")
    folder.take()
    (folder.tasks / LEADER).unlink()
    folder.write("model.pt", "two")
    assert refused(folder) == "worker-0 has died"
    folder.take("")


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: path.symlink_to("/etc/passwd"), "'odd' is a link that leads out of it, to '/etc/passwd'"),
        (lambda path: path.symlink_to("../other"), "'odd' is a link that leads out of it, to '../other'"),
        (lambda path: path.symlink_to("a/../../other"), "'odd' is a link that leads out of it"),
        (make_socket, "'odd' is no file"),
        (os.mkfifo, "'odd' is no file"),
        (lambda path: path.with_name("new\nline").touch(), r"'new\\nline' cannot be the path"),
    ],
    ids=["absolute link", "link", "winding link", "socket", "pipe", "name"],
)
def test_what_cannot_be_in_a_snapshot_is_named(folder: Folder, make: Callable[[Path], None], words: str) -> None:
    folder.write("model.pt", "one")
    make(folder.path / "odd")
    with pytest.raises(Unfit, match=words):
        folder.once("")


def test_a_link_inside_is_written_down(folder: Folder) -> None:
    folder.write("run/step-1/model.pt", "one")
    (folder.path / "run" / "latest").symlink_to("step-1")
    taken = folder.take("")
    assert texts(taken) == {"run/step-1/model.pt": "one"}
    assert json.loads((taken / "paceline.json").read_text())["watched"]["links"] == {"run/latest": "step-1"}
    (folder.path / "run" / "latest").unlink()
    (folder.path / "run" / "latest").symlink_to("step-0")
    folder.take("")


def test_a_file_where_the_folder_should_be(folder: Folder) -> None:
    folder.path.rmdir()
    folder.path.write_text("a file")
    with pytest.raises(Unfit, match="it is no folder"):
        folder.once("")


def test_one_that_is_not_wanted_any_more_leaves_what_is_good(folder: Folder) -> None:
    folder.write("model.pt", "one")
    asked = []

    def wanted(_: int) -> bool:
        asked.append(1)
        return False

    with pytest.raises(Unwanted):
        folder.taking.take(str(folder.own / "to"), {}, "", wanted)
    assert asked and list(folder.own.iterdir()) == []
    folder.take("")
