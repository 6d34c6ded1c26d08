"""The state of a run: from its events, and from its folder while the lock is held and after."""

import json
import math
from pathlib import Path

import pytest

from paceline.view import events, report, runs, state
from support import recorded
from support.recorded import event


def folded(lines: list[dict[str, object]]) -> state.State:
    return state.fold(filter(None, (events.parse(json.dumps(line)) for line in lines)))


def upto(kind: str, generation: int = 1) -> state.State:
    end = next(i for i, one in enumerate(recorded.LIFE) if one["event"] == kind and one["generation"] == generation)
    return folded(recorded.LIFE[: end + 1])


def test_nothing_known_is_starting() -> None:
    assert folded([]).status == "starting"
    assert folded([recorded.STARTED]).status == "starting"


def test_a_wait_is_told_until_the_generation_is_formed() -> None:
    waiting = folded([recorded.STARTED, recorded.WAITING])
    assert waiting.status == "starting"
    assert waiting.waiting is not None and waiting.waiting.names("missing") == ["worker-host-1"]
    assert upto("generation-formed").waiting is None


def test_a_generation_makes_it_running() -> None:
    formed = upto("generation-formed")
    assert (formed.status, formed.generation) == ("running", 1)
    assert {name: task.state for name, task in formed.tasks.items()} == {
        "worker-0": "starting", "worker-1": "starting", "evaluator-0": "waiting",
    }  # fmt: skip


def test_tasks_have_pid_host_and_step() -> None:
    task = upto("saved").tasks["worker-0"]
    assert (task.state, task.pid, task.host, task.step) == ("running", 4711, "worker-host-0", 60)


def test_a_killed_task_and_those_ended_with_it_are_told_apart() -> None:
    tasks = upto("restart").tasks
    assert (tasks["worker-1"].state, tasks["worker-1"].exit, tasks["worker-1"].pid) == ("failed", "SIGKILL", None)
    assert tasks["worker-0"].state == "ended"


def test_the_whole_life() -> None:
    end = folded(recorded.LIFE)
    assert (end.status, end.reason, end.cause) == ("succeeded", "all workers have succeeded", None)
    assert (end.generation, end.steps) == (2, 161)
    assert end.committed == state.Mark(100, "step-100-g1", recorded.at(5.5), 1)
    assert end.metrics == {"worker-0": {"loss": 0.2, "accuracy": 0.91}, "evaluator-0": {"accuracy": 0.9}}
    assert (end.tasks["evaluator-0"].step, end.best) == (100, recorded.BEST)
    assert end.restarts == recorded.REPORT["restarts"]
    assert end.stacks == {"worker-0": 'File "train.py", line 3'}
    assert end.warnings == ["the disk is full"]


def test_saved_and_committed_are_told_apart() -> None:
    saved = upto("saved")
    assert saved.saved is not None and (saved.saved.step, saved.committed) == (100, None)
    later = [*recorded.LIFE[:10], event(6, "saved", step=120, snapshot="step-120-g1")]
    found = folded(later)
    assert found.saved is not None and found.committed is not None
    assert (found.saved.step, found.committed.step) == (120, 100)


def test_what_a_generation_saved_and_did_not_commit_ends_with_it() -> None:
    saved = event(6, "saved", step=120, snapshot="step-120-g1")
    again = folded([*recorded.LIFE[:10], saved, {**recorded.FORMED, "generation": 2}])
    assert again.saved is not None and again.saved == again.committed
    assert folded([saved, {**recorded.FORMED, "generation": 2}]).saved is None


def test_steps_a_second_leave_out_the_time_between_generations() -> None:
    # 60 steps in 2 s in each of two generations; the 2.3 s between them, and the steps done twice, do not count.
    assert folded(recorded.LIFE).steps_per_s == pytest.approx(30.0)


def test_going_on_gives_the_same_as_all_at_once() -> None:
    parsed = [one for one in (events.parse(json.dumps(line)) for line in recorded.LIFE) if one]
    for cut in range(len(parsed)):
        assert state.fold(parsed[cut:], state.fold(parsed[:cut])) == state.fold(parsed)


