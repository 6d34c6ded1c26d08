"""Unit tests start no process: whatever tries is named. What needs one belongs to tests/local."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

STARTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.exec", "os.system")
_watched = False
_started: list[str] = []


def _watch(event: str, args: tuple[Any, ...]) -> None:
    if _watched and event in STARTS:
        _started.append(f"{event}{args[:2]}")
        raise AssertionError(f"a unit test starts a process: {_started[-1]}; move it to tests/local")


sys.addaudithook(_watch)


@pytest.fixture(autouse=True)
def no_process() -> Iterator[None]:
    global _watched
    _watched = True
    _started.clear()
    yield
    _watched = False
    assert not _started, f"it starts a process: {_started[0]}; move it to tests/local"


@pytest.fixture(autouse=True)
def usual_mask() -> Iterator[None]:
    """For files that tests write themselves, whoever runs them."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """One that any user can reach."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    for closed, _, _ in os.walk(folder):  # from above: each is open before what is in it is looked for
        Path(closed).chmod(0o700)
        for inner in Path(closed).iterdir():
            inner.is_symlink() or inner.chmod(0o700)
    shutil.rmtree(folder)
