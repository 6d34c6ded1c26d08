"""The time of a run by kind: it adds up, whatever happens, and whoever reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.agent.captain_process.event_log import EventLog
from paceline.agent.event_file import NAME, EventFile
from paceline.agent.goodput import KINDS, MOST_POINTS, Goodput, report_of, with_queue
from paceline.agent.run_files import stamp
from paceline.view.files import run_folders
from paceline.view.report import usage
from paceline.view.state import events, run_state, status_reader
from support import recorded
from support.recorded import FORMED, RESTART, STARTED, event

GROUP = ["worker-0", "worker-1"]
JOINED = [event(1, "member-joined", 0, host=f"worker-host-{index}") for index in (0, 1)] + [
    event(1, "member-joined", 0, host="evaluator-host-0")
]


def spent(*lines: dict[str, Any]) -> dict[str, float]:
    """Seconds of the kinds that are not 0."""
    return {kind: seconds for kind, seconds in Goodput().add_all(lines).seconds().items() if seconds}


def started(at: float, generation: int = 1) -> list[dict[str, Any]]:
    return [
        event(at, "task-started", generation, task=f"worker-{n}", pid=1, warm=False, host=f"worker-host-{n}")
        for n in range(2)
    ]


def formed(at: float, generation: int, restore: str | None) -> dict[str, Any]:
    return event(at, "generation-formed", generation, tasks=GROUP, restore=restore)


def step(at: float, number: int, generation: int = 1, task: str = "worker-0") -> dict[str, Any]:
    return event(at, "step", generation, task=task, step=number, metrics={}, steps_per_s=None)


def exited(at: float, task: str = "worker-0", code: int | None = None, expected: bool = False) -> dict[str, Any]:
    signal = "SIGKILL" if code is None else None
    return event(at, "task-exited", task=task, code=code, signal=signal, expected=expected)


BEGUN = [STARTED, *JOINED, FORMED, *started(2.5)]  # at 2.5 s


def test_training_goes_on_if_only_the_tasks_that_failed_start_again() -> None:
    begun = [{**STARTED, "restart_scope": "task"}, *BEGUN[1:], step(4.5, 1), step(10.5, 50)]
    alone = event(11, "generation-formed", 1, tasks=["worker-1"], restore="step-20-g1")
    lines = [*begun, exited(10.5, "worker-1"), {**RESTART, "at": recorded.at(10.5)}, alone, step(12.5, 60)]
    assert spent(*lines)["training"] == spent(*begun, step(12.5, 60))["training"]
    assert "lost" not in spent(*lines) and "restarting" not in spent(*lines)


def test_nothing_trains_if_all_tasks_have_failed_whatever_restarts() -> None:
    begun = [{**STARTED, "restart_scope": "task"}, *BEGUN[1:], step(4.5, 1), step(10.5, 50)]
    all_exited = [exited(10.5, "worker-1"), exited(10.5, "worker-0")]
    lines = [*begun, *all_exited, formed(11.5, 1, None), *started(11.5), step(13.5, 1)]
    assert spent(*lines)["lost"] == 6 and spent(*lines)["restarting"] == 3


def test_a_run_without_failures() -> None:
    queued_and_waiting = [STARTED, event(1, "member-joined", 0, host="worker-host-0")]
    all_joined = [event(3, "member-joined", 0, host=host) for host in ("worker-host-1", "evaluator-host-0")]
    training = [formed(4, 1, None), *started(4.5), step(7, 1), step(17, 100)]
    end = [exited(18, "worker-0", 0), exited(18, "worker-1", 0), event(20, "run-ended", status="succeeded")]
    assert spent(*queued_and_waiting, *all_joined, *training, *end) == {
        "queued": 1, "waiting": 2, "starting": 4, "training": 11, "ending": 2,
    }  # fmt: skip


def test_what_was_trained_after_the_restored_snapshot_is_lost() -> None:
    """Steps 0 to 100 take 10 s, and the snapshot of step 60 is restored: 4 s are lost, and 1 s after the last step."""
    training = [step(3, 1), step(13, 101), exited(14), RESTART | {"at": recorded.at(14.5)}]
    again = [formed(16, 2, "step-61-g1"), *started(16, 2), step(17, 62, 2), step(20, 90, 2)]
    assert spent(*BEGUN, *training, *again) == {
        "queued": 1, "starting": 2, "training": 6 + 3, "lost": 5, "restarting": 3,
    }  # fmt: skip


def test_everything_is_lost_from_scratch() -> None:
    training = [step(3, 1), step(13, 101), exited(13)]
    assert spent(*BEGUN, *training, formed(14, 2, None), step(15, 1, 2))["lost"] == 10


def test_a_restart_from_the_last_step_loses_nothing() -> None:
    training = [step(3, 1), step(13, 101), exited(13)]
    assert "lost" not in spent(*BEGUN, *training, formed(14, 2, "step-101-g1"), step(15, 102, 2))


def test_a_second_failure_loses_only_what_followed_the_first() -> None:
    first = [step(3, 0), step(13, 100), exited(13), formed(14, 2, "step-50-g1"), step(15, 50, 2)]
    second = [step(20, 100, 2), exited(20), formed(21, 3, "step-80-g2"), step(22, 81, 3)]
    assert spent(*BEGUN, *first, *second)["lost"] == 5 + 2
    back = [step(20, 100, 2), exited(20), formed(21, 3, "step-40-g1"), step(22, 41, 3)]
    assert spent(*BEGUN, *first, *back)["lost"] == 5 + 5 + 1


def test_a_hang_is_lost() -> None:
    hang = event(33, "hang", tasks=GROUP, silent_s=20.0, limit_s=20.0, progress="step")
    lines = [step(3, 0), step(13, 100), hang, exited(33.5, expected=True), formed(35, 2, "step-100-g1")]
    assert spent(*BEGUN, *lines, step(36, 101, 2)) == {
        "queued": 1, "starting": 2, "training": 10, "lost": 20, "restarting": 3,
    }  # fmt: skip


def test_a_run_waits_for_a_host_that_was_lost() -> None:
    lost = [step(3, 0), event(13, "member-lost", host="worker-host-1", reason="x"), exited(14, "worker-1")]
    replaced = [event(24, "member-joined", host="worker-host-1"), formed(26, 2, "step-0-g1"), step(27, 1, 2)]
    times = spent(*BEGUN, *lost, *replaced)
    assert (times["waiting"], times["restarting"], times["lost"]) == (10, 3, 11)


def test_no_host_of_an_evaluator_is_waited_for_in_a_restart() -> None:
    lost = [event(3, "member-lost", host="evaluator-host-0", reason="x"), step(3, 0), exited(13)]
    assert "waiting" not in spent(*BEGUN, *lost, formed(15, 2, None), step(16, 1, 2))


def test_snapshots_stall_training() -> None:
    saved = event(8, "saved", step=50, snapshot="step-50-g1", stall_s=1.5)
    assert spent(*BEGUN, step(3, 1), saved, step(13, 100)) == {
        "queued": 1, "starting": 2, "training": 8.5, "stalled": 1.5,
    }  # fmt: skip


@pytest.mark.parametrize("stall", [-1, float("nan"), float("inf"), 1e9, "1", None, True])
def test_an_impossible_stall_does_not_exceed_the_time(stall: Any) -> None:
    times = spent(*BEGUN, step(3, 1), event(8, "saved", step=50, snapshot="step-50-g1", stall_s=stall))
    assert times.get("training", 0) + times.get("stalled", 0) == 5


def test_evaluators_go_on_after_training() -> None:
    evaluator = event(2.5, "task-started", task="evaluator-0", pid=1, warm=False, host="evaluator-host-0")
    trained = [step(3, 1), exited(5, "worker-0", 0), exited(6, "worker-1", 0)]
    closing = event(6, "ending", reason="training succeeded; waiting for evaluator-0 to finish", grace_s=30)
    end = [exited(16, "evaluator-0", 0), event(17, "run-ended", status="succeeded")]
    assert spent(*BEGUN, evaluator, *trained, closing, *end) == {
        "queued": 1, "starting": 2, "training": 3, "evaluating": 10, "ending": 1,
    }  # fmt: skip


def test_an_evaluator_that_fails_does_not_stop_training() -> None:
    failed = [exited(5, "evaluator-0"), {**RESTART, "scope": ["evaluator-0"]}]
    again = event(8, "generation-formed", tasks=["evaluator-0"], restore=None)
    assert spent(*BEGUN, step(3, 1), *failed, again, step(9, 7, task="evaluator-0"), step(13, 100)) == {
        "queued": 1, "starting": 2, "training": 10,
    }  # fmt: skip


def test_a_worker_of_a_parameter_server_job_fails_alone() -> None:
    tasks = ["chief-0", "ps-0", "worker-0"]
    begin = [{**STARTED, "strategy": "parameter-server", "tasks": tasks, "hosts": []}]
    lines = [*begin, JOINED[0], {**FORMED, "tasks": tasks}, step(3, 1, task="chief-0"), exited(5, "worker-0")]
    again = [{**RESTART, "scope": ["worker-0"]}, event(8, "generation-formed", tasks=["worker-0"], restore=None)]
    assert spent(*lines, *again, exited(13, "chief-0", 0)) == {"queued": 1, "starting": 2, "training": 10}


def test_a_program_without_steps_trains_from_the_start_of_its_tasks() -> None:
    times = Goodput().add_all([*BEGUN, exited(12.5, "worker-0", 0), exited(12.5, "worker-1", 0)])
    assert times.seconds()["training"] == 10
    assert not times.has_steps


def test_the_snapshots_of_a_program_without_steps_are_counted() -> None:
    saved = [event(4.5 + 2 * n, "saved", step=n, snapshot=f"step-{n}-g1", counted=True) for n in range(4)]
    assert spent(*BEGUN, *saved, exited(12.5), formed(13, 2, "step-3-g1"), *started(13, 2))["lost"] == 2


def test_a_stopped_run() -> None:
    ending = event(13, "ending", reason="stopped by a user", grace_s=30)
    end = [exited(14, expected=True), event(15, "run-ended", status="stopped")]
    assert spent(*BEGUN, step(3, 1), ending, *end) == {"queued": 1, "starting": 2, "training": 10, "ending": 2}


def test_a_run_that_goes_on() -> None:
    goodput = Goodput().add_all([*BEGUN, step(3, 1)])
    now = events.seconds(recorded.at(13))
    assert now is not None
    assert goodput.seconds(now)["training"] == 10
    assert goodput.seconds()["training"] == 0  # unchanged
    assert goodput.to_report(now) == {
        "share": round(10 / 13, 4), "wall_s": 13, "seconds": goodput.seconds(now), "reports_steps": True,
    }  # fmt: skip


def test_a_run_may_be_queued_before_it_has_a_captain() -> None:
    report = Goodput().add_all([*BEGUN, step(3, 1), step(13, 2)]).to_report()
    assert report is not None
    queued = with_queue(report, 87.0)
    assert (queued["seconds"]["queued"], queued["wall_s"], queued["share"]) == (88, 100, 0.1)
    assert with_queue(report, -60.0) == report  # submitted by a clock that is ahead


def test_a_reader_that_missed_the_beginning_does_not_guess() -> None:
    """A cluster keeps only the last part of the output of a captain."""
    assert Goodput().add_all([step(3, 1), STARTED]).began is None
    assert Goodput().add_all(BEGUN).began == events.seconds(recorded.at(0))


def written(home: Path, lines: list[dict[str, Any]], reported: dict[str, Any] | None, **info: Any) -> dict[str, Any]:
    """The goodput of a run in a folder."""
    folder = recorded.write(home, events=lines, report={"status": "failed", "goodput": reported} if reported else None)
    run = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**run, **info}))
    goodput: dict[str, Any] = status_reader.read(run_folders.Run("digits-3f9a", folder), over=True).report["goodput"]
    return goodput


def test_the_report_of_a_captain_counts_unless_it_is_that_of_a_replaced_one(tmp_path: Path) -> None:
    lines = [*BEGUN, step(3, 1), step(13, 2)]
    whole = report_of({"queued": 4000, "training": 9000}, reports_steps=True)
    later = report_of({"queued": 4000, "training": 1000}, reports_steps=True)
    assert written(tmp_path / "1", lines, whole) == whole
    assert written(tmp_path / "2", lines, later)["wall_s"] == 13
    assert written(tmp_path / "3", lines, None)["wall_s"] == 13


def test_a_run_on_a_cluster_begins_when_it_is_submitted(tmp_path: Path) -> None:
    lines = [{**line, "at": line["at"].replace("T04:30", "T04:31")} for line in [*BEGUN, step(3, 1), step(13, 2)]]
    goodput = written(tmp_path, lines, None, on="kubernetes", context="c", namespace="n")
    assert (goodput["seconds"]["queued"], goodput["wall_s"]) == (61, 73)


def returned(at: float, generation: int, adopted: bool) -> dict[str, Any]:
    return event(at, "captain-returned", generation, adopted=adopted)


def test_a_captain_that_knows_nothing_of_an_earlier_one_states_since_when_it_counts() -> None:
    """Its pod was replaced, on another node, while training went on."""
    lines = [STARTED, *JOINED, returned(4, 3, True), step(5, 1001, 3), step(14, 1010, 3)]
    goodput = Goodput().add_all(lines)
    report = goodput.to_report()
    assert report is not None and report["since"] == STARTED["at"] and goodput.began is None
    assert spent(*lines) == {"training": 13, "starting": 1}
    assert report_of({"training": 1}, True).keys() == report.keys() - {"since"}


def test_a_group_that_a_captain_does_not_adopt_restarts() -> None:
    lines = [STARTED, *JOINED, returned(4, 3, False), formed(5, 4, "step-900-g3"), *started(6, 4), step(8, 901, 4)]
    assert spent(*lines, step(10, 902, 4)) == {"queued": 1, "starting": 3, "restarting": 4, "training": 2}


@pytest.mark.parametrize(
    "lines", [[*BEGUN, step(3, 1), returned(5, 1, True)], [STARTED, *JOINED, returned(4, 0, False), FORMED]]
)
def test_a_captain_that_has_the_events_counts_the_whole_run(lines: list[dict[str, Any]]) -> None:
    goodput = Goodput().add_all(lines)
    assert "since" not in (goodput.to_report() or {}) and goodput.began is not None


def test_a_reader_that_has_the_events_of_both_captains_counts_the_whole_run() -> None:
    """The second one begins with an event as if the run had started."""
    lines = [*BEGUN, step(3, 1), {**STARTED, "at": recorded.at(8)}, returned(9, 1, True), step(13, 2)]
    report = Goodput().add_all(lines).to_report()
    assert report is not None and report["wall_s"] == 13 and "since" not in report


def test_what_is_unknown_stays_unknown_after_a_rotation() -> None:
    begun = Goodput().add_all([STARTED, *JOINED, returned(4, 3, True)])
    mark = {**event(4, "rotated"), "goodput": json.loads(json.dumps(begun.to_json()))}
    assert "since" in (Goodput().add_all([mark]).to_report() or {})
    earlier = {name: value for name, value in Goodput().add_all(BEGUN).to_json().items() if name != "is_partial"}
    assert Goodput().add_all([{**mark, "goodput": earlier}]) == Goodput().add_all(BEGUN)


def test_status_says_since_when_it_counts(tmp_path: Path) -> None:
    reported = report_of({"training": 9000}, True, "2026-11-18T06:00:00.000Z")
    (note,) = [line for line in usage.goodput({"goodput": reported}) if "since" in line]
    assert note.strip() == "counted since 2026-11-18T06:00:00.000Z: what earlier captains recorded is lost"
    assert written(tmp_path, [], reported, on="kubernetes", context="c", namespace="n") == reported


def test_nothing_has_happened() -> None:
    assert Goodput().to_report(1e9) is None


# ---- in any order

KIND = st.sampled_from([*recorded.LIFE, *started(3), step(3, 50), exited(3, "worker-0", 0), exited(3, "worker-1", 0)])
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "step": st.sampled_from([0, 1, 50, 100, 120, 2**60, -1, None, 1.5]),
        "stall_s": st.sampled_from([0.25, 3, 1e9, -1, float("nan"), "1", None]),
        "restore": st.sampled_from([None, "step-0-g1", "step-50-g1", "step-110-g1", "step-x", 7]),
        "task": st.sampled_from([*GROUP, "evaluator-0", ""]),
        "expected": st.booleans(),
    },
)
LIFE = st.lists(st.tuples(KIND, FIELDS, st.integers(-3000, 100_000)), max_size=60)


def stream(life: list[tuple[dict[str, Any], dict[str, Any], int]]) -> list[dict[str, Any]]:
    at, lines = 1_700_000_000_000, []
    for line, fields, passed in life:
        at += passed
        lines.append({**line, **fields, "at": stamp(at / 1000)})
    return lines


@given(LIFE)
def test_the_kinds_add_up_to_the_time_of_the_run(life: list[tuple[dict[str, Any], dict[str, Any], int]]) -> None:
    goodput, highest, first = Goodput(), 0, None
    for line in stream(life):
        is_over = goodput.milliseconds() == goodput.milliseconds(1e10)
        goodput.add(line)
        at = round((events.seconds(line["at"]) or 0) * 1000)
        if line["event"] != "rotated" and not (is_over and first is not None):
            first = at if first is None else first
            highest = max(highest, at)
        times = goodput.milliseconds()
        assert tuple(times) == KINDS and min(times.values()) >= 0
        assert sum(times.values()) == highest - (first or 0)
        report = goodput.to_report()
        assert report is None or 0 <= report["share"] <= 1


JUNK = st.sampled_from(
    [None, True, -1, 1e300, float("nan"), 10**30, "", "x", "2026-11-15T04:30+01:00", [], [[]], {}, ["a", 1]]
)
NAMES = sorted({name for line in recorded.LIFE for name in line} | {"goodput", "stall_s", "by"})


@given(st.lists(st.tuples(st.sampled_from(recorded.LIFE), st.sampled_from(NAMES), JUNK), max_size=40))
def test_damaged_events_do_no_harm(life: list[tuple[dict[str, Any], str, Any]]) -> None:
    goodput = Goodput().add_all({**line, name: value} for line, name, value in life)
    times = goodput.milliseconds()
    assert min(times.values()) >= 0
    assert json.dumps(goodput.to_json()) and sum(times.values()) <= 13_000


HOSTS_CHANGE = [
    *BEGUN, *(event(1, "member-lost", host=f"worker-host-{index}") for index in (0, 1)), exited(3, code=0),
    exited(3, "worker-1", 0), event(2, "generation-formed", tasks=["worker-0"], absent=["worker-1"], restore=None),
]  # fmt: skip


@given(st.lists(st.sampled_from(HOSTS_CHANGE), max_size=40))
def test_whether_hosts_are_missing_is_known_without_comparing_all(lines: list[dict[str, Any]]) -> None:
    """Which would take a millisecond for each event if another user's run names thousands of them."""
    goodput = Goodput()
    for line in lines:
        goodput.add(line)
        known = goodput._missing_hosts, goodput._missing_needed, goodput._undecided
        goodput._compare_sets()
        assert known == (goodput._missing_hosts, goodput._missing_needed, goodput._undecided)


