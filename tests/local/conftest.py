"""Object stores for tests of runs: see tests/stores."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.import_plugin("stores.fixtures")
