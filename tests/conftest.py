"""Shared by all tests: the folders that tests import from."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import settings

# The same examples in every run; `--hypothesis-profile default` looks further, with a new seed each time.
settings.register_profile("same", derandomize=True)
settings.load_profile("same")

for folder in ("unit",):
    sys.path.insert(0, str(Path(__file__).parent / folder))

FRAMEWORKS = ("tests/chaos/", "tests/local/test_docs", "tests/local/test_failures", "tests/local/test_programs")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Two frameworks that are imported at once take so long that tests of hangs see one: one test after the other."""
    for item in items:
        if item.nodeid.startswith(FRAMEWORKS):
            item.add_marker(pytest.mark.xdist_group("frameworks"))