@given(LIFE, st.integers(0, 60))
def test_a_reader_continues_where_another_one_stopped(
    life: list[tuple[dict[str, Any], dict[str, Any], int]], number: int
) -> None:
    """After a rotation of the file, and for a new captain."""
    lines = stream(life)
    whole, before = Goodput().add_all(lines), Goodput().add_all(lines[:number])
    mark = json.loads(json.dumps({**event(0, "rotated"), "goodput": before.to_json()}))
    if before.has_begun:
        assert Goodput().add_all([mark, *lines[number:]]).to_json() == whole.to_json()


@pytest.mark.parametrize(
    "change",
    [
        {"times": {"training": 1}}, {"times": None}, {"curve": [[1]]}, {"curve": 7}, {"phase": "x"}, {"first": None},
        {"hosts": [1]}, {"has_steps": 1}, {"now": -1}, {"now": 1e300}, {"curve": [[1, 1]] * 1000},
    ],
    ids=str,
)  # fmt: skip
def test_a_damaged_mark_is_ignored(change: dict[str, Any]) -> None:
    lines = [*BEGUN, step(3, 1)]
    mark = {**event(0, "rotated"), "goodput": {**Goodput().add_all(lines).to_json(), **change}}
    assert spent(*lines, mark, step(13, 2)) == {"queued": 1, "starting": 2, "training": 10}


