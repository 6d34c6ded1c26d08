"""Tasks of a group save at the same step if one of them has to leave."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.runs import PROGRAMS, Run, alive, eventually, job
from support.stores.faults import Toxiproxy
from support.stores.servers import Store as Server


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Starts runs of three workers that step at different speeds."""
    runs: list[Run] = []

    def started(fields: dict[str, Any] | None = None, cli_env: dict[str, str] | None = None, **env: str) -> Run:
        """`fields`: of the job; `cli_env`: environment of the command line; `env`: of the tasks."""
        task_env: dict[str, Any] = {"FINISH": str(tmp_path / "finish"), **env}
        job_fields = {"env": task_env, "limits": {"grace": "20s"}, **(fields or {})}
        program = ["python", str(PROGRAMS / "asks.py")]
        runs.append(Run(tmp_path, job(program, workers=3, **job_fields), env=cli_env or {}))
        return runs[-1]

    yield started
    for run in runs:
        run.clean_up()


def wait_until_all_ask(run: Run) -> None:
    """A task asks whether to save after its first step, so the agent knows that at its second."""

    def check() -> bool:
        return len({event["task"] for event in run.events("step") if event["step"] > 1}) == 3

    eventually("all tasks are past their first step", check, more=run.story)


def saves(run: Run) -> set[int]:
    """The steps at which tasks have saved, according to their logs."""
    logs = [(run.folder / "logs" / f"worker-{n}.log").read_text().split() for n in range(3)]
    return {int(after) for log in logs for word, after in itertools.pairwise(log) if word == "saves"}


def test_a_preempted_host_leaves_after_the_group_has_saved_at_one_step(begin: Callable[..., Run]) -> None:
    run = begin()
    wait_until_all_ask(run)
    os.kill(run.keeper("worker-host-1"), signal.SIGTERM)
    run.wait("generation-formed", generation=2)
    committed = run.events("committed")[0]
    assert saves(run) == {committed["step"]}
    restart = run.events("restart")[0]
    assert (restart["cause"], restart["task"]) == ("preempted", "worker-1")
    assert run.events("generation-formed")[1]["restore"] == committed["snapshot"]
    run.wait("step", generation=2, task="worker-1")
    (run.place / "finish").touch()
    run.succeeds()


def test_a_preempted_host_ends_its_tasks_in_time_if_nothing_can_be_committed(
    begin: Callable[..., Run], s3: Server, toxiproxy: Toxiproxy
) -> None:
    """They get a SIGTERM and are not killed: part of the grace is reserved for that."""
    link = toxiproxy.link(s3.port)
    fields = {"limits": {"grace": "12s"}, "snapshots": {"to": s3.url}}
    run = begin(fields, s3.through(link).options, APART="0")
    wait_until_all_ask(run)
    keeper = run.keeper("worker-host-1")
    with link.down():
        os.kill(keeper, signal.SIGTERM)
        assert run.wait("task-exited", task="worker-1")["signal"] == "SIGTERM"
        eventually("the host has left", lambda: not alive(keeper), more=run.story)
        [saved] = run.events("saved", "committed")
        assert (saved["event"], saves(run)) == ("saved", {saved["step"]})
        assert run.wait("restart")["cause"] == "preempted"


def test_hosts_that_are_preempted_together_save_once(begin: Callable[..., Run]) -> None:
    run = begin()
    wait_until_all_ask(run)
    keepers = [run.keeper(f"worker-host-{number}") for number in range(3)]
    for keeper in keepers:
        os.kill(keeper, signal.SIGTERM)
    run.wait("generation-formed", generation=2)
    assert len(saves(run)) == 1
    (run.place / "finish").touch()
    run.succeeds()


def test_a_captain_that_is_preempted_too_stays_until_the_group_has_saved(begin: Callable[..., Run]) -> None:
    """As when a node is drained."""
    run = begin(APART="0")
    wait_until_all_ask(run)
    keepers = [run.keeper("captain"), run.keeper("worker-host-1")]
    for keeper in keepers:
        os.kill(keeper, signal.SIGTERM)
    run.wait("captain-returned")
    run.wait("restart")
    [committed] = run.events("committed")
    assert saves(run) == {committed["step"]}
    assert [event["cause"] for event in run.events("restart")] == ["preempted"]


@pytest.mark.parametrize("step_s", ["0.0005", "0.05"])
def test_a_task_may_ask_for_a_snapshot_of_its_group(begin: Callable[..., Run], step_s: str) -> None:
    """Fast tasks do more steps while the request is on its way, so that some attempts are too late."""
    run = begin(SAVE_NOW_AT="30", STEP_S=step_s)
    committed = run.wait("committed")
    assert saves(run) == {committed["step"]}
    (run.place / "finish").touch()
    report = run.succeeds()
    assert report["generations"] == 1


def test_helpers_save_by_time_at_the_same_step(tmp_path: Path) -> None:
    """Both processes save shards: a snapshot is complete only if they do so at the same step."""
    env = {"FINISH": str(tmp_path / "finish"), "EVERY": "0.5s"}
    run = Run(tmp_path, job(["python", str(PROGRAMS / "jax_by_time.py")], framework="jax", env=env))
    try:
        eventually("three snapshots", lambda: len(run.events("committed")) >= 3, more=run.story)
        partial = tmp_path / "finish.partial"
        partial.write_text(str(run.events("step")[-1]["step"] + 500))  # no process has come that far
        partial.rename(tmp_path / "finish")
        run.succeeds()
        assert "stopping []" in run.log("worker-0")
    finally:
        run.clean_up()
