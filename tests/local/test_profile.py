"""`paceline profile` on real runs: files of each framework's own profiler, and why there are none."""

from __future__ import annotations

import gzip
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from support.runs import PROGRAMS, Run, Starter, eventually, job, kill

pytestmark = pytest.mark.timeout(400)


def program(framework: str, state: Path, *more: str) -> list[str]:
    return ["python", str(PROGRAMS / "profiled.py"), framework, str(state / "end"), *more]


def profiled(run: Run, *options: str) -> dict[str, Any]:
    result = run.call("profile", "-o", "json", *options)
    assert result.returncode == 0, result.stderr + run.story()
    reply: dict[str, Any] = json.loads(result.stdout)
    return reply


def test_torch_tasks_are_profiled_and_continue(start: Starter, state: Path) -> None:
    run = start(job(program("torch", state, "save"), framework="torch", restart={"limit": 0}))
    for task in ("worker-0", "worker-1"):
        run.wait_for_step(task=task)
    reply = profiled(run, "--steps", "3")
    assert [(task["task"], task["steps"], task["problem"]) for task in reply["tasks"]] == [
        ("worker-0", 3, ""), ("worker-1", 3, ""),
    ]  # fmt: skip
    files = [Path(task["files"][0]) for task in reply["tasks"]]
    assert files[0].parent == files[1].parent and files[0].parents[3] == run.folder / "tensorboard"
    for file, task in zip(files, ("worker-0", "worker-1"), strict=True):
        assert file.name.startswith(f"{task}.") and file.name.endswith(".pt.trace.json")
        names = {event.get("name") for event in json.loads(file.read_text())["traceEvents"]}
        assert {"aten::matmul", "ProfilerStep#0", "ProfilerStep#2"} <= names and "ProfilerStep#3" not in names

    copied = run.call("profile", "--steps", "1", "--task", "worker-1", "--to", str(run.place / "copied"))
    assert copied.returncode == 0, copied.stderr
    (path,) = copied.stdout.split()
    assert path.startswith(f"{run.place}/copied/plugins/profile/") and json.loads(Path(path).read_text())["traceEvents"]
    assert not list(run.folder.glob(".profile-*"))
    (state / "end").touch()
    report = run.succeeds()
    assert (report["generations"], report["restarts"]) == (1, [])


@pytest.mark.long
@pytest.mark.parametrize("framework", ["tensorflow", "jax"])
def test_other_frameworks_write_files_for_tensorboards_plugin(start: Starter, state: Path, framework: str) -> None:
    run = start(job(program(framework, state), workers=1, framework=framework, restart={"limit": 0}))
    run.wait_for_step(task="worker-0")
    (task,) = profiled(run, "--steps", "3")["tasks"]
    assert (task["steps"], task["problem"]) == (3, "")
    files = {Path(file).name: Path(file) for file in task["files"]}
    assert b"train" in files["worker-0.xplane.pb"].read_bytes()  # the name of the steps
    if framework == "jax":
        assert json.loads(gzip.decompress(files["worker-0.trace.json.gz"].read_bytes()))["traceEvents"]
    (state / "end").touch()
    assert run.succeeds()["generations"] == 1


@pytest.mark.long
def test_a_restart_ends_a_profile_and_a_second_one_is_refused_meanwhile(start: Starter, state: Path) -> None:
    run = start(job(program("jax", state), framework="jax"))
    for task in ("worker-0", "worker-1"):
        run.wait_for_step(task=task)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(run.call, "profile", "--steps", "1000")
        eventually("both tasks are asked", lambda: len(list(run.folder.glob(".profile-*"))) == 2, more=run.story)
        second = run.call("profile")
        assert second.returncode == 1 and "refused: another profile of this run is being taken" in second.stderr
        kill(run.task("worker-1"))
        result = first.result()
    assert (result.returncode, result.stdout) == (1, "")
    for task in ("worker-0", "worker-1"):
        assert f"{task}: no profile: it ended or was restarted" in result.stderr
    run.wait_for_step(generation=2, task="worker-1")
    assert [task["problem"] for task in profiled(run, "--steps", "2")["tasks"]] == ["", ""]
    (state / "end").touch()
    assert run.succeeds()["generations"] == 2


@pytest.mark.long
def test_a_program_that_ends_while_it_is_profiled_succeeds(start: Starter, state: Path) -> None:
    """torch crashes if its profiler runs when the process exits."""
    run = start(job(program("torch", state), workers=1, framework="torch"))
    run.wait_for_step(task="worker-0")
    with ThreadPoolExecutor() as pool:
        profile = pool.submit(run.call, "profile", "--steps", "1000")
        eventually("the task is asked", lambda: list(run.folder.glob(".profile-*")), more=run.story)
        run.wait_for_step(after=run.position(), task="worker-0")
        (state / "end").touch()
        result = profile.result()
    assert (result.returncode, result.stdout) == (1, "")
    assert run.succeeds()["restarts"] == []


def test_a_program_that_reports_no_steps_is_named(start: Starter, state: Path) -> None:
    run = start(job(program("silent", state), workers=1, framework="torch", restart={"limit": 0}))
    run.wait("task-started", task="worker-0")
    result = run.call("profile", "--timeout", "1s")
    assert (result.returncode, result.stdout) == (1, "")
    assert "worker-0: no profile: it has reported no steps: programs report them with paceline.report" in result.stderr
    (state / "end").touch()
    run.succeeds()
