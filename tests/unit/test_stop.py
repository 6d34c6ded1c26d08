"""`paceline stop` of a run on a cluster that cannot be reached, or that rejects the request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx2
import pytest
from lightkube import ApiError, Client
from lightkube.resources.batch_v1 import Job

from paceline.agent.run_files import replace
from paceline.backends.kubernetes.api.cluster import Cluster
from paceline.backends.kubernetes.runs import local_folder
from paceline.backends.kubernetes.runs.running import STOP_REASON
from paceline.cli import app
from paceline.client.control import stop
from paceline.view.files import run_folders
from support.worlds import make_plan

RUN = "digits-3f9a"


def unreachable(*_: Any, **__: Any) -> Any:
    raise httpx2.ConnectError("connection refused")


def refused(reason: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        status = {"kind": "Status", "code": 403, "reason": reason, "message": reason}
        raise ApiError(response=httpx2.Response(403, json=status, request=httpx2.Request("GET", "https://any")))

    return refuse


def listed(kind: Any, **_: Any) -> list[Any]:
    name = RUN if kind is Job else f"{RUN}-0"
    return [SimpleNamespace(metadata=SimpleNamespace(name=name, uid="1", annotations={}), status=None)]


class FakeClient:
    def __init__(self, **methods: Callable[..., Any]) -> None:
        self.deleted: list[str] = []
        self.__dict__.update({"list": listed, "patch": lambda *_, **__: None, "delete": self._delete, **methods})

    def _delete(self, kind: Any, name: str, **_: Any) -> None:
        self.deleted.append(name)


@pytest.fixture
def run_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeClient], Path]:
    """A running run on a cluster with this client; returns its folder."""
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))

    @contextmanager
    def followed(*_: Any, **__: Any) -> Iterator[Callable[[], bool]]:
        yield lambda: True

    def make(client: FakeClient) -> Path:
        cluster = Cluster(cast(Client, client), "shared", "team", "https://127.0.0.1:1")
        monkeypatch.setattr(local_folder, "connect", lambda *_: cluster)
        monkeypatch.setattr("paceline.client.reading.find_run.refresh", lambda *_, **__: None)
        monkeypatch.setattr(stop, "followed", followed)
        folder = local_folder.make_folder(make_plan(1), "name: digits\n", cluster, RUN)
        local_folder.mark_submitted(folder)
        return folder

    return make


def test_stop_now_kills_the_pods(run_on: Callable[[FakeClient], Path]) -> None:
    client = FakeClient()
    folder = run_on(client)
    assert app.main(["stop", RUN, "--now"]) == 0
    assert client.deleted == [f"{RUN}-0"] and (folder / STOP_REASON).exists()


@pytest.mark.parametrize(
    "methods",
    [
        {"list": unreachable, "patch": unreachable, "delete": unreachable},
        {"patch": refused("Forbidden")},
        {"delete": unreachable},
        {"delete": refused("Forbidden")},
    ],
    ids=["unreachable", "jobs-forbidden", "then-unreachable", "pods-forbidden"],
)
def test_stop_now_fails_if_the_cluster_does_not_accept_it(
    methods: dict[str, Any], run_on: Callable[[FakeClient], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    run_on(FakeClient(**methods))
    assert app.main(["stop", RUN, "--now"]) == 1
    expected = f"{RUN} was not killed: the cluster cannot be reached, or it refused the request; try again"
    assert expected in capsys.readouterr().err


def test_a_run_that_was_not_stopped_is_not_marked_as_stopped(run_on: Callable[[FakeClient], Path]) -> None:
    folder = run_on(FakeClient(list=unreachable))
    assert app.main(["stop", RUN, "--now"]) == 1
    assert not (folder / STOP_REASON).exists()


def test_jobs_and_pods_that_were_deleted_meanwhile_are_no_failure(run_on: Callable[[FakeClient], Path]) -> None:
    run_on(FakeClient(patch=refused("NotFound"), delete=refused("NotFound")))
    assert app.main(["stop", RUN, "--now"]) == 0


def test_an_interrupted_submission_cannot_be_stopped_if_the_cluster_does_not_respond(
    run_on: Callable[[FakeClient], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run_on(FakeClient(list=unreachable))
    replace(str(folder / "run.json"), {**run_folders.info(folder), "submitted": False})
    assert app.main(["stop", RUN]) == 1
    assert "cannot connect to the cluster" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fields", "limit"), [({}, 45.0), ({"notify": [{"url_from": "HOOK"}]}, 80.0), ({"track": {"mlflow": "a"}}, 80.0)]
)
def test_a_run_that_notifies_others_has_time_for_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], limit: float
) -> None:
    limits: list[float] = []
    replace(str(tmp_path / "plan.json"), {"limits": {"grace": 30.0}, **fields})
    monkeypatch.setattr(stop, "_request_stop", lambda _, seconds, *__: limits.append(seconds) or True)
    assert stop.stop(run_folders.Run(RUN, tmp_path))
    assert limits == [limit]
