"""Unchanged programs that keep checkpoints in a folder of their own: the folder is watched, committed, and restored
after any failure; half of a file never is."""

from __future__ import annotations

import hashlib
import json
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support import runs
from support.runs import PROGRAMS, Run, Starter, eventually, job, kill, misbehave

pytestmark = pytest.mark.timeout(400)

WATCH = {"watch": "ckpt/", "keep": 100}
FRAMEWORK_S = 180.0  # for four processes of a framework to start at once


@pytest.fixture
def orders(tmp_path: Path) -> Path:
    """The folder in which keeps.py finds its orders."""
    folder = tmp_path / "orders"
    folder.mkdir()
    return folder


def a_job(orders: Path, *arguments: object, **overrides: Any) -> dict[str, Any]:
    command = ["python", str(PROGRAMS / "keeps.py"), str(orders), "ckpt", *map(str, arguments)]
    return job(command, **{"snapshots": WATCH, **overrides})


def tell(orders: Path, name: str, content: object = "") -> None:
    (orders / "partial").write_text(str(content))
    (orders / "partial").rename(orders / name)


def commit(run: Run, orders: Path, step: int) -> None:
    before = len(run.events("committed"))
    tell(orders, "step", step)
    eventually(f"step {step} is committed", lambda: len(run.events("committed")) > before, more=run.story)
    assert committed(run)[-1] == step


def committed(run: Run) -> list[int]:
    """The steps of the committed snapshots, read from their files, which must all be complete."""
    steps = []
    for event in run.events("committed"):
        file_steps = set()
        for path in (run.folder / "snapshots" / run.folder.name / event["snapshot"] / "worker-0").glob("state-*"):
            head, _, body = path.read_bytes().partition(b"\n")
            step, _, digest = head.decode().partition(" ")
            assert hashlib.sha256(body).hexdigest() == digest, f"{path} is torn"
            file_steps.add(int(step))
        assert len(file_steps) == 1, f"{event['snapshot']} has files of {file_steps}"
        steps += file_steps
    return steps


def starts(run: Run, task: str = "worker-0") -> list[int]:
    lines = run.log(task).split("\n")[:-1]  # the last one may not be complete yet
    return [int(line.split()[-1]) for line in lines if " start " in line]


def assert_resumed(run: Run, generation: int, step: int, tasks: tuple[str, ...] = ("worker-0", "worker-1")) -> None:
    for task in tasks:
        eventually(f"{task} resumes", lambda task=task: len(starts(run, task)) >= generation, more=run.story)  # type: ignore[misc]
        assert starts(run, task)[generation - 1] == step


def finish(run: Run, orders: Path) -> runs.Report:
    tell(orders, "finish")
    return run.succeeds()


def warnings(run: Run) -> list[str]:
    return [event["text"] for event in run.events("warning")]


def working_files(run: Run) -> list[str]:
    """The names in the working folder."""
    return sorted(path.name for path in run.place.iterdir() if path.name not in ("home", "stdout", "stderr"))


# ---- from the folder and back


def test_a_program_resumes_after_the_loss_of_its_machine(start: Starter, orders: Path) -> None:
    run = start(a_job(orders))
    commit(run, orders, 10)
    commit(run, orders, 20)
    tell(orders, "fail-0", "lose")
    assert_resumed(run, 2, 20)
    assert run.wait("generation-formed", generation=2)["restore"] == "step-2-g1"
    commit(run, orders, 30)
    for verb in (["pause", "--now"], ["resume"]):
        done = run.call(verb[0], run.folder.name, *verb[1:])
        assert done.returncode == 0, done.stderr
    assert_resumed(run, 3, 30)
    finish(run, orders)
    assert committed(run) == [10, 20, 30]
    assert [event["snapshot"] for event in run.events("committed")] == ["step-1-g1", "step-2-g1", "step-3-g2"]
    assert warnings(run) == []
    assert working_files(run) == ["ckpt", "job.yaml"]
    assert not [name for name in ("watched", "held", "restored") if (run.folder / name).exists()]


_BY_RUN = """
import os, pathlib, time
state = pathlib.Path("ckpt", os.environ["PACELINE_RUN"], "state")
print("start", state.read_text() if state.exists() else "anew", flush=True)
state.parent.mkdir(parents=True, exist_ok=True)
state.write_text(os.environ["PACELINE_RUN"] + " was here")
while not pathlib.Path("finish").exists():
    time.sleep(0.02)
"""


