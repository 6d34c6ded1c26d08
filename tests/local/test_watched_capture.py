"""Capturing a folder in which programs keep their own checkpoints: complete or not at all, whoever writes to it."""

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

from paceline.agent.transfers.porter import Porter
from paceline.agent.transfers.requests import UNFIT, CaptureWatched, Failure
from paceline.storage.snapshots.repository import SnapshotRepository, Unfit
from paceline.storage.stores.folder import FolderStore as Files
from paceline.storage.stores.protocol import TransferCanceled
from paceline.storage.watched import folder_contents
from paceline.storage.watched.capture import REST, RESTLESS, FolderCapture
from paceline.storage.watched.folder_contents import Later

pytestmark = pytest.mark.timeout(300)

LEADER = "worker-0"


class Folder:
    """A watched folder, and its captures."""

    def __init__(self, parent: Path, own: Path) -> None:
        self.path, self.tasks, self.own = parent / "ckpt", parent / "tasks", own
        self.path.mkdir()
        self.tasks.mkdir()
        self.record_task(LEADER, os.getpid())
        self.capture = FolderCapture(str(self.path), str(own), str(self.tasks))
        self._count = 0

    def record_task(self, task: str, pid: int) -> None:
        (self.tasks / task).write_text(str(pid))

    def write(self, name: str, text: str) -> Path:
        path = self.path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text)
        return path

    def once(self, leader: str = LEADER, metrics: dict[str, float] | None = None) -> Path | None:
        self._count += 1
        target = self.own / f"taken-{self._count}"
        return target if self.capture.take(str(target), metrics or {}, leader) else None

    def take(self, leader: str = LEADER, metrics: dict[str, float] | None = None) -> Path:
        """Its capture, once it is at rest."""
        until = time.monotonic() + 200
        while True:
            try:
                if (target := self.once(leader, metrics)) is not None:
                    return target
            except Later:
                pass
            assert time.monotonic() < until
            time.sleep(0.02)


def reason_for_refusal(folder: Folder, leader: str = LEADER) -> str:
    """Why it is not captured, even after it has rested for longer than required."""
    until = 0.0
    while True:
        rested = 0 < until < time.monotonic()
        with pytest.raises(Later) as later:
            folder.once(leader)
        if rested:
            return str(later.value)
        until = until or time.monotonic() + 2 * REST


def texts(folder: Path) -> dict[str, str]:
    contents = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}
    del contents["paceline.json"]
    return contents


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path, tmp_path / "own")


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """On another file system than the folder, as a run's own folder often is."""
    path = Path("/dev/shm") / f"paceline-test-{os.getpid()}"
    yield path
    subprocess.run(["rm", "-rf", str(path)], check=True)


# ---- what is captured


def test_files_are_captured_once_the_folder_is_at_rest(folder: Folder) -> None:
    folder.write("model.pt", "one")
    folder.write("logs/old/notes", "more")
    began = time.monotonic()
    with pytest.raises(Later, match="just changed"):
        folder.once()
    assert texts(folder.take()) == {"model.pt": "one", "logs/old/notes": "more"}
    assert time.monotonic() - began >= REST * 0.9
    assert folder.once() is None
    folder.write("model.pt", "two")
    assert texts(folder.take()) == {"model.pt": "two", "logs/old/notes": "more"}


def test_an_empty_or_missing_folder_is_not_captured(folder: Folder) -> None:
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
    unchanged, changed = folder.write("kept.pt", "as it was"), folder.write("changed.pt", "one")
    first = folder.take("")
    with changed.open("r+") as file:
        file.write("two")
    second = folder.take("")
    assert (first / "kept.pt").samefile(second / "kept.pt")
    assert not (first / "kept.pt").samefile(unchanged)
    assert texts(first) == {"kept.pt": "as it was", "changed.pt": "one"}
    assert texts(second) == {"kept.pt": "as it was", "changed.pt": "two"}
    with unchanged.open("r+") as file:
        file.write("AS IT")
    assert texts(folder.take(""))["kept.pt"] == "AS IT was"
    assert texts(first)["kept.pt"] == texts(second)["kept.pt"] == "as it was"


def test_only_copies_of_the_newest_capture_are_kept(folder: Folder) -> None:
    for number in range(3):
        folder.write(f"ckpt-{number}", str(number))
        (folder.path / f"ckpt-{number - 1}").unlink(missing_ok=True)
        folder.take("")
    assert [path.read_text() for path in folder.own.iterdir() if path.is_file()] == ["2"]


