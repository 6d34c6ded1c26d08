"""TensorFlow programs as processes: alone or as workers of one TF_CONFIG, with the variables that Paceline sets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from support.ports import free_port
from support.runs import PROGRAMS, TENSORFLOW_PATH

LIMIT_S = 300.0


def start(program: str, *arguments: object, env: Mapping[str, str], **more: Any) -> subprocess.Popen[str]:
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("PACELINE", "PYTEST", "TF_"))
    }
    return subprocess.Popen(
        [sys.executable, str(PROGRAMS / program), *map(str, arguments)], text=True,
        env={**inherited, "PYTHONPATH": TENSORFLOW_PATH, "TF_CPP_MIN_LOG_LEVEL": "2", **env},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more,
    )  # fmt: skip


def end(process: subprocess.Popen[str], code: int = 0) -> Any:
    """Waits for the program to end with this code; returns its last line, parsed."""
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    assert process.returncode == code, err[-6000:]
    return json.loads(out.splitlines()[-1]) if code == 0 else None


def run(program: str, *arguments: object, folder: Path, restore: Path | None = None, code: int = 0, **env: str) -> Any:
    return end(start(program, *arguments, env={**snapshots(folder, restore), **env}), code)


def snapshots(folder: Path, restore: Path | None) -> dict[str, str]:
    return {"PACELINE_SNAPSHOT_DIR": str(folder), "PACELINE_RESTORE": str(restore or "")}


def group(program: str, *arguments: object, folders: Sequence[Path]) -> list[subprocess.Popen[str]]:
    """Starts one worker for each of these snapshot folders."""
    ports: set[int] = set()
    while len(ports) < len(folders):
        ports.add(free_port())
    cluster = {"worker": [f"127.0.0.1:{port}" for port in ports]}
    processes = []
    for rank, folder in enumerate(folders):
        env = {
            **snapshots(folder, None),
            "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": rank}}),
            "PACELINE_RANK": str(rank),
            "PACELINE_WORLD_SIZE": str(len(folders)),
        }
        processes.append(start(program, *arguments, env=env))
    return processes


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in folder.glob("*")) if folder.exists() else []
