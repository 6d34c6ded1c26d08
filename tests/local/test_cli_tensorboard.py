"""`paceline tensorboard` for a run on this machine: it executes the tensorboard of the user's environment."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import paceline
from support.person import SHORT, Person, nothing_left

# Stands in for TensorBoard, which next to TensorFlow takes many seconds to start.
STAND_IN = "import os, sys\nprint('called with', *sys.argv[1:], 'as', os.getpid(), flush=True)\n"


@pytest.fixture
def me(tmp_path: Path) -> Iterator[Person]:
    with nothing_left(tmp_path / "home"):
        yield Person(tmp_path)


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A PYTHONPATH with the stand-in."""
    package = tmp_path / "stand-in" / "tensorboard"
    package.mkdir(parents=True)
    for name, text in (("__init__.py", ""), ("main.py", STAND_IN)):
        (package / name).write_text(text)
    return os.pathsep.join([str(package.parent), str(Path(paceline.__file__).parents[1])])


def test_the_folder_of_the_run_is_shown_at_the_address_that_is_printed(me: Person, path: str) -> None:
    me.job(SHORT + "import os\nopen(os.environ['PACELINE_TENSORBOARD_DIR'] + '/events', 'w').write('x')\n")
    assert me.call("run").returncode == 0
    result = me.call("tensorboard", "--port", "0", PYTHONPATH=path)
    assert result.returncode == 0, result.stderr
    url, call = result.stdout.splitlines()
    port = url.removeprefix("http://127.0.0.1:").removesuffix("/")
    assert f"--logdir {me.run_folder()}/tensorboard --host 127.0.0.1 --port {port} " in call
    assert "note:" not in result.stderr


def test_a_port_in_use_and_an_empty_folder_are_reported(me: Person, path: str) -> None:
    me.job(SHORT)
    assert me.call("run").returncode == 0
    with socket.create_server(("127.0.0.1", 0)) as server:
        result = me.call("tensorboard", "--port", str(server.getsockname()[1]), PYTHONPATH=path)
    assert result.returncode == 1 and ": Address already in use; choose another with --port" in result.stderr
    assert "is still empty: tasks must write to the folder in PACELINE_TENSORBOARD_DIR" in result.stderr


def test_an_environment_without_tensorboard_is_reported_with_what_to_install(me: Person, tmp_path: Path) -> None:
    me.job(SHORT)
    assert me.call("run").returncode == 0
    python = tmp_path / "bare" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(Path(sys.executable).resolve())
    result = me.call("tensorboard", VIRTUAL_ENV=str(tmp_path / "bare"))
    assert result.returncode == 1 and result.stdout == ""
    assert result.stderr == (
        f"error: tensorboard is not installed for {python}; "
        "install it in this environment, or activate one that has it\n"
    )


def test_a_run_continues_if_tensorboard_is_not_installed(me: Person, tmp_path: Path) -> None:
    me.job(SHORT, more="tensorboard: true\n")
    python = tmp_path / "bare" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(Path(sys.executable).resolve())
    result = me.call("run", VIRTUAL_ENV=str(tmp_path / "bare"))
    assert result.returncode == 0, result.stderr
    assert f"note: TensorBoard is not started: tensorboard is not installed for {python}" in result.stderr
