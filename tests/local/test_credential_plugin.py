"""The credential plugin of a kubeconfig, as a real program."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from lightkube.resources.batch_v1 import Job

from paceline.backends.kubernetes.api import credential_plugin, credential_renewal
from paceline.backends.kubernetes.api.cluster import Unreachable, connect
from support.api_server import RUN, UID, serving

EXEC: dict[str, Any] = {
    "apiVersion": "client.authentication.k8s.io/v1",
    "command": "./log-in",  # relative to the kubeconfig
    "args": ["token"],
    "env": [{"name": "FIELD", "value": "status"}],
}
SCRIPT = """#!/bin/sh
[ -n "$KUBERNETES_EXEC_INFO" ] || exit 1
cd "$(dirname "$0")"
printf '{"kind": "ExecCredential", "%s": {"%s": "%s"}}' "$FIELD" "$1" "$(cat secret)"
"""


def write(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o700)


def test_a_plugin_runs_again_when_its_token_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    monkeypatch.setattr(credential_renewal, "PLUGIN_PAUSE_S", 0.0)
    write(tmp_path / "log-in", SCRIPT)
    with serving(tmp_path) as server:
        server.kubeconfig(tmp_path / "config", exec=EXEC)
        cluster = connect()
        for token in ("first", "second"):
            (tmp_path / "secret").write_text(token)
            server.allow(token)
            assert cluster.find(Job, RUN).metadata.uid == UID
        assert len(server.refused) == 1
        cluster.close()


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("#!/bin/sh\necho 'the session has expired' >&2; exit 3\n", "failed with exit code 3: the session has expired"),
        ("#!/bin/sh\necho nothing\n", "printed no credential"),
        ('#!/bin/sh\necho \'{"status": {"token": ""}}\'\n', "printed no credential"),
        ("#!/bin/sh\nexec sleep 60\n", "did not finish within 0.5 s"),
        ("no program", "cannot be started"),
        (None, "does not exist: install log-in"),
    ],
)
def test_a_plugin_that_fails_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, problem: str
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    monkeypatch.setattr(credential_plugin, "LIMIT_S", 0.5)
    if script is not None:
        write(tmp_path / "log-in", script)
    config = {
        "current-context": "shared",
        "contexts": [{"name": "shared", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:1"}}],
        "users": [{"name": "u", "user": {"exec": {**EXEC, "installHint": "install log-in"}}}],
    }
    (tmp_path / "config").write_text(json.dumps(config))
    with pytest.raises(Unreachable) as error:
        connect().find(Job, RUN)
    assert problem in str(error.value) and "no credentials for context shared: " in str(error.value)


def test_a_plugin_that_leaves_a_process_running_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a helper that keeps a session: it inherits the plugin's output."""
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    monkeypatch.setattr(credential_plugin, "LIMIT_S", 20.0)
    pid_file = tmp_path / "pid"
    write(tmp_path / "log-in", f"#!/bin/sh\nsleep 600 &\necho $! > {pid_file}\ncat > /dev/null\n" + SCRIPT)
    (tmp_path / "secret").write_text("first")
    try:
        with serving(tmp_path) as server:
            server.kubeconfig(tmp_path / "config", exec=EXEC)
            server.allow("first")
            cluster = connect()
            assert cluster.find(Job, RUN).metadata.uid == UID
            cluster.close()
    finally:
        os.kill(int(pid_file.read_text()), signal.SIGKILL)
