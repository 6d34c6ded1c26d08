"""The snapshot folders that a program writes for its agent, tested without an agent."""

from __future__ import annotations

import shutil
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
