"""Parses a task's command: finds the Python program that it runs, so that a spare can be prepared for it."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SCRIPT, MODULE, CODE = "script", "module", "code"

_PYTHON = re.compile(r"python(\d+(\.\d+)*)?")
_SWITCHES = frozenset("bBdEIOPqRsSuvx")
_LONG = "--check-hash-based-pycs"
_TRAMPOLINE = re.compile(rb"'''exec' (\"[^\"]+\"|\S+) \"\$0\" \"\$@\"")


@dataclass(frozen=True)
class Python:
    interpreter: str
    flags: tuple[str, ...]
    kind: str  # SCRIPT, MODULE or CODE
    target: str
    args: tuple[str, ...]
    argv: tuple[str, ...]  # what is executed: the interpreter, then the arguments as the user wrote them

    @property
    def hooked(self) -> bool:
        """Whether Python reads PYTHONPATH and imports `site` with these flags, as recording and spares require."""
        return not any(set("EIS") & set(_letters(flag)) for flag in self.flags)


def parse_command(argv: Sequence[str], interpreter: str, path: str | None = None, cwd: str = "") -> Python | None:
    """The Python program that `argv` runs in `cwd`, or None if it runs something else.

    `python` and `python3` mean `interpreter`; other names are looked up in its folder, then in `path` (default: PATH).
    """
    if not argv:
        return None
    if _PYTHON.fullmatch(Path(argv[0]).name):
        resolved = _interpreter(argv[0], interpreter, path, cwd)
        return _parse(resolved, list(argv[1:])) if resolved else None
    script = _lookup(argv[0], interpreter, path, cwd)
    shebang = _shebang(Path(cwd, script)) if script else None
    if not script or not shebang:
        return None
    if Path(shebang[0]).name == "env" and len(shebang) == 2:
        shebang = [shebang[1]]
    if not _PYTHON.fullmatch(Path(shebang[0]).name):
        return None
    resolved = _interpreter(shebang[0], interpreter, path, cwd)
    return _parse(resolved, [*shebang[1:], script, *argv[1:]]) if resolved else None


def with_program_found(argv: Sequence[str], interpreter: str, path: str | None = None) -> tuple[str, ...]:
    """The command with the path of its program, if that is not in `path` (default: PATH) but beside the interpreter:
    programs of a virtual environment are found even if it is not active."""
    if os.sep in argv[0] or shutil.which(argv[0], path=path) is not None:
        return tuple(argv)
    return (shutil.which(argv[0], path=str(Path(interpreter).parent)) or argv[0], *argv[1:])


def active_interpreter() -> str:
    """The interpreter that `python` stands for on the user's machine: that of the active environment; if none is
    active, the one that Paceline runs in."""
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        active = os.environ.get(name)
        if active:
            python = Path(active) / "bin" / "python"
            if python.exists():
                return str(python)
    return sys.executable


def parse_python(argv: Sequence[str]) -> Python | None:
    """The Python program that `argv` runs, according to its arguments alone: no file is read."""
    return _parse(argv[0], list(argv[1:])) if argv and _PYTHON.fullmatch(Path(argv[0]).name) else None


def _parse(interpreter: str, args: list[str]) -> Python | None:
    flags: list[str] = []
    at = 0
    while at < len(args):
        arg = args[at]
        if arg == _LONG:
            flags += args[at : at + 2]
            at += 2
            continue
        if not arg.startswith("-"):
            return _python(interpreter, flags, SCRIPT, arg, args, at + 1)
        if arg == "-" or arg.startswith("--"):
            return None
        switches = "-"
        for position, letter in enumerate(arg[1:], 1):
            value = arg[position + 1 :]
            if letter in "mc":
                if switches != "-":
                    flags.append(switches)
                at += 0 if value else 1
                if at >= len(args):
                    return None
                return _python(interpreter, flags, MODULE if letter == "m" else CODE, value or args[at], args, at + 1)
            if letter in "XW":
                if not value and at + 1 >= len(args):
                    return None
                flags += [arg] if value else [arg, args[at + 1]]
                at += 0 if value else 1
                switches = ""
                break
            if letter not in _SWITCHES:
                return None
            switches += letter
        if switches:
            flags.append(switches)
        at += 1
    return None


def _python(interpreter: str, flags: list[str], kind: str, target: str, args: list[str], end: int) -> Python:
    """`end`: the index of the first argument of the program itself."""
    return Python(interpreter, tuple(flags), kind, target, tuple(args[end:]), (interpreter, *args))


def _letters(flag: str) -> str:
    """The switches in `flag`, without the value of -X or -W."""
    return re.split("[XW]", flag[1:])[0] if re.match("-[^-]", flag) else ""


def _interpreter(name: str, interpreter: str, path: str | None, cwd: str) -> str | None:
    return interpreter if name in ("python", "python3") else _lookup(name, interpreter, path, cwd)


def _lookup(name: str, interpreter: str, path: str | None, cwd: str) -> str | None:
    if os.sep in name:
        return name if os.access(Path(cwd, name), os.X_OK) else None
    return shutil.which(name, path=str(Path(interpreter).parent)) or shutil.which(name, path=path)


def _shebang(script: Path) -> list[str] | None:
    """The interpreter in a script's first line, with its one argument; or that in pip's trampoline for long paths."""
    try:
        with script.open("rb") as file:
            head = file.read(4096)
    except OSError:
        return None
    if not head.startswith(b"#!"):
        return None
    lines = head.split(b"\n", 2)
    if lines[0].strip() == b"#!/bin/sh" and len(lines) > 1:
        match = _TRAMPOLINE.match(lines[1])
        return [os.fsdecode(match.group(1).strip(b'"'))] if match else None
    return [os.fsdecode(word) for word in lines[0][2:].strip().split(None, 1)] or None
