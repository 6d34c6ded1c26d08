"""agent.pyz in real processes: a container's command joins its parts, and it is all that an agent and `import paceline`
need on Python 3.9 and newer."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import signal
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
from paceline.backends.kubernetes.objects import pods
from paceline.backends.kubernetes.objects.config_maps import cut, parts
from paceline.backends.kubernetes.payload.agent_archive import agent_archive
from paceline.backends.kubernetes.payload.code_archive import collect
from paceline.backends.kubernetes.runs.running import stop_command
from paceline.job import load_text, planning
from support.environment import without
from support.pods import in_folders
from support.ports import free_port

LIMIT_S = 120.0
IMPORT_THEIR_FRAMEWORK = ("paceline.jax", "paceline.keras", "paceline.tensorflow", "paceline.torch")


def pythons() -> dict[str, str]:
    """One interpreter of each version that this machine has, the tests' own among them."""
    interpreters = {"{}.{}".format(*sys.version_info[:2]): sys.executable}
    for path in sorted(Path.home().glob(".pyenv/versions/3.*/bin/python")):
        major, minor = path.parents[1].name.split(".")[:2]
        if minor.isdigit() and int(minor) >= 9:
            interpreters.setdefault(f"{major}.{minor}", str(path))
    return interpreters


PYTHONS = pythons()
every_python = pytest.mark.parametrize("python", PYTHONS.values(), ids=PYTHONS.keys())


@pytest.fixture
def pyz(tmp_path: Path) -> Path:
    path = tmp_path / "agent" / "agent.pyz"
    path.parent.mkdir()
    path.write_bytes(agent_archive())
    return path


def environment(tmp_path: Path, **more: str) -> dict[str, str]:
    """As in a bare image: without the variables of the Python that runs these tests."""
    (tmp_path / "tmp").mkdir(exist_ok=True)
    inherited = without("PACELINE", "PYTHON", "PYTEST")
    return {**inherited, "TMPDIR": str(tmp_path / "tmp"), **more}


# ---- how a container joins and starts the archive


