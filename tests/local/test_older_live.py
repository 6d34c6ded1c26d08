"""A run that an older version of Paceline has started and that is still running: this version follows, stops and reads
it, and starts a run from its snapshots."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from support import older_version
from support.runs import LIMIT_S, SOURCE, Run, Starter, eventually, job

TRAINING = """\
import os, sys, time
from pathlib import Path

import paceline
from paceline.runtime import snapshot_folders

print("from", paceline.__file__, flush=True)
restored = snapshot_folders.restored()
step = int((restored / "step").read_text()) if restored else 0
print("step", step, flush=True)
while not Path(sys.argv[1], "finish").exists():
    step += 1
    time.sleep(0.05)
    if os.environ["PACELINE_RANK"] == "0" and step % 10 == 0:
        with snapshot_folders.writing(step, 1, {"loss": 1 / step}) as folder:
            (folder / "step").write_text(str(step))
    paceline.report(step=step, loss=1 / step)
    print("step", step, flush=True)
"""
Begin = Callable[..., Run]


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return older_version.unpack(tmp_path_factory.mktemp("older"))


@pytest.fixture
def begin(start: Starter, older: Path, state: Path) -> Begin:
    """Starts a detached run with the older version. Its other commands are of this version."""
    (state / "train.py").write_text(TRAINING)

    def begin() -> Run:
        training = job(["python", str(state / "train.py"), str(state)], snapshots={"keep": 3}, limits={"grace": "20s"})
        run = start(training, "--detach", env={"PYTHONPATH": str(older)})
        assert run.cli.wait(LIMIT_S) == 0, run.said()
        run.env["PYTHONPATH"] = str(SOURCE)
        run.all_step()
        assert f"from {older}" in run.log("worker-0")
        return run

    return begin


@contextmanager
def following(run: Run, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A command that runs until the run has ended."""
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline.cli", *arguments], cwd=run.place, env=run.env, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def read_json(run: Run, *arguments: str) -> Any:
    done = run.call(*arguments, "-o", "json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_live_run_of_an_older_version_is_followed_and_stopped(begin: Begin) -> None:
    run = begin()
    name, tasks = run.folder.name, run.tasks()
    [listed] = read_json(run, "ls")
    assert (listed["run"], listed["status"]) == (name, "running") and "problems" not in listed
    status = read_json(run, "status", name)
    assert (status["status"], status["generations"]) == ("running", 1) and "problems" not in status
    assert {task["task"]: task["state"] for task in status["tasks"]} == dict.fromkeys(tasks, "running")

    with ExitStack() as until_the_end:
        logs, events, step = (
            until_the_end.enter_context(following(run, *arguments))
            for arguments in (("logs", "-f", name), ("events", "-f", name), ("wait", name, "--for", "step=50"))
        )
        assert f"{name} has reached step" in step.communicate(timeout=LIMIT_S)[0]
        assert step.returncode == 0

        too_old = f"error: {name} was started by an older version of Paceline, which cannot"
        for verb, action in {
            "stacks": "show what tasks are doing",
            "pause": "pause and resume runs",
            "resume": "pause and resume runs",
        }.items():
            refused = run.call(verb, name)
            assert refused.returncode == 1 and f"{too_old} {action}; stop it with `paceline stop" in refused.stderr
        refused = run.call("scale", name, "worker=3")
        assert refused.returncode == 2 and f"{name}: the number of worker hosts is fixed" in refused.stderr
        run.wait_for_step(after=run.position())
        assert run.tasks() == tasks
        # One task has reached it, the other one may be slower.
        eventually("worker-1 does step 50", lambda: "| step 50\n" in run.log("worker-1"), more=run.story)

        stopped = run.call("stop", name)
        assert stopped.returncode == 0 and "worker-1 was stopped" in stopped.stderr, stopped.stderr
        report = run.report()
        assert (report["status"], report["restarts"]) == ("stopped", [])
        printed, _ = logs.communicate(timeout=LIMIT_S)
        assert logs.returncode == 0 and {"worker-0 | step 1", "worker-1 | step 50"} <= set(printed.splitlines())
        printed, _ = events.communicate(timeout=LIMIT_S)
        assert events.returncode == 0 and "the run was stopped: stopped by `paceline stop`" in printed
    run.nothing_left()


def test_a_run_of_an_older_version_succeeds_and_another_continues_from_it(
    begin: Begin, start: Starter, state: Path
) -> None:
    run = begin()
    name = run.folder.name
    done = run.call("wait", name, "--for", "snapshot=10")
    assert done.returncode == 0 and f"{name} has committed step" in done.stdout + done.stderr, done
    (state / "finish").touch()
    assert read_json(run, "wait", name)["status"] == "succeeded"
    run.nothing_left()
    status = read_json(run, "status", name)
    assert (status["status"], status["restarts"]) == ("succeeded", []) and status["steps"] == run.report()["steps"]

    newest = read_json(run, "snapshots", "ls", name)[0]
    assert newest["step"] >= 10 and newest["metrics"] == {"loss": 1 / newest["step"]}
    assert run.call("snapshots", "verify", name).returncode == 0
    assert run.call("snapshots", "get", name, "--to", str(run.place / "copy")).returncode == 0
    assert (run.place / "copy/step").read_text() == str(newest["step"])

    training = job(["python", str(state / "train.py"), str(state)], snapshots={"from": name})
    later = start(training, home=run.home)
    later.succeeds()
    assert f"step {newest['step']}\n" in later.log("worker-1") and f"from {SOURCE}" in later.log("worker-1")
    deleted = run.call("delete", "-y", "--snapshots", name, later.folder.name)
    assert deleted.returncode == 0 and not list((run.home / "runs").iterdir()), deleted.stderr
