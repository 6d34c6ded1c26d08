"""agent.pyz in processes: joined by a container's command, enough for an agent and for `import paceline` on any Python
from 3.9 on."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline import plan as plans
from paceline.agent.options import Options
from paceline.backends import certificates
from paceline.backends.kubernetes import pods
from paceline.backends.kubernetes.archive import agent_archive
from paceline.backends.kubernetes.code import collect
from paceline.backends.kubernetes.config_maps import cut, parts
from paceline.backends.kubernetes.running import stop_command
from paceline.job import load_text
from support.environment import without
from support.pods import in_folders

pytestmark = pytest.mark.timeout(120)

LIMIT_S = 60.0
IMPORT_THEIR_FRAMEWORK = ("paceline.jax", "paceline.keras", "paceline.tensorflow", "paceline.torch")


def pythons() -> dict[str, str]:
    """One interpreter of each version that this machine has, the tests' own among them."""
    found = {"{}.{}".format(*sys.version_info[:2]): sys.executable}
    for path in sorted(Path.home().glob(".pyenv/versions/3.*/bin/python")):
        major, minor = path.parents[1].name.split(".")[:2]
        if minor.isdigit() and int(minor) >= 9:
            found.setdefault(f"{major}.{minor}", str(path))
    return found


PYTHONS = pythons()
every_python = pytest.mark.parametrize("python", PYTHONS.values(), ids=PYTHONS.keys())


@pytest.fixture
def pyz(tmp_path: Path) -> Path:
    path = tmp_path / "agent" / "agent.pyz"
    path.parent.mkdir()
    path.write_bytes(agent_archive())
    return path


def environment(tmp_path: Path, **more: str) -> dict[str, str]:
    """As in a bare image: nothing of these tests' own Python is to be found."""
    (tmp_path / "tmp").mkdir(exist_ok=True)
    kept = without("PACELINE", "PYTHON", "PYTEST")
    return {**kept, "TMPDIR": str(tmp_path / "tmp"), **more}


# ---- how a container gets and starts it