def test_a_loss_of_nan_is_kept() -> None:
    lost = folded([recorded.FORMED, {**recorded.STEP, "metrics": {"loss": float("nan"), "name": "x"}}])
    assert list(lost.metrics["worker-0"]) == ["loss"] and math.isnan(lost.metrics["worker-0"]["loss"])


@pytest.mark.parametrize("kind", events.KINDS)
def test_an_event_without_its_fields_is_no_reason_to_fail(kind: str) -> None:
    folded([event(1, kind), recorded.STEP])


def standing(folder: Path) -> state.Standing:
    return state.read(runs.Run(folder.name, folder))


def test_a_run_whose_lock_is_held_runs(tmp_path: Path) -> None:
    folder = recorded.write(tmp_path, events=recorded.LIFE[:11])
    with recorded.supervised(folder):
        found = standing(folder)
        assert found.alive and found.report["status"] == "running"
        assert found.report["steps"] == 120 and found.report["ended"] is None


def test_two_readers_do_not_take_each_other_for_the_supervisor(tmp_path: Path) -> None:
    import fcntl

    folder = recorded.write(tmp_path)
    with open(folder / "lock") as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        assert not runs.alive(folder)


def test_a_supervisor_gone_without_a_word_is_a_failure(tmp_path: Path) -> None:
    folder = recorded.write(tmp_path, events=recorded.LIFE[:11])
    found = standing(folder)
    assert (found.alive, found.report["status"], found.report["reason"]) == (False, "failed", state.GONE)


def test_the_events_are_enough_where_the_report_could_not_be_written(tmp_path: Path) -> None:
    assert standing(recorded.write(tmp_path)).report["status"] == "succeeded"


def test_the_report_counts_where_there_is_one(tmp_path: Path) -> None:
    folder = recorded.write(tmp_path, events=[], report={**recorded.REPORT, "status": "stopped"})
    assert standing(folder).report["status"] == state.summary(runs.Run(folder.name, folder))["status"] == "stopped"


@pytest.mark.parametrize("broken", ["run.json", "plan.json", "report.json", "events.jsonl", "lock"])
@pytest.mark.parametrize("content", [None, b"", b"\x00\xff", b"[1, 2]"])
def test_a_damaged_folder_can_still_be_read(tmp_path: Path, broken: str, content: bytes | None) -> None:
    folder = recorded.write(tmp_path, report=recorded.REPORT)
    (folder / broken).unlink()
    if content is not None:
        (folder / broken).write_bytes(content)
    found = standing(folder).report
    assert found["status"] == "succeeded"
    assert report.text(found)


def test_a_folder_just_made_is_starting_and_an_old_empty_one_has_failed(tmp_path: Path) -> None:
    import os

    folder = tmp_path / "runs" / "digits-0000"
    folder.mkdir(parents=True)
    assert standing(folder).report["status"] == "starting"
    os.utime(folder, (1, 1))
    found = standing(folder).report
    assert (found["status"], found["reason"]) == ("failed", state.NEVER)


@pytest.mark.parametrize(
    ("wanted", "found"),
    [(None, "digits-3f9b"), ("digits-3f9a", "digits-3f9a"), ("tr", "translate-0001"), ("digits-3f9", "digits-3f9")],
)
def test_runs_are_found_by_id_beginning_or_as_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: str | None, found: str
) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    for second, name in enumerate(["digits-3f9", "translate-0001", "digits-3f9a", "digits-3f9b"]):
        recorded.write(tmp_path, name, started=recorded.at(second))
    assert runs.find(wanted).name == found


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("digits", "'digits' is the beginning of 2 runs: digits-3f9b, digits-3f9a"),
        ("digit-3f9a", "no run 'digit-3f9a'; did you mean 'digits-3f9a'? `paceline ls` lists all"),
        ("../digits-3f9a", "no run '../digits-3f9a'; did you mean 'digits-3f9a'? `paceline ls` lists all"),
        ("zzzz", "no run 'zzzz'; the newest is 'digits-3f9b'; `paceline ls` lists all"),
        ("", "no run ''; the newest is 'digits-3f9b'; `paceline ls` lists all"),
    ],
)
def test_a_run_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: str, message: str) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    for second, name in enumerate(["digits-3f9a", "digits-3f9b"]):
        recorded.write(tmp_path, name, started=recorded.at(second))
    with pytest.raises(runs.NoRun) as raised:
        runs.find(wanted)
    assert str(raised.value) == message


