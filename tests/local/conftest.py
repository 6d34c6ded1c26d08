"""What tests of runs start from; object stores: see tests/stores."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.runs import Starter, starter


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starter]:
    with starter(tmp_path) as starts:
        yield starts


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """The folder by which a program is told what to do: orders.py, saves.py."""
    folder = tmp_path / "state"
    folder.mkdir()
    return folder