def test_copies_may_be_on_another_file_system(tmp_path: Path, elsewhere: Path) -> None:
    folder = Folder(tmp_path, elsewhere)
    data = os.urandom(20_000_000)
    (folder.path / "model.pt").write_bytes(data)
    assert (folder.take("") / "model.pt").read_bytes() == data
    to = tmp_path / "taken"  # to which no file there can be linked
    folder.write("more", "more")
    while not folder.capture.take(str(to), {}):
        pass
    assert (to / "model.pt").read_bytes() == data


def test_metrics_and_times_are_recorded(folder: Folder) -> None:
    path = folder.write("model.pt", "one")
    about = json.loads((folder.take("", {"loss": 0.5}) / "paceline.json").read_text())
    assert about == {
        "metrics": {"loss": 0.5},
        "watched": {"times": {"model.pt": path.stat().st_mtime_ns}, "links": {}},
    }


def test_tensorboard_files_may_grow_all_the_time(folder: Folder) -> None:
    folder.write("model.pt", "one")
    with (folder.path / "events.out.tfevents.1.host").open("w") as log:
        log.write("first ")
        log.flush()
        snapshot = folder.take()
        assert texts(snapshot) == {"model.pt": "one", "events.out.tfevents.1.host": "first "}
        log.write("second")
        log.flush()
        assert folder.once() is None
        folder.write("model.pt", "two")
        assert texts(folder.take())["events.out.tfevents.1.host"] == "first second"
    assert texts(snapshot)["events.out.tfevents.1.host"] == "first "


# ---- what is not captured


def test_a_file_that_is_open_for_writing_is_not_captured(folder: Folder) -> None:
    path = folder.write("model.pt", "whole")
    with path.open("r+"):
        for leader in (LEADER, ""):
            reason = reason_for_refusal(folder, leader)
            assert "model.pt is open for writing by " in reason and f"({os.getpid()})" in reason
    with path.open():  # for reading
        assert texts(folder.take()) == {"model.pt": "whole"}


def test_a_file_that_is_mapped_for_writing_is_not_captured(folder: Folder) -> None:
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


def test_a_file_that_another_process_has_open_is_not_captured(folder: Folder) -> None:
    """Even under another name."""
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
def test_a_folder_that_changes_while_it_is_copied_is_not_captured(folder: Folder, name: str) -> None:
    folder.write("a", "one")
    folder.write("b", "one")
    calls = []

    def proceed(_: int) -> bool:
        calls.append(1)
        if len(calls) == 2:  # one file is copied, and the other is next
            folder.write(name, "two")
        return True

    with pytest.raises(Later, match="changed while it was copied"):
        folder.capture.take(str(folder.own / "to"), {}, "", proceed)
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
    """Captured without a pause while a program rewrites it repeatedly; every byte of the copies is checked."""
    size, arguments = 4_000_000, ("4000000", "0.6")  # time enough for a copy and a scan of all processes
    with subprocess.Popen([sys.executable, "-c", REWRITER, str(folder.path / "model.pt"), *arguments]) as process:
        folder.record_task(LEADER, process.pid)
        try:
            copies = {bytes((folder.take("") / "model.pt").read_bytes()) for _ in range(8)}
        finally:
            process.kill()
    assert all(len(data) == size and len(set(data)) == 1 for data in copies)
    assert len(copies) > 1


def test_a_folder_that_never_rests_is_captured_in_a_pause(folder: Folder) -> None:
    with subprocess.Popen([sys.executable, "-c", REWRITER, str(folder.path / "model.pt"), "4000", "0.5"]) as process:
        folder.record_task(LEADER, process.pid)
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
def test_files_of_a_task_that_died_are_not_captured(folder: Folder, task: str, reaped: bool) -> None:
    folder.write("model.pt", "whole")
    with half_written(folder.path / "half.pt") as process:
        folder.record_task(task, process.pid)
        reason_for_refusal(folder)
        process.kill()
        if reaped:
            process.wait()
        else:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(Later, match=f"{task} has died"):
            folder.once()