class Container:
    """The folders of a container whose image has Python and no other program: not even `cat`."""

    def __init__(self, root: Path, python: str = sys.executable) -> None:
        self.root = root
        self.bin, self.agent, self.run = (root / name for name in ("bin", "agent", "run"))
        for folder in (self.bin, self.agent, self.run):
            folder.mkdir()
        (self.bin / "python3").symlink_to(Path(python).resolve())

    def mount(self, archive: bytes) -> None:
        """Like a projected volume: its files are links into a folder whose name begins with a dot."""
        data = self.agent / "..data"
        data.mkdir(exist_ok=True)
        for files in parts("agent", cut(archive, 100), key="agent-").values():
            for name, part in files.items():
                (data / name).write_bytes(part)
                if not (self.agent / name).is_symlink():
                    (self.agent / name).symlink_to(f"..data/{name}")

    def execute(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        folders = {pods.AGENT_FOLDER: self.agent, pods.RUN_FOLDER: self.run, pods.TERMINATION_LOG: self.root / "words"}
        work = self.root / "image's own"
        work.mkdir(exist_ok=True)
        (work / "os.py").write_text("raise SystemExit('a module of the image, where the agent is to be joined')")
        env = {"PATH": str(self.bin), "COLOUR": "blue"}
        return subprocess.run(
            in_folders(command, folders), env=env, cwd=work, capture_output=True, text=True, timeout=LIMIT_S
        )


def packed(files: dict[str, str]) -> bytes:
    """A zip archive of more than ten parts."""
    memory = io.BytesIO()
    with zipfile.ZipFile(memory, "w") as archive:
        for name, text in {**files, "more": "more" * 300}.items():
            archive.writestr(name, text)
    return memory.getvalue()


def program(text: str) -> bytes:
    return packed({"__main__.py": text})


@every_python
def test_a_container_joins_the_parts_and_starts_the_archive(python: str, tmp_path: Path) -> None:
    container = Container(tmp_path, python)
    archive = program("import os, sys; print(sys.argv[1:], sys.argv[0], os.environ['COLOUR'], sys.flags.isolated)")
    container.mount(archive)
    assert len(list(container.agent.glob("agent-*"))) > 10
    joined = container.run / "agent.pyz"
    for mode in ("pod", "export"):
        result = container.execute(pods.agent_command(mode, 66))
        assert (result.returncode, result.stdout) == (0, f"['{mode}'] {joined} blue 0\n"), result.stderr
        assert joined.read_bytes() == archive
    assert list(container.run.iterdir()) == [joined]


def test_a_restarted_container_ignores_the_files_of_the_previous_one(tmp_path: Path) -> None:
    container = Container(tmp_path)
    container.mount(program("print('whole')"))
    (container.run / "agent.pyz").write_bytes(b"of the container before")
    (container.run / "agent.pyz.partial").write_bytes(b"killed while it wrote" * 1000)
    result = container.execute(pods.agent_command("pod", 66))
    assert (result.returncode, result.stdout) == (0, "whole\n"), result.stderr


def test_the_exit_code_is_that_of_the_agent(tmp_path: Path) -> None:
    container = Container(tmp_path)
    container.mount(program("raise SystemExit(64)"))
    assert container.execute(pods.agent_command("pod", 66)).returncode == 64


def test_python_is_used_if_python3_is_too_old(tmp_path: Path) -> None:
    container = Container(tmp_path)
    container.mount(program("print('found')"))
    (container.bin / "python3").rename(container.bin / "python")
    (container.bin / "python3").write_text("#!/bin/sh\necho Python 2 >&2\nexit 1\n")
    (container.bin / "python3").chmod(0o755)
    result = container.execute(pods.agent_command("pod", 66))
    assert (result.returncode, result.stdout, result.stderr) == (0, "found\n", "")


@pytest.mark.parametrize("code", [0, 66])
def test_an_image_without_python_is_reported(code: int, tmp_path: Path) -> None:
    container = Container(tmp_path)
    container.mount(program(""))
    (container.bin / "python3").unlink()
    result = container.execute(pods.agent_command("pod", code))
    message = "paceline: there is no Python 3.9 or newer in this image: Paceline needs one on the PATH\n"
    assert (result.returncode, result.stdout, (tmp_path / "words").read_text()) == (code, message, message)


def test_the_container_is_retried_if_the_parts_cannot_be_joined(tmp_path: Path) -> None:
    """Exit codes 64 and 66 end the captain's Job, because a retry would not help."""
    result = Container(tmp_path).execute(pods.agent_command("pod", 66))
    assert result.returncode == 1 and f"No such file or directory: '{tmp_path}/agent/agent-*'" in result.stderr


@pytest.mark.parametrize("folder", ["run", "agent"])
def test_the_stop_command_runs_the_agent_archive_of_the_captains_pod(folder: str, tmp_path: Path) -> None:
    """`agent`: the folder in runs that the previous version submitted."""
    container = Container(tmp_path)
    control = {"paceline/agent/net/stop_request.py": "import sys; print(sys.argv[1:], __file__)"}
    folders = ("paceline", "paceline/agent", "paceline/agent/net")
    archive = packed({**{f"{each}/__init__.py": "" for each in folders}, **control})
    (tmp_path / folder / "agent.pyz").write_bytes(archive)
    result = container.execute(stop_command("it's enough"))
    arguments = ["127.0.0.1:7733", "/paceline/tls", "captain", "it's enough"]
    assert result.stdout == f"{arguments} {tmp_path}/{folder}/agent.pyz/paceline/agent/net/stop_request.py\n", (
        result.stderr
    )


# ---- contents of the archive


@every_python
def test_every_module_can_be_imported_with_nothing_installed(python: str, pyz: Path) -> None:
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
    result = subprocess.run([python, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=LIMIT_S)
    assert (result.returncode, result.stdout.strip()) == (0, f"{pyz}/paceline/agent/member.py"), result.stderr


@every_python
def test_sent_code_is_unpacked(python: str, pyz: Path, tmp_path: Path) -> None:
    source = tmp_path / "sent"
    (source / "lib").mkdir(parents=True)
    (source / "lib" / ("ö" * 80 + ".py")).write_text("x = 1")
    (source / "run.sh").write_text("true")
    (source / "run.sh").chmod(0o755)
    (source / "link").symlink_to("lib")
    parts = []
    for number, chunk in enumerate(collect(source).chunks(64)):
        parts.append(str(tmp_path / f"part-{number:02}"))
        Path(parts[-1]).write_bytes(chunk)
    code = (
        f"import sys; sys.path.insert(0, {str(pyz)!r}); from paceline.agent.code_unpacking import unpack\n"
        "unpack(sys.argv[2:], sys.argv[1]); unpack(sys.argv[2:], sys.argv[1])"
    )
    command = [python, "-S", "-c", code, str(tmp_path / "there"), *parts]
    env = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}  # as in many images
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    assert (result.returncode, result.stderr) == (0, "")
    assert collect(tmp_path / "there").archive() == collect(source).archive()


# ---- `import paceline` in a program


@every_python
def test_the_archive_on_pythonpath_is_a_library(python: str, pyz: Path, tmp_path: Path) -> None:
    code = "import sys; import paceline; paceline.report(step=1); print(paceline.__file__, paceline.__version__)"
    env = environment(tmp_path, PYTHONPATH=str(pyz))
    result = subprocess.run([python, "-S", "-c", code], env=env, capture_output=True, text=True, timeout=LIMIT_S)
    assert result.stdout.split() == [f"{pyz}/paceline/__init__.py", paceline.__version__], result.stderr


def test_as_a_library_it_loads_few_modules(pyz: Path, tmp_path: Path) -> None:
    code = "import sys; import paceline; print(*(name for name in sys.modules if name.startswith('paceline')))"
    env = environment(tmp_path, PYTHONPATH=str(pyz))
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=LIMIT_S)
    assert sorted(result.stdout.split()) == ["paceline", "paceline.runtime", "paceline.runtime.report"]


