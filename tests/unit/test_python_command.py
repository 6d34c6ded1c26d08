"""Which commands are Python programs, and how they are parsed."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from paceline.agent.tasks.python_command import CODE, MODULE, SCRIPT, Python, parse_command

PYTHON = "/opt/env/bin/python"


def parse(*argv: str) -> Python | None:
    return parse_command(argv, PYTHON)


@pytest.mark.parametrize(
    ("argv", "flags", "kind", "target", "args"),
    [
        (["python", "train.py"], (), SCRIPT, "train.py", ()),
        (["python3", "train.py", "--epochs", "3"], (), SCRIPT, "train.py", ("--epochs", "3")),
        (["python", "-u", "train.py", "-m", "x"], ("-u",), SCRIPT, "train.py", ("-m", "x")),
        (["python", "-uO", "train.py"], ("-uO",), SCRIPT, "train.py", ()),
        (["python", "-m", "pkg.train", "-c", "x"], (), MODULE, "pkg.train", ("-c", "x")),
        (["python", "-um", "pkg", "a"], ("-u",), MODULE, "pkg", ("a",)),
        (["python", "-umpkg", "a"], ("-u",), MODULE, "pkg", ("a",)),
        (["python", "-c", "print(1)", "a"], (), CODE, "print(1)", ("a",)),
        (["python", "-Wignore", "train.py"], ("-Wignore",), SCRIPT, "train.py", ()),
        (["python", "-W", "error", "-X", "utf8", "t.py"], ("-W", "error", "-X", "utf8"), SCRIPT, "t.py", ()),
        (["python", "-uW", "error", "t.py"], ("-uW", "error"), SCRIPT, "t.py", ()),
        (["python", "-Xfrozen_modules=off", "t.py"], ("-Xfrozen_modules=off",), SCRIPT, "t.py", ()),
        (["python", "--check-hash-based-pycs", "never", "t"], ("--check-hash-based-pycs", "never"), SCRIPT, "t", ()),
    ],
)  # fmt: skip
def test_python_commands(
    argv: list[str], flags: tuple[str, ...], kind: str, target: str, args: tuple[str, ...]
) -> None:
    assert parse(*argv) == Python(PYTHON, flags, kind, target, args, (PYTHON, *argv[1:]))


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["bash", "-c", "python train.py"],
        ["python"],
        ["python", "-"],
        ["python", "-i", "train.py"],
        ["python", "-ui", "train.py"],
        ["python", "-V"],
        ["python", "--version"],
        ["python", "-z", "train.py"],
        ["python", "-m"],
        ["python", "-X"],
        ["pythonic", "train.py"],
        ["no-such-command"],
        ["/no/such/python", "train.py"],
    ],
)
def test_other_commands_are_executed_unchanged(argv: list[str]) -> None:
    assert parse(*argv) is None


@pytest.mark.parametrize(
    ("flags", "hooked"),
    [(["-u"], True), (["-P"], True), (["-s"], True), (["-I"], False), (["-uE"], False), (["-S"], False),
     (["-WIES"], True), (["-X", "IES"], True)],
)  # fmt: skip
def test_flags_that_disable_site_or_the_environment_prevent_warm_starts(flags: list[str], hooked: bool) -> None:
    python = parse("python", *flags, "t.py")
    assert python is not None and python.hooked is hooked


def test_a_versioned_name_is_looked_up_beside_the_interpreter_first(tmp_path: Path) -> None:
    for folder in ("env", "other"):
        _program(tmp_path / folder / "python3.11", "")
    python = parse_command(["python3.11", "t.py"], str(tmp_path / "env" / "python"), path=str(tmp_path / "other"))
    assert python is not None and python.interpreter == str(tmp_path / "env" / "python3.11")
    assert parse_command(["python3.10", "t.py"], str(tmp_path / "env" / "python"), path=str(tmp_path / "other")) is None


def test_a_path_to_an_interpreter_is_kept(tmp_path: Path) -> None:
    python_path = _program(tmp_path / "python3", "")
    python = parse(python_path, "t.py")
    assert python is not None and python.argv == (python_path, "t.py")


@pytest.mark.parametrize(
    ("head", "interpreter", "flags"),
    [
        ("#!/usr/bin/env python3\n", PYTHON, ()),
        ("#!{python}\n", "{python}", ()),
        ("#!{python} -u\n", "{python}", ("-u",)),
        ("#!/bin/sh\n'''exec' {python} \"$0\" \"$@\"\n' '''\n", "{python}", ()),
        ("#!/bin/sh\n'''exec' \"{python}\" \"$0\" \"$@\"\n' '''\n", "{python}", ()),
    ],
)
def test_a_console_script_is_a_python_script(
    tmp_path: Path, head: str, interpreter: str, flags: tuple[str, ...]
) -> None:
    python_path = _program(tmp_path / "python3.11", "")
    script = _program(tmp_path / "bin" / "train", head.format(python=python_path) + "print(1)\n")
    python = parse_command(["train", "-m", "x"], PYTHON, path=str(tmp_path / "bin"))
    expected = interpreter.format(python=python_path)
    assert python == Python(expected, flags, SCRIPT, script, ("-m", "x"), (expected, *flags, script, "-m", "x"))


def test_a_relative_path_is_relative_to_the_working_folder(tmp_path: Path) -> None:
    _program(tmp_path / "train.py", "#!/usr/bin/env python3\n")
    python = parse_command(["./train.py", "x"], PYTHON, cwd=str(tmp_path))
    assert python is not None and python.argv == (PYTHON, "./train.py", "x")


@pytest.mark.parametrize(
    "head", ["#!/bin/bash\n", "#!/bin/sh\necho\n", "\x7fELF", "", "#!\n", "#!/usr/bin/env -S python3 -u\n"]
)
def test_other_programs_are_not_python_scripts(tmp_path: Path, head: str) -> None:
    _program(tmp_path / "train", head)
    assert parse_command(["train"], PYTHON, path=str(tmp_path)) is None


def _program(path: Path, text: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)
