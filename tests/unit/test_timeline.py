"""The timeline: one bar for each task, in order and without overlap, whatever happens."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.view.state import timeline
from paceline.view.state.events import Event, seconds
from paceline.view.state.timeline import Timeline
from support.recorded import LIFE, STARTED, at, event

HOSTS = {"worker-0": "worker-host-0", "worker-1": "worker-host-1", "evaluator-0": "evaluator-host-0"}
BASE = seconds(at(0)) or 0.0


def parsed(event: dict[str, Any]) -> Event:
    return Event(event["at"], event["event"], event["generation"], event)


def folded(*events: dict[str, Any]) -> Timeline:
    line = Timeline(HOSTS)
    for each in events:
        line.add(parsed(each))
    return line


def bar(line: Timeline, task: str = "worker-0", until: float = 60.0, resolution: float = 0.0) -> list[tuple[Any, ...]]:
    segments = line.window(task, BASE, BASE + until, resolution)
    return [(each.kind, round(each.begin - BASE, 3), round((each.end or 0) - BASE, 3)) for each in segments]


JOINED = event(1, "member-joined", 0, host="worker-host-0")
FORMED = event(2, "generation-formed", tasks=["worker-0", "worker-1"], restore=None)
BEGUN = event(3, "task-started", task="worker-0", pid=1, warm=False, host="worker-host-0")
STEP = event(6, "step", task="worker-0", step=1, metrics={}, steps_per_s=None)


def exited(at: float, code: int | None, expected: bool = False, task: str = "worker-0") -> dict[str, Any]:
    return event(
        at, "task-exited", task=task, code=code, signal=None if code is not None else "SIGKILL", expected=expected
    )


def test_a_task_without_failures() -> None:
    line = folded(STARTED, JOINED, FORMED, BEGUN, STEP, exited(9, 0), event(10, "run-ended", status="succeeded"))
    assert bar(line) == [
        ("queued", 0, 1), ("waiting", 1, 2), ("starting", 2, 6), ("training", 6, 9), ("succeeded", 9, 60),
    ]  # fmt: skip
    assert line.end == BASE + 10


def test_training_begins_at_the_first_step_not_when_it_is_known() -> None:
    times = event(6.1, "start-times", task="worker-0", imports_s=1.0, first_step_s=2.5)
    assert bar(folded(STARTED, JOINED, FORMED, BEGUN, STEP, times), until=7)[-2:] == [
        ("starting", 2, 5.5), ("training", 5.5, 7),
    ]  # fmt: skip


def test_a_program_that_reports_nothing_trains_once_it_has_started() -> None:
    times = event(33, "start-times", task="worker-0", imports_s=1.0, joined_s=1.5)
    assert bar(folded(STARTED, JOINED, FORMED, BEGUN, times))[-2:] == [("starting", 2, 4.5), ("training", 4.5, 60)]
    assert bar(folded(STARTED, JOINED, FORMED, BEGUN, exited(9, 0)))[-2:] == [("training", 3, 9), ("succeeded", 9, 60)]


def test_a_restart_of_a_group() -> None:
    restart = event(8, "restart", cause="signal", task="worker-0", detail="", scope=["worker-0", "worker-1"])
    again = event(10, "generation-formed", 2, tasks=["worker-0", "worker-1"], restore="step-1-g1")
    line = folded(
        STARTED, JOINED, FORMED, BEGUN, {**BEGUN, "task": "worker-1"}, STEP, {**STEP, "task": "worker-1"},
        exited(7, None), restart, exited(8.5, None, True, "worker-1"), again,
    )  # fmt: skip
    assert bar(line)[-3:] == [("training", 6, 7), ("restarting", 7, 10), ("restarting", 10, 60)]
    assert bar(line, "worker-1")[-3:] == [("training", 6, 8.5), ("restarting", 8.5, 10), ("restarting", 10, 60)]
    line.add(parsed({**STEP, "at": at(12), "generation": 2}))
    assert bar(line)[-2:] == [("restarting", 10, 12), ("training", 12, 60)]
    assert [mark.kind for mark in line.marks] == ["generation", "restart", "generation"]


def test_an_evaluator_evaluates_as_soon_as_it_runs() -> None:
    line = folded(STARTED, {**BEGUN, "task": "evaluator-0", "host": "evaluator-host-0"})
    assert bar(line, "evaluator-0") == [("queued", 0, 3), ("evaluating", 3, 60)]


def test_a_hang_begins_when_the_task_fell_silent() -> None:
    hang = event(20, "hang", tasks=["worker-0"], silent_s=10.0, limit_s=10.0, progress="step")
    restart = event(20.1, "restart", cause="hang", task="worker-0", detail="", scope=["worker-0"])
    line = folded(STARTED, JOINED, FORMED, BEGUN, STEP, hang, restart, exited(21, None, True))
    assert bar(line)[-3:] == [("training", 6, 10), ("hang", 10, 21), ("restarting", 21, 60)]


def test_training_that_waits_for_a_snapshot() -> None:
    saved = [event(second, "saved", step=second, snapshot=f"step-{second}-g1", stall_s=2.0) for second in (12, 20)]
    line = folded(STARTED, JOINED, FORMED, BEGUN, STEP, *saved)
    assert bar(line, until=30)[3:] == [
        ("training", 6, 10), ("snapshot", 10, 12), ("training", 12, 18), ("snapshot", 18, 20), ("training", 20, 30),
    ]  # fmt: skip
    assert bar(line, until=30, resolution=3)[-1] == ("training", 6, 30)


def test_what_users_do_is_marked() -> None:
    scaled = event(10, "scaled", role="worker", count=1, was=2, tasks=["worker-0"])
    paused = event(20, "paused", step=1, snapshot="step-1-g1")
    line = folded(STARTED, JOINED, FORMED, BEGUN, STEP, scaled, paused, event(30, "resumed", paused_s=10.0))
    assert [(mark.kind, mark.text) for mark in line.marks][1:] == [
        ("scaled", "scaling worker from 2 to 1 host"),
        ("paused", "the run is paused at step 1; it will continue from step 1"),
        ("resumed", "the run is being resumed after a pause of 10 s"),
    ]


def test_short_segments_are_merged() -> None:
    line = folded(STARTED, JOINED, FORMED, BEGUN, STEP)
    assert bar(line, resolution=1.5) == [("mixed", 0, 2), ("starting", 2, 6), ("training", 6, 60)]


def test_the_segments_of_a_task_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "_MOST_SEGMENTS", 20)
    events = [STARTED, JOINED]
    for number in range(1, 28):
        events += [
            event(2 * number, "task-started", number, task="worker-0", pid=1, warm=False, host="h"),
            event(2 * number + 1, "step", number, task="worker-0", step=1, metrics={}, steps_per_s=None),
        ]
    line = folded(*events)
    assert len(line.tasks["worker-0"]) <= 20
    assert bar(line)[0][:2] == ("mixed", 0) and bar(line)[-1] == ("training", 55, 60)


def test_tasks_with_odd_names_are_listed() -> None:
    """Not every digit is part of a number that Python reads, and not every number is short enough."""
    tasks = ["worker-2", "worker-10", "worker-" + "9" * 5000, "worker-\u00b2"]
    assert folded(event(0, "run-started", 0, tasks=tasks[::-1])).names() == tasks


def test_the_segments_of_all_tasks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline, "_MOST_IN_ALL", 100)
    tasks = [f"worker-{number}" for number in range(20)]
    events = [event(0, "run-started", 0, tasks=tasks)]
    for number in range(1, 28):
        events += [
            event(2 * number, "generation-formed", number, tasks=tasks, restore=None),
            event(2 * number + 1, "hang", number, tasks=tasks, silent_s=0.0),
        ]
    line = folded(*events)
    assert line.names() == tasks and sum(map(len, line.tasks.values())) <= 100
    assert bar(line)[0][:2] == ("mixed", 0) and bar(line)[-1] == ("hang", 55, 60)


@given(st.permutations(LIFE), st.floats(0, 10), st.floats(0, 20), st.floats(0, 2))
def test_bars_never_overlap_whatever_the_order_of_events(
    events: list[dict[str, Any]], begin: float, length: float, resolution: float
) -> None:
    line = folded(*events)
    for task in line.names():
        last = BASE + begin
        for each in line.window(task, BASE + begin, BASE + begin + length, resolution):
            assert each.kind in timeline.KINDS and each.end is not None
            assert last <= each.begin < each.end <= BASE + begin + length
            last = each.end
    form = line.to_json(BASE + 30, first=1, most=1, resolution=resolution)
    assert form["total_tasks"] == len(line.names()) and len(form["tasks"]) <= 1
