"""Credentials that are replaced while a run is followed: a real HTTPS server accepts only the newest."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lightkube.core.exceptions import ConfigError
from lightkube.resources.batch_v1 import Job

from paceline import plan as plans
from paceline.agent.run_files import replace
from paceline.backends.kubernetes.api import credential_plugin, credential_renewal, raw_requests
from paceline.backends.kubernetes.api.cluster import NoCredentials, Refused, Unreachable, connect
from paceline.backends.kubernetes.runs import local_folder, mirror
from paceline.client.reading.refreshed_folder import followed
from paceline.job import load_text, planning
from paceline.view.files.run_folders import Run
from support.api_server import RUN, UID, ApiServer, serving
from support.loopback_server import LoopbackServer, SilentHandler
from support.runs import eventually

pytestmark = pytest.mark.timeout(120)
JOB = "name: digits\nframework: none\ncommand: [python, -V]\nroles: {worker: {replicas: 1}}\nkubernetes: {image: any}\n"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    monkeypatch.setattr(mirror, "RETRY_S", 0.02)
    monkeypatch.setattr(mirror, "LONGEST_RETRY_S", 0.1)
    with serving(tmp_path) as server:
        yield server


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / RUN
    (folder / "logs").mkdir(parents=True)
    identity = {"run": RUN, "on": "kubernetes", "context": "shared", "namespace": "team", "uid": UID, "submitted": True}
    replace(str(folder / "run.json"), identity)
    (folder / "plan.json").write_text(
        plans.to_json(planning.make_plan(load_text(JOB, "job.yaml", folder, cluster=True).job))
    )
    return folder


class Plugin:
    """A stand-in for the program: tests in tests/local start a real one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.status: dict[str, Any] | Exception = {}
        self.runs = 0
        monkeypatch.setattr(credential_plugin, "run", self._run)
        monkeypatch.setattr(credential_renewal, "PLUGIN_PAUSE_S", 0.0)

    def _run(self, single: Any, plugin: Any, limit: float) -> dict[str, Any]:
        self.runs += 1
        self.limit = limit
        if isinstance(self.status, Exception):
            raise self.status
        return self.status


EXEC = {"apiVersion": "client.authentication.k8s.io/v1", "command": "log-in"}
Rotate = Callable[[], None]


