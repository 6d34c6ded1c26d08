"""The program for CLUSTER_CONFIG and POD_NAME reads digits, whichever task is killed, and its parameter servers end."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.job import load, planning
from support.example_runs import EXAMPLES, LIMIT_S, job
from support.runs import Run, Starter, causes, eventually, kill

ACCURACY = re.compile(r"step (\d+): ([\d.]+)% of 1000 held-out digits read correctly")
KILLS = (("worker-1", 150), ("worker-0", 300), ("ps-0", 450))
STEPS = 1500
FEW = 300  # steps of another run of it, at the same time and in the same folder


def test_it_needs_these_two_variables_and_nothing_else() -> None:
    program = (EXAMPLES / "contract" / "train.py").read_text()
    assert set(re.findall(r'environ\["(\w+)"\]', program)) == {"CLUSTER_CONFIG", "POD_NAME"}
    assert "import paceline" not in program
    assert program.count("environ") == 2


def test_only_workers_get_gpus() -> None:
    job_plan = planning.make_plan(load(EXAMPLES / "contract" / "job.yaml", ["roles.worker.gpus=1"]).job)
    assert {(host.role, host.gpus) for host in job_plan.hosts} == {("ps", 0), ("worker", 1)}


@pytest.fixture
def example(start: Starter, tmp_path: Path) -> Callable[..., Run]:
    """Starts it for a number of steps, in a copy of its folder: its checkpoints are written there."""
    code = shutil.copytree(EXAMPLES / "contract", tmp_path / "code")
    fields = {**job("contract"), "code": str(code), "roles": {"ps": {"replicas": 1}, "worker": {"replicas": 2}}}

    def begin(steps: int) -> Run:
        command = [*fields["command"], "--steps", str(steps)]
        return start({**fields, "command": command, "restart": {"warm": False}}, home=tmp_path / "home")

    return begin


@pytest.mark.long
@pytest.mark.timeout(900)
def test_it_reads_digits_whichever_task_is_killed(example: Callable[..., Run]) -> None:
    """Training is asynchronous, so no two runs are the same. A concurrent run is not affected by the kills."""
    run, concurrent = example(STEPS), example(FEW)
    for task, step in KILLS:
        eventually(f"step {step}", lambda: furthest(run) >= step or run.events("run-ended"), LIMIT_S, run.story)  # noqa: B023
        after = run.position()
        kill(run.task(task))
        run.wait("task-exited", LIMIT_S, after, task=task)
    assert concurrent.succeeds(LIMIT_S)["restarts"] == []
    step, accuracy = max(accuracies(concurrent))
    assert FEW <= step < FEW + 100, "it resumed from a checkpoint of the other run"
    assert accuracy >= 50
    report = run.succeeds(LIMIT_S)
    # A worker that has only just started may fail, instead of reconnecting, when its parameter server dies: then it
    # restarts, too.
    restarts = causes(report)
    assert [task for cause, task in restarts if cause == "signal"] == [task for task, _ in KILLS]
    assert {task for cause, task in restarts if cause != "signal"} <= {"worker-0", "worker-1"}, run.story()
    last = max(accuracies(run))
    assert last[0] >= STEPS
    assert last[1] >= 85


def accuracies(run: Run) -> list[tuple[int, float]]:
    output = run.log("worker-0") + run.log("worker-1")
    return [(int(step), float(percent)) for step, percent in ACCURACY.findall(output)]


def furthest(run: Run) -> int:
    return max((step for step, _ in accuracies(run)), default=0)
