"""Evaluators of real runs: each committed snapshot is evaluated once despite kills, and users see the results."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from paceline.storage.snapshots.manifest import SnapshotId
from support.runs import Run, Starter, eventually, kill
from support.saving import Place, a_job, bucket, commit, do, folder, warnings

BEST = {"best": {"metric": "accuracy", "mode": "max"}}


@pytest.fixture(params=["folder", "s3"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return folder(tmp_path / "place") if request.param == "folder" else bucket(request.getfixturevalue(request.param))


def evaluated_job(state: Path, location: Place, evaluators: int = 1, **more: Any) -> dict[str, Any]:
    roles = {"worker": {"replicas": 1}, "evaluator": {"replicas": evaluators}}
    return a_job(state, location, "--follow", roles=roles, **more)


def logged_steps(run: Run, word: str, task: str = "evaluator-0") -> list[int]:
    return [int(line.split()[-1]) for line in run.log(task).splitlines() if f" {word} " in line]


def wait_until_begun(run: Run, *steps: int) -> None:
    eventually(
        f"it begins with {steps}", lambda: logged_steps(run, "begins") == list(steps), more=lambda: log_and_story(run)
    )


def log_and_story(run: Run) -> str:
    return f"{run.log('evaluator-0')}\n{run.story()}"


def curve(run: Run, task: str = "evaluator-0") -> Iterator[tuple[int, float]]:
    """As TensorBoard reads it."""
    accumulator = EventAccumulator(str(run.folder / "tensorboard" / task))
    accumulator.Reload()
    for event in accumulator.Tensors("accuracy"):
        yield event.step, round(float(event.tensor_proto.float_val[0]), 4)


def test_each_snapshot_is_evaluated_once_despite_kills_and_the_best_is_kept(
    start: Starter, state: Path, location: Place
) -> None:
    run = start(evaluated_job(state, location, snapshots={"keep": 1, **BEST}), env=location.env)
    commit(run, state, 10, 20, 30)
    wait_until_begun(run, 10)
    kill(run.task("evaluator-0"))
    wait_until_begun(run, 10, 10)
    (state / "go-10").touch()
    run.wait("evaluated", step=10)
    wait_until_begun(run, 10, 10, 20)
    kill(run.keeper("evaluator-host-0"))
    wait_until_begun(run, 10, 10, 20, 20)
    assert location.of(run).inventory().committed == {SnapshotId(30, 1), SnapshotId(20, 1), SnapshotId(10, 1)}, (
        "the best so far, and those that wait for evaluation"
    )
    kill(run.agent("captain"))
    (state / "go-20").touch()
    run.wait("evaluated", step=20)
    (state / "finish").touch()
    run.wait("ending")
    wait_until_begun(run, 10, 10, 20, 20, 30)
    before = run.position()
    kill(run.agent("captain"))
    run.wait("captain-returned", after=before)
    kill(run.task("evaluator-0"))
    wait_until_begun(run, 10, 10, 20, 20, 30, 30)
    (state / "go").touch()
    report = run.succeeds()
    assert logged_steps(run, "evaluated") == [10, 20, 30] and "no more" in run.log("evaluator-0")
    assert [event["step"] for event in run.events("evaluated")] == [10, 20, 30]
    assert location.of(run).inventory().committed == {SnapshotId(30, 1), SnapshotId(20, 1)}
    best = {"snapshot": "step-20-g1", "metric": "accuracy", "value": 1.0}
    assert report["best"] == best and report["metrics"]["evaluator-0"]["accuracy"] == pytest.approx(1 / 11)
    assert list(curve(run)) == [(10, 0.0909), (20, 1.0), (30, 0.0909)]
    snapshots = json.loads(run.call("snapshots", "ls", run.folder.name, "-o", "json").stdout)
    assert [each["metrics"]["accuracy"] for each in snapshots] == pytest.approx([1 / 11, 1.0])
    assert "  best         step-20-g1: accuracy 1" in run.call("status", run.folder.name).stdout
    assert not [name for name in ("evaluating", "evaluated") if (run.folder / name).exists()]
    assert warnings(run) == []


def test_evaluations_made_while_the_captain_is_away_are_not_repeated(
    start: Starter, state: Path, tmp_path: Path
) -> None:
    location = folder(tmp_path / "place")
    run = start(evaluated_job(state, location, 2), env=location.env)
    commit(run, state, 10, 20)
    eventually(
        "both have one",
        lambda: logged_steps(run, "begins") and logged_steps(run, "begins", "evaluator-1"),
        more=run.story,
    )
    commit(run, state, 30)
    kill(run.keeper("captain"))
    (state / "go").touch()
    run.wait("captain-returned")
    commit(run, state, 40)
    do(state, 50)
    (state / "finish").touch()
    run.succeeds()
    evaluated = logged_steps(run, "evaluated") + logged_steps(run, "evaluated", "evaluator-1")
    assert sorted(evaluated) == [10, 20, 30, 40, 50], "the evaluators share the snapshots"
    assert {event["step"] for event in run.events("evaluated")} == {10, 20, 30, 40, 50}
    curve_steps = [step for task in ("evaluator-0", "evaluator-1") for step, _ in curve(run, task)]
    assert sorted(curve_steps) == [10, 20, 30, 40, 50]
