"""What tests of examples start from: `example("torch-ddp", "--steps", 40, sets={"roles.worker.replicas": 1})`."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.example_runs import Begin, begin
from support.runs import Starter, starter


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starter]:
    with starter(tmp_path) as starts:
        yield starts


@pytest.fixture
def example(start: Starter, tmp_path: Path) -> Begin:
    """Runs of examples in one home and one code folder; ended, whatever happens, when the test is over."""
    return functools.partial(begin, start, tmp_path / "home")
