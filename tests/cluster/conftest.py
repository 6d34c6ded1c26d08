"""One cluster for all cluster tests of a session, whichever process they run in; left out where none can run."""

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
LEFT_OUT = pytest.StashKey[str]()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    ours = [item for item in items if item.path.is_relative_to(HERE)]
    for item in ours:
        if "breakable" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("breakable"))  # one after the other: no process waits for its turn
    reason = needs.unmet()
    if not (ours and reason):
        return
    items[:] = [item for item in items if item not in ours]
    config.hook.pytest_deselected(items=ours)
    config.stash[LEFT_OUT] = f"{len(ours)} cluster tests left out: {reason}"
    if getattr(config, "workerinput", {}).get("workerid") == "gw0":
        # The process that writes the summary has not collected, so it does not know.
        with _uncaptured(config):
            say(config.stash[LEFT_OUT])


def pytest_collection_finish(session: pytest.Session) -> None:
    """The first build takes minutes: not on the time of whichever test comes first."""
    wanted = any(item.path.is_relative_to(HERE) for item in session.items)
    if wanted and not session.config.option.collectonly:
        try:
            with _uncaptured(session.config):
                prepare()
        except BuildFailed as error:
            pytest.exit(str(error), 1)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """That nothing is left to run is no failure where it has been said why."""
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and needs.unmet():
        session.exitstatus = pytest.ExitCode.OK


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if LEFT_OUT in config.stash:
        terminalreporter.write_line(config.stash[LEFT_OUT])


def _uncaptured(config: pytest.Config) -> contextlib.AbstractContextManager[None]:
    capture = config.pluginmanager.getplugin("capturemanager")
    return capture.global_and_fixture_disabled() if capture else contextlib.nullcontext()


@pytest.fixture(scope="session")
def together(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """The folder that all processes of this session share."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if hasattr(request.config, "workerinput") else folder


@pytest.fixture(scope="session")
def cluster(together: Path) -> Iterator[Cluster]:
    """For everybody at once."""
    with _shared(together, "cluster") as found:
        yield found


@pytest.fixture(scope="session")
def second(together: Path) -> Iterator[Cluster]:
    with _shared(together, "second") as found:
        yield found


@contextlib.contextmanager
def _shared(together: Path, which: str) -> Iterator[Cluster]:
    """Started by whoever needs it first; the last one out waits until it is gone."""
    with locked(together / f"{which}.lock"):
        found = _join(together / f"{which}.name")
    with found:
        yield found


def _join(named: Path) -> Cluster:
    if named.exists():
        with contextlib.suppress(LabError):
            return Cluster.join(named.read_text())
    started = Cluster.start()
    named.write_text(started.name)
    return started


@pytest.fixture
def breakable(together: Path, second: Cluster) -> Iterator[Cluster]:
    """A cluster for tests that break or change it: nobody else uses it meanwhile, and it is repaired afterwards."""
    with locked(together / "second.turn"):
        yield second
        second.repair()


@pytest.fixture
def used(request: pytest.FixtureRequest) -> Cluster:
    """The cluster that the test is about."""
    found: Cluster = request.getfixturevalue("breakable" if "breakable" in request.fixturenames else "cluster")
    return found


@pytest.fixture
def namespace(used: Cluster, request: pytest.FixtureRequest) -> Iterator[str]:
    """One that enforces `restricted`, and is empty again afterwards."""
    with used.namespace(f"team-{uuid.uuid4().hex[:6]}") as name:
        yield name
        if "breakable" in request.fixturenames:
            used.repair()  # before pods of lost nodes can go


@pytest.fixture
def person(used: Cluster, namespace: str, tmp_path: Path) -> Person:
    """Has rights in one namespace alone."""
    return Person(used, namespace, tmp_path)


@pytest.fixture
def start(person: Person) -> Iterator[Callable[..., Run]]:
    """Starts runs in the foreground: words for the command line, fields for the job file."""
    runs: list[Run] = []

    def begin(*words: str, **job: Any) -> Run:
        runs.append(Run(person, person.job(**job), *words))
        return runs[-1]

    yield begin
    for run in runs:
        run.clean_up()


@pytest.fixture
def bucket(person: Person) -> dict[str, str]:
    """In the namespace, as a Secret `store`."""
    return bucket_of(person)


@pytest.fixture
def outside(person: Person, bucket: dict[str, str], tmp_path: Path) -> Iterator[dict[str, str]]:
    """The settings of the same bucket for this machine, which has a server of its own before it."""
    from support.stores import parts
    from support.stores.serving import Port, Server, running

    folder = tmp_path / "outside"
    (folder / "sidecar").mkdir(parents=True)
    port = Port()
    command = [parts.versitygw(), "--port", port.address, "posix", "--sidecar", folder / "sidecar"]
    keys = {"ROOT_ACCESS_KEY": bucket["AWS_ACCESS_KEY_ID"], "ROOT_SECRET_KEY": bucket["AWS_SECRET_ACCESS_KEY"]}
    with running(folder, Server("versitygw", folder, port, [*command, person.shared / "objects"], keys)):
        yield {**bucket, "AWS_ENDPOINT_URL": f"http://{port.address}"}
