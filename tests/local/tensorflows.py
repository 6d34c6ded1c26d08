"""TensorFlow programs as processes: alone, or as the tasks of one TF_CONFIG, with what Paceline would give them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runs import PROGRAMS, SOURCE

LIMIT_S = 120.0


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


def group(
    roles: Mapping[str, int], program: str, *words: object, folders: Sequence[Path], restore: Path | None = None
) -> dict[str, subprocess.Popen[str]]:
    """A process for each task, with its own folder for snapshots; `folders` in the order of `roles`."""
    sockets = [socket.socket() for _ in range(sum(roles.values()))]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    names = [(role, index) for role, count in roles.items() for index in range(count)]
    cluster: dict[str, list[str]] = {}
    for (role, _), port in zip(names, ports, strict=True):
        cluster.setdefault(role, []).append(f"127.0.0.1:{port}")
    started = {}
    for rank, ((role, index), folder) in enumerate(zip(names, folders, strict=True)):
        env = {
            **snapshots(folder, restore),
            "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": role, "index": index}}),
            "PACELINE_RANK": str(rank),
            "PACELINE_WORLD_SIZE": str(roles.get("worker", 1)),
        }
        started[f"{role}-{index}"] = start(program, *words, env=env)
    return started


def steps(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in folder.glob("*")) if folder.exists() else []
