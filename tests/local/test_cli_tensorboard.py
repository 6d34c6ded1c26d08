"""`paceline tensorboard` for a run on this machine: it becomes the tensorboard of the person's environment."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import paceline
from support.person import SHORT, Person, nothing_left

pytestmark = pytest.mark.timeout(120)

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
    done = me.call("tensorboard", "--port", "0", PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    url, called = done.stdout.splitlines()
    port = url.removeprefix("http://127.0.0.1:").removesuffix("/")
    assert f"--logdir {me.run_folder()}/tensorboard --host 127.0.0.1 --port {port} " in called
    assert "note:" not in done.stderr


def test_a_port_that_is_taken_is_said_and_an_empty_folder_too(me: Person, path: str) -> None:
    me.job(SHORT)
    assert me.call("run").returncode == 0
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = me.call("tensorboard", "--port", str(taken.getsockname()[1]), PYTHONPATH=path)
    assert done.returncode == 1 and "cannot be used: Address already in use; give another with --port" in done.stderr
    assert "yet: tasks find it as PACELINE_TENSORBOARD_DIR" in done.stderr


def test_an_environment_without_tensorboard_is_said_with_what_to_install(me: Person, tmp_path: Path) -> None:
    me.job(SHORT)
    assert me.call("run").returncode == 0
    python = tmp_path / "bare" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(Path(sys.executable).resolve())
    done = me.call("tensorboard", VIRTUAL_ENV=str(tmp_path / "bare"))
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == (
        f"error: {python} has no tensorboard: pip install tensorboard, or activate an environment that has it\n"
    )


def test_a_run_goes_on_without_tensorboard_where_there_is_none(me: Person, tmp_path: Path) -> None:
    me.job(SHORT, more="tensorboard: true\n")
    python = tmp_path / "bare" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(Path(sys.executable).resolve())
    done = me.call("run", VIRTUAL_ENV=str(tmp_path / "bare"))
    assert done.returncode == 0, done.stderr
    assert f"note: no TensorBoard beside the run: {python} has no tensorboard (pip install tensorboard)" in done.stderr