# ---- for weeks


def test_a_month_needs_little_memory_and_stays_exact() -> None:
    """A step a minute, a snapshot an hour, a failure a day that loses half an hour."""
    goodput, at, number, generation = Goodput().add_all(BEGUN), 1_800_000_000, 0, 1
    for minute in range(30 * 24 * 60):
        at, number = at + 60, number + 1
        goodput.add({**step(0, number, generation), "at": stamp(at)})
        if minute % (24 * 60) == 24 * 60 - 1:
            generation, number = generation + 1, number - 30
            goodput.add({**exited(0), "at": stamp(at)})
            goodput.add({**formed(0, generation, f"step-{number}-g{generation - 1}"), "at": stamp(at + 60)})
            at += 60
    assert len(json.dumps(goodput.to_json())) < 5000
    assert abs(goodput.seconds()["lost"] - 30 * 30 * 60) < 60
    assert len(goodput.to_json()["curve"]) <= MOST_POINTS


def test_a_rotated_file_gives_the_same_times(tmp_path: Path) -> None:
    file, lines = EventFile(str(tmp_path), pytest.fail, limit=20_000), [*BEGUN]
    for number in range(1, 3000):
        lines.append({**step(0, number), "at": stamp(1_800_000_000 + number)})
        if number % 500 == 0:
            restored = {**formed(0, 2, f"step-{number - 100}-g1"), "at": stamp(1_800_000_000 + number + 0.5)}
            lines += [{**exited(0), "at": stamp(1_800_000_000 + number)}, restored]
    for line in lines:
        assert file.write(json.dumps(line).encode() + b"\n", line)
    file.close()
    assert b"rotated" in (tmp_path / NAME).read_bytes()
    state = run_state.fold(events.read(tmp_path, pytest.fail))
    assert state.goodput.milliseconds() == Goodput().add_all(lines).milliseconds()
    assert state.goodput.seconds()["lost"] > 400


