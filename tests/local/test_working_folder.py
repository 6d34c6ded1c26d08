"""Files in the working folder are not imported in place of modules: other users may be able to write to that folder."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

import paceline
from paceline.serve.json_process import JsonProcess
from support.in_process_server import SIGNATURE
from support.person import environment, nothing_left

pytestmark = pytest.mark.timeout(400)

# Modules of the standard library, of Paceline, and of what it starts.
MODULES = ("importlib", "json", "numpy", "orjson", "paceline", "pickle", "runpy", "tensorboard", "types", "uvicorn")
PACELINE = "import sys; del sys.path[0]; from paceline.cli import main; main()"
TENSORBOARD = (
    "import sys\n\ndef run_main(): print('TensorBoard', flush=True)\n\nif __name__ == '__main__': run_main()\n"
)
JOB = "name: a\nframework: none\ncommand: [sh, -c, 'true']\nroles: {worker: {replicas: 1}}\ntensorboard: true\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with such files: each of them leaves a mark when it is imported."""
    folder = tmp_path / "work"
    folder.mkdir()
    for name in MODULES:
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'a').write('{name} ')\n")
    (folder / "job.yaml").write_text(JOB)
    return folder


def imported(folder: Path) -> str:
    mark = folder.parent / "imported"
    return mark.read_text() if mark.exists() else ""


def test_by_the_command_line(folder: Path, tmp_path: Path) -> None:
    home, package = tmp_path / "home", tmp_path / "installed" / "tensorboard"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "main.py").write_text(TENSORBOARD)
    path = os.pathsep.join([str(package.parent), str(Path(paceline.__file__).parents[1])])

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", PACELINE, *arguments]
        env = environment(home, PYTHONPATH=path)
        return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120)

    with nothing_left(home):
        result = call("run", "job.yaml")
        assert result.returncode == 0 and "TensorBoard is not started" not in result.stderr, result.stderr
        assert call("tensorboard", "--port", "0").stdout.splitlines()[1:] == ["TensorBoard"]
        assert "export" in call("serve").stderr  # the job has no such section
    assert imported(folder) == ""


def test_by_the_model_server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def parse() -> None:
        process = JsonProcess()
        try:
            inputs = await process.call("parse", b'{"instances": [[1, 2]]}', {"serving_default": SIGNATURE})
            assert inputs.rows == 1
        finally:
            process.close()

    monkeypatch.chdir(folder)
    asyncio.run(parse())
    assert imported(folder) == ""