def test_killed_during_a_capture(folder: Folder) -> None:
    """In a write that stalls, so that only the death reveals it: an incomplete file is never captured."""
    folder.write("model.pt", "whole")
    for number in range(10):
        with half_written(folder.path / "half.pt") as process:
            folder.record_task(LEADER, process.pid)
            killer = threading.Timer(number * 0.005, process.kill)
            killer.start()
            for _ in range(4):
                with pytest.raises(Later):
                    folder.once("")
            killer.join()


def test_files_of_a_task_that_died_are_not_captured_by_a_new_porter(folder: Folder, tmp_path: Path) -> None:
    signature = folder_contents.signature(folder.write("model.pt", "ha").stat())
    snapshots = SnapshotRepository(Files(str(tmp_path / "place")), "run")
    own, copies, to = (str(tmp_path / name) for name in ("own", "copies", "to"))
    request = CaptureWatched(str(folder.path), own, copies, to, {}, "", {"model.pt": signature})
    answer = Porter(snapshots, snapshots, lambda *_: None, lanes=()).execute(request)
    assert isinstance(answer, Failure) and answer.kind == UNFIT and "the task that wrote it died" in answer.text


def test_files_of_a_task_that_died_are_not_captured_later_either(folder: Folder) -> None:
    folder.write("old.pt", "whole")
    path = folder.write("model.pt", "ha")
    status = path.stat()
    signature = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    folder.capture.begin(restored=False, doubtful={"model.pt": signature})
    with pytest.raises(Unfit, match=r"'model.pt' may be incomplete: the task that wrote it died"):
        folder.once("")
    folder.write("model.pt", "whole")
    assert texts(folder.take("")) == {"old.pt": "whole", "model.pt": "whole"}


def test_a_task_that_ended_well_does_not_prevent_a_capture(folder: Folder) -> None:
    folder.write("model.pt", "one")
    process = subprocess.Popen(["true"])
    process.wait()
    folder.record_task("worker-1", process.pid)
    with pytest.raises(Later, match="worker-1 has died"):
        folder.once("")
    (folder.tasks / "worker-1").unlink()
    folder.take("")


def test_without_its_leader_nothing_is_captured(folder: Folder) -> None:
    folder.write("model.pt", "one")
    folder.take()
    (folder.tasks / LEADER).unlink()
    folder.write("model.pt", "two")
    assert reason_for_refusal(folder) == "worker-0 has died"
    folder.take("")


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.symlink_to("/etc/passwd"), "'odd' is a symbolic link to '/etc/passwd', outside the folder"),
        (lambda path: path.symlink_to("../other"), "'odd' is a symbolic link to '../other', outside the folder"),
        (lambda path: path.symlink_to("a/../../other"), "'odd' is a symbolic link to 'a/../../other', outside"),
        (make_socket, "'odd' is not a regular file"),
        (os.mkfifo, "'odd' is not a regular file"),
        (lambda path: path.with_name("new\nline").touch(), r"'new\\nline' is not a valid path"),
    ],
    ids=["absolute link", "link", "winding link", "socket", "pipe", "name"],
)
def test_files_that_cannot_be_in_a_snapshot_are_named(
    folder: Folder, make: Callable[[Path], None], message: str
) -> None:
    folder.write("model.pt", "one")
    make(folder.path / "odd")
    with pytest.raises(Unfit, match=message):
        folder.once("")


def test_a_link_inside_the_folder_is_recorded(folder: Folder) -> None:
    folder.write("run/step-1/model.pt", "one")
    (folder.path / "run" / "latest").symlink_to("step-1")
    snapshot = folder.take("")
    assert texts(snapshot) == {"run/step-1/model.pt": "one"}
    assert json.loads((snapshot / "paceline.json").read_text())["watched"]["links"] == {"run/latest": "step-1"}
    (folder.path / "run" / "latest").unlink()
    (folder.path / "run" / "latest").symlink_to("step-0")
    folder.take("")


def test_a_file_instead_of_the_folder_is_captured_as_a_file(folder: Folder) -> None:
    folder.path.rmdir()
    folder.path.write_text("a file")
    assert (folder.take() / "ckpt").read_text() == "a file"


def test_a_canceled_capture_leaves_no_files(folder: Folder) -> None:
    folder.write("model.pt", "one")
    calls = []

    def proceed(_: int) -> bool:
        calls.append(1)
        return False

    with pytest.raises(TransferCanceled):
        folder.capture.take(str(folder.own / "to"), {}, "", proceed)
    assert calls and list(folder.own.iterdir()) == []
    folder.take("")
