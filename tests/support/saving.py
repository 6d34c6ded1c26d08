"""Runs of saves.py on this machine: told by files which step to do, they save it to a folder or a bucket."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.storage.folder import Folder
from paceline.storage.objects import Objects
from paceline.storage.snapshots import Snapshots
from paceline.storage.store import Store
from support import runs
from support.runs import PROGRAMS, Run, eventually, job
from support.stores.servers import Store as Server


class Place:
    """Where the snapshots of a run go, as a job file and as a client have it."""

    def __init__(self, to: str, env: dict[str, str], store: Store) -> None:
        self.to, self.env, self.store = to, env, store

    def of(self, run: Run) -> Snapshots:
        return Snapshots(self.store, run.folder.name)

    def counted(self, run: Run) -> list[str]:
        return [str(id) for id in self.of(run).known().counted()]


def bucket(server: Server, client: Server | None = None) -> Place:
    """`client`: how the run reaches it."""
    return Place(server.url, (client or server).options, Objects(server.url, **server.config))


def folder(path: Path) -> Place:
    return Place(str(path), {}, Folder(str(path)))


def saves(state: Path, *words: object) -> list[str]:
    return ["python", str(PROGRAMS / "saves.py"), str(state), *map(str, words)]


def a_job(state: Path, place: Place | None, *words: object, snapshots: Any = None, **more: Any) -> dict[str, Any]:
    to = {"to": place.to} if place is not None else {}
    return job(saves(state, *words), snapshots={**to, "keep": 10, **(snapshots or {})}, **more)


def do(state: Path, step: int) -> None:
    """Has all ranks do this step, and rank 0 (or those with a part) save it."""
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
    """The steps that a task went on from, by its own word."""
    return [int(line.split()[-1]) for line in run.log(task).splitlines() if " start " in line]