# ---- a whole run


class Run:
    """A captain and one member, started as the first processes of two pods are."""

    def __init__(self, python: str, pyz: Path, root: Path, program: str) -> None:
        self.folder = root / "run"
        work = root / "work"
        for folder in (self.folder, work):
            folder.mkdir()
        (work / "train.py").write_text(program)
        job = {"name": "tiny", "framework": "none", "command": ["python", "train.py"], "roles": {"worker": {}}}
        plan = planning.make_plan(load_text(json.dumps(job), "job.yaml", work).job)
        (self.folder / "plan.json").write_text(plans.to_json(plan))
        certificates.make(self.folder / "tls")
        captain = f"127.0.0.1:{free_port()}"
        plan_path, tls = self.folder / "plan.json", self.folder / "tls"
        common = Options("tiny-0000", "captain", str(plan_path), str(self.folder), str(tls), captain, work=str(work))
        env = environment(root, PYTHONPATH=str(pyz))
        self.hosts = []
        with (self.folder / "agents.log").open("ab") as log:
            for host in ("captain", "worker-host-0"):
                command = [python, str(pyz), dataclasses.replace(common, host=host).to_json()]
                self.hosts.append(
                    subprocess.Popen(command, cwd=root, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
                )

    def wait_for(self, kind: str) -> dict[str, Any]:
        until = time.monotonic() + LIMIT_S
        while time.monotonic() < until:
            events = self.events(kind)
            if events:
                return events[-1]
            assert all(host.poll() is None for host in self.hosts), self.output()
            time.sleep(0.02)
        raise AssertionError(f"no {kind} within {LIMIT_S:g} s\n{self.output()}")

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
            raise AssertionError(f"the run has not ended within {LIMIT_S:g} s\n{self.output()}") from None
        assert codes == [0, 0], self.output()
        report: dict[str, Any] = json.loads((self.folder / "report.json").read_text())
        assert report["status"] == "succeeded", self.output()
        return report

    def output(self) -> str:
        paths = [path for path in self.folder.rglob("*") if path.suffix in (".log", ".jsonl")]
        return "\n".join(f"{path.name}:\n{path.read_text(errors='replace')[-3000:]}" for path in paths)

    def end(self) -> None:
        """Leaves no process behind: on SIGUSR1, the first process of a host ends its children."""
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
def started(python: str, pyz: Path, root: Path, program: str) -> Iterator[Run]:
    run = Run(python, pyz, root, program)
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
        assert f"{pyz}/paceline/__init__.py {version}" in run.log(), run.output()
        assert "cannot prepare" not in run.log()


@every_python
def test_modules_that_run_in_a_tasks_interpreter_are_included(python: str, pyz: Path, tmp_path: Path) -> None:
    """A spare needs all of them: the second attempt is forked from one."""
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
        assert [event["warm"] for event in run.events("task-started")] == [False, True], run.output()
