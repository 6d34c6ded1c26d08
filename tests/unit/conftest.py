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


def _watch(event: str, args: tuple[Any, ...]) -> None:
    if _watched and event in STARTS:
        raise AssertionError(f"a unit test starts a process: {event}{args[:2]}; move it to tests/local")


sys.addaudithook(_watch)


@pytest.fixture(autouse=True)
def no_process() -> Iterator[None]:
    global _watched
    _watched = True
    yield
    _watched = False


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
