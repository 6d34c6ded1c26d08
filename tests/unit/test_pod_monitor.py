"""The PodMonitor of a run: created where the cluster knows it and the user may, else the reason is given."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from paceline import plan as plans
from paceline.backends.kubernetes.api.cluster import Cluster, connect
from paceline.client.submission.kubernetes_submission import monitor_metrics
from paceline.job import load_text, planning

RUN = "digits-3f9a"
JOB = """
{name: digits, framework: none, command: [python], code: image, metrics: true,
 kubernetes: {image: python, labels: {release: prometheus}}}
"""


class Api:
    """Answers that it knows PodMonitors or not, and how it creates one."""

    def __init__(self) -> None:
        self.knows, self.code = 200, 201
        self.received: list[tuple[str, Any]] = []
        api = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(api.knows if self.path == "/apis/monitoring.coreos.com/v1" else 500)

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                api.received.append((self.path, json.loads(body)))
                self._answer(api.code)

            def _answer(self, code: int) -> None:
                self.send_response(code)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)


@pytest.fixture
def api() -> Iterator[Api]:
    api = Api()
    thread = threading.Thread(target=api.server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield api
    api.server.shutdown()
    api.server.server_close()
    thread.join()


@pytest.fixture
def cluster(api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    url = f"http://127.0.0.1:{api.server.server_address[1]}"
    config = {
        "apiVersion": "v1", "kind": "Config", "current-context": "test",
        "clusters": [{"name": "test", "cluster": {"server": url}}],
        "users": [{"name": "test", "user": {"token": "a"}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test", "namespace": "team-a"}}],
    }  # fmt: skip
    (tmp_path / "kubeconfig").write_text(json.dumps(config))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    return connect()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / RUN
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"uid": "1234"}))
    return folder


@pytest.fixture
def plan(tmp_path: Path) -> plans.Plan:
    return planning.make_plan(load_text(JOB, "job.yaml", tmp_path, cluster=True).job)


def test_it_selects_the_captain_and_belongs_to_the_run(
    api: Api, cluster: Cluster, folder: Path, plan: plans.Plan
) -> None:
    assert monitor_metrics(cluster, folder, plan) == ""
    [(path, monitor)] = api.received
    assert path == "/apis/monitoring.coreos.com/v1/namespaces/team-a/podmonitors"
    assert monitor["metadata"]["name"] == "digits-3f9a-metrics"
    [owner] = monitor["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["uid"]) == ("Job", RUN, "1234")
    assert monitor["metadata"]["labels"].items() >= {"release": "prometheus", "paceline.dev/run": RUN}.items()
    labels = {"paceline.dev/run": RUN, "paceline.dev/role": "captain"}
    endpoints = [{"port": "metrics", "path": "/metrics"}]
    assert monitor["spec"] == {"selector": {"matchLabels": labels}, "podMetricsEndpoints": endpoints}


@pytest.mark.parametrize(
    ("knows", "code", "reason"),
    [
        (404, 403, "this cluster has no PodMonitor (no Prometheus Operator): "),
        (200, 403, "you have no permission to create podmonitors.monitoring.coreos.com in team-a: "),
        (403, 422, "the PodMonitor was refused (HTTP 422): "),
    ],
)
def test_without_it_the_run_goes_on_with_a_note(
    api: Api, cluster: Cluster, folder: Path, plan: plans.Plan, knows: int, code: int, reason: str
) -> None:
    api.knows, api.code = knows, code
    annotations = "the annotations prometheus.io/scrape, port and path of pods"
    expected = f"{reason}Prometheus finds the captain only if it reads {annotations}"
    assert monitor_metrics(cluster, folder, plan) == expected


def test_a_cluster_that_does_not_answer_is_a_note_too(cluster: Cluster, folder: Path, plan: plans.Plan) -> None:
    away = replace(cluster, server="http://127.0.0.1:1")
    assert "cannot connect to the cluster" in monitor_metrics(away, folder, plan)


def test_a_run_without_metrics_has_none(api: Api, cluster: Cluster, folder: Path, plan: plans.Plan) -> None:
    assert monitor_metrics(cluster, folder, replace(plan, metrics=False)) == "" and not api.received
