"""Elastic jobs: hosts are lost and come back, the others train on, and every example is used once per epoch."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from paceline import client
from support.elastic_program import BATCH, SIZE, last_step
from support.runs import LIMIT_S, PROGRAMS, TOGETHER, Run, Starter, eventually, finish, job, orders, without_host
from support.short_lease import with_lease

ROUNDS, REQUESTS = 5, 6  # of test_many_changes_of_size: 40 changes
COMMAND = with_lease(7.0)  # other hosts must not be lost when the machine is busy: changes are counted
FORMED_S = 330.0  # a host that joins imports the framework first, at low priority, on a busy machine
STARTED = ("starting", "running")  # states of tasks that take part


def elastic_job(framework: str, state: Path, **more: Any) -> dict[str, Any]:
    command = ["python", str(PROGRAMS / "elastic.py"), framework, str(state)]
    roles = {"worker": {"replicas": 3, "min": 2}}
    wait = "60s" if framework == "none" else "300s"  # until a host joins without a spare
    return job(command, framework=framework, roles=roles, elastic={"wait": wait, "every": "3s"}, **more)


def formed(run: Run, size: int, after: int) -> dict[str, Any]:
    """Waits for a generation with that many workers, and for a step of it."""

    def check() -> dict[str, Any] | None:
        events = run.events()[after:]
        formed = [event for event in events if event["event"] == "generation-formed" and len(event["tasks"]) == size]
        return formed[-1] if formed else None

    event = eventually(f"a generation of {size}", check, FORMED_S, run.story)
    assert event is not None
    run.wait_for_step(FORMED_S, after, event["generation"])
    return event


def check_epochs(state: Path, last: int) -> None:
    """What counts of a step is what the newest generation that has done it has used."""
    shares: dict[int, dict[int, list[list[int]]]] = {}
    for path in (state / "seen").iterdir():
        step, generation, _ = map(int, path.name.split("-"))
        shares.setdefault(step, {}).setdefault(generation, []).append(json.loads(path.read_text()))
    assert sorted(shares) == list(range(1, last + 1))
    used = {step: by_generation[max(by_generation)] for step, by_generation in shares.items()}
    per_epoch = SIZE // BATCH
    for first in range(1, last + 1, per_epoch):
        epoch = sorted(index for step in range(first, first + per_epoch) for share in used[step] for index in share)
        assert epoch == list(range(SIZE)), f"the epoch from step {first} on"


@pytest.mark.parametrize(
    "framework", ["none", pytest.param("torch", marks=[pytest.mark.long, pytest.mark.timeout(900)])]
)
def test_a_group_shrinks_and_grows_back_and_uses_every_example_once(
    start: Starter, state: Path, framework: str
) -> None:
    run = start(elastic_job(framework, state), command=COMMAND)
    run.all_step()
    after = run.position()
    with without_host(run, "worker-host-0"):
        smaller = formed(run, 2, after)
        assert smaller["absent"] == ["worker-0"]
        assert run.call("status", run.folder.name).stdout.count("absent") == 1
        after = run.position()
    larger = formed(run, 3, after)
    assert larger["restore"].endswith(f"-g{smaller['generation']}"), "from a snapshot that was taken for this"
    again = run.wait("task-started", after=after, task="worker-0", generation=larger["generation"])
    assert again["warm"] is True, run.story()
    places = "as 0 of 2", "as 1 of 3"
    eventually("worker-1 says so", lambda: all(each in run.log("worker-1") for each in places), more=run.story)
    last = last_step(state)
    report = run.succeeds()
    assert [restart["cause"] for restart in report["restarts"]] == ["host-lost"]
    assert report["generations"] == larger["generation"] == 3
    check_epochs(state, last)


def test_a_run_is_scaled_up_and_down_and_uses_every_example_once(
    start: Starter, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roles = {"worker": {"replicas": 2, "min": 1, "max": 4}}
    # Nothing else makes hosts join: a request does not wait for `every`.
    run = start({**elastic_job("none", state), "roles": roles, "elastic": {"wait": "60s", "every": "1h"}})
    run.all_step()
    assert run.events("run-started")[0]["tasks"] == ["worker-0", "worker-1"] and "worker-2" not in shown(run)
    after = run.position()

    up = run.call("scale", run.folder.name, "worker=3", limit=FORMED_S)
    assert up.returncode == 0 and up.stderr.endswith("worker has 3 hosts\n"), up.stderr
    larger = formed(run, 3, after)
    assert larger["restore"].endswith("-g1"), "from a snapshot that was taken for this"
    assert shown(run) == {f"worker-{index}": "running" for index in range(3)}
    eventually("worker-2 says so", lambda: "as 2 of 3" in run.log("worker-2"), more=run.story)

    after = run.position()
    down = run.call("scale", run.folder.name, "worker=2", limit=FORMED_S)
    assert down.returncode == 0 and "worker-host-2 to leave" in down.stderr, down.stderr
    smaller = formed(run, 2, after)
    assert "absent" not in smaller
    run.wait("committed", snapshot=smaller["restore"])
    assert shown(run) == {"worker-0": "running", "worker-1": "running", "worker-2": "ended"}
    eventually("the agent has exited", lambda: "worker-host-2" not in run.keepers(), more=run.story)

    after = run.position()
    monkeypatch.setenv("PACELINE_HOME", str(run.folder.parent.parent))
    status = client.get(run.folder.name).scale(worker=4, timeout=FORMED_S)
    assert [task.name for task in status.tasks if task.state in STARTED] == [f"worker-{index}" for index in range(4)]
    largest = formed(run, 4, after)
    last = last_step(state)
    report = run.succeeds()
    assert report["restarts"] == [] and report["generations"] == largest["generation"] == 4, run.story()
    assert [(event["was"], event["count"]) for event in run.events("scaled")] == [(2, 3), (3, 2), (2, 4)]
    assert not run.events("member-lost", "restart", "warning")
    check_epochs(state, last)


def shown(run: Run) -> dict[str, str]:
    """The states of tasks that `status` shows. A task may still be starting while another one has done a step."""
    status = json.loads(run.call("status", run.folder.name, "-o", "json").stdout)
    return {task["task"]: "running" if task["state"] in STARTED else task["state"] for task in status["tasks"]}


def test_a_captain_that_returns_continues_to_scale(start: Starter, state: Path) -> None:
    roles = {"worker": {"replicas": 3, "min": 2}}
    run = start({**elastic_job("none", state), "roles": roles}, command=COMMAND)
    run.all_step()
    after = run.position()
    tasks = run.tasks().values()
    for pid in tasks:
        os.kill(pid, signal.SIGSTOP)  # so that the group cannot take a snapshot
    timeout = run.call("scale", run.folder.name, "worker=2", "--timeout", "1s")
    assert timeout.returncode == 124 and "has not been scaled within 1 s" in timeout.stderr, timeout.stderr
    os.kill(run.agent("captain"), signal.SIGKILL)
    run.wait("captain-returned", after=after)
    for pid in tasks:
        os.kill(pid, signal.SIGCONT)
    formed(run, 2, after)
    eventually("the agent has exited", lambda: "worker-host-2" not in run.keepers(), more=run.story)
    last = last_step(state)
    assert run.succeeds()["restarts"] == []
    check_epochs(state, last)


def test_requests_that_a_run_cannot_fulfil(start: Starter, state: Path) -> None:
    roles = {"worker": {"replicas": 2, "max": 3}}
    run = start({**elastic_job("none", state), "roles": roles})
    run.all_step()
    name = run.folder.name
    stacks = json.loads(run.call("stacks", name, "-o", "json").stdout)
    assert {process["task"] for process in stacks["tasks"]} == {"worker-0", "worker-1"}, "the plan has one more"

    def error(*arguments: str) -> str:
        refused = run.call("scale", *arguments)
        assert refused.returncode == 2 and refused.stdout == ""
        return refused.stderr

    assert error(name, "worker=4") == f"error: worker=4: role worker of {name} can have 2 to 3 hosts\n"
    assert error(name, "worker=1") == f"error: worker=1: role worker of {name} can have 2 to 3 hosts\n"
    assert error(name, "wroker=3").startswith(f"error: wroker=3: {name} has no role 'wroker'; did you mean \"worker\"?")
    assert "invalid number of hosts" in error(name, "worker=many")
    assert "one role and its number of hosts" in error(name)
    last_step(state)
    run.succeeds()
    ended = run.call("scale", name, "worker=3")
    assert ended.returncode == 1 and ended.stderr.startswith(f"error: {name} is not running"), ended.stderr


@pytest.mark.long
@pytest.mark.parametrize("framework", ["jax", "tensorflow"])
def test_the_others_of_a_lost_host_train_together(start: Starter, state: Path, framework: str) -> None:
    """The program checks at each step that all tasks that take part have contributed. It takes no snapshots, so nobody
    is interrupted when the host is back."""
    run = start({**elastic_job(framework, state), "command": orders(framework, state)}, command=COMMAND)
    run.all_step(FORMED_S)
    after = run.position()
    with without_host(run, "worker-host-0"):
        smaller = formed(run, 2, after)
    run.wait("member-joined", after=after, host="worker-host-0")
    report = finish(run, state, ahead=TOGETHER)
    assert report["generations"] == smaller["generation"] == 2
    assert [restart["cause"] for restart in report["restarts"]] == ["host-lost"]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_chief_goes_on_without_a_worker_that_joins_again_later(start: Starter, tmp_path: Path) -> None:
    """While the host of a worker is lost, a parameter server dies: the next chief does not know that worker. Once the
    host is back, another generation has all of them, from a snapshot that the chief takes for that."""
    program = str(PROGRAMS / "tf_snapshots_ps.py")
    command = ["python", program, "--steps", "100000", "--every", "1000000", "--pace", "0.05"]
    roles = {"chief": {}, "ps": {}, "worker": {"replicas": 2, "min": 1}}
    more = {"strategy": "parameter-server", "roles": roles, "elastic": {"wait": "60s", "every": "3s"}}
    to = {"to": str(tmp_path / "place")}
    run = start(job(command, framework="tensorflow", snapshots=to, **more), command=COMMAND)
    run.wait_for_step(FORMED_S)
    with without_host(run, "worker-host-1"):
        run.wait("restart", LIMIT_S, cause="host-lost")
        after = run.position()
        os.kill(run.task("ps-0"), signal.SIGKILL)
        smaller = formed(run, 3, after)
        assert smaller["absent"] == ["worker-1"]
        after = run.position()
    whole = formed(run, 4, after)
    assert "absent" not in whole and whole["restore"].endswith(f"g{smaller['generation']}"), run.story()
    run.cli.send_signal(signal.SIGINT)
    _, report = run.end(FORMED_S)
    assert [restart["cause"] for restart in report["restarts"]] == ["host-lost", "signal"]


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_many_changes_of_size(start: Starter, state: Path) -> None:
    """A host is lost and comes back, then the number of hosts is changed six times, and so on: 40 changes."""
    run = start(elastic_job("none", state), command=COMMAND)
    run.all_step()
    for number in range(ROUNDS):
        after = run.position()
        with without_host(run, f"worker-host-{number % 3}"):
            formed(run, 2, after)
            after = run.position()
        formed(run, 3, after)
        for size in (2, 3) * (REQUESTS // 2):
            after = run.position()
            assert run.call("scale", run.folder.name, f"worker={size}", limit=FORMED_S).returncode == 0
            formed(run, size, after)
    last = last_step(state)
    report = run.succeeds()
    assert report["generations"] == 1 + ROUNDS * (2 + REQUESTS), run.story()
    assert [restart["cause"] for restart in report["restarts"]] == ["host-lost"] * ROUNDS
    check_epochs(state, last)
    committed = [event["step"] for event in run.events("committed")]
    restored = [int(event["restore"].split("-")[1]) for event in run.events("generation-formed") if event["restore"]]
    assert restored == sorted(restored) and committed == sorted(committed), "no change has lost a committed step"
