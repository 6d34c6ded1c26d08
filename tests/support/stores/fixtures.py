"""Fixtures: `s3`, `gcs` and `azure` are a store each, at a prefix of the test's own; `store` is one after the other.

The servers start when a test first asks for them, once in each process of the session. A test may stop its server: it
is up again for the next. This is a plugin of pytest, which tests/conftest.py loads.
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
    wanting = [item for item in items if _wanted(item)]
    for item in items:
        if item in wanting or item.path.is_relative_to(TESTS):
            item.add_marker(pytest.mark.long)
    left_out = wanting if parts.unmet() else []
    if left_out:
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    reason = parts.unmet()
    if reason and "not long" not in config.option.markexpr:
        terminalreporter.write_line(f"tests with object stores left out: {reason}")


def pytest_collection_finish(session: pytest.Session) -> None:
    """The first build takes minutes: not on the time of whichever test comes first."""
    wanted = {name for item in session.items for name in _wanted(item)}
    if session.config.option.collectonly:
        return
    capture = session.config.pluginmanager.getplugin("capturemanager")
    try:
        with capture.global_and_fixture_disabled() if capture else contextlib.nullcontext():
            for name in sorted(wanted):
                for made in MADE_OF[name]:
                    made()
    except parts.BuildFailed as error:
        pytest.exit(str(error), 1)


def _wanted(item: pytest.Item) -> set[str]:
    """By name, or by a parameter that says which one is to be had."""
    chosen = getattr(item, "callspec", None)
    named = [value for value in chosen.params.values() if isinstance(value, str)] if chosen else []
    return set(MADE_OF) & {*getattr(item, "fixturenames", ()), *named}


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with servers.s3(tmp_path_factory.mktemp("s3")) as found:
        yield found


@pytest.fixture(scope="session")
def gcs_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with servers.gcs(tmp_path_factory.mktemp("gcs")) as found:
        yield found


@pytest.fixture(scope="session")
def azure_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with servers.azure(tmp_path_factory.mktemp("azure")) as found:
        yield found


@pytest.fixture(scope="session")
def toxiproxy_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Toxiproxy]:
    with faults.toxiproxy(tmp_path_factory.mktemp("toxiproxy")) as found:
        yield found


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
    found: Store = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def toxiproxy(toxiproxy_server: Toxiproxy) -> Iterator[Toxiproxy]:
    """Its links go with the test."""
    yield toxiproxy_server
    toxiproxy_server.clear()


def _own(store: Store) -> Iterator[Store]:
    yield store.at(f"test-{uuid.uuid4().hex[:8]}")
    store.start()
