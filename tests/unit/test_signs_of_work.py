"""Which changed files of a working folder count as checkpoints of its program."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.agent.tasks import signs_of_work
from paceline.agent.tasks.signs_of_work import changed_checkpoint


def write(path: Path, changed: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("x")
    os.utime(path, (changed, changed))


@pytest.mark.parametrize("name", ["model.pt", "out/run/best.keras", "checkpoints/5", "ckpt-3.data-00000-of-00001"])
def test_a_file_that_has_changed_since_the_start(tmp_path: Path, name: str) -> None:
    write(tmp_path / name, 200.0)
    assert changed_checkpoint(str(tmp_path), 100.0) == name
    assert changed_checkpoint(str(tmp_path), 300.0) == ""


@pytest.mark.parametrize(
    "name", ["train.log", ".cache/model.pt", "venv/lib/x.pt", "runs/run-1/snapshots/x", "a/b/c/d/e.pt"]
)
def test_other_files_do_not_count(tmp_path: Path, name: str) -> None:
    write(tmp_path / "venv" / "pyvenv.cfg", 0.0)
    write(tmp_path / name, 200.0)
    assert changed_checkpoint(str(tmp_path), 100.0, str(tmp_path / "runs")) == ""


def test_the_newest_one_is_named(tmp_path: Path) -> None:
    write(tmp_path / "a.pt", 300.0)
    write(tmp_path / "b.pt", 200.0)
    assert changed_checkpoint(str(tmp_path), 100.0) == "a.pt"


def test_the_search_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(20):
        write(tmp_path / f"{number}.txt", 200.0)
    write(tmp_path / "sub" / "model.pt", 200.0)
    monkeypatch.setattr(signs_of_work, "MOST_ENTRIES", 10)
    assert changed_checkpoint(str(tmp_path), 100.0) == ""
    assert changed_checkpoint(str(tmp_path / "missing"), 100.0) == ""
