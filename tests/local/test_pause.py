"""`paceline pause` and `resume` with a real program: its hosts leave, and it continues as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from paceline import client
from support.elastic_program import last_step
from support.runs import LIMIT_S, PROGRAMS, Run, Starter, eventually, job, misbehave


def training(state: Path, **more: Any) -> dict[str, Any]:
    return job(["python", str(PROGRAMS / "elastic.py"), "none", str(state)], framework="none", **more)


def used(state: Path, generation: int) -> set[int]:
    """The steps of a generation."""
    names = [path.name.split("-") for path in (state / "seen").iterdir()]
    return {int(step) for step, each, _ in names if int(each) == generation}


def status_of(run: Run) -> dict[str, Any]:
    return dict(json.loads(run.call("status", run.folder.name, "-o", "json").stdout))


def test_a_run_is_paused_and_continues_with_the_same_id_output_and_curves(start: Starter, state: Path) -> None:
    run = start(training(state))
    run.all_step()
    name = run.folder.name
    paused = run.call("pause", name)
    assert paused.returncode == 0, paused.stderr
    event = run.events("paused")[0]
    step = int(event["snapshot"].split("-")[1])
    assert paused.stderr.endswith(f"{name} is paused; to continue from step {step}: paceline resume {name}\n")
    eventually("the agents have exited", lambda: set(run.keepers()) <= {"captain"}, more=run.story)
    assert run.tasks() == {}
    status = status_of(run)
    assert status["status"] == "paused" and {task["state"] for task in status["tasks"]} == {"waiting"}
    assert " paused " in run.call("ls").stdout

    again = run.call("pause", name)
    assert again.returncode == 1 and again.stderr.endswith(
        f"{name} is already paused; to continue: paceline resume {name}\n"
    )
    after = run.position()
    os.kill(run.agent("captain"), signal.SIGKILL)
    run.wait("captain-returned", after=after)
    assert status_of(run)["status"] == "paused" and set(run.keepers()) == {"captain"}

    resumed = run.call("resume", name)
    assert resumed.returncode == 0 and resumed.stderr.endswith(f"{name} continues\n"), resumed.stderr
    run.wait_for_step(generation=2)
    last = last_step(state)
    report = run.succeeds()
    assert report["run"] == name and report["restarts"] == [] and report["generations"] == 2, run.story()
    assert not run.events("restart", "member-lost", "hang", "warning")
    assert run.events("generation-formed")[1]["restore"] == event["snapshot"]
    assert report["goodput"]["seconds"]["paused"] > 0
    assert sum(report["goodput"]["seconds"].values()) == pytest.approx(report["goodput"]["wall_s"], abs=0.01)

    assert min(used(state, 2)) == step + 1 and used(state, 1) | used(state, 2) == set(range(1, last + 1))
    for rank in (0, 1):
        lines = run.log(f"worker-{rank}")
        assert f"start 0 as {rank} of 2" in lines and f"start {step} as {rank} of 2" in lines


def test_the_python_api_pauses_and_resumes_a_run(start: Starter, state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = start(training(state))
    handle.all_step()
    monkeypatch.setenv("PACELINE_HOME", str(handle.folder.parent.parent))
    run = client.get(handle.folder.name)
    status = run.pause(timeout=LIMIT_S)
    assert status.status == "paused" and status.is_running
    before = run.series("step")
    run.resume(timeout=LIMIT_S)
    handle.wait_for_step(generation=2)
    last_step(state)
    handle.succeeds()
    after = run.series("step")
    assert {point.generation for point in after} == {1, 2} and len(after) > len(before), "the curves go on"


def test_a_program_that_takes_no_snapshots_is_not_paused(start: Starter) -> None:
    run = start(job(misbehave("--report", "--steps", 10**6), framework="none"))
    run.wait_for_step()
    refused = run.call("pause", run.folder.name, "--within", "1s")
    assert refused.returncode == 1 and "no new snapshot was committed within 1 s" in refused.stderr, refused.stderr
    assert run.events("pause-canceled") and not run.events("paused")
    now = run.call("pause", run.folder.name, "--now")
    assert now.returncode == 0 and "to continue from the beginning, as it has no snapshot" in now.stderr, now.stderr
    stopped = run.call("stop", run.folder.name)
    assert stopped.returncode == 0, stopped.stderr
    assert run.end()[1]["status"] == "stopped"
