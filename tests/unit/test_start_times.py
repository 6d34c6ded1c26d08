"""Where the time of a start goes: what an agent measures, what the captain records, and what it concludes."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.agent.captain import events as ev
from paceline.agent.captain import start_times
from paceline.agent.spares import import_recorder
from paceline.agent.tasks.start_timer import QUIET_S, StartTimer
from paceline.frameworks import start_stages
from support.worlds import make_plan, up

SLOW_DATA = {
    "warm": False, "imports_s": 2.0, "joining_s": 8.1, "joined_s": 8.2, "restoring_s": 9.0, "restored_s": 9.5,
    "first_step_s": 11.8,
}  # fmt: skip


def report(stage: str, **fields: Any) -> dict[str, Any]:
    return {"_": "start", "stage": stage, **fields}


def test_stages_are_measured_from_the_start_of_the_task() -> None:
    timer = StartTimer(100.0, "torch")
    timer.on_report(report("imported", framework="torch", imports=2.5), 103.0)
    timer.on_report(report("joining", framework="torch", imports=3.0), 104.0)
    timer.on_report(report("joined", framework="torch", imports=3.0), 105.0)
    timer.on_report(report("joined", framework="torch", imports=3.0), 106.0)  # a second group
    timer.on_report(report("restoring"), 107.0)
    timer.on_report(report("restored"), 108.0)
    assert timer.unsent(109.0) is None  # the first step may follow soon
    timer.on_first_step(110.0)
    timer.on_report(report("joining", framework="torch", imports=4.0), 111.0)
    assert timer.unsent(112.0, at_once=True) == ev.StartTimes(3.0, 4.0, 5.0, 7.0, 8.0, 10.0)
    assert timer.unsent(1000.0, at_once=True) is None


def test_a_program_that_reports_no_steps_gets_what_is_known() -> None:
    timer = StartTimer(0.0, "torch")
    assert timer.unsent(QUIET_S, at_once=True) is None
    timer.on_report(report("joined", framework="torch"), 5.0)
    assert timer.unsent(QUIET_S) is None
    assert timer.unsent(QUIET_S + 5.0) == ev.StartTimes(joined=5.0)
    timer.on_first_step(100.0)
    assert timer.unsent(100.0, at_once=True) == ev.StartTimes(joined=5.0, first_step=100.0)


def test_a_start_that_begins_again_without_a_spare_is_measured_anew() -> None:
    timer = StartTimer(0.0, "torch")
    timer.on_report(report("joining", framework="torch"), 1.0)
    timer.restart()
    timer.on_report(report("joining", framework="torch"), 4.0)
    assert timer.unsent(5.0, at_once=True) == ev.StartTimes(joining=4.0)


@pytest.mark.parametrize(
    "message",
    [
        report("joined", framework="jax"),  # imported by a torch program
        report("exploded", framework="torch"),
        report("imported", framework="torch", imports=9.0),  # more than has passed
        report("imported", framework="torch", imports=-1),
        report("imported", framework="torch", imports=float("nan")),
        report("imported", framework="torch", imports="2"),
        {"_": "start", "stage": ["joined"]},
        {"_": "start"},
    ],
    ids=str,
)
def test_invalid_reports_are_ignored(message: dict[str, Any]) -> None:
    timer = StartTimer(0.0, "torch")
    timer.on_report(message, 5.0)
    assert timer.unsent(6.0, at_once=True) is None


def test_the_captain_records_the_times_of_running_attempts() -> None:
    world = up(make_plan(2))
    times = ev.StartTimes(imports=2.0, first_step=3.12345)
    for attempt in (7, 1):
        world.captain.handle(ev.StartMeasured("worker-host-0", "worker-0", attempt, times), world.now)
    [emitted] = [
        instruction.fields
        for instruction in world.captain.handle(
            ev.StartMeasured("worker-host-1", "worker-1", 1, ev.StartTimes(joined=1.0)), world.now
        )
        if getattr(instruction, "kind", "") == "start-times"
    ]
    assert emitted == {"task": "worker-1", "joined_s": 1.0}
    [first] = start_times.to_report(world.captain.starts)
    assert first["generation"] == 1
    assert first["tasks"]["worker-0"] == {"warm": False, "imports_s": 2.0, "first_step_s": 3.123}
    assert first["tasks"]["worker-1"] == {"warm": False, "joined_s": 1.0}


def test_only_the_newest_generations_are_kept() -> None:
    starts: start_times.Starts = {}
    for generation in range(1, 30):
        start_times.record_started(starts, generation, "worker-0", warm=generation > 1)
        start_times.record_measured(starts, generation, "worker-0", {"first_step_s": 1.0})
        start_times.forget_old(starts)
    assert [start["generation"] for start in start_times.to_report(starts)] == list(range(20, 30))


def test_phases_add_up_to_the_time_until_the_first_step() -> None:
    spent = start_times.phases(SLOW_DATA)
    assert spent == pytest.approx(
        {
            "imports": 2.0, "before joining": 6.1, "joining": 0.1, "before restoring": 0.8, "restoring": 0.5,
            "first step": 2.3,
        }
    )  # fmt: skip
    assert sum(spent.values()) == pytest.approx(11.8)
    assert start_times.phases({"first_step_s": 3.0}) == {"first step": 3.0}


SLOW_TRACE = {**SLOW_DATA, "joining_s": 2.5, "joined_s": 2.6, "restoring_s": 3.0, "restored_s": 3.1}
COLD = {"warm": False, "imports_s": 4.0, "joining_s": 4.1, "joined_s": 4.2, "first_step_s": 4.5}


@pytest.mark.parametrize(
    ("generation", "measured", "advice"),
    [
        (1, SLOW_DATA, "6.1 s of 11.8 s before worker-1 joined the group: prepare data in `ingest`"),
        (1, SLOW_TRACE, "8.7 s of 11.8 s between restoring and the first step of worker-1: trace or compile less"),
        (2, COLD, "4.0 s of 4.5 s for imports: worker-1 was not started from a spare"),
        (1, COLD, ""),  # nothing to be done about the first start
        (2, {**COLD, "warm": True}, ""),
        (1, {name: value for name, value in SLOW_DATA.items() if name != "first_step_s"}, ""),  # no step reported
        (1, {"joined_s": 1.0, "first_step_s": 60.0}, ""),  # anything may have happened in between
        (2, {name: value / 20 for name, value in SLOW_DATA.items()}, ""),  # fast enough
    ],
)
def test_advice_is_about_the_longest_phase_that_can_be_changed(
    generation: int, measured: dict[str, Any], advice: str
) -> None:
    others = {
        "worker-0": {"warm": False, "imports_s": 1.0, "joining_s": 1.0 * ("joining_s" in measured), "joined_s": 8.2}
    }
    assert start_times.advice(generation, {**others, "worker-1": measured}) == advice


def test_the_modules_that_are_observed_are_those_that_the_hook_can_handle() -> None:
    assert import_recorder._HOOKS["PACELINE_REPORT_INODE"].keys() == start_stages.JOINS.keys()
