"""Loads the fixtures for everybody; another folder that wants them loads them in the same way: once is enough."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.import_plugin("stores.fixtures")