def test_runs_in_one_working_folder_have_a_folder_each(start: Starter, tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.mkdir()
    snapshots = {"watch": "ckpt/$PACELINE_RUN"}
    fields = job(["python", "-c", _BY_RUN], workers=1, code=str(code), snapshots=snapshots, restart={"warm": False})
    one, two = (start(fields, home=tmp_path / "home") for _ in range(2))
    for run in (one, two):
        run.wait("committed")
    kill(one.task("worker-0"))
    name = one.folder.name
    eventually("it resumes", lambda: f"start {name} was here" in one.log("worker-0"), more=one.story)
    tell(code, "finish")
    assert [len(run.succeeds()["restarts"]) for run in (one, two)] == [1, 0]
    assert sorted(path.name for path in (code / "ckpt").iterdir()) == sorted([name, two.folder.name])


_ONE_FILE = """
import json, os, pathlib, time
snapshot, orders = pathlib.Path("snapshot.pt"), pathlib.Path("orders")
step = json.loads(snapshot.read_text())["step"] if snapshot.exists() else 0
print("start", step, flush=True)
while not (orders / "finish").exists():
    if (orders / "save").exists():
        step += 10
        (orders / "save").unlink()
        snapshot.write_text(json.dumps({"step": step}))  # in place
    if (orders / "tear").exists():
        (orders / "tear").unlink()
        snapshot.write_text('{"step": 9')
        os.kill(os.getpid(), 9)
    time.sleep(0.02)
"""


def test_a_single_file_in_the_working_folder(start: Starter, tmp_path: Path) -> None:
    """As in the tutorial of torch: `torch.save(state, "snapshot.pt")`."""
    code = tmp_path / "code"
    (code / "orders").mkdir(parents=True)
    (code / "train.py").write_text(_ONE_FILE)
    fields = job(["python", "train.py"], workers=1, code=str(code), snapshots={"watch": "snapshot.pt"})
    run = start(fields)
    for saved in (1, 2):
        (code / "orders" / "save").touch()
        eventually("it is committed", lambda saved=saved: len(run.events("committed")) == saved, more=run.story)  # type: ignore[misc]
    (code / "orders" / "tear").touch()
    eventually("it resumes", lambda: starts(run) == [0, 20], more=run.story)
    (code / "orders" / "finish").touch()
    run.succeeds()
    said = run.said()
    assert "* starting worker-0 from snapshot 2 (generation 2)" in said and "snapshots    snapshot 2 committed" in said
    assert sorted(path.name for path in code.iterdir()) == ["orders", "snapshot.pt", "train.py"]


def test_the_end_says_that_nothing_was_captured(start: Starter) -> None:
    run = start(job(["true"], workers=1, snapshots={"watch": "chkpt/"}))
    run.succeeds()
    assert "snapshots    none: nothing was captured from chkpt (snapshots.watch)" in run.said()


def test_files_written_since_the_last_commit_are_removed(start: Starter, orders: Path) -> None:
    """They are newer than the committed files, and may be incomplete."""
    run = start(a_job(orders))
    commit(run, orders, 10)
    tell(orders, "fail-0", "kill while it writes")
    tell(orders, "step", 20)
    assert_resumed(run, 2, 10)
    eventually("the step is done again", lambda: len(committed(run)) == 2, more=run.story)
    finish(run, orders)
    assert committed(run) == [10, 20]


def test_steps_are_those_that_the_program_reports(start: Starter) -> None:
    code = """
import pathlib, time, paceline
folder = pathlib.Path("ckpt")
folder.mkdir(exist_ok=True)
for step in (100, 200):
    paceline.report(step=step, loss=1 / step)
    (folder / "state").write_text(str(step))
    before = step == 100 and pathlib.Path("go")
    while before and not before.exists():
        time.sleep(0.01)
"""
    best = {"best": {"metric": "loss"}, "keep": 1}
    run = start(job(["python", "-c", code], workers=1, snapshots={**WATCH, **best}))
    assert run.wait("committed")["step"] == 100
    (run.place / "go").touch()
    run.succeeds()
    assert [event["step"] for event in run.events("committed")] == [100, 200]
    [snapshot] = (run.folder / "snapshots" / run.folder.name).glob("step-*")
    assert json.loads((snapshot / "manifest.json").read_text())["metrics"] == {"loss": 0.005}


# ---- the last snapshot


def test_the_last_files_are_committed_before_the_run_ends(start: Starter, orders: Path) -> None:
    tell(orders, "step", 7)
    tell(orders, "finish")
    run = start(a_job(orders))
    run.succeeds()
    assert committed(run) == [7]


def test_files_written_in_the_grace_of_a_stopped_run_are_committed(start: Starter, orders: Path) -> None:
    run = start(a_job(orders, "--on-sigterm", workers=1))
    commit(run, orders, 10)
    assert run.call("stop", run.folder.name).returncode == 0
    assert run.end()[1]["status"] == "stopped"
    assert committed(run) == [10, 11]


def test_files_of_a_failed_program_are_not_committed(start: Starter, orders: Path) -> None:
    run = start(a_job(orders, workers=1, restart={"limit": 0}))
    commit(run, orders, 10)
    tell(orders, "fail-0", "exit while it writes")
    tell(orders, "step", 20)
    run.fails()
    assert committed(run) == [10]
    assert working_files(run) == ["ckpt", "job.yaml"]  # with half of a file: the folder belongs to the program


def test_a_folder_that_cannot_be_captured_is_reported(start: Starter) -> None:
    code = "import os; os.mkdir('ckpt'); open('ckpt/state', 'w').close(); os.symlink('/', 'ckpt/root')"
    run = start(job(["python", "-c", code], workers=1, snapshots=WATCH))
    run.succeeds()
    detail = "after worker-0 ended: 'root' is a symbolic link to '/', outside the folder"
    assert warnings(run) == [f"could not take a snapshot of {run.place}/ckpt {detail}"]


def test_a_file_that_stays_open_does_not_block_the_end_of_a_run(start: Starter, orders: Path) -> None:
    run = start(a_job(orders, workers=1, limits={"commit": "3s"}))
    commit(run, orders, 10)
    with (run.place / "ckpt" / "more").open("w") as file:
        tell(orders, "finish")
        run.succeeds()
        file.write("")
    [warning] = warnings(run)
    assert "after worker-0 ended: more is open for writing by" in warning


def test_a_file_that_stays_open_does_not_block_a_restart(start: Starter, orders: Path) -> None:
    run = start(a_job(orders))
    commit(run, orders, 10)
    with (run.place / "ckpt" / "state-0").open("r+") as file:
        file.write("1")  # the same content, but the file has changed
        file.flush()
        tell(orders, "fail-1", "hang")
        eventually("the other does not end", lambda: "hangs" in run.log("worker-1"), more=run.story)
        tell(orders, "finish")
        eventually("the first has ended", lambda: "done" in run.log("worker-0"), more=run.story)
        kill(run.task("worker-1"))
        run.wait("generation-formed", generation=2)
    run.succeeds()
    assert starts(run) == starts(run, "worker-1") == [0, 10]


# ---- killed at various moments


VICTIMS: dict[str, Callable[[Run], None]] = {
    "task": lambda run: kill(run.task("worker-0")),
    "other task": lambda run: kill(run.task("worker-1")),
    "agent": lambda run: kill(run.agent("worker-host-0")),
    "host": lambda run: kill(run.keeper("worker-host-0")),
    "other host": lambda run: kill(run.keeper("worker-host-1")),
}


@pytest.mark.long
def test_killed_at_any_moment(start: Starter, orders: Path) -> None:
    """A third of the time, while it writes a file in place."""
    chance = random.Random(20260724)
    run = start(a_job(orders, "--every", 1.2, "--pause", 0.07, restart={"limit": 100}))
    for generation in range(1, 6):
        run.wait("committed", generation=generation)
        time.sleep(chance.uniform(0.0, 2.0))
        VICTIMS[chance.choice(list(VICTIMS))](run)
        run.wait("generation-formed", generation=generation + 1)
    run.wait("committed", generation=6)
    finish(run, orders)
    assert starts(run) == starts(run, "worker-1") and len(starts(run)) == 6
    steps = committed(run)
    assert starts(run)[-1] > starts(run)[0] == 0
    assert steps == sorted(steps) and set(starts(run)) <= {0, *steps}
    assert "put back" not in run.log("worker-0") + run.log("worker-1")


@pytest.mark.parametrize("victim", VICTIMS)
def test_killed_in_the_middle_of_a_write_that_stalls(start: Starter, orders: Path, victim: str) -> None:
    """The folder is at rest, and only the death of a task shows that a file is incomplete."""
    other = victim.startswith("other")
    run = start(a_job(orders, "--savers", 2))
    commit(run, orders, 10)
    tell(orders, "fail-1" if other else "fail-0", "hang while it writes")
    tell(orders, "step", 20)
    eventually("it hangs", lambda: "hangs" in run.log("worker-1" if other else "worker-0"), more=run.story)
    time.sleep(1.5)  # the folder has rested for longer than required
    VICTIMS[victim](run)
    assert_resumed(run, 2, 10)
    eventually("the step is done again", lambda: len(committed(run)) == 2, more=run.story)
    finish(run, orders)
    assert committed(run) == [10, 20]


def test_killed_before_anything_was_captured(start: Starter, orders: Path) -> None:
    """There is nothing to resume from, and no incomplete file is left for the next generation."""
    run = start(a_job(orders, workers=1))
    tell(orders, "fail-0", "kill while it writes")
    tell(orders, "step", 10)
    assert_resumed(run, 2, 0, ("worker-0",))
    finish(run, orders)
    assert committed(run) == [10]


def test_files_from_before_the_run_are_found_and_captured(start: Starter, orders: Path) -> None:
    code = """
import os, pathlib, signal
state = pathlib.Path("ckpt/state")
print("start", state.read_text(), flush=True)
while not pathlib.Path("go").exists():
    pass
pathlib.Path("go").unlink()
state.write_text(str(int(state.read_text()) + 1))
if state.read_text() == "6":
    state.write_text("ha")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    folder = orders.parent / "run-0"
    (folder / "ckpt").mkdir(parents=True)
    (folder / "ckpt" / "state").write_text("5")
    run = start(job(["python", "-c", code], workers=1, snapshots=WATCH))
    run.wait("committed")
    (folder / "go").touch()
    eventually("it resumes", lambda: starts(run) == [5, 5], more=run.story)
    (folder / "ckpt" / "state").write_text("8")
    (folder / "go").touch()
    run.succeeds()
    assert (folder / "ckpt" / "state").read_text() == "9"


# ---- what is refused


def test_a_folder_that_contains_the_run_itself_is_refused_immediately(start: Starter, orders: Path) -> None:
    run = start(a_job(orders, snapshots={"watch": str(orders.parent)}))
    report = run.fails()
    assert "contains more than checkpoints" in report["reason"] and report["steps"] == 0


def test_the_program_s_own_snapshots_are_ignored(start: Starter) -> None:
    run = start(job(misbehave("--resume", "--steps", 3), workers=1, snapshots=WATCH))
    run.succeeds()
    assert warnings(run) == ["worker-0: its snapshots are ignored because snapshots.watch is set"]
    assert run.events("saved") == []


# ---- frameworks, with programs that know nothing of Paceline


COLD = {"restart": {"warm": False}}  # a spare of a framework takes seconds of CPU time


def assert_recovers(start: Starter, framework: dict[str, str], program: str) -> None:
    """Its folder is lost with its first task; it ends with the same weights as an undisturbed run."""
    command = ["python", str(PROGRAMS / program), "--steps", "20"]
    undisturbed = start(job(command, **framework, **COLD))
    fault = ["--fail-at", "12", "--fail-rank", "0", "--fail-once", "lost", "--fail-when", "lose"]
    arguments = ["--checkpoint-dir", "ckpt", *fault, "--fail-how", "lose:ckpt"]
    run = start(job([*command, *arguments], **framework, **COLD, snapshots=WATCH))
    eventually("it waits", lambda: (run.place / "lost").exists(), FRAMEWORK_S, run.story)
    run.wait("committed")
    (run.place / "lose").touch()
    run.succeeds(FRAMEWORK_S)
    undisturbed.succeeds(FRAMEWORK_S)
    for task in ("worker-0", "worker-1"):
        assert [step > 0 for step in starts(run, task)] == [False, True]
        assert weights(run, task) == weights(undisturbed, task)


def weights(run: Run, task: str) -> str:
    return next(line.split()[-1] for line in run.log(task).splitlines() if " weights " in line)


@pytest.mark.timeout(700)
def test_tensorflow_s_checkpoint_manager(start: Starter) -> None:
    assert_recovers(start, {"framework": "tensorflow", "strategy": "multi-worker"}, "tf_multiworker.py")


@pytest.mark.long
@pytest.mark.timeout(700)
def test_torch_save(start: Starter) -> None:
    assert_recovers(start, {"framework": "torch"}, "torch_ddp.py")


@pytest.mark.long
@pytest.mark.timeout(700)
def test_keras_callbacks(start: Starter, tmp_path: Path) -> None:
    """ModelCheckpoint and BackupAndRestore resume after their files were lost with their task."""
    logs = []
    for name in ("disturbed", "undisturbed"):
        state = tmp_path / name
        state.mkdir()
        if name == "undisturbed":
            (state / "lost").touch()
        command = ["python", str(PROGRAMS / "keras_plain.py"), str(state)]
        run = start(job(command, workers=1, **COLD, snapshots=WATCH))
        if name == "disturbed":
            eventually("it waits", (state / "waits").exists, FRAMEWORK_S, run.story)
            run.wait("committed")
            (state / "lose").touch()
        run.succeeds(FRAMEWORK_S)
        logs.append(re.findall(r"(?:epoch \d done|model (?:True|False)|weights [\d.]+)$", run.log("worker-0"), re.M))
    disturbed, undisturbed = logs
    epochs = [f"epoch {number} done" for number in range(4)]
    assert undisturbed[:-1] == ["model False", *epochs]
    assert disturbed[:4] == ["model False", *epochs[:2], "model True"]
    # Which epoch is next depends on when the last one was committed.
    assert disturbed[4:] in ([*epochs[first:], undisturbed[-1]] for first in (1, 2))
