"""The state of a run: from its events, and from its folder while its lock is held and afterwards."""

import json
import math
from pathlib import Path

import pytest

from paceline.view.files import run_folders, run_lookup
from paceline.view.report import run_report
from paceline.view.state import events, run_state, status_reader
from support import recorded
from support.recorded import event


def fold_events(lines: list[dict[str, object]]) -> run_state.State:
    return run_state.fold(filter(None, (events.parse(json.dumps(line)) for line in lines)))


def state_after(kind: str, generation: int = 1) -> run_state.State:
    end = next(i for i, one in enumerate(recorded.LIFE) if one["event"] == kind and one["generation"] == generation)
    return fold_events(recorded.LIFE[: end + 1])


def test_a_run_without_events_is_starting() -> None:
    assert fold_events([]).status == "starting"
    assert fold_events([recorded.STARTED]).status == "starting"


def test_waiting_is_shown_until_the_generation_is_formed() -> None:
    waiting = fold_events([recorded.STARTED, recorded.WAITING])
    assert waiting.status == "starting"
    assert waiting.waiting is not None and waiting.waiting.names("missing") == ["worker-host-1"]
    assert state_after("generation-formed").waiting is None


def test_a_run_with_a_generation_is_running() -> None:
    formed = state_after("generation-formed")
    assert (formed.status, formed.generation) == ("running", 1)
    assert {name: task.state for name, task in formed.tasks.items()} == {
        "worker-0": "starting", "worker-1": "starting", "evaluator-0": "waiting",
    }  # fmt: skip


def test_tasks_have_pid_host_and_step() -> None:
    task = state_after("saved").tasks["worker-0"]
    assert (task.state, task.pid, task.host, task.step) == ("running", 4711, "worker-host-0", 60)


def test_a_killed_task_and_those_ended_with_it_are_told_apart() -> None:
    tasks = state_after("restart").tasks
    assert (tasks["worker-1"].state, tasks["worker-1"].exit, tasks["worker-1"].pid) == ("failed", "SIGKILL", None)
    assert tasks["worker-0"].state == "ended"


def test_the_whole_life() -> None:
    end = fold_events(recorded.LIFE)
    assert (end.status, end.reason, end.cause) == ("succeeded", "all workers have succeeded", None)
    assert (end.generation, end.steps) == (2, 161)
    assert end.committed == run_state.Mark(100, "step-100-g1", recorded.at(5.5), 1, size=1000, took_s=0.5)
    assert end.metrics == {"worker-0": {"loss": 0.2, "accuracy": 0.91}, "evaluator-0": {"accuracy": 0.9}}
    assert (end.tasks["evaluator-0"].step, end.best) == (100, recorded.BEST)
    assert end.restarts == recorded.REPORT["restarts"]
    assert end.stacks == {"worker-0": 'File "train.py", line 3'}
    assert end.warnings == ["the disk is full"]


def test_a_failure_that_no_generation_has_followed_is_no_restart(tmp_path: Path) -> None:
    """A captain that outlives other hosts when the run is killed announces a restart."""
    again = {**recorded.RESTART, "generation": 2, "at": recorded.at(11.9)}
    alive = [*recorded.LIFE[:-3], again]
    assert len(fold_events(alive).restarts) == 2, "the run may go on"
    stopped = event(12, "run-ended", 2, status="stopped", reason="killed", cause=None)
    for number, lines in enumerate(([*alive, stopped], alive)):
        folder = recorded.write(tmp_path / str(number), events=lines)
        assert standing(folder).report["restarts"] == recorded.REPORT["restarts"], "the supervisor is gone, too"
        with recorded.supervised(folder):
            assert len(standing(folder).report["restarts"]) == 1 + number
    followed = [*alive, event(12, "generation-formed", 3, tasks=["worker-0"], restore=None), stopped]
    assert len(standing(recorded.write(tmp_path / "3", events=followed)).report["restarts"]) == 2


def test_a_restart_of_the_ingest_is_followed_by_the_ingest() -> None:
    failed = event(3, "restart", 0, cause="signal", task="ingest-0", detail="killed", scope=["ingest-0"])
    assert fold_events([recorded.STARTED, failed]).followed_restarts == []
    started = event(4, "ingest-started", 0, host="worker-host-0", data="/data")
    assert len(fold_events([recorded.STARTED, failed, started]).followed_restarts) == 1


def test_saved_and_committed_are_told_apart() -> None:
    saved = state_after("saved")
    assert saved.saved is not None and (saved.saved.step, saved.committed) == (100, None)
    later = [*recorded.LIFE[:10], event(6, "saved", step=120, snapshot="step-120-g1")]
    state = fold_events(later)
    assert state.saved is not None and state.committed is not None
    assert (state.saved.step, state.committed.step) == (120, 100)


def test_a_snapshot_that_was_saved_but_not_committed_ends_with_its_generation() -> None:
    saved = event(6, "saved", step=120, snapshot="step-120-g1")
    state = fold_events([*recorded.LIFE[:10], saved, {**recorded.FORMED, "generation": 2}])
    assert state.saved is not None and state.saved == state.committed
    assert fold_events([saved, {**recorded.FORMED, "generation": 2}]).saved is None