def a_token(server: ApiServer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Rotate:
    server.kubeconfig(folder / "config", token="old")
    return lambda: void(server.kubeconfig(folder / "config", token="new"))


def a_token_file(server: ApiServer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Rotate:
    server.kubeconfig(folder / "config", tokenFile="token")  # relative to the kubeconfig
    (folder / "token").write_text("old\n")
    return lambda: void((folder / "token").write_text("new\n"))


def a_password(server: ApiServer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Rotate:
    server.kubeconfig(folder / "config", username="old", password=":")
    server.allow("old::")
    return lambda: void(server.kubeconfig(folder / "config", token="new"))


def a_plugin(server: ApiServer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Rotate:
    plugin = Plugin(monkeypatch)
    server.kubeconfig(folder / "config", exec=EXEC)
    plugin.status = {"token": "old"}
    return lambda: setattr(plugin, "status", {"token": "new"})


def a_certificate(server: ApiServer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Rotate:
    server.authority.write("old", "client")
    server.kubeconfig(folder / "config", **{"client-certificate": "client.pem", "client-key": "client.key"})
    return lambda: void(server.authority.write("new", "client"))


def certificate_data(server: ApiServer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Rotate:
    def write(name: str) -> None:
        chain, key = (base64.b64encode(path.read_bytes()).decode() for path in server.authority.write(name))
        server.kubeconfig(folder / "config", **{"client-certificate-data": chain, "client-key-data": key})

    write("old")
    return lambda: write("new")


def a_plugin_with_certificates(server: ApiServer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Rotate:
    plugin = Plugin(monkeypatch)

    def write(name: str) -> None:
        chain, key = (path.read_text() for path in server.authority.write(name))
        plugin.status = {"clientCertificateData": chain, "clientKeyData": key}

    server.kubeconfig(folder / "config", exec=EXEC)
    write("old")
    return lambda: write("new")


KINDS = (
    a_token, a_token_file, a_password, a_plugin, a_certificate, certificate_data, a_plugin_with_certificates,
)  # fmt: skip


def void(_: object) -> None:
    pass


def event(number: int) -> dict[str, Any]:
    at = f"2026-11-17T12:00:{number:02}.000Z"
    return {"at": at, "event": "step", "generation": 1, "task": "worker-0", "step": number}


def steps(folder: Path) -> list[int]:
    try:
        events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    except FileNotFoundError:
        return []
    return [each["step"] for each in events if each["event"] == "step"]


def notes(folder: Path) -> list[str]:
    path = folder / "events.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [each["text"] for each in events if each["event"] == "note"]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("is_late", [False, True], ids=["before", "after"])
def test_following_goes_on_with_new_credentials(
    server: ApiServer, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, is_late: bool
) -> None:
    """They are replaced before the cluster refuses the old ones, or after."""
    server.allow("old")
    rotate = kind(server, tmp_path, monkeypatch)
    server.write(event(1))
    with local_folder.followed(folder) as running:
        assert running is not None
        eventually("the first event", lambda: steps(folder) == [1])
        if is_late:
            server.allow("new")
            eventually("a note", lambda: "log in to the cluster again" in "".join(notes(folder)))
            rotate()
        else:
            rotate()
            server.allow("new")
        server.write(event(2))
        eventually("the next event", lambda: steps(folder) == [1, 2])
        assert not running.ended(0)
    assert len([text for text in notes(folder) if "no valid credentials for context shared" in text]) == is_late


def test_a_certificate_that_ends_is_replaced_although_the_handshake_fails(server: ApiServer, tmp_path: Path) -> None:
    server.allow("client")
    server.authority.write("client", hours=-1)
    server.kubeconfig(tmp_path / "config", **{"client-certificate": "client.pem", "client-key": "client.key"})
    cluster = connect()
    with pytest.raises(Unreachable, match="cannot read the Job"):
        cluster.find(Job, RUN)
    cluster.access.credentials._checked_at = -1e9  # type: ignore[union-attr]  # a while later
    server.authority.write("client")
    assert cluster.find(Job, RUN).metadata.uid == UID
    cluster.close()


def test_a_credential_that_stays_refused_is_sent_once(server: ApiServer, tmp_path: Path) -> None:
    server.kubeconfig(tmp_path / "config", token="old")
    cluster = connect()
    with pytest.raises(Refused, match="log in to the cluster again"):
        cluster.find(Job, RUN)
    assert len(server.refused) == 1
    server.kubeconfig(tmp_path / "config", token="also refused")
    with pytest.raises(Refused):
        cluster.find(Job, RUN)
    assert len(server.refused) == 3
    cluster.close()


@pytest.mark.parametrize("kind", ["token", "tokenFile", "exec"])
def test_a_token_that_cannot_be_sent_is_not_shown(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """An HTTP library quotes the header that it rejects."""
    token = "secret\nof mine"
    (tmp_path / "token").write_text(token)
    Plugin(monkeypatch).status = {"token": token}
    server.kubeconfig(tmp_path / "config", **{kind: {"token": token, "tokenFile": "token", "exec": EXEC}[kind]})
    with pytest.raises(NoCredentials, match="the token contains a character that is not allowed") as caught:
        connect().find(Job, RUN)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("name", ["token", "client.pem", "client.key"])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(server: ApiServer, tmp_path: Path, name: str) -> None:
    server.authority.write("old", "client")
    server.kubeconfig(
        tmp_path / "config", tokenFile="token", **{"client-certificate": "client.pem", "client-key": "client.key"}
    )
    (tmp_path / "token").write_text("old")
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(NoCredentials, match="not a regular file"):
        connect().find(Job, RUN)


def test_a_redirect_is_neither_followed_nor_a_lack_of_credentials(server: ApiServer, tmp_path: Path) -> None:
    """The token would go to whichever server it names. Such an answer has no Content-Type."""
    answers: list[str] = []

    class Handler(SilentHandler):
        def do_GET(self) -> None:
            answers.append(self.path)
            self.send_response(307)
            self.send_header("Location", f"{server.url}{self.path}")
            self.send_header("Content-Length", "0")
            self.end_headers()

    elsewhere = LoopbackServer(Handler)
    try:
        server.kubeconfig(tmp_path / "config", token="secret")
        text = (tmp_path / "config").read_text()
        (tmp_path / "config").write_text(text.replace(server.url, elsewhere.url))
        with pytest.raises(Unreachable, match="did not answer as a Kubernetes API server does") as caught:
            connect().find(Job, RUN)
    finally:
        elsewhere.close()
    assert not isinstance(caught.value, NoCredentials)
    assert len(answers) == 1 and not server.refused


def test_a_plugin_is_not_started_again_and_again(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = Plugin(monkeypatch)
    monkeypatch.setattr(credential_renewal, "PLUGIN_PAUSE_S", 1000.0)
    server.kubeconfig(tmp_path / "config", exec=EXEC)
    plugin.status = {"token": "refused", "expirationTimestamp": "2020-01-01T00:00:00Z"}
    cluster = connect()
    for _ in range(3):
        with pytest.raises(Refused):
            cluster.find(Job, RUN)
    assert (plugin.runs, len(server.refused)) == (1, 3)
    plugin.status = ConfigError("the credential plugin log-in failed with exit code 1: the session has expired")
    cluster = connect()
    for _ in range(3):
        with pytest.raises(NoCredentials, match=r"no credentials for context shared: .* the session has expired"):
            cluster.find(Job, RUN)
    assert plugin.runs == 2


def test_a_token_that_expires_soon_is_replaced_before_it_is_refused(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = Plugin(monkeypatch)
    server.allow("new", "old")
    server.kubeconfig(tmp_path / "config", exec=EXEC)
    cluster = connect()
    for seconds, runs in ((1, 1), (1000, 2), (1000, 2)):
        plugin.status = {"token": "old", "expirationTimestamp": _time(seconds)}
        assert cluster.find(Job, RUN) is not None
        assert plugin.runs == runs
    assert server.refused == []
    cluster.close()


def _time(seconds: float) -> str:
    return (datetime.now(UTC) + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


@pytest.mark.parametrize("damage", ["", "{", "clusters: []", "another server", "half a certificate"])
def test_a_kubeconfig_that_is_being_written_is_read_again_later(server: ApiServer, tmp_path: Path, damage: str) -> None:
    config = tmp_path / "config"
    server.kubeconfig(config, token="old")
    cluster = connect()
    if damage == "another server":
        config.write_text(server.kubeconfig(config, token="new").read_text().replace(server.url, "https://127.0.0.1:1"))
    elif damage == "half a certificate":
        server.authority.write("client")
        server.authority.write("other")
        server.kubeconfig(config, **{"client-certificate": "client.pem", "client-key": "other.key"})
    else:
        config.write_text(damage)
    server.allow("new")
    with pytest.raises(Refused):
        cluster.find(Job, RUN)
    assert len(server.refused) == 1
    server.kubeconfig(config, token="new")
    assert cluster.find(Job, RUN) is not None
    cluster.close()


def test_other_requests_use_new_credentials_too(server: ApiServer, tmp_path: Path) -> None:
    server.allow("old")
    server.kubeconfig(tmp_path / "config", token="old")
    cluster = connect()
    path = f"/apis/batch/v1/namespaces/team/jobs/{RUN}"

    async def get() -> None:
        async with raw_requests.async_client(cluster, 30) as client:
            assert (await client.get(path)).json()["metadata"]["uid"] == UID
            server.allow("new")
            server.kubeconfig(tmp_path / "config", token="new")
            assert (await client.get(path)).json()["metadata"]["uid"] == UID

    with raw_requests.client(cluster, 30) as client:
        assert client.get(path).status_code == 200
        asyncio.run(get())
        assert client.get(path).status_code == 200
    assert len(server.refused) == 1, "the second client knows what the first one has read"


def test_a_run_that_is_no_longer_followed_leaves_no_thread(
    server: ApiServer, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.allow("old")
    server.kubeconfig(tmp_path / "config", token="old")
    before = {thread for thread in threading.enumerate() if not _is_of_server(thread)}
    for number in range(3):
        server.write(event(number))
        with followed(Run(RUN, folder), follow=True) as has_ended:
            eventually("the event", partial(_has_step, folder, number))
            assert not has_ended()
        assert {thread for thread in threading.enumerate() if not _is_of_server(thread)} <= before
    assert notes(folder) == []


def _has_step(folder: Path, number: int) -> bool:
    return number in steps(folder)


def _is_of_server(thread: threading.Thread) -> bool:
    return "process_request" in thread.name