class Container:
    """The folders of one, and an image that has Python and no other program: not even `cat`."""

    def __init__(self, place: Path, python: str = sys.executable) -> None:
        self.place = place
        self.bin, self.agent, self.run = (place / name for name in ("bin", "agent", "run"))
        for folder in (self.bin, self.agent, self.run):
            folder.mkdir()
        (self.bin / "python3").symlink_to(Path(python).resolve())

    def carry(self, archive: bytes) -> None:
        """As a projected volume does, whose files are links below a folder that begins with a dot."""
        data = self.agent / "..data"
        data.mkdir(exist_ok=True)
        for files in parts("agent", cut(archive, 100), key="agent-").values():
            for name, part in files.items():
                (data / name).write_bytes(part)
                if not (self.agent / name).is_symlink():
                    (self.agent / name).symlink_to(f"..data/{name}")

    def execute(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        folders = {pods.AGENT_FOLDER: self.agent, pods.RUN_FOLDER: self.run, pods.LAST_WORDS: self.place / "words"}
        here = self.place / "image's own"
        here.mkdir(exist_ok=True)
        (here / "os.py").write_text("raise SystemExit('a module of the image, where the agent is to be joined')")
        env = {"PATH": str(self.bin), "COLOUR": "blue"}
        return subprocess.run(
            in_folders(command, folders), env=env, cwd=here, capture_output=True, text=True, timeout=LIMIT_S
        )


def packed(files: dict[str, str]) -> bytes:
    """More than ten parts."""
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w") as archive:
        for name, text in {**files, "more": "more" * 300}.items():
            archive.writestr(name, text)
    return memory.getvalue()


def program(text: str) -> bytes:
    return packed({"__main__.py": text})


@every_python
def test_a_container_joins_the_parts_and_starts_what_they_are(python: str, tmp_path: Path) -> None:
    container = Container(tmp_path, python)
    archive = program("import os, sys; print(sys.argv[1:], sys.argv[0], os.environ['COLOUR'], sys.flags.isolated)")
    container.carry(archive)
    assert len(list(container.agent.glob("agent-*"))) > 10
    joined = container.run / "agent.pyz"
    for what in ("pod", "export"):
        done = container.execute(pods.agent_command(what, 66))
        assert (done.returncode, done.stdout) == (0, f"['{what}'] {joined} blue 0\n"), done.stderr
        assert joined.read_bytes() == archive
    assert list(container.run.iterdir()) == [joined]


def test_a_container_that_starts_again_is_not_misled_by_what_the_one_before_has_left(tmp_path: Path) -> None:
    container = Container(tmp_path)
    container.carry(program("print('whole')"))
    (container.run / "agent.pyz").write_bytes(b"of the container before")
    (container.run / "agent.pyz.partial").write_bytes(b"killed while it wrote" * 1000)
    done = container.execute(pods.agent_command("pod", 66))
    assert (done.returncode, done.stdout) == (0, "whole\n"), done.stderr


def test_the_exit_code_is_that_of_the_agent(tmp_path: Path) -> None:
    container = Container(tmp_path)
    container.carry(program("raise SystemExit(64)"))
    assert container.execute(pods.agent_command("pod", 66)).returncode == 64


def test_what_is_called_python3_may_be_too_old(tmp_path: Path) -> None:
    container = Container(tmp_path)
    container.carry(program("print('found')"))
    (container.bin / "python3").rename(container.bin / "python")
    (container.bin / "python3").write_text("#!/bin/sh\necho Python 2 >&2\nexit 1\n")
    (container.bin / "python3").chmod(0o755)
    done = container.execute(pods.agent_command("pod", 66))
    assert (done.returncode, done.stdout, done.stderr) == (0, "found\n", "")


@pytest.mark.parametrize("code", [0, 66])
def test_an_image_without_python_says_so(code: int, tmp_path: Path) -> None:
    container = Container(tmp_path)
    container.carry(program(""))
    (container.bin / "python3").unlink()
    done = container.execute(pods.agent_command("pod", code))
    words = "paceline: there is no Python 3.9 or newer in this image: Paceline needs one on the PATH\n"
    assert (done.returncode, done.stdout, (tmp_path / "words").read_text()) == (code, words, words)


def test_where_the_parts_cannot_be_joined_the_container_is_tried_again(tmp_path: Path) -> None:
    """64 and 66 are for what another try would not change, and end the captain's Job."""
    done = Container(tmp_path).execute(pods.agent_command("pod", 66))
    assert done.returncode == 1 and f"No such file or directory: '{tmp_path}/agent/agent-*'" in done.stderr


@pytest.mark.parametrize("folder", ["run", "agent"])
def test_the_captain_is_asked_to_stop_by_the_agent_of_its_own_pod(folder: str, tmp_path: Path) -> None:
    """In `agent`: of a run that the version before has submitted."""
    container = Container(tmp_path)
    control = {"paceline/agent/control.py": "import sys; print(sys.argv[1:], __file__)"}
    archive = packed({"paceline/__init__.py": "", "paceline/agent/__init__.py": "", **control})
    (tmp_path / folder / "agent.pyz").write_bytes(archive)
    done = container.execute(stop_command("it's enough"))
    asked = ["127.0.0.1:7733", "/paceline/tls", "captain", "it's enough"]
    assert done.stdout == f"{asked} {tmp_path}/{folder}/agent.pyz/paceline/agent/control.py\n", done.stderr


# ---- what is in it


@every_python
def test_every_module_of_it_is_imported_without_anything_installed(python: str, pyz: Path) -> None:
    names = sorted(zipfile.ZipFile(pyz).namelist())
    modules = [name[:-3].replace("/", ".").replace(".__init__", "") for name in names if "/site/" not in name]
    modules.remove("__main__")
    modules = [name for name in modules if not name.startswith(IMPORT_THEIR_FRAMEWORK)]
    code = (
        f"import importlib.util, sys; sys.path.insert(0, {str(pyz)!r})\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        f"for name in {IMPORT_THEIR_FRAMEWORK!r}: assert importlib.util.find_spec(name), name\n"
        "print(sys.modules['paceline.agent.member'].__file__)"
    )
    done = subprocess.run([python, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.returncode, done.stdout.strip()) == (0, f"{pyz}/paceline/agent/member.py"), done.stderr


@every_python
def test_code_that_was_sent_is_put_in_place(python: str, pyz: Path, tmp_path: Path) -> None:
    sent = tmp_path / "sent"
    (sent / "lib").mkdir(parents=True)
    (sent / "lib" / ("ö" * 80 + ".py")).write_text("x = 1")
    (sent / "run.sh").write_text("true")
    (sent / "run.sh").chmod(0o755)
    (sent / "link").symlink_to("lib")
    parts = []
    for number, chunk in enumerate(collect(sent).chunks(64)):
        parts.append(str(tmp_path / f"part-{number:02}"))
        Path(parts[-1]).write_bytes(chunk)
    code = (
        f"import sys; sys.path.insert(0, {str(pyz)!r}); from paceline.agent.unpack import unpack\n"
        "unpack(sys.argv[2:], sys.argv[1]); unpack(sys.argv[2:], sys.argv[1])"
    )
    words = [python, "-S", "-c", code, str(tmp_path / "there"), *parts]
    env = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}  # as in many an image
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.returncode, done.stderr) == (0, "")
    assert collect(tmp_path / "there").archive() == collect(sent).archive()


# ---- `import paceline` in a program


@every_python
def test_on_the_path_it_is_a_library(python: str, pyz: Path, tmp_path: Path) -> None:
    code = "import sys; import paceline; paceline.report(step=1); print(paceline.__file__, paceline.__version__)"
    env = environment(tmp_path, PYTHONPATH=str(pyz))
    done = subprocess.run([python, "-S", "-c", code], env=env, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.stdout.split() == [f"{pyz}/paceline/__init__.py", paceline.__version__], done.stderr


def test_as_a_library_it_loads_next_to_nothing(pyz: Path, tmp_path: Path) -> None:
    code = "import sys; import paceline; print(*(name for name in sys.modules if name.startswith('paceline')))"
    env = environment(tmp_path, PYTHONPATH=str(pyz))
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=LIMIT_S)
    assert sorted(done.stdout.split()) == ["paceline", "paceline.runtime", "paceline.runtime.report"]


