"""Fixtures for tests of examples: `example("torch-ddp", "--steps", 40, sets={"roles.worker.replicas": 1})`."""

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
    """Starts runs of examples, with one home and one code folder; they are always ended when the test is over."""
    return functools.partial(begin, start, tmp_path / "home")
