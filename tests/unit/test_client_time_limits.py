"""Time limits of the Python API also end requests: to a server that accepts connections and never replies, and to a
credential plugin. Requests have no other limit here, so that a test ends only if the limit does."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lightkube.core.exceptions import ConfigError

from paceline import client
from paceline.backends.kubernetes.api import cluster as clusters
from paceline.backends.kubernetes.api import credential_plugin
from paceline.backends.kubernetes.runs import local_folder
from paceline.client.notebooks import live_table
from paceline.client.reading.find_run import Target
from support.runs import eventually
from support.worlds import make_plan

RUN = "digits-1"
pytestmark = pytest.mark.timeout(240)


def kubeconfig(folder: Path, port: int, **user: Any) -> Path:
    path = folder / "config"
    config = {
        "apiVersion": "v1", "kind": "Config", "current-context": "shared",
        "clusters": [{"name": "c", "cluster": {"server": f"https://127.0.0.1:{port}"}}],
        "users": [{"name": "me", "user": user}],
        "contexts": [{"name": "shared", "context": {"cluster": "c", "user": "me", "namespace": "team"}}],
    }  # fmt: skip
    path.write_text(json.dumps(config))
    return path


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("CONNECT_S", "RESPONSE_S"):
        monkeypatch.setattr(clusters, name, 1000.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        path = kubeconfig(tmp_path, server.getsockname()[1], token="any")
        monkeypatch.setenv("KUBECONFIG", str(path))
        yield path


@pytest.fixture
def run(config: Path) -> client.Run:
    folder = local_folder.make_folder(make_plan(1), "name: digits\n", clusters.connect(), RUN)
    local_folder.mark_submitted(folder)
    return client.get(RUN)


def waits(run: client.Run) -> list[Callable[[], object]]:
    return [
        lambda: run.wait(timeout=0.3),
        lambda: run.wait(timeout=0.0),
        lambda: list(run.events(follow=True, timeout=0.3)),
        lambda: list(run.logs(follow=True, timeout=0.3)),
        lambda: run.watch(timeout=0.3),
    ]


def test_a_cluster_that_does_not_respond(run: client.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_table, "_in_notebook", lambda: True)
    monkeypatch.setattr("IPython.display.display", lambda *_, **__: None)
    before = set(threading.enumerate())
    for wait in waits(run):
        with pytest.raises(client.WaitTimeout, match="digits-1 has not ended within"):
            wait()
    eventually("threads of requests end", lambda: set(threading.enumerate()) <= before)
    events = run.folder / "events.jsonl"
    assert not events.exists() or events.read_text() == "", "the limit is no problem of the cluster"


def test_a_run_that_has_to_be_found_first(config: Path) -> None:
    target = Target("kubernetes", "shared", "team", (config,))
    for wait in waits(client.Run(RUN, target))[:4]:
        with pytest.raises(client.WaitTimeout, match="digits-1 has not been found within"):
            wait()
    run = client.Run(RUN, target)
    with run._lock, pytest.raises(client.WaitTimeout, match="has not been found"):  # another thread searches it
        run.wait(timeout=0.05)


def test_a_credential_plugin_is_ended(run: client.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = []

    def plugin(single: Any, exec: Any, limit: float) -> dict[str, Any]:
        limits.append(limit)
        threading.Event().wait(limit)
        raise ConfigError("the credential plugin did not finish")

    port = int(json.loads((tmp_path / "config").read_text())["clusters"][0]["cluster"]["server"].rpartition(":")[2])
    kubeconfig(tmp_path, port, exec={"apiVersion": "client.authentication.k8s.io/v1", "command": "log-in"})
    monkeypatch.setattr(credential_plugin, "run", plugin)
    for timeout in (0.3, 3.0, 30.0):  # on a busy machine, the time may pass before the plugin is started
        with pytest.raises(client.WaitTimeout):
            run.wait(timeout=timeout)
        if limits:
            break
    assert limits and max(limits) <= timeout
