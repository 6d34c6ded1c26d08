"""Machines with few open files, another encoding, no home, no /dev/shm or no IPv4: a run works, or says why not."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from support.recorded import environment

JOB = """\
name: odd
framework: none
command: [python, "trän.py", "--grüße"]
env: {GRUSS: größe}
roles: {worker: {replicas: 2}}
"""
PROGRAM = """\
import os, sys
from paceline.runtime import snapshot_folders
if os.environ["PACELINE_RANK"] == "0":
    with snapshot_folders.writing(1, 1, {}) as folder:
        (folder / "x").write_text("1")
print(os.fsencode(sys.argv[1]), os.environb[b"GRUSS"])
"""
PACELINE = [sys.executable, "-m", "paceline.cli"]


@pytest.fixture
def code(tmp_path: Path) -> Path:
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "job.yaml").write_text(JOB, encoding="utf-8")
    (folder / "trän.py").write_text(PROGRAM, encoding="utf-8")
    return folder


def run(
    code: Path, *arguments: str, before: list[str] | None = None, preexec: Callable[[], None] | None = None, **env: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*(before or []), *PACELINE, *arguments], cwd=code, env={**environment(code.parent / "home"), **env},
        capture_output=True, text=True, encoding="utf-8", preexec_fn=preexec, timeout=120,
    )  # fmt: skip


def assert_succeeded(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0 and "succeeded" in done.stderr, done
    assert "step 1 committed" in done.stderr, done


def assert_refused(done: subprocess.CompletedProcess[str], code: Path, reason: str) -> None:
    """With the reason, and without a folder left behind."""
    assert done.returncode in (1, 2) and reason in done.stderr, done
    assert "bug" not in done.stderr and "Traceback" not in done.stderr, done
    assert not (code.parent / "home").exists()


def few_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))


def test_a_run_needs_few_open_files(code: Path) -> None:
    refused = run(code, "run", "job.yaml", "--set", "roles.worker.replicas=60", preexec=few_files)
    assert_refused(refused, code, "the captain of 60 hosts needs up to 84 open files, and the limit here is 64")
    assert_succeeded(run(code, "run", "job.yaml", preexec=few_files))


@pytest.mark.parametrize("locale", ["C", "POSIX"])
def test_job_files_are_utf8_in_every_locale(code: Path, locale: str) -> None:
    env = {"LC_ALL": locale, "LANG": locale, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = run(code, "validate", "job.yaml", **env)
    assert done.returncode == 0 and done.stdout + done.stderr == "job.yaml is valid: 2 workers\n", done
    if locale == "C":
        assert_succeeded(run(code, "run", "job.yaml", **env))
        logs = run(code, "logs", "--task", "worker-1", **env)
        assert logs.stdout == f"worker-1 | {'--grüße'.encode()!r} {'größe'.encode()!r}\n", logs


# ---- as root, with namespaces


def in_namespace(
    code: Path, script: str, options: str, *arguments: str, **env: str
) -> subprocess.CompletedProcess[str]:
    setup = f'{script}\nexec "$@"'
    return run(code, *arguments, before=["unshare", *options.split(), "sh", "-ec", setup, "sh"], **env)


@pytest.mark.long
def test_a_user_without_a_home(code: Path) -> None:
    options = "--user --map-user=12345 --map-group=12345"
    script = "unset HOME PACELINE_HOME XDG_CACHE_HOME"
    for verb in ("run", "ls", "status", "delete --finished"):
        done = in_namespace(code, script, options, *verb.split())
        assert_refused(done, code, "this user has no home folder; set HOME, or PACELINE_HOME to a folder for runs")
    for verb in ("validate", "plan", "run --dry-run"):
        assert in_namespace(code, script, options, *verb.split(), "job.yaml").returncode == 0
    assert_succeeded(in_namespace(code, "unset HOME XDG_CACHE_HOME", options, "run", "job.yaml"))


@pytest.mark.long
def test_a_read_only_home(code: Path) -> None:
    home = code.parent / "read-only"
    home.mkdir()
    script = f"mount -t tmpfs -o ro none {home}\nunset PACELINE_HOME XDG_CACHE_HOME\nexport HOME={home}"
    done = in_namespace(code, script, "-m", "run", "job.yaml")
    assert_refused(done, code, "Read-only file system; set PACELINE_HOME to another folder")
    for verb in ("ls", "validate", "plan"):
        assert in_namespace(code, script, "-m", verb, *(["job.yaml"] if verb != "ls" else [])).returncode == 0


@pytest.mark.long
def test_a_machine_without_shared_memory(code: Path) -> None:
    dev = code.parent / "dev"
    script = f"""
        mkdir {dev} && mount -t tmpfs none {dev}
        for name in null zero random urandom tty; do touch {dev}/$name; mount --bind /dev/$name {dev}/$name; done
        ln -s /proc/self/fd {dev}/fd && mount --rbind {dev} /dev && [ ! -e /dev/shm ]
    """
    assert_succeeded(in_namespace(code, script, "-m", "run", "job.yaml"))
    read_only = in_namespace(code, "mount -t tmpfs -o ro none /dev/shm", "-m", "run", "job.yaml")
    assert_succeeded(read_only)


@pytest.mark.long
@pytest.mark.parametrize("script", ["ip link set lo up && ip addr del 127.0.0.1/8 dev lo", "true"])
def test_a_machine_without_an_ipv4_loopback(code: Path, script: str) -> None:
    done = in_namespace(code, script, "-n", "run", "job.yaml")
    assert_refused(done, code, "127.0.0.1 cannot be used: ")


@pytest.mark.long
def test_a_working_folder_with_a_path_of_4000_characters(code: Path) -> None:
    folder = code
    while len(str(folder)) < 3750:
        folder = folder / ("d" * 200)
    folder = folder / ("e" * (4000 - len(str(folder)) - 1))
    folder.mkdir(parents=True)
    for path in code.iterdir():
        if path.is_file():
            (folder / path.name).write_bytes(path.read_bytes())
    assert len(str(folder)) == 4000
    env = environment(code.parent / "home")
    done = subprocess.run(
        [*PACELINE, "run", "job.yaml"], cwd=folder, env=env, capture_output=True, text=True, timeout=120
    )
    assert_succeeded(done)
    for verb in ("validate", "plan"):
        arguments = [*PACELINE, verb, str(folder / "job.yaml")]
        assert subprocess.run(arguments, env=env, cwd=os.sep, capture_output=True, timeout=120).returncode == 0
