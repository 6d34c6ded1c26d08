"""The Python API with two clusters whose contexts have the same name: runs stay on their cluster, connections are
closed, and what a notebook shows asks no cluster."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from lightkube import ApiError
from lightkube.models.batch_v1 import JobSpec, JobStatus
from lightkube.models.core_v1 import PodTemplateSpec
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.batch_v1 import Job
from lightkube.resources.core_v1 import ConfigMap

from paceline import client, plan
from paceline.backends import local
from paceline.backends.kubernetes.api import cluster as clusters
from paceline.backends.kubernetes.objects import names
from paceline.backends.kubernetes.runs import host_files, local_folder, snapshot_reader, task_request
from paceline.client.control import stop
from paceline.client.notebooks import live_table
from paceline.client.reading import refreshed_folder
from paceline.client.reading.find_run import Target
from paceline.client.submission import kubernetes_submission
from paceline.client.submission import submit as submission
from paceline.view.files import run_folders
from paceline.view.state import events
from support import recorded
from support.recorded import LIFE, REPORT
from support.worlds import make_plan

RUN = "digits-1"
CREATED = datetime(2026, 11, 17, tzinfo=UTC)
KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: shared
clusters: [{{name: c, cluster: {{server: "https://{name}.invalid"}}}}]
users: [{{name: me, user: {{token: any}}}}]
contexts:
- {{name: shared, context: {{cluster: c, user: me, namespace: team}}}}
- {{name: other, context: {{cluster: c, user: me, namespace: other}}}}
"""


class Transport:
    is_closed = False

    def close(self) -> None:
        self.is_closed = True


class FakeCluster:
    """A client of a cluster with these Jobs."""

    def __init__(self) -> None:
        self.jobs: dict[str, str] = {}  # run -> uid of its Job
        self.requests: list[str] = []
        self.is_reachable = True

    def _check(self, request: str) -> None:
        self.requests.append(request)
        if not self.is_reachable:
            raise httpx2.ConnectError("connection refused")

    def list(self, kind: Any, fields: Any = None, **_: Any) -> list[Any]:
        self._check(f"list {kind.__name__}")
        wanted = (fields or {}).get("metadata.name")
        return [_job(*each) for each in self.jobs.items() if kind is Job and wanted in (None, each[0])]

    def get(self, kind: Any, name: str) -> Any:
        self._check(f"get {kind.__name__} {name}")
        if kind is ConfigMap and name.removesuffix("-plan") in self.jobs:
            return SimpleNamespace(data={"plan.json": plan.to_json(make_plan(1))})
        if kind is Job and name in self.jobs:
            return _job(name, self.jobs[name])
        raise _not_found()

    def delete(self, kind: Any, name: str, **_: Any) -> None:
        self._check(f"delete {kind.__name__} {name}")
        if kind is not Job or not self.jobs.pop(name, None):
            raise _not_found()

    def patch(self, kind: Any, name: str, *_: Any, **__: Any) -> None:
        self._check(f"patch {kind.__name__} {name}")


def _job(name: str, uid: str) -> Job:
    metadata = ObjectMeta(name=name, uid=uid, labels={names.RUN_LABEL: name}, creationTimestamp=CREATED, annotations={})
    return Job(metadata=metadata, spec=JobSpec(template=PodTemplateSpec(), suspend=False), status=JobStatus())


def _not_found() -> ApiError:
    return ApiError(response=httpx2.Response(404, json={"code": 404, "reason": "NotFound", "message": "not found"}))


