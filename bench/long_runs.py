"""Folders of runs that have lasted for four weeks: files that a captain's code has written, without the processes."""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import measure

sys.path.insert(0, str(measure.SOURCE))

from paceline import job
from paceline.agent.event_file import LIMIT, NAME, EventFile
from paceline.job import planning
from paceline.plan import to_json
from paceline.view.files import run_folders
from paceline.view.state import status_reader

LASTED_S = 28 * 86400.0
ROTATIONS = 2  # of events.jsonl
ROUNDS_OF_A_GENERATION = 20  # rounds in which every task reports a step
_JOB = "{name: bench, framework: none, command: [python, train.py], roles: {worker: {replicas: %d}}}\n"


@contextmanager
def long_runs(home: Path, count: int, live: int, workers: int) -> Iterator[list[str]]:
    """The ids of the runs, those that are live first. Their events.jsonl has almost its largest size."""
    first = _write_run(home, workers)
    with ExitStack() as locks:
        locks.enter_context(_lock(first))
        report = status_reader.read(run_folders.Run(first.name, first)).report
        ended = json.dumps({**report, "status": "succeeded", "ended": _at(time.time())})
        folders = [first]
        for number in range(1, count):
            folder = first.with_name(f"bench-{number:04}")
            (folder / "logs").mkdir(parents=True)
            info = json.loads((first / "run.json").read_text())
            (folder / "run.json").write_text(json.dumps({**info, "run": folder.name}))
            for name in ("plan.json", NAME):
                os.link(first / name, folder / name)  # 200 copies would take 400 MB
            if number < live:
                locks.enter_context(_lock(folder))
            else:
                (folder / "lock").touch()
                (folder / "report.json").write_text(ended.replace(first.name, folder.name))
            folders.append(folder)
        yield [folder.name for folder in folders]


def _write_run(home: Path, workers: int) -> Path:
    folder = home / "runs" / "bench-0000"
    (folder / "logs").mkdir(parents=True)
    (home / "train.py").touch()
    plan = planning.make_plan(job.load_text(_JOB % workers, "job.yaml", home).job)
    (folder / "plan.json").write_text(to_json(plan))
    began = time.time() - LASTED_S
    info = {"run": folder.name, "job": "bench", "framework": "none", "started": _at(began), "supervisor": os.getpid()}
    (folder / "run.json").write_text(json.dumps(info))
    _Events(folder, began, [task.name for task in plan.tasks], [host.name for host in plan.hosts]).write()
    return folder


class _Events:
    def __init__(self, folder: Path, began: float, tasks: list[str], hosts: list[str]) -> None:
        self._path, self._now, self._tasks, self._hosts = folder / NAME, began, tasks, hosts
        self._file = EventFile(str(folder), measure.say)
        self._generation = self._step = self._rotations = 0
        self._inode = -1
        # A step and a report of resources of each task have about 600 bytes.
        self._every_s = LASTED_S / ((ROTATIONS + 1) * LIMIT / (600 * len(tasks)))

    def write(self) -> None:
        about = {"run": "bench-0000", "job": "bench", "framework": "none", "strategy": "multi-worker"}
        self._add("run-started", **about, tasks=self._tasks, hosts=self._hosts)
        for host in self._hosts:
            self._add("member-joined", host=host)
        while self._rotations < ROTATIONS or self._path.stat().st_size < 0.95 * LIMIT:
            self._write_generation()
        self._file.close()

    def _write_generation(self) -> None:
        self._generation += 1
        restore = f"step-{self._step}-g{self._generation - 1}" if self._step else None
        self._add("generation-formed", tasks=self._tasks, restore=restore)
        for task, host in zip(self._tasks, self._hosts, strict=True):
            self._add("task-started", task=task, pid=1, warm=False, host=host)
        for _ in range(ROUNDS_OF_A_GENERATION):
            self._now += self._every_s
            self._step += 40_000
            for task in self._tasks:
                self._add("step", task=task, step=self._step, metrics={"loss": 1 / self._step}, steps_per_s=10.0)
            self._resources()
            name = f"step-{self._step}-g{self._generation}"
            self._add("saved", step=self._step, snapshot=name)
            self._add("committed", step=self._step, snapshot=name, bytes=2**30, took_s=4.0)
            if self._rotations >= ROTATIONS and self._path.stat().st_size >= 0.95 * LIMIT:
                return
        task = self._tasks[self._generation % len(self._tasks)]
        self._add("task-exited", task=task, code=None, signal="SIGKILL", expected=False)
        restart = {"cause": "signal", "task": task, "detail": "killed by SIGKILL", "scope": self._tasks}
        self._add("restart", **restart, delay_s=0.0, count=1, limit=10)

    def _resources(self) -> None:
        network = {"received_bytes_per_s": 1000, "sent_bytes_per_s": 1000}
        used = {"cpu": 1.0, "memory": 2**30, "memory_peak": 2**30, "read_bytes_per_s": 0, "written_bytes_per_s": 0}
        for task, host in zip(self._tasks, self._hosts, strict=True):
            machine = {"memory": 2**30, "memory_limit": 2**33, **network}
            self._add("resources", host=host, machine=machine, tasks={task: used})

    def _add(self, kind: str, **fields: Any) -> None:
        self._now += 0.001
        event = {"at": _at(self._now), "event": kind, "generation": self._generation, **fields}
        self._file.write(json.dumps(event).encode() + b"\n", event)
        inode = self._path.stat().st_ino
        self._rotations += inode != self._inode and self._inode != -1
        self._inode = inode


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """As that of a run that is alive."""
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _at(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
