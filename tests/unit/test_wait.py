"""`paceline wait`: conditions, time limits and exit codes, on run folders written by hand."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from paceline.backends.kubernetes.runs import local_folder
from paceline.backends.kubernetes.runs.pod_lines import try_lock
from paceline.client.control import wait as waiting
from paceline.client.control.wait import Deadline, Ended, EndedBefore, SnapshotCommitted, StepReached, WaitTimeout
from paceline.view.files.run_folders import Run
from support import recorded
from support.recorded import LIFE, REPORT, at, call

RUN = "digits-3f9a"
STEP_300 = recorded.event(13, "step", 2, task="worker-0", step=300, metrics={}, steps_per_s=30.0)
COMMITTED_200 = recorded.event(13, "committed", 2, step=200, snapshot="step-200-g2", bytes=1, took_s=0.1)
COPIED = recorded.event(
    1.8, "committed", 0, step=500, snapshot="step-500-g0", bytes=1, took_s=0.1, origin="/kept/digits-1a2b/step-500-g1"
)


class Clock:
    """The time, which passes only while the command sleeps. Something may happen in each sleep."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.sleeps: list[float] = []
        self.happens: Iterator[Callable[[], object]] = iter(())

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds
        assert len(self.sleeps) < 10_000, "it waits forever"
        next(self.happens, lambda: None)()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(waiting, "time", clock)
    return clock


class Training:
    """A run on this machine whose supervisor lives."""

    def __init__(self, home: Path, stack: contextlib.ExitStack) -> None:
        self.folder = recorded.write(home, RUN, events=LIFE[:11])  # until step 120
        self._supervisor = stack
        stack.enter_context(recorded.supervised(self.folder))

    def writes(self, *events: dict[str, Any]) -> Callable[[], object]:
        text = "".join(json.dumps(event) + "\n" for event in events)

        def write() -> None:
            with open(self.folder / "events.jsonl", "a") as file:
                file.write(text)

        return write

    def ends(self, status: str = "succeeded", reason: str = "all workers have succeeded") -> Callable[[], object]:
        def end() -> None:
            report = {**REPORT, "run": RUN, "folder": str(self.folder), "status": status, "reason": reason}
            (self.folder / "report.json").write_text(json.dumps(report))
            self._supervisor.close()

        return end


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    with contextlib.ExitStack() as stack:
        yield Training(tmp_path, stack)


# ---- runs that have ended


@pytest.mark.parametrize(
    ("status", "reason", "code", "text"),
    [
        ("succeeded", "all workers have succeeded", 0, "digits-3f9a succeeded after 12 s\n"),
        ("failed", "ValueError: no", 1, "digits-3f9a failed after 12 s: ValueError: no\n"),
        ("stopped", "interrupted", 130, "digits-3f9a was stopped after 12 s: interrupted\n"),
    ],
)
def test_the_exit_code_is_the_outcome_of_the_run(
    tmp_path: Path, status: str, reason: str, code: int, text: str
) -> None:
    recorded.write(tmp_path, RUN, report={**REPORT, "status": status, "reason": reason})
    for arguments in ([], ["digits", "--for", "ended", "--timeout", "1h"]):
        result = call(tmp_path, "wait", *arguments)
        assert (result.returncode, result.stdout, result.stderr) == (code, "", text)


def test_a_run_whose_supervisor_was_killed_has_failed(tmp_path: Path) -> None:
    recorded.write(tmp_path, RUN, events=LIFE[:11])
    result = call(tmp_path, "wait")
    assert result.returncode == 1 and "the supervisor ended without a report" in result.stderr


@pytest.mark.parametrize(
    ("condition", "code", "text"),
    [
        ("step=1", 0, "digits-3f9a has reached step 1\n"),
        ("step=161", 0, "digits-3f9a has reached step 161\n"),
        ("step=162", 3, "error: digits-3f9a succeeded before it reached step 162: its last step is 161\n"),
        ("snapshot", 0, "digits-3f9a has committed step 100: {folder}/snapshots/digits-3f9a/step-100-g1\n"),
        ("snapshot=100", 0, "digits-3f9a has committed step 100: {folder}/snapshots/digits-3f9a/step-100-g1\n"),
        ("snapshot=101", 3, "error: digits-3f9a succeeded before it committed a snapshot of step 101 or later\n"),
    ],
)
def test_steps_and_snapshots_of_a_run_that_has_ended(tmp_path: Path, condition: str, code: int, text: str) -> None:
    folder = recorded.write(tmp_path, RUN, report=REPORT)
    result = call(tmp_path, "wait", "--for", condition)
    assert (result.returncode, result.stdout, result.stderr) == (code, "", text.format(folder=folder))


def test_a_run_that_failed_before_its_first_step(tmp_path: Path) -> None:
    failed = {**REPORT, "status": "failed", "reason": "ValueError: no", "steps": 0}
    recorded.write(tmp_path, RUN, events=LIFE[:7], report=failed)
    step, snapshot = (call(tmp_path, "wait", "--for", each) for each in ("step=1", "snapshot"))
    assert (step.returncode, step.stderr) == (
        3,
        "error: digits-3f9a failed before it reached step 1: it has reported no steps; ValueError: no\n",
    )
    assert snapshot.stderr == "error: digits-3f9a failed before it committed a snapshot: ValueError: no\n"


