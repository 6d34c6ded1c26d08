"""What tests of examples start from: `example("torch-ddp", "--steps", 40, sets={"roles.worker.replicas": 1})`."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "local"))

from example_runs import Begin, begin
from runs import Starter, starter


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.import_plugin("stores.fixtures")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starter]:
    with starter(tmp_path) as starts:
        yield starts


@pytest.fixture
def example(start: Starter, tmp_path: Path) -> Begin:
    """Runs of examples in one home and one code folder; ended, whatever happens, when the test is over."""
    return functools.partial(begin, start, tmp_path / "home")
