"""Modules and files that are named in strings, which no type checker checks, exist."""

from __future__ import annotations

import ast
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

import paceline
from paceline.agent.spares import spare
from paceline.backends.kubernetes.payload import agent_archive
from paceline.backends.kubernetes.runs.running import stop_command
from paceline.cli.app import VERBS

PACKAGE = Path(paceline.__file__).parent
MODULE_NAME = re.compile(r"\bpaceline(?:\.[a-z_]+)+\b")


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_its_module(verb: str) -> None:
    assert (PACKAGE / "cli" / f"{verb}.py").is_file()


def test_modules_that_start_agent_processes_exist() -> None:
    """Every call of `process("paceline...", ...)`, and the stop command of a pod."""
    modules = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "process" and node.args:
                modules.add(ast.literal_eval(node.args[0]))
    modules.update(MODULE_NAME.findall(" ".join(stop_command("why"))))
    assert len(modules) > 2
    assert [name for name in modules if find_spec(name) is None] == []


def test_modules_that_the_archive_starts_exist() -> None:
    tree = ast.parse(agent_archive._MAIN)
    imported = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert len(imported) == 3
    for node in imported:
        assert [
            f"{node.module}.{name.name}" for name in node.names if find_spec(f"{node.module}.{name.name}") is None
        ] == []


def test_files_of_a_spare_exist() -> None:
    for name in spare._HOOK:
        assert (PACKAGE / name).is_file(), name
    loaded = set()
    for name in spare._HOOK:
        for node in ast.walk(ast.parse((PACKAGE / name).read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("load", "_load"):
                parts = [part.value for part in node.args if isinstance(part, ast.Constant)]
                if len(parts) == len(node.args):
                    loaded.add("/".join(parts))
    assert loaded and loaded <= set(spare._HOOK)
