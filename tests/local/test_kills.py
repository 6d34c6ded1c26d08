"""Training with the helpers of a framework, under kills: it ends with the bits of a run that nobody disturbed.

With those of torch: tests/local/test_torch_snapshots.py and tests/examples/test_torch.py.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from paceline.storage.manifest import parse_id
from support.runs import PROGRAMS, Run, Starter, causes, eventually, kill

pytestmark = pytest.mark.timeout(300)

SEED = 20261117
KILLS = 5
LEAST, MOST = 2, 10  # steps from one kill to the next
STEPS, EVERY, PACE = 80, 3, 0.04  # so many that it does not end before the last kill
LIMIT_S = 90.0
TASKS = ("worker-0", "worker-1")
OPTIONS = {"steps": STEPS, "every": EVERY, "pace": PACE}
COMMANDS = {
    "tensorflow": ["tf_snapshots.py", *(word for name, value in OPTIONS.items() for word in (f"--{name}", str(value)))],
    "jax": ["jax_snapshots.py", json.dumps(OPTIONS)],
}
SAID = re.compile(r" g(\d+) \| (step|restored|counter) (\d+) ?(\w*)$", re.MULTILINE)


def job(framework: str, snapshots: dict[str, str], **more: Any) -> dict[str, Any]:
    made = {
        "name": "kills",
        "framework": framework,
        "code": str(PROGRAMS),
        "command": ["python", *COMMANDS.get(framework, ())],
        "env": {"TF_CPP_MIN_LOG_LEVEL": "2"},
        "roles": {"worker": {"replicas": 2}},
        "snapshots": snapshots,
    }
    return {**made, **more}


def ended(run: Run, task: str) -> Any:
    """What the task ended with: digests of everything that it trains, and the next random numbers."""
    return json.loads(run.log(task).splitlines()[-1].split(" | ", 1)[1])["ended"]


def steps_done(run: Run, task: str, generation: int) -> int:
    return run.log(task).count(f" g{generation} | step ")


def disturb(run: Run, dice: random.Random) -> list[str]:
    """Kills tasks, each a few steps after the last; their names."""
    killed = []
    for generation in range(1, KILLS + 1):
        task, steps = dice.choice(TASKS), dice.randint(LEAST, MOST)
        words = f"{steps} steps of {task} in generation {generation}"
        eventually(words, lambda: steps_done(run, task, generation) >= steps, LIMIT_S, run.story)  # noqa: B023
        kill(run.wait("task-started", LIMIT_S, task=task, generation=generation)["pid"])
        killed.append(task)
    return killed


@pytest.mark.parametrize("framework", ["tensorflow", pytest.param("jax", marks=pytest.mark.long)])
def test_it_ends_with_the_same_bits(framework: str, start: Starter, tmp_path: Path) -> None:
    """Dropout or noise, a shuffled order that begins anew in the middle, and random numbers of Python and numpy."""
    whole = start(job(framework, {"to": str(tmp_path / "whole")}, restart={"warm": False}))
    assert whole.succeeds(LIMIT_S)["restarts"] == []
    run = start(job(framework, {"to": str(tmp_path / "killed")}))
    killed = disturb(run, random.Random(f"{SEED} {framework}"))
    assert causes(run.succeeds(LIMIT_S)) == [("signal", task) for task in killed]
    for task in TASKS:
        assert ended(run, task) == ended(whole, task), f"seed {SEED}\n{run.story()}"
    restored = [event["restore"] for event in run.events("generation-formed")]
    assert restored[0] is None
    assert len(set(filter(None, restored))) > 1, f"seed {SEED}: {restored}"


def test_with_parameter_servers_no_committed_step_is_lost(start: Starter, tmp_path: Path) -> None:
    """Two workers train as it comes, so there is no run to compare with. But each chief goes on from the newest
    committed step, with the variables of that step to the bit, and a worker that dies takes nothing with it."""
    steps, whole = 120, ["chief-0", "ps-0", "ps-1", "worker-0", "worker-1"]
    command = ["python", "tf_snapshots_ps.py", "--steps", str(steps), "--every", "2", "--pace", str(PACE)]
    roles: dict[str, Any] = {"chief": {}, "worker": {"replicas": 2}, "ps": {"replicas": 2}}
    more = {"strategy": "parameter-server", "roles": roles, "command": command, "restart": {"warm": False}}
    run = start(job("tensorflow", {"to": str(tmp_path / "place")}, **more))
    scopes = {"worker-1": ["worker-1"], "ps-1": whole, "worker-0": ["worker-0"], "chief-0": whole}
    for task, scope in scopes.items():
        after = run.position()
        run.wait("committed", LIMIT_S, after)
        kill(run.task(task))
        assert sorted(run.wait("restart", LIMIT_S, after)["scope"]) == scope
        run.wait("recovered", LIMIT_S, after)
    assert causes(run.succeeds(LIMIT_S)) == [("signal", task) for task in scopes]

    told = [(int(g), what, int(n), rest) for g, what, n, rest in SAID.findall(run.log("chief-0"))]
    digests = {(step, generation): digest for generation, what, step, digest in told if what == "step"}
    begun, newest = [], None
    for event in run.events("committed", "generation-formed"):
        if event["event"] == "committed":
            newest = parse_id(event["snapshot"])
        elif newest and "chief-0" in event["tasks"]:
            begun.append(event["generation"])
            restored = parse_id(event["restore"])
            assert restored and restored >= newest
            first, second = [line for line in told if line[0] == begun[-1]][:2]
            assert first[1:] == ("restored", restored.step, digests[restored.step, restored.generation])
            assert second[1:3] == ("step", restored.step + 1)
    assert begun == [2, 3]
    # Two updates a step. What a worker had in hand when it was killed was done again, whether it had been done or not.
    *_, (_, what, counted, _) = told
    assert what == "counter"
    assert 2 * steps <= counted <= 2 * steps + 2


@pytest.mark.long
def test_each_example_counts_once_an_epoch_however_many_workers_there_are(start: Starter, tmp_path: Path) -> None:
    """Three workers, then two, then four, with a sharded model. Each run starts from a snapshot in the middle of an
    epoch, and what the one before it did after that does not count. 60 examples in batches of 12: 5 steps an epoch."""
    counted: dict[int, list[int]] = {}
    before: dict[str, str] = {}
    for name, workers, steps in (("three", 3, 7), ("two", 2, 11), ("four", 4, 15)):
        options = {"kind": "fsdp", "steps": steps, "every": EVERY, "pace": PACE}
        command = ["python", "torch_snapshots.py", json.dumps(options)]
        roles = {"worker": {"replicas": workers}}
        snapshots = {"to": str(tmp_path / "place"), **before}
        made = job("torch", snapshots, command=command, roles=roles, restart={"warm": False})
        run = start(made, "--run", name, home=tmp_path / "home")
        assert run.succeeds(LIMIT_S)["steps"] == steps
        (begun,) = run.events("generation-formed")
        restored = parse_id(begun["restore"]) if before else None
        first = restored.step if restored else 0
        counted = {step: seen for step, seen in counted.items() if step <= first}
        for task in range(workers):
            for step, seen in re.findall(r" \| step (\d+) \[(.*)\]", run.log(f"worker-{task}")):
                assert int(step) > first
                counted.setdefault(int(step), []).extend(map(int, seen.split(", ")))
        before = {"from": name}
    assert sorted(counted) == list(range(1, 16))
    for epoch in range(3):
        examples = [index for step in range(5 * epoch + 1, 5 * epoch + 6) for index in counted[step]]
        assert sorted(examples) == list(range(60)), f"epoch {epoch}"