def test_the_report_tells_the_step_if_events_are_missing(tmp_path: Path) -> None:
    recorded.write(tmp_path, RUN, events=LIFE[:7], report=REPORT)
    assert call(tmp_path, "wait", "--for", "step=161").returncode == 0


def test_the_copy_of_the_snapshot_that_the_run_started_from_does_not_count(tmp_path: Path) -> None:
    recorded.write(tmp_path, RUN, events=[LIFE[0], COPIED, *LIFE[4:8], LIFE[-1]], report=REPORT)
    assert call(tmp_path, "wait", "--for", "snapshot").returncode == 3


def test_json(tmp_path: Path) -> None:
    folder = recorded.write(tmp_path, RUN, report={**REPORT, "status": "failed"})
    mark = {"step": 100, "snapshot": "step-100-g1", "at": at(5.5)}
    result = call(tmp_path, "wait", "-o", "json")
    expected = {**REPORT, "status": "failed", "run": RUN, "folder": str(folder), "saved": mark, "committed": mark}
    printed = json.loads(result.stdout)
    measured = {name: printed[name] for name in ("goodput", "resources")}  # derived: not in this report
    assert (result.returncode, printed) == (1, {"schema_version": 1, **expected, **measured})
    missed = call(tmp_path, "wait", "--for", "step=1000", "-o", "json")
    error = json.loads(missed.stdout)["error"]
    assert (missed.returncode, error["kind"]) == (3, "EndedBefore")
    assert error["what"].startswith("digits-3f9a failed before it reached step 1000: its last step is 161")


# ---- runs that train


def test_it_waits_for_the_end(tmp_path: Path, training: Training, clock: Clock) -> None:
    ended = training.writes(LIFE[-1])
    clock.happens = iter([training.writes(STEP_300), ended, training.ends("stopped", "interrupted")])
    result = call(tmp_path, "wait", "--timeout", "1h")
    assert (result.returncode, len(clock.sleeps)) == (130, 3)
    assert result.stderr == "digits-3f9a was stopped after 12 s: interrupted\n"


@pytest.mark.parametrize("condition", ["step=300", "snapshot=200"])
def test_it_returns_while_the_run_trains(tmp_path: Path, training: Training, clock: Clock, condition: str) -> None:
    nothing = training.writes()
    clock.happens = iter([nothing, training.writes(LIFE[10]), training.writes(STEP_300, COMMITTED_200)])
    result = call(tmp_path, "wait", "--for", condition, "-o", "json")
    report = json.loads(result.stdout)
    assert (result.returncode, len(clock.sleeps)) == (0, 3)
    assert (report["status"], report["steps"], report["committed"]["snapshot"]) == ("running", 300, "step-200-g2")


def test_the_last_events_of_a_run_count(tmp_path: Path, training: Training, clock: Clock) -> None:
    def end() -> None:
        training.writes(STEP_300)()
        training.ends()()

    clock.happens = iter([end])
    assert call(tmp_path, "wait", "--for", "step=300").returncode == 0


@pytest.mark.parametrize(
    ("condition", "text"),
    [
        ("ended", "digits-3f9a has not ended within 10 min"),
        ("step=1000", "digits-3f9a has not reached step 1000 within 10 min: its last step is 120"),
        ("snapshot=1000", "digits-3f9a has not committed a snapshot of step 1000 or later within 10 min"),
    ],
)
def test_a_time_limit_has_its_own_exit_code(
    tmp_path: Path, training: Training, clock: Clock, condition: str, text: str
) -> None:
    result = call(tmp_path, "wait", "--for", condition, "--timeout", "10m")
    assert (result.returncode, result.stdout) == (124, "")
    assert result.stderr == f"error: {text}; see: paceline status digits-3f9a\n"
    assert sum(clock.sleeps) == pytest.approx(600)


def test_it_does_not_busy_wait(tmp_path: Path, training: Training, clock: Clock) -> None:
    call(tmp_path, "wait", "--timeout", "1h")
    assert len(clock.sleeps) <= 3600 * 2 + 10 and min(clock.sleeps[:-1]) >= 0.1


def test_a_run_that_waits_for_its_hosts_is_waited_for(tmp_path: Path, clock: Clock) -> None:
    folder = recorded.write(tmp_path, RUN, events=[recorded.STARTED, recorded.WAITING])
    with recorded.supervised(folder):
        result = call(tmp_path, "wait", "--for", "step=1", "--timeout", "5")
    assert "has not reached step 1 within 5 s: it has reported no steps; see" in result.stderr


def test_a_run_whose_supervisor_has_not_started_yet_is_waited_for(tmp_path: Path, clock: Clock) -> None:
    recorded.write(tmp_path, RUN, events=[])
    assert call(tmp_path, "wait", "--timeout", "5s").returncode == 124


