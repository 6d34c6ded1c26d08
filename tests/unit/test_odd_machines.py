"""What this machine lacks is said before a run starts, and nothing is left behind."""

from __future__ import annotations

import errno
import io
import os
import socket
import threading
from pathlib import Path
from typing import Any, cast

import pytest

from paceline import job
from paceline.agent.transfers import requests as req
from paceline.agent.transfers.porter import Porter
from paceline.backends import local
from paceline.cli import follow
from paceline.job import planning
from paceline.storage.snapshots.manifest import SnapshotId
from paceline.storage.snapshots.repository import SnapshotRepository
from paceline.storage.stores.folder import FolderStore
from paceline.storage.stores.protocol import StoreError
from paceline.view import machine_info
from paceline.view.text import terminal
from support.recorded import Done, call

JOB = """\
name: odd
framework: none
command: [python, train.py]
roles: {worker: {replicas: 2}}
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "job.yaml").write_text(JOB)
    (folder / "train.py").touch()
    return folder


def in_code(code: Path, *arguments: str, **env: str) -> Done:
    return call(code.parent / "home", *arguments, cwd=code, env={"XDG_CACHE_HOME": str(code.parent / "cache"), **env})


def refused(code: Path, *arguments: str, **env: str) -> str:
    done = in_code(code, *arguments, **env)
    assert done.returncode == 2 and done.stderr.startswith("error: "), done
    assert not (code.parent / "home").exists()
    return done.stderr


def test_10000_tasks_are_planned_but_not_started_on_a_small_machine(
    code: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = ("--set", "roles.worker.replicas=10000")
    assert "10000 workers" in in_code(code, "validate", "job.yaml", *many).stdout
    assert "worker-9999" in in_code(code, "plan", "job.yaml", *many).stdout
    assert "worker-9999" in in_code(code, "run", "--dry-run", "job.yaml", *many).stdout
    image = ("--set", "kubernetes.image=example.com/image", "--set", "code=image")
    assert "completions: 10000" in in_code(code, "render", "job.yaml", *many, *image).stdout
    monkeypatch.setattr(machine_info, "memory", lambda: 32 << 30)
    assert refused(code, "run", "job.yaml", *many) == (
        "error: 10000 tasks on 10000 hosts need at least 146 GiB of memory before they train, and this machine has "
        "32 GiB; lower replicas, or run with --on kubernetes\n"
    )
    monkeypatch.setattr(machine_info, "memory", lambda: None)
    monkeypatch.setattr(machine_info, "processes", lambda: 4000)
    assert "need at least 30000 processes, and the limit here is 4000" in refused(code, "run", "job.yaml", *many)


def test_a_machine_without_loopback_is_named(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def create_server(*_: Any) -> Any:
        raise OSError(errno.EADDRNOTAVAIL, "something else")

    monkeypatch.setattr(socket, "create_server", create_server)
    assert "127.0.0.1 cannot be used: Cannot assign requested address; bring up" in refused(code, "run", "job.yaml")


def test_a_path_that_is_too_long_is_named(code: Path, tmp_path: Path) -> None:
    home = f"{tmp_path}/" + "x/" * 1950
    error = refused(code, "run", "job.yaml", PACELINE_HOME=home)
    length = len(f"{home}runs")
    assert f"the path of the folder for runs is too long: {length} bytes; at most 3696 are allowed" in error
    assert not (tmp_path / "x").exists()
    done = in_code(code, "validate", "x" * 4000)
    assert done.returncode == 2 and "file name too long" in done.stderr


def test_a_user_without_a_home_is_told_what_to_set(code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home(*_: Any) -> Any:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr(Path, "expanduser", no_home)
    message = "error: this user has no home folder; set HOME, or PACELINE_HOME to a folder for runs\n"
    for verb in (("run", "job.yaml"), ("ls",), ("status",), ("stop",), ("delete", "--finished")):
        assert refused(code, *verb, PACELINE_HOME="") == message
    assert in_code(code, "run", "--dry-run", "job.yaml", PACELINE_HOME="").returncode == 0


def test_a_run_that_cannot_be_created_leaves_no_folder(
    code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    planned = planning.make_plan(job.load(code / "job.yaml").job)
    existing, _ = local.create(planned, JOB, "odd-existing")

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(local.CannotRun, match="No space left on device"):
            local.create(planned, JOB)
    with monkeypatch.context() as patch:
        patch.setattr("paceline.backends.snapshot_origin.taken", full)
        with pytest.raises(local.CannotRun, match="No space left on device"):
            local.create(planned, JOB)
    run, folder = local.create(planned, JOB)
    with monkeypatch.context() as patch:
        patch.setattr("paceline.agent.free_ports.free_port", full)
        with pytest.raises(local.CannotRun, match="cannot start the run: No space left on device"):
            local.start(planned, run, folder, detach=True)
    assert [path.name for path in (tmp_path / "home/runs").iterdir()] == [existing]


class Allowed:
    """How many more threads can be started."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
        self.count, self.started, start = count, list[threading.Thread](), threading.Thread.start

        def start_or_fail(thread: threading.Thread) -> None:
            if len(self.started) >= self.count:
                raise RuntimeError("can't start new thread")
            self.started.append(thread)
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", start_or_fail)


def test_a_machine_that_allows_no_more_threads_stops_no_snapshots_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots = SnapshotRepository(FolderStore(str(tmp_path / "store")), "odd")
    saved = tmp_path / "saved"
    saved.mkdir()
    for name in ("a", "b"):
        (saved / name).touch()
    allowed = Allowed(monkeypatch, 2)
    with pytest.raises(StoreError, match="this machine allows no more threads") as failed:
        Porter(snapshots, snapshots, lambda *_: None)
    assert failed.value.is_transient
    for thread in allowed.started:
        thread.join(60)
        assert not thread.is_alive()
    send = req.SendPart(SnapshotId(1, 1), "worker-0", str(saved))
    answer = Porter(snapshots, snapshots, lambda *_: None, lanes=()).execute(send)
    assert isinstance(answer, req.Failure) and answer.passing and "allows no more threads" in answer.text
    allowed.count = 100
    assert isinstance(Porter(snapshots, snapshots, lambda *_: None, lanes=()).execute(send), req.PartSent)


def test_ctrl_c_stops_a_run_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter((False, False, True))

    class Running:
        def stop(self, reason: str, interrupt: bool = False) -> bool:
            return next(answers)

    Allowed(monkeypatch, 0)
    signals = follow.Signals()
    signals.stop_requested = True
    stopping = follow.Stopping(cast(Any, Running()), 30.0, terminal.Screen(io.StringIO()))
    for _ in range(5):
        stopping.update(signals, False)
    assert next(answers, None) is None


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError()])
def test_exhausted_threads_and_memory_are_no_bug(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def exhausted(*_: Any) -> Any:
        raise error

    monkeypatch.setattr("paceline.view.files.run_folders.all_runs", exhausted)
    done = call(tmp_path, "ls")
    assert done.returncode == 1 and done.stderr.startswith("error: ") and "bug" not in done.stderr


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EAGAIN, errno.ENOMEM])
def test_an_exhausted_limit_is_no_bug(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def exhausted(*_: Any) -> Any:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("paceline.view.files.run_folders.all_runs", exhausted)
    done = call(tmp_path, "ls")
    assert (
        done.returncode == 1 and done.stderr.startswith(f"error: {os.strerror(number)}; ") and "bug" not in done.stderr
    )
