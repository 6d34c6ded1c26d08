"""Programs that tolerate losses: what `restart.scope` names starts again, and the others never stop."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from support.runs import PROGRAMS, Run, Starter, causes, eventually, job, kill, without_host
from support.torchft_packages import lighthouse, python_path

AHEAD = 40  # steps until the end, so that all read the file before any is there


def averaging(state: Path, scope: str, *options: str, **worker: Any) -> dict[str, Any]:
    """Workers that average their parameters."""
    command = ["python", str(PROGRAMS / "averages.py"), str(state), *options]
    return job(command, roles={"worker": worker}, restart={"scope": scope})


def trains_with(run: Run, task: str, peers: int, after: int) -> int:
    """Waits until the task, at or after this position of the events, has so many peers. Returns the step."""

    def check() -> int:
        for event in run.events()[after:]:
            if event["event"] == "step" and event["task"] == task and event["metrics"].get("peers") == peers:
                return int(event["step"])
        return 0

    return eventually(f"{task} has {peers} peers", check, more=run.story)


def end(run: Run, state: Path) -> dict[str, Any]:
    newest = max(event["step"] for event in run.events("step"))
    (state / "finish.partial").write_text(str(newest + AHEAD))
    (state / "finish.partial").rename(state / "finish")
    return run.succeeds()


def starts(run: Run, task: str) -> list[str]:
    """What each attempt of the task was told: its generation and the addresses of all."""
    return [line.partition("| ")[2] for line in run.log(task).splitlines() if "peers" in line]


def test_a_killed_worker_comes_back_and_the_others_do_not_notice(start: Starter, state: Path) -> None:
    run = start(averaging(state, "task", replicas=3))
    run.all_step()
    trains_with(run, "worker-0", 2, 0)
    before, after = run.tasks(), run.position()
    kill(before["worker-1"])
    formed = run.wait("generation-formed", after=after)
    assert (formed["tasks"], formed["generation"]) == (["worker-1"], 1)
    run.wait("recovered", after=after, task="worker-1")
    back = run.position()
    assert trains_with(run, "worker-1", 2, back) > trains_with(run, "worker-0", 2, 0), "it goes on where the others are"
    trains_with(run, "worker-0", 2, back)
    assert {name: pid for name, pid in run.tasks().items() if name != "worker-1"} == {
        name: before[name] for name in ("worker-0", "worker-2")
    }
    report = end(run, state)
    assert causes(report) == [("signal", "worker-1")]
    assert report["generations"] == 1
    assert [len(starts(run, f"worker-{n}")) for n in range(3)] == [1, 2, 1]
    assert len({address for n in range(3) for address in starts(run, f"worker-{n}")}) == 1, "the same addresses for all"


def test_the_tasks_of_a_host_come_back_together(start: Starter, state: Path) -> None:
    run = start(averaging(state, "host", replicas=2, tasks_per_host=2))
    run.all_step()
    trains_with(run, "worker-0", 3, 0)
    before, after = run.tasks(), run.position()
    kill(before["worker-3"])
    assert run.wait("generation-formed", after=after)["tasks"] == ["worker-2", "worker-3"]
    run.wait("recovered", after=after)
    trains_with(run, "worker-0", 3, run.position())
    now = run.tasks()
    assert [now[name] == before[name] for name in sorted(now)] == [True, True, False, False]
    assert causes(end(run, state)) == [("signal", "worker-3")]
    assert [len(starts(run, f"worker-{n}")) for n in range(4)] == [1, 1, 2, 2]


def test_the_others_train_while_a_host_is_lost_and_only_its_tasks_start_when_it_is_back(
    start: Starter, state: Path
) -> None:
    run = start(averaging(state, "task", replicas=3))
    run.all_step()
    before, after = run.tasks(), run.position()
    with without_host(run, "worker-host-2"):
        trains_with(run, "worker-0", 1, after)
        trains_with(run, "worker-1", 1, after)
    run.wait("recovered", after=after, task="worker-2")
    trains_with(run, "worker-0", 2, run.position())
    assert [run.tasks()[name] for name in ("worker-0", "worker-1")] == [before["worker-0"], before["worker-1"]]
    assert causes(end(run, state)) == [("host-lost", "worker-2")]


def test_a_task_that_restarts_alone_resumes_from_the_newest_snapshot_and_saves_more(
    start: Starter, state: Path
) -> None:
    run = start(averaging(state, "task", "--save", replicas=2))
    run.all_step()
    run.wait("committed")
    for task in ("worker-1", "worker-0"):
        after = run.position()
        kill(run.task(task))
        restore = run.wait("generation-formed", after=after)["restore"]
        assert restore is not None, run.story()
        step = int(restore.split("-")[1])
        eventually("it says where it begins", lambda line=f"begins at step {step}\n", name=task: line in run.log(name))
        run.wait("recovered", after=after, task=task)
    eventually("it commits more", lambda: any(each["step"] > step for each in run.events("committed")), more=run.story)
    assert {each["generation"] for each in run.events("committed")} == {1}
    assert causes(end(run, state)) == [("signal", "worker-1"), ("signal", "worker-0")]


@pytest.mark.long
def test_the_torch_tasks_of_a_host_form_their_group_again_and_those_of_others_keep_theirs(
    start: Starter, state: Path
) -> None:
    command = ["python", str(PROGRAMS / "torch_units.py"), str(state)]
    roles = {"worker": {"replicas": 2, "tasks_per_host": 2}}
    run = start(job(command, framework="torch", roles=roles, restart={"scope": "host"}))
    run.all_step(150)
    before, after = run.tasks(), run.position()
    kill(before["worker-2"])
    run.wait("recovered", after=after)
    now = run.tasks()
    assert [now[name] == before[name] for name in sorted(now)] == [True, True, False, False]
    (state / "end").touch()
    assert causes(run.succeeds()) == [("signal", "worker-2")]
    groups = ["worker-0 worker-1"] * 2 + ["worker-2 worker-3"] * 2
    assert [run.log(f"worker-{n}").count(f"trains with {group} of 4") for n, group in enumerate(groups)] == [1, 1, 2, 2]


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_killed_replica_of_torchft_comes_back_warm_and_the_others_never_stop(
    start: Starter, state: Path, tmp_path: Path
) -> None:
    with lighthouse(tmp_path / "lighthouse.log") as address:
        command = ["python", str(PROGRAMS / "torchft_ddp.py"), str(state)]
        more = {"restart": {"scope": "task"}, "env": {"TORCHFT_LIGHTHOUSE": address}}
        run = start(job(command, 3, framework="torch", **more), env={"PYTHONPATH": python_path()})
        run.all_step(150)
        train_together(run, 0)
        eventually("a spare is ready", lambda: has_current_spare(run, "worker-host-1"), 480, run.story)
        before, after = run.tasks(), run.position()
        last = {event["task"]: event["step"] for event in run.events()[:after] if event["event"] == "step"}
        kill(before["worker-1"])
        again = run.wait("task-started", after=after)
        assert (again["task"], again["warm"], again["generation"]) == ("worker-1", True, 1)
        recovered = run.position()
        run.wait("recovered", after=after, task="worker-1")
        train_together(run, recovered)
        steps = [event["step"] for event in run.events()[after:] if event["event"] == "step"]
        assert min(steps) >= min(last.values()), "no replica goes back: the new one got its state from the others"
        assert [run.tasks()[name] for name in ("worker-0", "worker-2")] == [before["worker-0"], before["worker-2"]]
        report = end(run, state)
    assert causes(report) == [("signal", "worker-1")]
    logs = [run.log(f"worker-{n}") for n in range(3)]
    assert [log.count("begins as replica") for log in logs] == [1, 2, 1]
    weights = [next(line.partition("weights ")[2] for line in log.splitlines() if "weights" in line) for log in logs]
    assert len(set(weights)) == 1, weights


def has_current_spare(run: Run, host: str) -> bool:
    """Whether the spare was started after the last import of the program: otherwise it may be about to be replaced."""
    ready = [event for event in run.events("spare-ready") if event["host"] == host]
    imported = (run.folder / "logs" / f".{host}.imports").stat().st_mtime
    return bool(ready) and datetime.fromisoformat(ready[-1]["at"]).timestamp() - ready[-1]["took_s"] >= imported


def train_together(run: Run, after: int) -> None:
    """Waits until all replicas, at or after this position of the events, have taken a step together."""
    for task in ("worker-0", "worker-1", "worker-2"):

        def check(task: str = task) -> bool:
            steps = [each for each in run.events()[after:] if each["event"] == "step" and each["task"] == task]
            return any(each["metrics"].get("replicas") == 3 for each in steps)

        eventually(f"{task} trains with all others", check, more=run.story)