def test_a_task_that_does_steps_runs_even_if_its_start_was_never_reported() -> None:
    """The captain died before it could."""
    formed = {**recorded.FORMED, "generation": 2}
    state = fold_events([*recorded.LIFE[:4], formed])
    assert state.tasks["worker-0"].state == "starting"
    step = event(8, "step", task="worker-0", step=5, metrics={}, steps_per_s=None)
    state = fold_events([*recorded.LIFE[:4], formed, {**step, "generation": 2}])
    assert state.tasks["worker-0"].state == "running"


def test_a_snapshot_that_the_next_generation_resumes_from_stays_the_newest_saved_one() -> None:
    saved = event(6, "saved", step=120, snapshot="step-120-g1")
    formed = {**recorded.FORMED, "generation": 2, "restore": "step-120-g1"}
    state = fold_events([*recorded.LIFE[:10], saved, formed])
    assert state.saved is not None and state.committed is not None
    assert (state.saved.step, state.committed.step) == (120, 100)


def test_steps_per_second_exclude_the_time_between_generations() -> None:
    # 60 steps in 2 s in each of two generations; the 2.3 s between them, and the steps done twice, do not count.
    assert fold_events(recorded.LIFE).steps_per_s == pytest.approx(30.0)


def test_incremental_reading_gives_the_same_state() -> None:
    parsed = [one for one in (events.parse(json.dumps(line)) for line in recorded.LIFE) if one]
    for cut in range(len(parsed)):
        assert run_state.fold(parsed[cut:], run_state.fold(parsed[:cut])) == run_state.fold(parsed)


def test_a_loss_of_nan_is_kept() -> None:
    state = fold_events([recorded.FORMED, {**recorded.STEP, "metrics": {"loss": float("nan"), "name": "x"}}])
    assert list(state.metrics["worker-0"]) == ["loss"] and math.isnan(state.metrics["worker-0"]["loss"])


@pytest.mark.parametrize("kind", events.KINDS)
def test_an_event_without_its_fields_is_not_an_error(kind: str) -> None:
    fold_events([event(1, kind), recorded.STEP])


def standing(folder: Path) -> status_reader.Standing:
    return status_reader.read(run_folders.Run(folder.name, folder))


def test_a_run_whose_lock_is_held_is_running(tmp_path: Path) -> None:
    folder = recorded.write(tmp_path, events=recorded.LIFE[:11])
    with recorded.supervised(folder):
        run_standing = standing(folder)
        assert run_standing.alive and run_standing.report["status"] == "running"
        assert run_standing.report["steps"] == 120 and run_standing.report["ended"] is None


def test_a_reader_is_not_mistaken_for_the_supervisor(tmp_path: Path) -> None:
    import fcntl

    folder = recorded.write(tmp_path)
    with open(folder / "lock") as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        assert not run_folders.alive(folder)


def test_a_supervisor_that_ended_without_a_report_is_a_failure(tmp_path: Path) -> None:
    folder = recorded.write(tmp_path, events=recorded.LIFE[:11])
    run_standing = standing(folder)
    assert (run_standing.alive, run_standing.report["status"], run_standing.report["reason"]) == (
        False,
        "failed",
        status_reader.GONE,
    )


def test_the_events_are_enough_if_the_report_is_missing(tmp_path: Path) -> None:
    assert standing(recorded.write(tmp_path)).report["status"] == "succeeded"


def test_the_report_takes_precedence_over_the_events(tmp_path: Path) -> None:
    folder = recorded.write(tmp_path, events=[], report={**recorded.REPORT, "status": "stopped"})
    assert (
        standing(folder).report["status"]
        == status_reader.summary(run_folders.Run(folder.name, folder))["status"]
        == "stopped"
    )


@pytest.mark.parametrize("damaged", ["run.json", "plan.json", "report.json", "events.jsonl", "lock"])
@pytest.mark.parametrize("content", [None, b"", b"\x00\xff", b"[1, 2]"])
def test_a_damaged_folder_can_still_be_read(tmp_path: Path, damaged: str, content: bytes | None) -> None:
    folder = recorded.write(tmp_path, report=recorded.REPORT)
    (folder / damaged).unlink()
    if content is not None:
        (folder / damaged).write_bytes(content)
    report = standing(folder).report
    assert report["status"] == "succeeded"
    assert run_report.text(report)


def test_a_new_folder_is_starting_and_an_old_empty_one_has_failed(tmp_path: Path) -> None:
    import os

    folder = tmp_path / "runs" / "digits-0000"
    folder.mkdir(parents=True)
    assert standing(folder).report["status"] == "starting"
    os.utime(folder, (1, 1))
    report = standing(folder).report
    assert (report["status"], report["reason"]) == ("failed", status_reader.NEVER)


@pytest.mark.parametrize(
    ("cause", "expected"), [(None, True), ("start-timeout", True), (run_folders.JOB_DELETED, False)]
)
def test_the_outcome_of_a_run_is_known_unless_only_its_job_was_deleted(
    tmp_path: Path, cause: str | None, expected: bool
) -> None:
    assert not run_folders.outcome_known(tmp_path)
    report = {"status": "failed", "reason": run_folders.JOB_DELETED_REASON, "cause": cause}
    (tmp_path / "report.json").write_text(json.dumps(report))
    assert run_folders.outcome_known(tmp_path) is expected


