"""TensorFlow programs as processes: alone, or as the workers of one TF_CONFIG, with what Paceline would give them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from support.runs import PROGRAMS, SOURCE

LIMIT_S = 180.0


def start(program: str, *words: object, env: Mapping[str, str], **more: Any) -> subprocess.Popen[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PACELINE", "PYTEST", "TF_"))}
    return subprocess.Popen(
        [sys.executable, str(PROGRAMS / program), *map(str, words)], text=True,
        env={**kept, "PYTHONPATH": str(SOURCE), "TF_CPP_MIN_LOG_LEVEL": "2", **env},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more,
    )  # fmt: skip


def end(process: subprocess.Popen[str], code: int = 0) -> Any:
    """What the program said in its last line."""
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    assert process.returncode == code, err[-6000:]
    return json.loads(out.splitlines()[-1]) if code == 0 else None


def run(program: str, *words: object, folder: Path, restore: Path | None = None, code: int = 0, **env: str) -> Any:
    return end(start(program, *words, env={**snapshots(folder, restore), **env}), code)


def snapshots(folder: Path, restore: Path | None) -> dict[str, str]:
    return {"PACELINE_SNAPSHOT_DIR": str(folder), "PACELINE_RESTORE": str(restore or "")}


def group(program: str, *words: object, folders: Sequence[Path]) -> list[subprocess.Popen[str]]:
    """A worker for each folder, which it has for snapshots."""
    sockets = [socket.socket() for _ in folders]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    cluster = {"worker": [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]}
    for each in sockets:
        each.close()
    started = []
    for rank, folder in enumerate(folders):
        env = {
            **snapshots(folder, None),
            "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": rank}}),
            "PACELINE_RANK": str(rank),
            "PACELINE_WORLD_SIZE": str(len(folders)),
        }
        started.append(start(program, *words, env=env))
    return started


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in folder.glob("*")) if folder.exists() else []
