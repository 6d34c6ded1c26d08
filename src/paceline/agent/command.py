"""Understands a task's command: which Python program it runs, so that it can be recorded and started warm."""

from __future__ import annotations

import os
import re
import shutil
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
    argv: tuple[str, ...]  # what is executed: the interpreter, then the words as the person wrote them

    @property
    def hooked(self) -> bool:
        """Whether Python reads PYTHONPATH and runs `site` under these flags: what recording and spares stand on."""
        return not any(set("EIS") & set(_letters(flag)) for flag in self.flags)


def understand(argv: Sequence[str], interpreter: str, path: str | None = None, cwd: str = "") -> Python | None:
    """The Python program that `argv` runs in `cwd`, or None where it is something else, to be executed as it is.

    `python` and `python3` are `interpreter`; other names are looked up beside it, then in `path` (default: PATH).
    """
    if not argv:
        return None
    if _PYTHON.fullmatch(Path(argv[0]).name):
        found = _interpreter(argv[0], interpreter, path, cwd)
        return _parse(found, list(argv[1:])) if found else None
    script = _lookup(argv[0], interpreter, path, cwd)
    first = _shebang(Path(cwd, script)) if script else None
    if not script or not first:
        return None
    if Path(first[0]).name == "env" and len(first) == 2:
        first = [first[1]]
    if not _PYTHON.fullmatch(Path(first[0]).name):
        return None
    found = _interpreter(first[0], interpreter, path, cwd)
    return _parse(found, [*first[1:], script, *argv[1:]]) if found else None


def _parse(interpreter: str, words: list[str]) -> Python | None:
    flags: list[str] = []
    at = 0
    while at < len(words):
        word = words[at]
        if word == _LONG:
            flags += words[at : at + 2]
            at += 2
            continue
        if not word.startswith("-"):
            return _python(interpreter, flags, SCRIPT, word, words, at + 1)
        if word == "-" or word.startswith("--"):
            return None
        kept = "-"
        for position, letter in enumerate(word[1:], 1):
            rest = word[position + 1 :]
            if letter in "mc":
                if kept != "-":
                    flags.append(kept)
                at += 0 if rest else 1
                if at >= len(words):
                    return None
                return _python(interpreter, flags, MODULE if letter == "m" else CODE, rest or words[at], words, at + 1)
            if letter in "XW":
                if not rest and at + 1 >= len(words):
                    return None
                flags += [word] if rest else [word, words[at + 1]]
                at += 0 if rest else 1
                kept = ""
                break
            if letter not in _SWITCHES:
                return None
            kept += letter
        if kept:
            flags.append(kept)
        at += 1
    return None


def _python(interpreter: str, flags: list[str], kind: str, target: str, words: list[str], rest: int) -> Python:
    return Python(interpreter, tuple(flags), kind, target, tuple(words[rest:]), (interpreter, *words))


def _letters(flag: str) -> str:
    """The switches in `flag`: not the value of -X or -W."""
    return re.split("[XW]", flag[1:])[0] if re.match("-[^-]", flag) else ""


def _interpreter(name: str, interpreter: str, path: str | None, cwd: str) -> str | None:
    return interpreter if name in ("python", "python3") else _lookup(name, interpreter, path, cwd)


def _lookup(name: str, interpreter: str, path: str | None, cwd: str) -> str | None:
    if os.sep in name:
        return name if os.access(Path(cwd, name), os.X_OK) else None
    return shutil.which(name, path=str(Path(interpreter).parent)) or shutil.which(name, path=path)


def _shebang(script: Path) -> list[str] | None:
    """The interpreter named in a script's first line with its one argument, or in pip's trampoline for long paths."""
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
