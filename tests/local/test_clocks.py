"""Wall clocks that jump by hours, on one host or on all: no snapshot is lost, and no run ends early because of it."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest

from support.clocks import HOUR, Clocks
from support.runs import PROGRAMS, Run, Starter, causes, eventually, job, kill
from support.saving import do
from support.stores.servers import Store as Server

pytestmark = pytest.mark.long  # needs a C compiler

CAPTAIN, HOST = "captain", "worker-host-0"


@pytest.fixture
def clocks(tmp_path: Path) -> Clocks:
    return Clocks(tmp_path)


def saves(state: Path) -> list[str]:
    return ["python", str(PROGRAMS / "saves.py"), str(state)]


def commit(run: Run, state: Path, step: int) -> float:
    """Commits a snapshot; returns the time of it by the captain's clock."""
    do(state, step)
    return datetime.fromisoformat(run.wait("committed", step=step)["at"]).timestamp()


def resumes(run: Run, generation: int, restore: str) -> None:
    assert run.wait("generation-formed", generation=generation)["restore"] == restore
    run.wait("task-started", generation=generation, task="worker-1")


def test_clock_jumps_change_nothing(start: Starter, state: Path, tmp_path: Path, clocks: Clocks) -> None:
    settings = {"to": str(tmp_path / "place"), "keep": 3}
    limits, restart = {"runtime": "2h", "start": "10m"}, {"hang_after": "10m"}
    run = start(job(saves(state), snapshots=settings, limits=limits, restart=restart), env=clocks.env)
    first_commit = commit(run, state, 10)
    clocks.set(7, CAPTAIN)
    assert commit(run, state, 20) - first_commit > 6 * HOUR, "the captain's clock has jumped"
    clocks.set(-7, HOST)
    kill(run.task("worker-1"))
    resumes(run, 2, "step-20-g1")
    clocks.set(-20)
    clocks.set(-20, CAPTAIN)
    assert commit(run, state, 30) - first_commit < -19 * HOUR
    kill(run.agent(CAPTAIN))
    assert run.wait("captain-returned")["adopted"] is True
    clocks.set(30, CAPTAIN)
    commit(run, state, 40)
    kill(run.keeper(CAPTAIN))  # by its clock, two days have passed since the previous commit
    eventually("the captain is back again", lambda: len(run.events("captain-returned")) == 2, more=run.story)
    clocks.set(9, HOST)
    kill(run.keeper(HOST))
    resumes(run, 3, "step-40-g2")
    commit(run, state, 50)
    snapshots = json.loads(run.call("snapshots", "ls", run.folder.name, "-o", "json").stdout)
    assert [each["snapshot"] for each in snapshots] == ["step-50-g3", "step-40-g2", "step-30-g2"]
    assert run.call("snapshots", "verify", run.folder.name, "--all").returncode == 0
    (state / "finish").touch()
    report = run.succeeds()
    assert causes(report) == [("signal", "worker-1"), ("host-lost", "worker-0")]
    assert not run.events("warning", "hang")


def test_a_bucket_that_refuses_requests_of_a_machine_with_a_wrong_clock(
    start: Starter, state: Path, clocks: Clocks, s3: Server
) -> None:
    """Requests are signed with the time. Training continues, and the snapshot is committed once the clock is right."""
    env = {**clocks.env, **s3.options}
    run = start(job(saves(state), snapshots={"to": s3.url}), env=env)
    commit(run, state, 10)
    clocks.set(5)
    do(state, 20)
    warning = run.wait("warning")["text"]
    assert warning.endswith("the clock of this machine is wrong (RequestTimeTooSkewed)")
    kill(run.task("worker-1"))
    run.wait("restart")
    clocks.set(0)
    resumes(run, 2, "step-20-g1")
    (state / "finish").touch()
    run.succeeds()
