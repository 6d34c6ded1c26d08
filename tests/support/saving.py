"""Runs of saves.py on this machine: files tell them which step to do, and they save it to a folder or a bucket."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.storage.snapshots.repository import SnapshotRepository
from paceline.storage.stores.bucket import BucketStore
from paceline.storage.stores.folder import FolderStore
from paceline.storage.stores.protocol import Store
from support import runs
from support.runs import PROGRAMS, Run, eventually, job
from support.stores.servers import Store as Server


class Place:
    """The location of a run's snapshots: its address in the job file, and a store to read it."""

    def __init__(self, to: str, env: dict[str, str], store: Store) -> None:
        self.to, self.env, self.store = to, env, store

    def of(self, run: Run) -> SnapshotRepository:
        return SnapshotRepository(self.store, run.folder.name)

    def counted(self, run: Run) -> list[str]:
        return [str(id) for id in self.of(run).inventory().current()]


def bucket(server: Server, client: Server | None = None) -> Place:
    """`client`: the address and options that the run uses, if not those of `server`."""
    return Place(server.url, (client or server).options, BucketStore(server.url, **server.config))


def folder(path: Path) -> Place:
    return Place(str(path), {}, FolderStore(str(path)))


def saves(state: Path, *options: object) -> list[str]:
    return ["python", str(PROGRAMS / "saves.py"), str(state), *map(str, options)]


def a_job(state: Path, location: Place | None, *options: object, snapshots: Any = None, **more: Any) -> dict[str, Any]:
    to = {"to": location.to} if location is not None else {}
    return job(saves(state, *options), snapshots={**to, "keep": 10, **(snapshots or {})}, **more)


def do(state: Path, step: int) -> None:
    """Makes all ranks do this step; rank 0 (or each rank with a part) saves it."""
    (state / "step.partial").write_text(str(step))
    (state / "step.partial").rename(state / "step")


def done(run: Run, state: Path, step: int, rank: int = 0) -> None:
    def check() -> bool:
        path = state / f"done-{rank}"
        return path.exists() and int(path.read_text()) >= step

    eventually(f"rank {rank} does step {step}", check, more=run.story)


def commit(run: Run, state: Path, *steps: int) -> None:
    for step in steps:
        do(state, step)
        run.wait("committed", step=step)


def finish(run: Run, state: Path) -> runs.Report:
    (state / "finish").touch()
    return run.succeeds()


def restores(run: Run) -> list[str | None]:
    return [event["restore"] for event in run.events("generation-formed")]


def warnings(run: Run) -> list[str]:
    return [event["text"] for event in run.events("warning")]


def starts(run: Run, task: str) -> list[int]:
    """The steps that a task started from, according to its log."""
    lines = run.log(task).split("\n")[:-1]  # the last one may not be complete yet
    return [int(line.split()[-1]) for line in lines if " start " in line]