# ---- a whole run from it


class Run:
    """A captain and one member, started as the first processes of two pods are."""

    def __init__(self, python: str, pyz: Path, place: Path, program: str) -> None:
        self.folder = place / "run"
        work = place / "work"
        for folder in (self.folder, work):
            folder.mkdir()
        (work / "train.py").write_text(program)
        job = {"name": "tiny", "framework": "none", "command": ["python", "train.py"], "roles": {"worker": {}}}
        plan = plans.make(load_text(json.dumps(job), "job.yaml", work).job)
        (self.folder / "plan.json").write_text(plans.to_json(plan))
        certificates.make(self.folder / "tls")
        with socket.create_server(("127.0.0.1", 0)) as probe:
            captain = f"127.0.0.1:{probe.getsockname()[1]}"
        plan_path, tls = self.folder / "plan.json", self.folder / "tls"
        common = Options("tiny-0000", "captain", str(plan_path), str(self.folder), str(tls), captain, work=str(work))
        env = environment(place, PYTHONPATH=str(pyz))
        self.hosts = []
        with (self.folder / "agents.log").open("ab") as log:
            for host in ("captain", "worker-host-0"):
                words = [python, str(pyz), dataclasses.replace(common, host=host).to_json()]
                self.hosts.append(
                    subprocess.Popen(words, cwd=place, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
                )

    def wait_for(self, kind: str) -> dict[str, Any]:
        until = time.monotonic() + LIMIT_S
        while time.monotonic() < until:
            found = self.events(kind)
            if found:
                return found[-1]
            assert all(host.poll() is None for host in self.hosts), self.said()
            time.sleep(0.02)
        raise AssertionError(f"no {kind} within {LIMIT_S:g} s\n{self.said()}")

    def events(self, kind: str) -> list[dict[str, Any]]:
        path = self.folder / "events.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [event for event in map(json.loads, lines) if event["event"] == kind]

    def log(self) -> str:
        return (self.folder / "logs" / "worker-0.log").read_text()

    def succeeds(self) -> dict[str, Any]:
        try:
            codes = [host.wait(LIMIT_S) for host in self.hosts]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the run has not ended within {LIMIT_S:g} s\n{self.said()}") from None
        assert codes == [0, 0], self.said()
        report: dict[str, Any] = json.loads((self.folder / "report.json").read_text())
        assert report["status"] == "succeeded", self.said()
        return report

    def said(self) -> str:
        paths = [path for path in self.folder.rglob("*") if path.suffix in (".log", ".jsonl")]
        return "\n".join(f"{path.name}:\n{path.read_text(errors='replace')[-3000:]}" for path in paths)

    def end(self) -> None:
        """Nothing of it is left: a first process that is told to ends what is below it."""
        for host in self.hosts:
            with contextlib.suppress(ProcessLookupError):
                host.send_signal(signal.SIGUSR1)
        for host in self.hosts:
            try:
                host.wait(15)
            except subprocess.TimeoutExpired:
                host.kill()
                host.wait()


@contextlib.contextmanager
def started(python: str, pyz: Path, place: Path, program: str) -> Iterator[Run]:
    run = Run(python, pyz, place, program)
    try:
        yield run
    finally:
        run.end()


@every_python
def test_a_whole_run(python: str, pyz: Path, tmp_path: Path) -> None:
    program = (
        "import sys, paceline\n"
        "for step in range(1, 4):\n"
        "    paceline.report(step=step, loss=1 / step)\n"
        "print(paceline.__file__, '%d.%d' % sys.version_info[:2])\n"
    )
    with started(python, pyz, tmp_path, program) as run:
        report = run.succeeds()
        assert (report["steps"], report["restarts"]) == (3, [])
        version = next(name for name, path in PYTHONS.items() if path == python)
        assert f"{pyz}/paceline/__init__.py {version}" in run.log(), run.said()
        assert "cannot prepare" not in run.log()


@every_python
def test_what_runs_in_a_tasks_interpreter_is_there_too(python: str, pyz: Path, tmp_path: Path) -> None:
    """A spare takes all of it: the second attempt is forked from one."""
    program = (
        "import decimal, os, time, paceline\n"
        "first = os.environ['PACELINE_GENERATION'] == '1'\n"
        "for step in range(1, 1 + (10**6 if first else 3)):\n"
        "    paceline.report(step=step)\n"
        "    time.sleep(0.05 if first else 0)\n"
    )
    with started(python, pyz, tmp_path, program) as run:
        run.wait_for("spare-ready")
        os.kill(run.events("task-started")[0]["pid"], signal.SIGKILL)
        report = run.succeeds()
        assert [restart["cause"] for restart in report["restarts"]] == ["signal"], report
        assert [event["warm"] for event in run.events("task-started")] == [False, True], run.said()
