"""Evaluators of real runs: each committed snapshot once, whoever is killed, and what came of it where people look."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from paceline.storage.manifest import Id
from support.runs import Run, Starter, eventually, kill
from support.saving import Place, a_job, bucket, commit, do, folder, warnings

pytestmark = pytest.mark.timeout(180)

BEST = {"best": {"metric": "accuracy", "mode": "max"}}


@pytest.fixture(params=["folder", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return folder(tmp_path / "place") if request.param == "folder" else bucket(request.getfixturevalue(request.param))


def evaluated_job(state: Path, place: Place, evaluators: int = 1, **more: Any) -> dict[str, Any]:
    roles = {"worker": {"replicas": 1}, "evaluator": {"replicas": evaluators}}
    return a_job(state, place, "--follow", roles=roles, **more)


def said(run: Run, word: str, task: str = "evaluator-0") -> list[int]:
    return [int(line.split()[-1]) for line in run.log(task).splitlines() if f" {word} " in line]


def begins(run: Run, *steps: int) -> None:
    eventually(f"it begins with {steps}", lambda: said(run, "begins") == list(steps), more=lambda: _all(run))


def _all(run: Run) -> str:
    return f"{run.log('evaluator-0')}\n{run.story()}"


def curve(run: Run, task: str = "evaluator-0") -> Iterator[tuple[int, float]]:
    """As TensorBoard reads it."""
    found = EventAccumulator(str(run.folder / "tensorboard" / task))
    found.Reload()
    for event in found.Tensors("accuracy"):
        yield event.step, round(float(event.tensor_proto.float_val[0]), 4)


def test_each_is_evaluated_once_whoever_is_killed_and_the_best_is_kept(
    start: Starter, state: Path, place: Place
) -> None:
    run = start(evaluated_job(state, place, snapshots={"keep": 1, **BEST}), env=place.env)
    commit(run, state, 10, 20, 30)
    begins(run, 10)
    kill(run.task("evaluator-0"))
    begins(run, 10, 10)
    (state / "go-10").touch()
    run.wait("evaluated", step=10)
    begins(run, 10, 10, 20)
    kill(run.keeper("evaluator-host-0"))
    begins(run, 10, 10, 20, 20)
    assert place.of(run).known().committed == {Id(30, 1), Id(20, 1), Id(10, 1)}, "the best so far, and what waits"
    kill(run.agent("captain"))
    (state / "go-20").touch()
    run.wait("evaluated", step=20)
    (state / "finish").touch()
    run.wait("ending")
    begins(run, 10, 10, 20, 20, 30)
    kill(run.agent("captain"))
    run.wait("captain-returned", after=run.position())
    kill(run.task("evaluator-0"))
    begins(run, 10, 10, 20, 20, 30, 30)
    (state / "go").touch()
    report = run.succeeds()
    assert said(run, "evaluated") == [10, 20, 30] and "no more" in run.log("evaluator-0")
    assert [event["step"] for event in run.events("evaluated")] == [10, 20, 30]
    assert place.of(run).known().committed == {Id(30, 1), Id(20, 1)}
    best = {"snapshot": "step-20-g1", "metric": "accuracy", "value": 1.0}
    assert report["best"] == best and report["metrics"]["evaluator-0"]["accuracy"] == pytest.approx(1 / 11)
    assert list(curve(run)) == [(10, 0.0909), (20, 1.0), (30, 0.0909)]
    shown = json.loads(run.call("snapshots", "ls", run.folder.name, "-o", "json").stdout)
    assert [each["metrics"]["accuracy"] for each in shown] == pytest.approx([1 / 11, 1.0])
    assert "  best         step-20-g1: accuracy 1" in run.call("status", run.folder.name).stdout
    assert not [name for name in ("evaluating", "evaluated") if (run.folder / name).exists()]
    assert warnings(run) == []


def test_what_is_done_while_the_captain_is_away_is_not_done_again(start: Starter, state: Path, tmp_path: Path) -> None:
    place = folder(tmp_path / "place")
    run = start(evaluated_job(state, place, 2), env=place.env)
    commit(run, state, 10, 20)
    eventually("both have one", lambda: said(run, "begins") + said(run, "begins", "evaluator-1"), more=run.story)
    commit(run, state, 30)
    kill(run.keeper("captain"))
    (state / "go").touch()
    run.wait("captain-returned")
    commit(run, state, 40)
    do(state, 50)
    (state / "finish").touch()
    run.succeeds()
    done = said(run, "evaluated") + said(run, "evaluated", "evaluator-1")
    assert sorted(done) == [10, 20, 30, 40, 50], "they share them"
    assert {event["step"] for event in run.events("evaluated")} == {10, 20, 30, 40, 50}
    each = [step for task in ("evaluator-0", "evaluator-1") for step, _ in curve(run, task)]
    assert sorted(each) == [10, 20, 30, 40, 50]