def test_a_captain_that_restarts_continues(tmp_path: Path) -> None:
    first = EventLog(str(tmp_path), None, pytest.fail)
    first.write("run-started", 0, {key: STARTED[key] for key in ("run", "job", "tasks", "hosts", "strategy")})
    first.write("generation-formed", 1, {"tasks": GROUP, "restore": None})
    second = EventLog(str(tmp_path), None, pytest.fail)
    assert second.goodput.to_json() == first.goodput.to_json()
    assert second.goodput.has_begun


# ---- clocks


@pytest.mark.parametrize("shift", [35.0, -12.0, 0.0])
def test_a_clock_that_is_set_while_the_captain_runs_changes_nothing(shift: float) -> None:
    changed = event(15 + shift, "clock-changed", shift_s=shift)
    after = [step(16 + shift, 20), event(20 + shift, "run-ended", status="succeeded")]
    assert spent(*BEGUN, step(3, 1), step(13, 10), changed, *after) == spent(
        *BEGUN, step(3, 1), step(13, 10), step(16, 20), event(20, "run-ended", status="succeeded")
    )


@pytest.mark.parametrize("shift", [None, "7", float("nan"), float("inf"), 1e300, -1e15])
def test_a_shift_that_is_not_valid_is_ignored(shift: Any) -> None:
    assert spent(*BEGUN, step(3, 1), event(13, "clock-changed", shift_s=shift)) == spent(
        *BEGUN, step(3, 1), step(13, 1)
    )