def test_ctrl_c_ends_only_the_waiting(tmp_path: Path, training: Training, clock: Clock) -> None:
    def press() -> None:
        raise KeyboardInterrupt

    clock.happens = iter([press])
    before = recorded.contents(training.folder)
    result = call(tmp_path, "wait")
    assert (result.returncode, result.stderr) == (130, "interrupted; this does not stop digits-3f9a\n")
    assert recorded.contents(training.folder) == before


def test_a_run_that_is_deleted_meanwhile(tmp_path: Path, training: Training, clock: Clock) -> None:
    def delete() -> None:
        training.ends()()
        assert call(tmp_path, "delete", RUN, "--yes").returncode == 0

    clock.happens = iter([delete])
    result = call(tmp_path, "wait")
    assert (result.returncode, result.stderr) == (1, "error: digits-3f9a was deleted\n")


# ---- the Python API


def test_the_client_raises_and_prints_nothing(
    training: Training, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(RUN, training.folder)
    assert waiting.wait(run, SnapshotCommitted(), Deadline(RUN)).state.committed is not None
    with pytest.raises(WaitTimeout):
        waiting.wait(run, Ended(), Deadline(RUN, 1.0))
    clock.happens = iter([training.ends()])
    with pytest.raises(EndedBefore):
        waiting.wait(run, StepReached(1000), Deadline(RUN))
    assert waiting.wait(run, Ended(), Deadline(RUN)).report["status"] == "succeeded"
    assert capsys.readouterr() == ("", "")


# ---- a run on a cluster


class Followed:
    """A run on a cluster that this process follows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        inbox = SimpleNamespace(close=lambda: None)
        self.mirror = SimpleNamespace(start=lambda: None, stop=lambda: None, output_incomplete=False, inbox=inbox)

    def ended(self, timeout: float) -> bool:
        (self.folder / "report.json").write_text(json.dumps({**REPORT, "run": RUN}))
        return True


@pytest.fixture
def on_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = recorded.write(tmp_path, RUN, events=LIFE[:11])
    info = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(
        json.dumps({**info, "on": "kubernetes", "context": "lab", "namespace": "team-a", "submitted": True})
    )
    monkeypatch.setattr(local_folder, "refresh", lambda *_: None)
    monkeypatch.setattr(local_folder, "reopen", lambda folder, until: cast(Any, Followed(folder)))
    return folder


def test_a_run_that_another_process_follows_is_waited_for_in_its_folder(
    tmp_path: Path, on_cluster: Path, clock: Clock
) -> None:
    with try_lock(on_cluster) as is_locked:
        assert is_locked
        report = json.dumps({**REPORT, "run": RUN, "status": "failed"})
        clock.happens = iter([lambda: None, lambda: (on_cluster / "report.json").write_text(report)])
        assert call(tmp_path, "wait").returncode == 1
    assert len(clock.sleeps) == 2


def test_if_the_process_that_follows_the_run_exits_the_run_is_followed_here(
    tmp_path: Path, on_cluster: Path, clock: Clock
) -> None:
    with contextlib.ExitStack() as other_process:
        assert other_process.enter_context(try_lock(on_cluster))
        clock.happens = iter([lambda: None, other_process.close])
        assert call(tmp_path, "wait", "--timeout", "1h").returncode == 0
    assert len(clock.sleeps) == 2
    with try_lock(on_cluster) as is_free:
        assert is_free


# ---- wrong usage


@pytest.mark.parametrize("condition", ["", "end", "step", "step=", "step=-1", "step=1e3", "steps=5", "snapshot=best",
                                       "ended=1", "step=" + "9" * 5000])  # fmt: skip
def test_invalid_conditions(tmp_path: Path, condition: str) -> None:
    recorded.write(tmp_path, RUN, report=REPORT)
    result = call(tmp_path, "wait", "--for", condition)
    assert (result.returncode, result.stdout) == (2, "")
    remedy = "invalid condition; use ended, step=N, snapshot or snapshot=STEP"
    assert result.stderr == f"error: --for {condition!r}: {remedy}\n"


@pytest.mark.parametrize(
    ("timeout", "text"),
    [
        ("ten", "--timeout 'ten': \"ten\" is not a duration; use a duration such as \"90s\", \"10m\""),
        ("10 minutes", "--timeout '10 minutes': \"10 minutes\" is not a duration; did you mean \"10m\"?"),
        ("0", "--timeout '0': must be longer than 0 seconds, got 0"),
        ("-5", "--timeout '-5': \"-5\" is not a duration"),
        ("9999d", "--timeout '9999d': must be at most 3650d"),
    ],
)  # fmt: skip
def test_invalid_time_limits(tmp_path: Path, timeout: str, text: str) -> None:
    recorded.write(tmp_path, RUN, report=REPORT)
    result = call(tmp_path, "wait", "--timeout", timeout)
    assert (result.returncode, result.stdout) == (2, "") and f"error: {text}" in result.stderr


def test_a_location_is_not_a_run(tmp_path: Path) -> None:
    result = call(tmp_path, "wait", "s3://bucket/path/digits-3f9a")
    assert (result.returncode, result.stderr) == (
        2,
        "error: s3://bucket/path/digits-3f9a: wait requires a run id, not a location\n",
    )