@pytest.mark.parametrize(
    ("query", "expected"),
    [(None, "digits-3f9b"), ("digits-3f9a", "digits-3f9a"), ("tr", "translate-0001"), ("digits-3f9", "digits-3f9")],
)
def test_runs_are_found_by_id_by_prefix_or_as_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, query: str | None, expected: str
) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    for second, name in enumerate(["digits-3f9", "translate-0001", "digits-3f9a", "digits-3f9b"]):
        recorded.write(tmp_path, name, started=recorded.at(second))
    assert run_lookup.find(query).name == expected


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("digits", "'digits' matches 2 runs: digits-3f9b, digits-3f9a"),
        ("digit-3f9a", "no run 'digit-3f9a'; did you mean 'digits-3f9a'? `client.runs()` lists all"),
        ("../digits-3f9a", "no run '../digits-3f9a'; did you mean 'digits-3f9a'? `client.runs()` lists all"),
        ("zzzz", "no run 'zzzz'; the newest is 'digits-3f9b'; `client.runs()` lists all"),
        ("", "no run ''; the newest is 'digits-3f9b'; `client.runs()` lists all"),
    ],
)
def test_a_missing_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, query: str, message: str) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    for second, name in enumerate(["digits-3f9a", "digits-3f9b"]):
        recorded.write(tmp_path, name, started=recorded.at(second))
    with pytest.raises(run_folders.NoRun) as raised:
        run_lookup.find(query)
    assert str(raised.value) == message


def test_the_report_as_text(tmp_path: Path) -> None:
    folder = recorded.write(tmp_path, report=recorded.REPORT, logs={"worker-0": ""})
    (folder / "tensorboard").mkdir()
    (folder / "tensorboard" / "events.out").touch()
    lines = run_report.text(standing(folder).report)
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
    run_standing = standing(folder)
    text = run_report.snapshots(run_standing)
    assert text == f"step 100 committed: {folder}/snapshots/digits-3f9a/step-100-g1"
    assert f"  snapshots    {text}" in run_report.text(run_standing.report, text)
    plan = json.loads((folder / "plan.json").read_text())
    (folder / "plan.json").write_text(json.dumps({**plan, "snapshots": {"to": "s3://training/digits"}}))
    assert run_report.snapshots(run_standing) == "step 100 committed: s3://training/digits/digits-3f9a/step-100-g1"


def test_the_report_names_a_snapshot_that_is_only_saved(tmp_path: Path) -> None:
    saved = event(6, "saved", step=120, snapshot="step-120-g1")
    folder = recorded.write(tmp_path, events=[recorded.STARTED, saved], report={**recorded.REPORT, "skipped": 3})
    assert run_report.snapshots(standing(folder)) == "step 120 saved, 3 skipped, none committed"
    (folder / "report.json").unlink()
    with recorded.supervised(folder):
        moment = events.seconds(recorded.at(18))
        assert run_report.snapshots(standing(folder), moment) == "step 120 saved 12 s ago, none committed yet"


@pytest.mark.parametrize(
    ("to", "location"),
    [("", "in its captain's pod"), ("claim://kept/x", "claim://kept/x/digits-3f9a/step-100-g1 on its cluster")],
)
def test_snapshots_inside_a_cluster_are_reported_as_such(tmp_path: Path, to: str, location: str) -> None:
    folder = recorded.write(tmp_path, report=recorded.REPORT)
    for name, more in (("run.json", {"on": "kubernetes"}), ("plan.json", {"snapshots": {"to": to}})):
        (folder / name).write_text(json.dumps({**json.loads((folder / name).read_text()), **more}))
    assert run_report.snapshots(standing(folder)) == f"step 100 committed: {location}"


def test_a_failed_run_names_its_reason_and_the_log_to_read(tmp_path: Path) -> None:
    failed = {**recorded.REPORT, "status": "failed", "reason": "ValueError: no", "cause": "program-error"}
    lines = run_report.text(standing(recorded.write(tmp_path, report=failed)).report)
    assert lines[0] == "digits-3f9a failed after 12 s: ValueError: no"
    assert lines[-1] == "  next         paceline logs digits-3f9a --task worker-1"


@pytest.mark.parametrize(
    "status, line",
    [
        ("running", "digits-3f9a is running, started 2 h 10 min ago: no host"),
        ("paused", "digits-3f9a is paused, started 2 h 10 min ago: no host"),
        ("abandoned", "digits-3f9a was abandoned: no host"),
        ("stopped", "digits-3f9a was stopped after 2 h 10 min: no host"),
    ],
)
def test_the_headline_says_since_when_a_run_exists_or_how_long_it_took(status: str, line: str) -> None:
    times = {"started": "2026-10-01T10:00:00Z", "ended": "2026-10-01T12:10:00Z"}
    assert run_report.headline({"run": "digits-3f9a", "status": status, "reason": "no host", **times}) == line