def test_the_report_in_words(tmp_path: Path) -> None:
    folder = recorded.write(tmp_path, report=recorded.REPORT, logs={"worker-0": ""})
    (folder / "tensorboard").mkdir()
    (folder / "tensorboard" / "events.out").touch()
    lines = report.text(standing(folder).report)
    assert lines[0] == "digits-3f9a succeeded after 12 s"
    assert lines[1:3] == ["  loss 0.2 (worker-0)", "  161 steps, 30 steps/s, 2 generations"]
    assert lines[3] == "  1 restart:"
    assert lines[4].endswith("worker-1 signal: killed by SIGKILL; next step after 1.3 s")
    assert lines[5:] == [
        f"  logs         {folder}/logs",
        "  best         step-100-g1: accuracy 0.9",
        f"  tensorboard  {folder}/tensorboard",
        "  next         paceline tensorboard digits-3f9a",
    ]


def test_the_report_says_which_snapshot_is_committed_and_where(tmp_path: Path) -> None:
    folder = recorded.write(tmp_path, report=recorded.REPORT)
    found = standing(folder)
    told = report.snapshots(found)
    assert told == f"step 100 committed: {folder}/snapshots/digits-3f9a/step-100-g1"
    assert f"  snapshots    {told}" in report.text(found.report, told)
    plan = json.loads((folder / "plan.json").read_text())
    (folder / "plan.json").write_text(json.dumps({**plan, "snapshots": {"to": "s3://training/digits"}}))
    assert report.snapshots(found) == "step 100 committed: s3://training/digits/digits-3f9a/step-100-g1"


def test_the_report_says_what_is_saved_only(tmp_path: Path) -> None:
    saved = event(6, "saved", step=120, snapshot="step-120-g1")
    folder = recorded.write(tmp_path, events=[recorded.STARTED, saved], report={**recorded.REPORT, "skipped": 3})
    assert report.snapshots(standing(folder)) == "step 120 saved, 3 skipped, none committed"
    (folder / "report.json").unlink()
    with recorded.supervised(folder):
        moment = events.seconds(recorded.at(18))
        assert report.snapshots(standing(folder), moment) == "step 120 saved 12 s ago, none committed yet"


@pytest.mark.parametrize(
    ("to", "where"),
    [("", "in its captain's pod"), ("claim://kept/x", "claim://kept/x/digits-3f9a/step-100-g1 on its cluster")],
)
def test_snapshots_inside_a_cluster_are_said_to_be_there(tmp_path: Path, to: str, where: str) -> None:
    folder = recorded.write(tmp_path, report=recorded.REPORT)
    for name, more in (("run.json", {"on": "kubernetes"}), ("plan.json", {"snapshots": {"to": to}})):
        (folder / name).write_text(json.dumps({**json.loads((folder / name).read_text()), **more}))
    assert report.snapshots(standing(folder)) == f"step 100 committed: {where}"


def test_a_failed_run_names_its_reason_and_the_log_to_read(tmp_path: Path) -> None:
    failed = {**recorded.REPORT, "status": "failed", "reason": "ValueError: no", "cause": "program-error"}
    lines = report.text(standing(recorded.write(tmp_path, report=failed)).report)
    assert lines[0] == "digits-3f9a failed after 12 s: ValueError: no"
    assert lines[-1] == "  next         paceline logs digits-3f9a --task worker-1"
