"""Training with the helpers of a framework, under kills: it ends with the same bits as an undisturbed run.

For torch, see tests/local/test_torch_snapshots.py and tests/examples/test_torch.py.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from paceline.storage.snapshots.manifest import parse_id
from support.runs import PROGRAMS, Run, Starter, eventually, kill

pytestmark = pytest.mark.timeout(900)

SEED = 20261117
KILLS = {"tensorflow": 2, "jax": 2}
LEAST, MOST = 2, 10  # steps from one kill to the next
STEPS, EVERY, PACE = 100, 3, 0.04  # so many steps that it does not end before the last kill
LIMIT_S = 240.0
TASKS = ("worker-0", "worker-1")
OPTIONS = {"steps": STEPS, "every": EVERY, "pace": PACE}
COMMANDS = {
    "tensorflow": ["tf_snapshots.py", *(word for name, value in OPTIONS.items() for word in (f"--{name}", str(value)))],
    "jax": ["jax_snapshots.py", json.dumps(OPTIONS)],
}
STAGES = ("imports_s", "joining_s", "joined_s", "restoring_s", "restored_s", "first_step_s")
LOG_LINE = re.compile(r" g(\d+) \| (step|restored|counter) (\d+) ?(\w*)$", re.MULTILINE)


def job(framework: str, snapshots: dict[str, str], **more: Any) -> dict[str, Any]:
    fields = {
        "name": "kills",
        "framework": framework,
        "code": str(PROGRAMS),
        "command": ["python", *COMMANDS.get(framework, ())],
        "env": {"TF_CPP_MIN_LOG_LEVEL": "2"},
        "roles": {"worker": {"replicas": 2}},
        "snapshots": snapshots,
    }
    return {**fields, **more}


def final_state(run: Run, task: str) -> Any:
    """What the task printed last: digests of everything that it trains, and its next random numbers. The framework may
    print an error behind it: another task has left first."""
    return json.loads(re.findall(r" \| (\{.*\})$", run.log(task), re.MULTILINE)[-1])["ended"]


def steps_done(run: Run, task: str, generation: int) -> int:
    return run.log(task).count(f" g{generation} | step ")


def kill_tasks(run: Run, dice: random.Random, kills: int) -> list[str]:
    """Kills tasks, each a few steps after the previous one; returns their names. The first two generations have
    committed a snapshot by then, so the next one does not start from where they did."""
    killed = []
    for generation in range(1, kills + 1):
        task, steps = dice.choice(TASKS), dice.randint(LEAST, MOST)
        if generation <= 2:
            run.wait("committed", LIMIT_S, generation=generation)
        description = f"{steps} steps of {task} in generation {generation}"
        eventually(description, lambda: steps_done(run, task, generation) >= steps, LIMIT_S, run.story)  # noqa: B023
        kill(run.wait("task-started", LIMIT_S, task=task, generation=generation)["pid"])
        killed.append(task)
    return killed


@pytest.mark.parametrize("framework", ["tensorflow", pytest.param("jax", marks=pytest.mark.long)])
def test_training_ends_with_the_same_bits_after_kills(framework: str, start: Starter, tmp_path: Path) -> None:
    """Dropout or noise, a shuffled order that starts over in the middle, and random numbers of Python and numpy."""
    undisturbed = start(job(framework, {"to": str(tmp_path / "whole")}, restart={"warm": False}))
    assert undisturbed.succeeds(LIMIT_S)["restarts"] == []
    assert undisturbed.events("warning") == []  # none that the workers did not communicate
    run = start(job(framework, {"to": str(tmp_path / "killed")}))
    killed = kill_tasks(run, random.Random(f"{SEED} {framework}"), KILLS[framework])
    # On a busy machine the error of its peer may be detected before the kill: the cause does not matter here.
    assert len(run.succeeds(LIMIT_S)["restarts"]) == len(killed), run.story()
    for task in TASKS:
        assert final_state(run, task) == final_state(undisturbed, task), f"seed {SEED}\n{run.story()}"
    measured = {(event["generation"], event["task"]): event for event in run.events("start-times")}
    for generation in range(1, KILLS[framework] + 2):
        for task in TASKS:
            times = [measured[generation, task][name] for name in STAGES]
            assert times == sorted(times) and times[0] >= 0, run.story()
    spares = {(event["generation"], event["task"]) for event in run.events("task-started") if event["warm"]}
    # Any one of them may have waited for a core.
    warm, cold = ([measured[key]["imports_s"] for key in keys] for keys in (spares, [(1, task) for task in TASKS]))
    assert not warm or min(warm) < min(cold) / 2, run.story()
    restored = [event["restore"] for event in run.events("generation-formed")]
    assert restored[0] is None
    assert len(set(filter(None, restored))) > 1, f"seed {SEED}: {restored}"


def test_with_parameter_servers_no_committed_step_is_lost(start: Starter, tmp_path: Path) -> None:
    """Two workers train asynchronously, so there is no run to compare with. But each chief resumes from the newest
    committed step, with exactly the variables of that step, and nothing is lost with a worker that dies."""
    steps, all_tasks = 120, ["chief-0", "ps-0", "ps-1", "worker-0", "worker-1"]
    command = ["python", "tf_snapshots_ps.py", "--steps", str(steps), "--every", "2", "--pace", str(PACE)]
    roles: dict[str, Any] = {"chief": {}, "worker": {"replicas": 2}, "ps": {"replicas": 2}}
    more = {"strategy": "parameter-server", "roles": roles, "command": command, "restart": {"warm": False}}
    run = start(job("tensorflow", {"to": str(tmp_path / "place")}, **more))
    scopes = {"worker-1": ["worker-1"], "ps-1": all_tasks, "chief-0": all_tasks}
    for task, scope in scopes.items():
        after = run.position()
        run.wait("committed", LIMIT_S, after)
        kill(run.task(task))
        assert sorted(run.wait("restart", LIMIT_S, after)["scope"]) == scope
        run.wait("recovered", LIMIT_S, after)
    # On a busy machine the chief's error may be detected before the kill that it follows from.
    assert len(run.succeeds(LIMIT_S)["restarts"]) == len(scopes), run.story()

    lines = [(int(g), kind, int(n), rest) for g, kind, n, rest in LOG_LINE.findall(run.log("chief-0"))]
    digests = {(step, generation): digest for generation, kind, step, digest in lines if kind == "step"}
    generations, newest = [], None
    for event in run.events("committed", "generation-formed"):
        if event["event"] == "committed":
            newest = parse_id(event["snapshot"])
        elif newest and "chief-0" in event["tasks"]:
            generations.append(event["generation"])
            restored = parse_id(event["restore"])
            assert restored and restored >= newest
            first, second = [line for line in lines if line[0] == generations[-1]][:2]
            assert first[1:] == ("restored", restored.step, digests[restored.step, restored.generation])
            assert second[1:3] == ("step", restored.step + 1)
    assert generations == [2, 3]
    # Two updates per step. The update in progress in the killed worker is repeated, whether it was completed or not.
    *_, (_, kind, counter, _) = lines
    assert kind == "counter"
    assert 2 * steps <= counter <= 2 * steps + 1


@pytest.mark.long
def test_each_example_is_used_once_per_epoch_with_any_number_of_workers(start: Starter, tmp_path: Path) -> None:
    """Three workers, then two, then four, with a sharded model. Each run starts from a snapshot in the middle of an
    epoch; later steps of the previous run are ignored. 60 examples in batches of 12: 5 steps per epoch."""
    examples_by_step: dict[int, list[int]] = {}
    origin: dict[str, str] = {}
    for name, workers, steps in (("three", 3, 7), ("two", 2, 11), ("four", 4, 15)):
        options = {"kind": "fsdp", "steps": steps, "every": EVERY, "pace": PACE}
        command = ["python", "torch_snapshots.py", json.dumps(options)]
        roles = {"worker": {"replicas": workers}}
        snapshots = {"to": str(tmp_path / "place"), **origin}
        fields = job("torch", snapshots, command=command, roles=roles, restart={"warm": False})
        run = start(fields, "--run", name, home=tmp_path / "home")
        assert run.succeeds(LIMIT_S)["steps"] == steps
        (formed,) = run.events("generation-formed")
        restored = parse_id(formed["restore"]) if origin else None
        first = restored.step if restored else 0
        examples_by_step = {step: indices for step, indices in examples_by_step.items() if step <= first}
        for task in range(workers):
            for step, indices in re.findall(r" \| step (\d+) \[(.*)\]", run.log(f"worker-{task}")):
                assert int(step) > first
                examples_by_step.setdefault(int(step), []).extend(map(int, indices.split(", ")))
        origin = {"from": name}
    assert sorted(examples_by_step) == list(range(1, 16))
    for epoch in range(3):
        examples = [index for step in range(5 * epoch + 1, 5 * epoch + 6) for index in examples_by_step[step]]
        assert sorted(examples) == list(range(60)), f"epoch {epoch}"
