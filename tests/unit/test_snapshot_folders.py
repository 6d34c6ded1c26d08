"""The snapshot folders that a program writes for its agent, tested without an agent."""

from __future__ import annotations

import itertools
import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from paceline.runtime import snapshot_folders


def test_a_step_that_is_saved_again_is_never_incomplete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is deleted under a name that an agent would pick up."""
    monkeypatch.setenv("PACELINE_SNAPSHOT_DIR", str(tmp_path))
    real, deleted = shutil.rmtree, []

    def rmtree(path: Path, **more: Any) -> None:
        deleted.append(path.name)
        real(path, **more)

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    for content in ("first", "second"):
        with snapshot_folders.writing(3) as folder:
            (folder / "state").write_text(content)
    assert [path.name for path in tmp_path.iterdir()] == ["step-3"]
    assert (tmp_path / "step-3" / "state").read_text() == "second"
    assert deleted and all(name.endswith(".partial") for name in deleted)


def test_how_long_training_waits_is_stored_with_a_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the time, unless a thread writes it: then what its caller says."""
    monkeypatch.setenv("PACELINE_SNAPSHOT_DIR", str(tmp_path))
    times = itertools.count(100.0, 2.5)
    monkeypatch.setattr(time, "monotonic", lambda: next(times))
    snapshot_folders.save_snapshot(lambda _: None, 1)
    snapshot_folders.save_snapshot(lambda _: None, 2, stall=0.25)
    for step, stall in ((3, None), (4, 0.5)):
        background = snapshot_folders.Background()
        background.start(
            step, lambda step=step, stall=stall: snapshot_folders.save_snapshot(lambda _: None, step, stall=stall)
        )
        background.wait()
    about = [json.loads((tmp_path / f"step-{step}" / "paceline.json").read_text()) for step in range(1, 5)]
    assert [each["stall_s"] for each in about] == [2.5, 0.25, 0.0, 0.5]


# ---- with `snapshots.memory`


class Folders:
    """The two folders of a task. `room`: simulates the free space of the one in memory, which is an ordinary folder."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.disk, self.memory, self.room = root / "disk", root / "memory", 100 << 20
        self.disk.mkdir()
        self.memory.mkdir()
        monkeypatch.setenv("PACELINE_SNAPSHOT_DIR", str(self.disk))
        monkeypatch.setenv("PACELINE_SNAPSHOT_MEMORY_DIR", str(self.memory))
        monkeypatch.setattr(snapshot_folders, "_last_size", 0)
        monkeypatch.setattr(snapshot_folders, "free_space", lambda _: self.room)

    def save(self, step: int, size: int = 1) -> None:
        snapshot_folders.save_snapshot(lambda folder: (folder / "state").write_bytes(bytes(size)), step)

    def saved(self) -> tuple[list[str], list[str]]:
        """What is in memory, and what is on disk."""
        on_disk = sorted(path.name for path in self.disk.iterdir() if path.name != "no-room")
        return sorted(path.name for path in self.memory.iterdir()), on_disk

    @property
    def tells_why(self) -> bool:
        return (self.disk / "no-room").exists()


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folders:
    return Folders(tmp_path, monkeypatch)


def test_snapshots_are_saved_to_memory_while_there_is_room_for_one_more(folders: Folders) -> None:
    folders.save(1, 8 << 20)
    assert folders.saved() == (["step-1"], []) and not folders.tells_why
    folders.room = 8 << 20
    folders.save(2, 8 << 20)
    assert folders.saved() == (["step-1"], ["step-2"]) and folders.tells_why
    folders.room = 10 << 20
    folders.save(3, 8 << 20)
    assert folders.saved() == (["step-1", "step-3"], ["step-2"])
    assert (folders.memory / "step-3" / "state").stat().st_size == 8 << 20


def test_a_snapshot_leaves_room_for_what_the_agent_writes_next_to_it(folders: Folders) -> None:
    def write(folder: Path) -> None:
        (folder / "state").touch()
        folders.room = 4096

    snapshot_folders.save_snapshot(write, 1)
    assert folders.saved() == ([], ["step-1"])


def test_a_snapshot_that_does_not_fit_into_memory_is_written_to_disk(folders: Folders) -> None:
    """Nothing of it stays in memory, and the next one is not tried there. Frameworks raise errors of their own."""
    tried = []

    def write(folder: Path) -> None:
        tried.append(folder.parent.name)
        (folder / "state").write_bytes(bytes(8 << 20))
        if folder.parent == folders.memory:
            raise RuntimeError("unexpected pos 640 vs 598")

    folders.room = 6 << 20
    snapshot_folders.save_snapshot(write, 1)
    assert folders.saved() == ([], ["step-1"]) and folders.tells_why
    snapshot_folders.save_snapshot(write, 2)
    assert tried == ["memory", "disk", "disk"]


def test_an_error_of_another_kind_is_raised_and_leaves_nothing_behind(folders: Folders) -> None:
    def write(folder: Path) -> None:
        (folder / "state").touch()
        raise ValueError("the model has no such layer")

    with pytest.raises(ValueError, match="no such layer"):
        snapshot_folders.save_snapshot(write, 1)
    assert folders.saved() == ([], []) and not folders.tells_why


def test_without_memory_snapshots_are_written_to_disk(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_SNAPSHOT_MEMORY_DIR")
    folders.save(1)
    assert folders.saved() == ([], ["step-1"]) and not folders.tells_why


def test_the_free_space_of_a_folder(tmp_path: Path) -> None:
    assert 0 < snapshot_folders.free_space(str(tmp_path)) <= shutil.disk_usage(tmp_path).free + (64 << 20)