class World:
    """Two clusters, `a` and `b`. `use` sets KUBECONFIG, as a user does between two cells of a notebook."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.a, self.b = FakeCluster(), FakeCluster()
        self.transports: list[Transport] = []
        self._folder, self._monkeypatch = folder, monkeypatch
        for name in ("a", "b"):
            self.kubeconfig(name).write_text(KUBECONFIG.format(name=name))
        self.use("a")

    def kubeconfig(self, name: str) -> Path:
        return self._folder / f"config-{name}"

    def use(self, name: str) -> None:
        self._monkeypatch.setenv("KUBECONFIG", str(self.kubeconfig(name)))

    def connect(
        self, context: str | None = None, namespace: str | None = None, files: Any = (), until: float = math.inf
    ) -> clusters.Cluster:
        real = CONNECT(context, namespace, files, until)
        fake: Any = {"https://a.invalid": self.a, "https://b.invalid": self.b}[real.server]
        transport: Any = Transport()
        self.transports.append(transport)
        return dataclasses.replace(real, client=fake, transport=transport)

    def submitted(self, run: str = RUN) -> client.Run:
        """As submit() returns it."""
        cluster = self.connect()
        cluster.close()
        folder = local_folder.make_folder(make_plan(1), "name: digits\n", cluster, run)
        local_folder.save_job_uid(folder, f"uid of {run}")
        local_folder.mark_submitted(folder)
        self.a.jobs[run] = f"uid of {run}"
        target = Target("kubernetes", cluster.context, cluster.namespace, cluster.kubeconfig)
        return client.Run(run, target, folder)

    def check_closed(self) -> None:
        assert self.transports and all(each.is_closed for each in self.transports)


CONNECT = clusters.connect


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    world = World(tmp_path, monkeypatch)
    for module in (clusters, local_folder):
        monkeypatch.setattr(module, "connect", world.connect)
    monkeypatch.setattr(local_folder, "_kubeconfigs", {})
    return world


# ---- deleting


def test_a_second_delete_does_not_delete_a_run_whose_id_starts_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    recorded.write(tmp_path, "digits-1", report=REPORT)
    other = recorded.write(tmp_path, "digits-10", report=REPORT)
    run = client.get("digits-1")
    run.delete()
    with pytest.raises(client.NoRun, match="digits-1 was deleted"):
        run.delete()
    assert other.is_dir()


def test_a_run_is_deleted_in_its_own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders, restored = {}, {}
    for name in ("first", "second"):
        folders[name] = recorded.write(tmp_path / name, RUN, report=REPORT)
        restored[name] = tmp_path / name / "restored" / f"{RUN}@1" / "step-1-g1"
        restored[name].mkdir(parents=True)
        restored[name].with_name("step-1-g1.lock").touch()
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "first"))
    run = client.get(RUN)
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "second"))
    run.delete()
    assert not folders["first"].exists() and not restored["first"].exists()
    assert folders["second"].is_dir() and restored["second"].is_dir()


def test_a_deleted_run_with_snapshots_is_deleted_only_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    folder = recorded.write(tmp_path, RUN, report=REPORT)
    run = client.get(RUN)
    (folder / run_folders.DELETED).touch()
    with pytest.raises(client.NoRun, match=r"except for its snapshots; `.*delete\(snapshots=True\)` deletes them"):
        run.delete()
    assert run.delete(snapshots=True).only_snapshots and not folder.exists()


def test_a_folder_that_is_not_the_runs_is_not_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    elsewhere = recorded.write(tmp_path / "elsewhere", RUN, report=REPORT)
    link = tmp_path / "home" / "runs" / RUN
    link.parent.mkdir(parents=True)
    link.symlink_to(elsewhere)
    for run, folder in ((RUN, link), (f"../{RUN}", elsewhere / ".." / RUN)):
        with pytest.raises(client.NotDeleted, match="is not the folder of"):
            client.Run(run, folder=folder).delete()
    assert elsewhere.is_dir()


@pytest.mark.parametrize("origin", ["submit", "get", "list"])
def test_a_run_is_deleted_on_its_own_cluster(world: World, origin: str) -> None:
    run = world.submitted()
    if origin != "submit":
        run = client.get(RUN, on="kubernetes") if origin == "get" else client.runs(on="kubernetes")[0]
    world.use("b")
    with pytest.raises(client.NotDeleted, match="still running"):
        run.delete()
    run.delete(force=True)
    assert world.a.jobs == {} and world.b.requests == []
    assert client.runs().to_dict() == []


def test_a_search_on_a_cluster_without_the_run_does_not_move_it_there(world: World) -> None:
    run = world.submitted()
    world.use("b")
    with pytest.raises(client.PacelineError, match="belongs to a different cluster: it was submitted to"):
        client.get(RUN, on="kubernetes")
    world.b.requests.clear()
    run.delete(force=True)
    assert world.a.jobs == {} and world.b.requests == []


def test_a_run_that_is_found_with_another_kubeconfig_uses_that(world: World, tmp_path: Path) -> None:
    """For example, the first one has expired credentials."""
    run = world.submitted()
    renewed = tmp_path / "renewed"
    shutil.copy(world.kubeconfig("a"), renewed)
    world._monkeypatch.setenv("KUBECONFIG", str(renewed))
    client.get(RUN, on="kubernetes")
    assert local_folder.connect_for(run.folder).kubeconfig == (renewed,)


@pytest.mark.parametrize("origin", ["submit", "get"])
def test_force_deletes_a_run_here_if_its_cluster_is_unreachable(world: World, origin: str) -> None:
    run = world.submitted()
    if origin == "get":
        run = client.get(RUN, on="kubernetes")
    folder = run.folder
    world.a.is_reachable = False
    with pytest.raises(client.NotDeleted):
        run.delete()
    assert "cannot connect to the cluster" in run.delete(force=True).cluster_error
    assert not folder.exists()


# ---- the cluster of a run


def test_all_readers_use_the_cluster_of_the_run(world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = world.submitted()
    world.use("b")
    used: list[str] = []
    monkeypatch.setattr(host_files, "_fetch", lambda cluster, *_: used.append(cluster.server))
    host_files.fetch(run.folder, "worker-host-0", "profiles", {}, tmp_path)
    reader = snapshot_reader.SnapshotPod(run.folder, print)
    used.append(reader._cluster.server)
    reader.close()
    used.append(local_folder.reopen(run.folder).cluster.server)
    assert used == ["https://a.invalid"] * 3


def test_a_list_of_runs_is_of_the_cluster_that_was_current(world: World) -> None:
    world.a.jobs = {RUN: "1"}
    listed = client.runs(on="kubernetes")[0]
    world.use("b")
    assert run_folders.cluster_of(listed.folder) == ("shared", "team")
    assert world.b.requests == []


def test_a_target_keeps_the_cluster_that_was_current(world: World) -> None:
    target = Target("kubernetes", namespace="mine").resolved()
    assert target == Target("kubernetes", "shared", "mine", (world.kubeconfig("a"),))
    config = world.kubeconfig("a").read_text().replace("current-context: shared", "current-context: other")
    world.kubeconfig("a").write_text(config)
    world.use("b")
    cluster = target.cluster()
    assert (cluster.server, cluster.context, cluster.namespace) == ("https://a.invalid", "shared", "mine")
    assert Target("local").resolved() == Target("local")


def test_a_later_process_uses_the_cluster_of_the_run(world: World, tmp_path: Path) -> None:
    run = world.submitted()
    local_folder._kubeconfigs.clear()  # of this process
    world.use("b")
    assert client.get(RUN).status().is_running
    assert world.a.requests and world.b.requests == []
    renewed = tmp_path / "renewed"
    shutil.copy(world.kubeconfig("a"), renewed)
    world._monkeypatch.setenv("KUBECONFIG", str(renewed))
    assert local_folder.connect_for(run.folder).kubeconfig == (renewed,), "its credentials may be newer"
    world.kubeconfig("a").unlink()
    assert local_folder.connect_for(run.folder).server == "https://a.invalid"
    world.use("b")
    with pytest.raises(clusters.Unreachable, match="config-a, which no longer exists; set KUBECONFIG"):
        local_folder.connect_for(run.folder)
    assert world.b.requests == []


def test_a_run_that_is_found_with_another_kubeconfig_uses_that_later(world: World, tmp_path: Path) -> None:
    run = world.submitted()
    shutil.copy(world.kubeconfig("a"), tmp_path / "renewed")
    world._monkeypatch.setenv("KUBECONFIG", str(tmp_path / "renewed"))
    client.get(RUN, on="kubernetes")
    local_folder._kubeconfigs.clear()
    world.use("b")
    assert local_folder.connect_for(run.folder).kubeconfig == (tmp_path / "renewed",)


def test_a_run_without_a_recorded_kubeconfig_uses_the_current_one(world: World) -> None:
    """An older version of Paceline has submitted it."""
    run = world.submitted()
    local_folder._kubeconfigs.clear()
    info = {name: value for name, value in run_folders.info(run.folder).items() if name not in ("kubeconfig", "server")}
    (run.folder / "run.json").write_text(json.dumps(info))
    world.use("b")
    assert local_folder.connect_for(run.folder).server == "https://b.invalid"


@pytest.mark.parametrize("action", [client.Run.pause, client.Run.resume])
def test_a_request_to_a_captain_says_that_its_cluster_cannot_be_reached(world: World, action: Any) -> None:
    run = world.submitted()
    world.a.is_reachable = False
    with pytest.raises(client.PacelineError, match="cannot connect to the cluster at https:"):
        action(run)


# ---- connections


def test_connections_are_closed(world: World) -> None:
    run = world.submitted()
    client.runs(on="kubernetes")
    client.get(RUN, on="kubernetes").status()
    (run.folder / "report.json").write_text("{}")  # written by a pod: the cluster is asked nevertheless
    assert stop.is_running(run_folders.Run(RUN, run.folder))
    reader = snapshot_reader.SnapshotPod(run.folder, print)
    assert reader._captain() == ""
    reader.close()
    assert list(task_request.ask_captain(run.folder, {"type": "stacks"}, 1.0)) == []
    with pytest.raises(client.PacelineError):
        host_files.fetch(run.folder, make_plan(1).hosts[0].name, "profiles", {"a": 1}, Path("/nonexistent"))
    with pytest.raises(client.NoRun):
        client.get("none-1", on="kubernetes")
    run.delete(force=True)
    assert len(world.transports) >= 10
    world.check_closed()


def test_connections_are_closed_after_a_stop(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    run = world.submitted()
    monkeypatch.setattr(stop, "followed", ended_at_once)
    run.stop(now=True)
    world.check_closed()


def test_a_submission_closes_its_connections_and_its_run_knows_the_cluster(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def submitted(prepared: Any, cluster: clusters.Cluster, *_: Any) -> Iterator[Path]:
        if world.a.is_reachable:
            yield local_folder.make_folder(prepared.plan, "", cluster, RUN)
        else:
            raise client.PacelineError("no permission")

    settings = {"context": None, "namespace": None}
    prepared = Prepared(dataclasses.replace(make_plan(1), kubernetes=settings))
    monkeypatch.setattr(submission, "prepare", lambda job: prepared)
    monkeypatch.setattr(kubernetes_submission, "submitted", submitted)
    monkeypatch.setattr(kubernetes_submission, "published_tensorboard", lambda *_: "")
    job = object.__new__(client.Job)
    run = client.submit(job, on="kubernetes")
    assert run._target == Target("kubernetes", "shared", "team", (world.kubeconfig("a"),))
    world.a.is_reachable = False
    with pytest.raises(client.PacelineError, match="no permission"):
        client.submit(job, on="kubernetes")
    world.check_closed()


@dataclasses.dataclass(frozen=True)
class Prepared:
    plan: plan.Plan
    notes: tuple[str, ...] = ()


@contextmanager
def ended_at_once(*_: Any, **__: Any) -> Iterator[Callable[[], bool]]:
    yield lambda: True


def test_events_are_closed_if_a_stop_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = recorded.write(tmp_path, RUN, events=LIFE[:8])
    closed: list[str] = []

    class Tail:
        reads = iter([[b"{}"], []])

        def read(self) -> list[bytes]:
            try:
                return next(self.reads)
            except StopIteration:
                raise KeyboardInterrupt from None

        def close(self) -> None:
            closed.append("tail")

    released = threading.Event()
    monkeypatch.setattr(events, "follow", lambda folder: Tail())
    monkeypatch.setattr(local, "stop", lambda *_: released.wait(30))
    with pytest.raises(KeyboardInterrupt):
        stop.stop(run_folders.Run(RUN, folder))
    released.set()
    assert closed == ["tail"]


# ---- notebooks


def test_watch_sends_no_requests_of_its_own(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads the folder, which is updated over one connection."""
    run = world.submitted()
    looks = iter([False, True])
    monkeypatch.setattr(refreshed_folder, "followed", lambda *_, **__: nullcontext(lambda: next(looks)))
    monkeypatch.setattr(live_table, "_in_notebook", lambda: True)
    monkeypatch.setattr(live_table, "INTERVAL_S", 0.0)
    monkeypatch.setattr("IPython.display.display", lambda *_, **__: SimpleNamespace(update=updates.append))
    updates: list[Any] = []
    connections = len(world.transports)

    def end() -> None:
        (run.folder / "report.json").write_text(json.dumps(REPORT))

    monkeypatch.setattr(live_table.time, "sleep", lambda _: end())
    run.watch()
    assert len(updates) == 1 and "succeeded" in updates[0].data
    assert list(looks) == [] and len(world.transports) == connections and world.a.requests == []


def test_the_html_of_a_run_on_a_cluster_asks_no_cluster(world: World) -> None:
    run = world.submitted()
    listed = client.runs(on="kubernetes")[0]
    requests = len(world.a.requests)
    world.a.is_reachable = False
    assert "last known state; status() asks the cluster" in run._repr_html_()
    assert listed._repr_html_() == f"<div><b>{RUN}</b> in namespace team (context shared)</div>"
    with listed._lock:  # another thread is asking the cluster
        assert RUN in listed._repr_html_()
    assert len(world.a.requests) == requests


def test_the_html_of_a_deleted_or_damaged_run_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    folder = recorded.write(tmp_path, RUN, report=REPORT)
    run = client.get(RUN)
    (folder / "run.json").unlink()
    (folder / "run.json").mkdir()
    (folder / "plan.json").write_text("{")
    assert RUN in run._repr_html_()
    monkeypatch.setattr("paceline.view.state.status_reader.read", lambda *_: 1 / 0)
    assert run._repr_html_() == f"<div><b>{RUN}</b> </div>"
    shutil.rmtree(folder)
    assert run._repr_html_() == f"<div><b>{RUN}</b> was deleted</div>"
