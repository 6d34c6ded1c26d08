"""The credential plugin of a kubeconfig, as a real program."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from lightkube.config.models import UserExec
from lightkube.core.exceptions import ConfigError
from lightkube.resources.batch_v1 import Job

from paceline.backends.kubernetes.api import credential_plugin, credential_renewal
from paceline.backends.kubernetes.api.cluster import Unreachable, connect
from support.api_server import RUN, UID, serving
from support.runs import alive, eventually, kill

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
        ("no program", "cannot be started"),
        (None, "does not exist: install log-in"),
    ],
)
def test_a_plugin_that_fails_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, problem: str
) -> None:
    assert problem in failure_of(script, tmp_path, monkeypatch)


def test_a_plugin_that_does_not_finish_is_reported_with_what_it_has_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(credential_plugin, "LIMIT_S", 0.5)
    assert "did not finish within 0.5 s" in failure_of("#!/bin/sh\nexec sleep 60\n", tmp_path, monkeypatch)
    for limit in (0.5, 5, 50):  # on a busy machine, it prints later
        monkeypatch.setattr(credential_plugin, "LIMIT_S", limit)
        script = f"#!/bin/sh\necho open http://a/ >&2; touch {tmp_path}/printed; exec sleep 60\n"
        failure = failure_of(script, tmp_path, monkeypatch)
        if (tmp_path / "printed").exists():
            break
    assert f"did not finish within {limit} s: open http://a/" in failure


def failure_of(script: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
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
    assert "no credentials for context shared: " in str(error.value)
    return str(error.value)


PROMPT = """#!/bin/sh
echo 'open http://127.0.0.1/device and enter ABCD' >&2
"""


def test_on_a_terminal_the_plugins_prompt_is_shown_while_it_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    ours, theirs = pty.openpty()
    with open(theirs, "r+b", buffering=0) as terminal, open(ours, "rb", buffering=0) as screen:
        for name, mode in (("stdin", "r"), ("stderr", "w")):
            monkeypatch.setattr(sys, name, open(terminal.fileno(), mode, closefd=False))  # noqa: SIM115
        (tmp_path / "secret").write_text("first")
        write(tmp_path / "log-in", PROMPT + SCRIPT)
        with serving(tmp_path) as server:
            server.kubeconfig(tmp_path / "config", exec=EXEC)
            server.allow("first")
            cluster = connect()
            assert cluster.find(Job, RUN).metadata.uid == UID
            cluster.close()
        assert screen.read(1000) == b"open http://127.0.0.1/device and enter ABCD\r\n"


def test_a_plugin_that_leaves_a_process_running_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a helper that keeps a session: it inherits the plugin's output."""
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    monkeypatch.setattr(credential_plugin, "LIMIT_S", 60.0)
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


# Leaves a child that ignores Ctrl-C, as shells start it, and the end of the terminal; then it asks on the terminal.
LEAVING = """#!/bin/sh
nohup sleep 600 > /dev/null 2>&1 &
echo $! > child.new
mv child.new child
printf 'password: ' > /dev/tty
read answer < /dev/tty
printf '{"status": {"token": "%s"}}' "$answer"
"""
# Its standard streams are a terminal, which it makes its own.
PROGRAM = """
import fcntl, sys, termios, threading
from lightkube.config.models import UserExec
from paceline.backends.kubernetes.api import credential_plugin

fcntl.ioctl(0, termios.TIOCSCTTY, 0)
plugin = UserExec(apiVersion="client.authentication.k8s.io/v1", command="log-in")
run = lambda: print(credential_plugin.run(None, plugin)["token"], flush=True)
if sys.argv[1] == "main":
    run()
else:
    threading.Thread(target=run, daemon=True).start()
    sys.stdin.readline()
"""


def child_of_plugin(folder: Path) -> int:
    return int((folder / "child").read_text())


@contextmanager
def on_a_terminal(folder: Path, thread: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A program that waits for its plugin, in this thread, and its terminal."""
    write(folder / "log-in", LEAVING)
    ours, theirs = pty.openpty()
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    command = [sys.executable, "-c", PROGRAM, thread]
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder, env=environment, start_new_session=True
    )
    os.close(theirs)
    try:
        yield process, ours
    finally:
        process.kill()
        process.wait(60)
        os.close(ours)
        if (folder / "child").exists():
            kill(child_of_plugin(folder))


def shown(terminal: int, text: bytes) -> bytes:
    """What the terminal shows, up to this text."""
    output = b""
    while text not in output:
        output += os.read(terminal, 1000)
    return output


def test_a_plugin_can_ask_on_the_terminal_and_leave_a_process_running(tmp_path: Path) -> None:
    with on_a_terminal(tmp_path, "main") as (process, terminal):
        shown(terminal, b"password: ")
        os.write(terminal, b"first\n")
        shown(terminal, b"first\r\nfirst\r\n")  # what was typed, and what it became
        assert process.wait(60) == 0 and alive(child_of_plugin(tmp_path))


@pytest.mark.parametrize("thread", ["main", "other"])
def test_after_ctrl_c_nothing_of_a_plugin_is_left(tmp_path: Path, thread: str) -> None:
    with on_a_terminal(tmp_path, thread) as (process, terminal):
        shown(terminal, b"password: ")
        os.write(terminal, b"\x03")
        assert process.wait(60) != 0
        eventually("its child has ended", lambda: not alive(child_of_plugin(tmp_path)))


def test_a_plugin_that_fails_leaves_no_process_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends the plugin before this process knows of it."""
    write(tmp_path / "log-in", "#!/bin/sh\nsleep 600 &\necho $! > child\nkill -INT $$\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    plugin = UserExec(apiVersion=EXEC["apiVersion"], command="log-in")
    single: Any = None  # only needed for commands with a path
    try:
        with pytest.raises(ConfigError, match="failed with exit code -2"):
            credential_plugin.run(single, plugin)
        eventually("its child has ended", lambda: not alive(child_of_plugin(tmp_path)))
    finally:
        kill(child_of_plugin(tmp_path))


def test_at_its_time_limit_a_plugin_is_ended_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "log-in", "#!/bin/sh\nsleep 600 &\necho $! > new\nmv new child\nwait\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    plugin = UserExec(apiVersion=EXEC["apiVersion"], command="log-in")
    single: Any = None  # only needed for commands with a path
    for limit in (0.5, 5.0, 50.0):  # on a busy machine, its child starts later
        with pytest.raises(ConfigError, match=rf"did not finish within {limit:g} s"):
            credential_plugin.run(single, plugin, limit)
        if (tmp_path / "child").exists():
            break
    try:
        eventually("its child has ended", lambda: not alive(child_of_plugin(tmp_path)))
    finally:
        kill(child_of_plugin(tmp_path))
