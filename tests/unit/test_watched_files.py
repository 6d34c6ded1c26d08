"""A single file, or files whose names match a pattern, as a program's own checkpoints: captured and restored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.storage.snapshots.repository import Unfit
from paceline.storage.watched.capture import FolderCapture
from paceline.storage.watched.restore import begin, tidy
from paceline.storage.watched.selection import is_empty

OWNER = ("digits-3f9a", "worker-host-0")
FILE, PATTERN = "snapshot.pt", "model-*.pt"


class Work:
    """A working folder, and what the agent does with it."""

    def __init__(self, parent: Path, watch: str) -> None:
        self.folder, self.own = parent / "work", parent / "run"
        self.folder.mkdir()
        self.watch = str(self.folder / watch)
        self.capture = FolderCapture(self.watch, str(parent / "copies"), str(parent / "tasks"))
        self._parent, self._count = parent, 0
        (self.folder / "train.py").write_text("print()")

    def write(self, **files: str) -> None:
        for name, text in files.items():
            (self.folder / f"{name.replace('_', '-')}.pt").write_text(text)

    def take(self) -> Path | None:
        self._count += 1
        target = self._parent / f"taken-{self._count}"
        return target if self.capture.take(str(target), {}) else None

    def begin(self, generation: int, source: Path | None = None) -> tuple[list[str], str]:
        inner = [str(self.folder), str(self.own)]
        text = "" if source is None else str(source)
        doubtful, backup = begin(self.watch, str(self.own), OWNER, generation, text, inner)
        self.capture.begin(source is not None, doubtful)
        return sorted(doubtful), backup

    def texts(self, folder: Path | None = None) -> dict[str, str]:
        return {path.name: path.read_text() for path in (folder or self.folder).iterdir() if path.is_file()}

    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())


@pytest.fixture
def one_file(tmp_path: Path) -> Work:
    return Work(tmp_path, FILE)


@pytest.fixture
def several(tmp_path: Path) -> Work:
    return Work(tmp_path, PATTERN)


def snapshot_texts(work: Work, taken: Path | None) -> dict[str, str]:
    assert taken is not None
    texts = work.texts(taken)
    assert json.loads(texts.pop("paceline.json"))["watched"]["files"] is True
    return texts


def test_only_the_named_file_is_captured_and_only_if_it_has_changed(one_file: Work) -> None:
    one_file.begin(1)
    one_file.write(other="no")
    assert one_file.take() is None and is_empty(one_file.watch)
    one_file.write(snapshot="one")
    assert snapshot_texts(one_file, one_file.take()) == {FILE: "one"}
    one_file.write(other="still no")
    assert one_file.take() is None
    one_file.write(snapshot="two")
    assert snapshot_texts(one_file, one_file.take()) == {FILE: "two"}


def test_only_files_that_match_are_captured(several: Work) -> None:
    several.begin(1)
    (several.folder / "model-dir.pt").mkdir()
    several.write(model_1="one", model_2="two", other="no")
    assert snapshot_texts(several, several.take()) == {"model-1.pt": "one", "model-2.pt": "two"}


def test_a_restored_file_replaces_the_torn_one_and_nothing_else(one_file: Work) -> None:
    one_file.begin(1)
    one_file.write(snapshot="one")
    taken = one_file.take()
    one_file.write(snapshot="torn", other="mine")
    assert one_file.begin(2, taken) == ([], "")
    assert one_file.texts() == {"train.py": "print()", FILE: "one", "other.pt": "mine"}
    assert one_file.take() is None, "it has just been restored"
    tidy(one_file.watch, str(one_file.own), OWNER)
    assert one_file.names() == ["other.pt", FILE, "train.py"] and not one_file.own.exists()


def test_what_a_paused_run_has_written_is_still_its_own_when_it_is_resumed(several: Work) -> None:
    several.write(mine="mine")
    (several.folder / "mine.pt").rename(several.folder / "model-0.pt")
    several.begin(1)
    several.write(model_1="one")
    taken = several.take()
    several.write(model_2="not committed")
    tidy(several.watch, str(several.own), OWNER, keep_record=True)
    assert [path.name for path in several.own.iterdir()] == ["begun.json"]
    assert several.begin(2, taken)[1] == "", "nothing is moved aside as if it were from before the run"
    assert several.texts() == {"train.py": "print()", "model-0.pt": "mine", "model-1.pt": "one"}


def test_without_a_snapshot_a_resumed_run_does_not_find_what_it_had_written(several: Work) -> None:
    several.begin(1)
    several.write(model_1="half of it")
    tidy(several.watch, str(several.own), OWNER, keep_record=True)
    several.begin(2)
    assert several.texts() == {"train.py": "print()"}


def test_files_that_are_not_in_the_snapshot_are_removed(several: Work) -> None:
    several.begin(1)
    several.write(model_1="one")
    taken = several.take()
    several.write(model_1="damaged", model_2="newer", other="mine")
    several.begin(2, taken)
    assert several.texts() == {"train.py": "print()", "model-1.pt": "one", "other.pt": "mine"}


def test_a_killed_restore_is_completed_by_the_next(several: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    several.begin(1)
    several.write(model_1="one", model_2="two")
    taken = several.take()
    several.write(model_1="damaged")

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("os.replace", killed)
        several.begin(2, taken)
    assert several.begin(2, taken) == ([], "")
    assert several.texts() == {"train.py": "print()", "model-1.pt": "one", "model-2.pt": "two"}


def test_without_a_snapshot_what_a_dead_task_has_left_is_removed(one_file: Work) -> None:
    one_file.begin(1)
    one_file.write(snapshot="torn")
    assert one_file.begin(2) == ([], "")
    assert one_file.names() == ["train.py"]


def test_a_file_from_before_the_run_stays_for_the_program(one_file: Work) -> None:
    one_file.write(snapshot="mine")
    assert one_file.begin(1) == ([], "")
    assert snapshot_texts(one_file, one_file.take()) == {FILE: "mine"}


def test_files_from_before_the_run_are_kept_if_it_starts_from_a_snapshot(several: Work, tmp_path: Path) -> None:
    several.write(model_1="mine")
    origin = tmp_path / "origin"
    origin.mkdir()
    (origin / "model-7.pt").write_text("seven")
    _, backup = several.begin(1, origin)
    assert backup == f"{several.folder}/model-_.pt.before-{OWNER[0]}"
    assert several.texts(Path(backup)) == {"model-1.pt": "mine"}
    assert several.texts() == {"train.py": "print()", "model-7.pt": "seven"}


def test_a_folder_with_only_that_file_can_be_restored(one_file: Work, tmp_path: Path) -> None:
    origin = tmp_path / "origin"
    origin.mkdir()
    (origin / FILE).write_text("seven")
    one_file.begin(1, origin)
    assert one_file.texts()[FILE] == "seven"


def test_a_snapshot_without_a_matching_file_is_rejected(several: Work, tmp_path: Path) -> None:
    origin = tmp_path / "origin"
    origin.mkdir()
    (origin / "weights.h5").write_text("x")
    with pytest.raises(Unfit, match="contains no file that matches model-"):
        several.begin(1, origin)
    assert several.names() == ["train.py"]


def test_a_folder_that_contains_a_file_of_its_own_name_stays_a_folder(tmp_path: Path) -> None:
    """As TensorFlow's `checkpoint/checkpoint`."""
    work = Work(tmp_path, "checkpoint")
    work.begin(1)
    (work.folder / "checkpoint").mkdir()
    (work.folder / "checkpoint" / "checkpoint").write_text("one")
    taken = work.take()
    (work.folder / "checkpoint" / "checkpoint").write_text("torn")
    work.begin(2, taken)
    assert (work.folder / "checkpoint" / "checkpoint").read_text() == "one"
