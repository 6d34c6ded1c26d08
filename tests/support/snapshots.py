"""Groups of real processes that take snapshots; like their agents, it merges all parts into one folder."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from paceline import Shards
from support.runs import PROGRAMS, SOURCE

LIMIT_S = 300  # for all ranks to import a framework on a busy machine

other_positions = pytest.mark.parametrize(
    ("theirs", "ours", "said"),
    [
        (Shards(9, 3), None, "only in the snapshot: order"),
        (None, Shards(9, 3), "not in the snapshot: order"),
        (Shards(9, 3), Shards(8, 3), r"different: order/size \(9 in the snapshot, 8 here\)"),
    ],
)


@dataclass
class Group:
    place: Path
    results: list[Any]  # by rank; None for a rank that failed
    told: list[dict[str, Any]]  # messages to the agent
    said: str

    def result(self, rank: int = 0) -> Any:
        assert self.results[rank] is not None, self.said
        return self.results[rank]

    def steps(self, rank: int = 0) -> list[int]:
        folder = self.place / f"task-{rank}" / "snapshots"
        return sorted(int(path.name[5:]) for path in folder.glob("step-*") if path.suffix == "")

    def merged(self, step: int) -> Path:
        """Merges the parts of all tasks into one folder; of two files with the same name, the first is used."""
        into = self.place / "merged" / f"step-{step}"
        into.mkdir(parents=True)
        for task in sorted(self.place.glob("task-*")):
            for path in sorted((task / "snapshots" / f"step-{step}").rglob("*")):
                target = into / path.relative_to(task / "snapshots" / f"step-{step}")
                if path.is_file() and not target.exists():
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(path, target)
        metadata = json.loads((into / "paceline.json").read_text())
        assert metadata["parts"] == len(list(self.place.glob(f"task-*/snapshots/step-{step}")))
        return into


def group(root: Path, program: str, world: int, restore: Path | None = None, **options: Any) -> Group:
    root.mkdir()
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PACELINE", "PYTEST"))}
    receiver, sender = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    env = {
        **inherited,
        "PYTHONPATH": str(SOURCE),
        "PACELINE_RESTORE": str(restore or ""),
        "PACELINE_REPORT_FD": str(sender.fileno()),
        "PACELINE_REPORT_INODE": str(os.fstat(sender.fileno()).st_ino),
    }
    with receiver, sender:
        process = subprocess.Popen(
            [sys.executable, str(PROGRAMS / program), str(root), str(world), json.dumps(options)], env=env,
            pass_fds=[sender.fileno()], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=LIMIT_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with the tasks that it started
            process.wait()
        receiver.setblocking(False)
        messages = []
        while True:
            try:
                messages.append(json.loads(receiver.recv(1 << 16)))
            except BlockingIOError:
                break
    files = [root / f"result-{rank}.json" for rank in range(world)]
    results = [json.loads(path.read_text()) if path.exists() else None for path in files]
    return Group(root, results, messages, output)
