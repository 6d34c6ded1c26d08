"""Fixtures: `s3`, `gcs` and `azure` are one store each, with a prefix per test; `store` is each of them in turn.

A server starts when a test first uses it, once in each process of the session. A test may stop its server: it is
started again for the next test. This is a pytest plugin, loaded by tests/conftest.py.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.stores import faults, parts, servers
from support.stores.faults import Toxiproxy
from support.stores.servers import Store

TESTS = Path(__file__).parents[2] / "stores"
MADE_OF = {
    "s3": [parts.versitygw],
    "gcs": [parts.versitygw],
    "azure": [parts.azurite],
    "store": [parts.versitygw, parts.azurite],
    "toxiproxy": [parts.toxiproxy],
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    store_tests = [item for item in items if _needed(item)]
    for item in items:
        if item in store_tests or item.path.is_relative_to(TESTS):
            item.add_marker(pytest.mark.long)
    deselected = store_tests if parts.unmet() else []
    if deselected:
        items[:] = [item for item in items if item not in deselected]
        config.hook.pytest_deselected(items=deselected)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    reason = parts.unmet()
    if reason and "not long" not in config.option.markexpr:
        terminalreporter.write_line(f"tests with object stores left out: {reason}")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Builds the servers before the first test: a build takes minutes, and must not count as time of a test."""
    needed = {name for item in session.items for name in _needed(item)}
    if session.config.option.collectonly:
        return
    capture = session.config.pluginmanager.getplugin("capturemanager")
    try:
        with capture.global_and_fixture_disabled() if capture else contextlib.nullcontext():
            for name in sorted(needed):
                for build in MADE_OF[name]:
                    build()
    except parts.BuildFailed as error:
        pytest.exit(str(error), 1)


def _needed(item: pytest.Item) -> set[str]:
    """The store fixtures of a test, by fixture name or by the value of a parameter."""
    callspec = getattr(item, "callspec", None)
    parameters = [value for value in callspec.params.values() if isinstance(value, str)] if callspec else []
    return set(MADE_OF) & {*getattr(item, "fixturenames", ()), *parameters}


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with servers.s3(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(scope="session")
def gcs_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with servers.gcs(tmp_path_factory.mktemp("gcs")) as server:
        yield server


@pytest.fixture(scope="session")
def azure_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with servers.azure(tmp_path_factory.mktemp("azure")) as server:
        yield server


@pytest.fixture(scope="session")
def toxiproxy_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Toxiproxy]:
    with faults.toxiproxy(tmp_path_factory.mktemp("toxiproxy")) as server:
        yield server


@pytest.fixture
def s3(s3_server: Store) -> Iterator[Store]:
    yield from _own(s3_server)


@pytest.fixture
def gcs(gcs_server: Store) -> Iterator[Store]:
    yield from _own(gcs_server)


@pytest.fixture
def azure(azure_server: Store) -> Iterator[Store]:
    yield from _own(azure_server)


@pytest.fixture(params=["s3", "gcs", "azure"])
def store(request: pytest.FixtureRequest) -> Store:
    server: Store = request.getfixturevalue(request.param)
    return server


@pytest.fixture
def toxiproxy(toxiproxy_server: Toxiproxy) -> Iterator[Toxiproxy]:
    """Its links are removed after the test."""
    yield toxiproxy_server
    toxiproxy_server.clear()


def _own(store: Store) -> Iterator[Store]:
    yield store.at(f"test-{uuid.uuid4().hex[:8]}")
    store.start()
