"""One cluster shared by all cluster tests of a session, in all processes; deselected if no cluster can run here."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.lab import needs
from support.lab.cluster import Cluster, LabError, prepare
from support.lab.components import BuildFailed
from support.lab.places import locked, say
from support.people import Person, Run, bucket_of

HERE = Path(__file__).parent
DESELECTED = pytest.StashKey[str]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    cluster_tests = [item for item in items if item.path.is_relative_to(HERE)]
    for item in cluster_tests:
        if "breakable" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("breakable"))  # in one process: no other waits for the lock
    reason = needs.unmet()
    if not (cluster_tests and reason):
        return
    items[:] = [item for item in items if item not in cluster_tests]
    config.hook.pytest_deselected(items=cluster_tests)
    config.stash[DESELECTED] = f"{len(cluster_tests)} cluster tests deselected: {reason}"
    if getattr(config, "workerinput", {}).get("workerid") == "gw0":
        # The process that writes the summary does not collect tests, so it cannot report this.
        with _uncaptured(config):
            say(config.stash[DESELECTED])


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build before the first test: this may take minutes and must not count toward its timeout."""
    has_cluster_tests = any(item.path.is_relative_to(HERE) for item in session.items)
    if has_cluster_tests and not session.config.option.collectonly:
        try:
            with _uncaptured(session.config):
                prepare()
        except BuildFailed as error:
            pytest.exit(str(error), 1)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A session without tests is not a failure if the reason was reported."""
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and needs.unmet():
        session.exitstatus = pytest.ExitCode.OK


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if DESELECTED in config.stash:
        terminalreporter.write_line(config.stash[DESELECTED])


def _uncaptured(config: pytest.Config) -> contextlib.AbstractContextManager[None]:
    capture = config.pluginmanager.getplugin("capturemanager")
    return capture.global_and_fixture_disabled() if capture else contextlib.nullcontext()


@pytest.fixture(scope="session")
def together(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """The folder shared by all processes of this session."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if hasattr(request.config, "workerinput") else folder


@pytest.fixture(scope="session")
def cluster(together: Path) -> Iterator[Cluster]:
    """Used by all tests at the same time."""
    with _shared(together, "cluster") as shared:
        yield shared


@pytest.fixture(scope="session")
def second(together: Path) -> Iterator[Cluster]:
    with _shared(together, "second") as shared:
        yield shared


@contextlib.contextmanager
def _shared(together: Path, name: str) -> Iterator[Cluster]:
    """Started by the first process that needs it; the last one waits until it is deleted."""
    with locked(together / f"{name}.lock"):
        cluster = _join(together / f"{name}.name")
    with cluster:
        yield cluster


def _join(name_file: Path) -> Cluster:
    if name_file.exists():
        with contextlib.suppress(LabError):
            return Cluster.join(name_file.read_text())
    cluster = Cluster.start()
    name_file.write_text(cluster.name)
    return cluster


@pytest.fixture
def breakable(together: Path, second: Cluster) -> Iterator[Cluster]:
    """A cluster for tests that break or change it: used by one test at a time, and repaired afterwards."""
    with locked(together / "second.turn"):
        yield second
        second.repair()


@pytest.fixture
def used(request: pytest.FixtureRequest) -> Cluster:
    """The cluster that the test uses."""
    cluster: Cluster = request.getfixturevalue("breakable" if "breakable" in request.fixturenames else "cluster")
    return cluster


@pytest.fixture
def namespace(used: Cluster, request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace that enforces `restricted`; it is deleted afterwards."""
    with used.namespace(f"team-{uuid.uuid4().hex[:6]}") as name:
        yield name
        if "breakable" in request.fixturenames:
            used.repair()  # pods of lost nodes cannot be deleted before


@pytest.fixture
def person(used: Cluster, namespace: str, tmp_path: Path) -> Person:
    """A user with rights in one namespace only."""
    return Person(used, namespace, tmp_path)


@pytest.fixture
def start(person: Person) -> Iterator[Callable[..., Run]]:
    """Starts runs in the foreground: `arguments` of the command line, `job` fields of the job file."""
    runs: list[Run] = []

    def begin(*arguments: str, **job: Any) -> Run:
        runs.append(Run(person, person.job(**job), *arguments))
        return runs[-1]

    yield begin
    for run in runs:
        run.clean_up()


@pytest.fixture
def bucket(person: Person) -> dict[str, str]:
    """A bucket in the namespace; its settings are in the Secret `store`."""
    return bucket_of(person)


@pytest.fixture
def outside(person: Person, bucket: dict[str, str], tmp_path: Path) -> Iterator[dict[str, str]]:
    """The settings of the same bucket for this machine, which accesses it through its own server."""
    from support.stores import parts
    from support.stores.serving import Port, Server, running

    folder = tmp_path / "outside"
    (folder / "sidecar").mkdir(parents=True)
    port = Port()
    command = [parts.versitygw(), "--port", port.address, "posix", "--sidecar", folder / "sidecar"]
    keys = {"ROOT_ACCESS_KEY": bucket["AWS_ACCESS_KEY_ID"], "ROOT_SECRET_KEY": bucket["AWS_SECRET_ACCESS_KEY"]}
    with running(folder, Server("versitygw", folder, port, [*command, person.shared / "objects"], keys)):
        yield {**bucket, "AWS_ENDPOINT_URL": f"http://{port.address}"}
