"""The wheel and the sdist that `make dist` builds, installed into clean environments; needs the package index."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from support import person
from support.environment import without
from support.pages import ROOT

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("packages")]

UV = ROOT / ".tools" / "bin" / "uv"
# Together they use every package that Paceline depends on, except obstore.
WITH_LOWEST_VERSIONS = (
    "test_job_schema.py::test_the_published_schema_matches_the_models", "test_job_load.py", "test_job_mistakes.py",
    "test_render.py", "test_serving_objects.py", "test_serving_deployment.py", "test_view_verbs.py",
)  # fmt: skip


def call(*command: str | Path, **environment: str) -> str:
    result = subprocess.run(
        [str(word) for word in command], cwd=ROOT, env={**without("PACELINE", "VIRTUAL_ENV", "PYTHON"), **environment},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert result.returncode == 0, f"{command}:\n{result.stdout}{result.stderr}"
    return result.stdout + result.stderr


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    call(UV, "build", "--quiet", "--no-build-isolation", "--python", sys.executable, "--out-dir", folder)
    return folder


def clean_environment(folder: Path) -> Path:
    call(UV, "venv", "--quiet", "--python", sys.executable, folder)
    return folder


def wheel_of(dist: Path) -> Path:
    [wheel] = dist.glob("*.whl")
    return wheel


def test_make_dist_runs_the_build_command_tested_here() -> None:
    recipe = (ROOT / "Makefile").read_text().partition("\ndist: ")[2]
    assert "$(UV) build --quiet --no-build-isolation --python .venv --out-dir dist\n" in recipe


@pytest.mark.parametrize("kind", ["whl", "tar.gz"])
def test_the_package_trains_in_a_clean_environment(dist: Path, tmp_path: Path, kind: str) -> None:
    [package] = dist.glob(f"*.{kind}")
    python = clean_environment(tmp_path / "clean")
    call(UV, "pip", "install", "--quiet", "--python", python, package)
    program = "import paceline; paceline.report(step=7); print(paceline.__file__)"
    home = tmp_path / "home"
    with person.nothing_left(home):
        output = call(
            python / "bin" / "paceline", "run", "--workers", "2", "--", "python", "-c", program,
            PACELINE_HOME=str(home), PATH=f"{python / 'bin'}:{os.environ['PATH']}",
        )  # fmt: skip
    assert f"worker-1 | {python}" in output and "7 steps" in output


def test_wheel_and_sdist_contain_the_same_package(dist: Path) -> None:
    [sdist] = dist.glob("*.tar.gz")
    with zipfile.ZipFile(wheel_of(dist)) as wheel, tarfile.open(sdist) as source:
        in_wheel = {name for name in wheel.namelist() if name.startswith("paceline/")}
        prefix = f"{sdist.name.removesuffix('.tar.gz')}/src/"
        in_sdist = {name.removeprefix(prefix) for name in source.getnames() if name.startswith(prefix)}
    assert in_wheel == in_sdist
    assert {"paceline/py.typed", "paceline/cli/__main__.py"} <= in_wheel
    assert not [name for name in in_wheel if "__pycache__" in name]


def test_the_lowest_allowed_versions_work(dist: Path, tmp_path: Path) -> None:
    """Framework versions are not tested: each is allowed in one minor version only, or is the newest."""
    python, requirements = clean_environment(tmp_path / "lowest"), tmp_path / "lowest.txt"
    call(
        UV, "pip", "compile", "--quiet", "--resolution", "lowest-direct", "--extra", "serve", "--no-emit-index-url",
        "--python", sys.executable, "pyproject.toml", "-o", requirements,
    )  # fmt: skip
    call(UV, "pip", "install", "--quiet", "--python", python, "-r", requirements)
    call(UV, "pip", "install", "--quiet", "--python", python, "--no-deps", wheel_of(dist))
    # pytest and other test dependencies come from this environment, after the lowest versions.
    [site_packages] = (python / "lib").glob("python*/site-packages")
    (site_packages / "zz_tests.pth").write_text(f"{Path(pytest.__file__).parents[1]}\n")
    tests = [f"{ROOT}/tests/unit/{name}" for name in WITH_LOWEST_VERSIONS]
    call(python / "bin" / "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests)
    call(python / "bin" / "python", "-c", "import paceline.serve.app, paceline.serve.graceful_exit")
