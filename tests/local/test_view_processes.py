"""The verbs that read runs, as processes: what they load, how much memory they use, how they end."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.storage.stores.folder import FolderStore
from support import committed, recorded
from support.recorded import REPORT, at

LOGS = {"worker-0": f"{at(1)} g1 | hello\n", "worker-1": f"{at(2)} g1 | again\n"}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Contains one run and its snapshots."""
    folder = recorded.write(tmp_path, "digits-3f9a", report=REPORT, logs=LOGS)
    committed.life(FolderStore(str(folder / "snapshots")), tmp_path / "scratch")
    return tmp_path


def test_following_ends_with_the_run(tmp_path: Path) -> None:
    folder = recorded.write(tmp_path, logs={"worker-0": f"{at(1)} g1 | first\n"}, events=recorded.LIFE[:5])
    with recorded.supervised(folder):
        logs = subprocess.Popen(
            recorded.paceline_command("logs", "-f"),
            env=recorded.environment(tmp_path),
            stdout=subprocess.PIPE,
            text=True,
        )
        events = subprocess.Popen(
            recorded.paceline_command("events", "-f"),
            env=recorded.environment(tmp_path),
            stdout=subprocess.PIPE,
            text=True,
        )
        assert logs.stdout is not None and events.stdout is not None
        assert logs.stdout.readline() == "worker-0    | first\n"
        assert (
            events.stdout.readline()
            == "04:30:00 g0   digits-3f9a started: 3 tasks on 3 hosts (tensorflow multi-worker)\n"
        )
        with open(folder / "logs" / "worker-1.log", "a") as file:
            file.write(f"{at(2)} g1 | second\n")
        with open(folder / "events.jsonl", "a") as file:
            file.write(json.dumps(recorded.KILLED) + "\n" + '{"half')
        assert logs.stdout.readline() == "worker-1    | second\n"
        assert "worker-1 was killed by SIGKILL\n" in [events.stdout.readline()[14:] for _ in range(5)]
        assert logs.poll() is None and events.poll() is None
    assert logs.communicate(timeout=180)[0] == "" and events.communicate(timeout=180)[0] == ""
    assert (logs.returncode, events.returncode) == (0, 0)


@pytest.mark.parametrize("verb", ["logs", "events", "ls"])
def test_a_closed_pipe_ends_a_reader_silently(tmp_path: Path, verb: str) -> None:
    folder = recorded.write(
        tmp_path, events=recorded.LIFE * 3000, logs={"worker-0": f"{at(1)} g1 | {'x' * 100}\n" * 50_000}
    )
    with recorded.supervised(folder):
        reader = subprocess.Popen(
            recorded.paceline_command(verb), env=recorded.environment(tmp_path), stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert reader.stdout is not None and reader.stderr is not None
        assert reader.stdout.readline()
        reader.stdout.close()
        assert reader.stderr.read() == ""
        reader.stderr.close()
        assert reader.wait(180) in (0, -13)


@pytest.mark.parametrize(
    ("shell", "variables", "expected"),
    [
        ("bash", {"COMP_WORDS": "paceline status d", "COMP_CWORD": "2"}, "digits-3f9a"),
        ("zsh", {"_TYPER_COMPLETE_ARGS": "paceline logs dig"}, '"digits-3f9a":"succeeded"'),
        (
            "fish",
            {"_TYPER_COMPLETE_ARGS": "paceline stop ", "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
            "digits-3f9a\tsucceeded",
        ),
        ("bash", {"COMP_WORDS": "paceline logs digits-3f9a --task w", "COMP_CWORD": "4"}, "worker-0\nworker-1"),
        ("bash", {"COMP_WORDS": "paceline st", "COMP_CWORD": "1"}, "status\nstacks\nstop"),
    ],
)
def test_completion(home: Path, shell: str, variables: dict[str, str], expected: str) -> None:
    def complete(**variables: str) -> str:
        env = {**recorded.environment(home), **variables}
        result = subprocess.run(recorded.paceline_command(), env=env, capture_output=True, text=True, timeout=180)
        assert result.returncode == 0, result.stderr
        return result.stdout

    assert "paceline" in complete(_PACELINE_COMPLETE=f"source_{shell}")
    assert expected in complete(_PACELINE_COMPLETE=f"complete_{shell}", **variables)


def test_help_and_views_load_no_slow_modules(home: Path) -> None:
    slow = ("pydantic", "ruamel", "cryptography", "rich", "asyncio", "paceline.job", "paceline.backends")
    for arguments in (["--help"], ["stop", "--help"], ["ls"], ["status"], ["logs"], ["events"], ["wait"]):
        python = ["-X", "importtime", "-m", "paceline.cli", *arguments]
        result = subprocess.run(
            [sys.executable, *python],
            env=recorded.environment(home),
            capture_output=True,
            text=True,
            timeout=180,
        )
        loaded = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
        assert "paceline.cli.app" in loaded
        assert not {name for name in loaded if name.startswith(slow)}


def test_snapshots_in_a_folder_are_read_without_slow_modules(home: Path) -> None:
    slow = ("pydantic", "obstore", "lightkube", "cryptography", "rich", "asyncio", "paceline.job", "paceline.backends")
    for arguments in (["--help"], ["ls", "--help"], ["ls"], ["show"]):
        result = subprocess.run(
            [sys.executable, "-X", "importtime", "-m", "paceline.cli", "snapshots", *arguments],
            env=recorded.environment(home), capture_output=True, text=True, timeout=180,
        )  # fmt: skip
        loaded = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
        assert "paceline.cli.app" in loaded
        assert not {name for name in loaded if name.startswith(slow)}


def test_importing_is_cheap() -> None:
    code = "import sys, paceline.job; print([name for name in ('pydantic', 'ruamel.yaml') if name in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": ":".join(sys.path)}
    )
    assert result.stdout == "[]\n"


def test_a_log_larger_than_the_memory_allowed_is_read(tmp_path: Path) -> None:
    folder = recorded.write(tmp_path, logs={})
    block = f"{at(1)} g1 | {'x' * 900}\n".encode() * 1100
    with open(folder / "logs" / "worker-0.log", "wb") as file:
        for _ in range(200):
            file.write(block)
    count = "import sys; from pathlib import Path; from paceline.view.output.merged_logs import Logs\n"
    count += "print(sum(1 for _ in Logs(Path(sys.argv[1])).backlog()))"

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (120 << 20, 120 << 20))

    result = subprocess.run(
        [sys.executable, "-c", count, str(folder)], env=recorded.environment(tmp_path), preexec_fn=limit,
        capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert result.stdout == "220000\n", result.stderr
