"""Unit tests must not start processes: a test that does fails. Tests that need one belong in tests/local."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

STARTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.exec", "os.system")
_is_active = False
_started: list[str] = []


def _watch(event: str, args: tuple[Any, ...]) -> None:
    if _is_active and event in STARTS:
        _started.append(f"{event}{args[:2]}")
        raise AssertionError(f"a unit test starts a process: {_started[-1]}; move it to tests/local")


sys.addaudithook(_watch)


@pytest.fixture(autouse=True)
def no_process() -> Iterator[None]:
    global _is_active
    _is_active = True
    _started.clear()
    yield
    _is_active = False
    assert not _started, f"the test started a process: {_started[0]}; move it to tests/local"


@pytest.fixture(autouse=True)
def usual_mask() -> Iterator[None]:
    """A fixed umask for files that tests write, whatever the umask of the user is."""
    previous = os.umask(0o022)
    yield
    os.umask(previous)


@pytest.fixture(autouse=True)
def ignored_pipes() -> Iterator[None]:
    """A test that calls the command line in this process changes what SIGPIPE does: it would end this process later."""
    previous = signal.getsignal(signal.SIGPIPE)
    yield
    signal.signal(signal.SIGPIPE, previous)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that any user can access."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    for subfolder, _, _ in os.walk(folder):  # top-down: each folder is opened before its contents are listed
        Path(subfolder).chmod(0o700)
        for path in Path(subfolder).iterdir():
            path.is_symlink() or path.chmod(0o700)
    shutil.rmtree(folder)