@pytest.mark.parametrize("shift", [3600.0, -3600.0])
def test_the_captain_notes_that_its_clock_was_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shift: float
) -> None:
    clocks = {"time": 1_000_000.0, "monotonic": 500.0}
    for name in clocks:
        monkeypatch.setattr(f"time.{name}", lambda name=name: clocks[name])

    def write(seconds: float, kind: str, **fields: Any) -> None:
        for name in clocks:
            clocks[name] += seconds
        log.write(kind, 1, fields)

    log = EventLog(str(tmp_path), None, print)
    write(0, "run-started", tasks=GROUP, hosts=["host"], strategy="", framework="none")
    write(1, "member-joined", host="host")
    write(1, "generation-formed", tasks=GROUP, restore=None)
    write(1, "step", task="worker-0", step=1, metrics={}, steps_per_s=None)
    clocks["time"] += 0.2  # corrected gradually
    write(1, "step", task="worker-0", step=2, metrics={}, steps_per_s=None)
    clocks["time"] += shift
    write(10, "step", task="worker-0", step=3, metrics={}, steps_per_s=None)
    lines = [json.loads(line) for line in (tmp_path / NAME).read_text().splitlines()]
    assert [line["shift_s"] for line in lines if line["event"] == "clock-changed"] == [shift]
    assert [line["event"] for line in lines[-2:]] == ["clock-changed", "step"]
    assert log.goodput.seconds()["training"] == pytest.approx(11.2, abs=0.01)
    assert log.goodput == Goodput().add_all(lines)
