"""The server programs, each fetched and built once per machine, pinned by version and checksum."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from support.lab.components import GO_FLAGS, BuildFailed
from support.lab.places import cache, key, made_once, say

BUILD = Path(__file__).parent / "build"
TESTS = Path(__file__).parents[2]
BUILD_S = 1200.0  # a build of all Go packages takes about a minute; after twenty minutes it is stuck
PROGRAMS = ("go", "npm", "node", "setpriv")

_GO = ("go", "build", "-ldflags", "-s -w", "tool")
_NPM = ("npm", "ci", "--ignore-scripts", "--omit=dev", "--no-audit", "--no-fund")


def unmet() -> str:
    """In one line, why no object store can run here; empty if one can."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    return f"this machine has no {', '.join(missing)}" if missing else ""


def versitygw() -> Path:
    return _built("versitygw", _GO, _go) / "versitygw"


def toxiproxy() -> Path:
    return _built("toxiproxy", _GO, _go) / "server"


def azurite() -> Path:
    return _built("azurite", _NPM, _npm) / "node_modules/.bin/azurite-blob"


def _built(name: str, command: tuple[str, ...], make: Callable[[str, Path], None]) -> Path:
    pins = [path.read_bytes() for path in sorted((BUILD / name).iterdir())]
    folder = cache() / "components" / f"{name}-{key(*pins, *command, GO_FLAGS)}"
    return made_once(folder, lambda partial: make(name, partial))


def _go(name: str, folder: Path) -> None:
    # Go caches every finished package: an interrupted build resumes where it stopped.
    settings = {"CGO_ENABLED": "0", "GOFLAGS": GO_FLAGS, "GOWORK": "off"}
    _run(name, [*_GO[:-1], "-o", f"{folder}/", _GO[-1]], BUILD / name, settings)


def _npm(name: str, folder: Path) -> None:
    shutil.copytree(BUILD / name, folder, dirs_exist_ok=True)
    _run(name, [*_NPM], folder, {})


def _run(name: str, command: list[str], folder: Path, settings: dict[str, str]) -> None:
    say(f"building {name} ...")
    started = time.monotonic()
    try:
        result = subprocess.run(
            ["nice", *command], cwd=folder, env={**os.environ, **settings}, timeout=BUILD_S,
            stdin=subprocess.DEVNULL, capture_output=True, text=True,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise BuildFailed(f"could not build {name}: {command[0]} was not done after {BUILD_S:g} s") from None
    if result.returncode:
        raise BuildFailed(
            f"could not build {name}: {command[0]} ended with {result.returncode}\n{result.stderr[-3000:]}"
        )
    say(f"built {name} in {time.monotonic() - started:.0f} s")
