"""When helpers take snapshots: by steps, or by time."""

from __future__ import annotations

import warnings
from typing import Any

import numpy
import pytest

from paceline.runtime import report, save_schedule
from paceline.runtime.save_schedule import SaveSchedule


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    saves: list[str] = []
    monkeypatch.setattr(save_schedule, "save_now", lambda: saves.append("request"))
    monkeypatch.setattr(report, "_descriptor", 0)  # there is a connection to the agent
    monkeypatch.setenv("PACELINE_RANK", "0")
    monkeypatch.setenv("PACELINE_WORLD_SIZE", "2")
    return saves


def test_every_n_steps() -> None:
    schedule = SaveSchedule(10)
    assert [n for n in range(1, 31) if schedule.is_due(n)] == [10, 20, 30]
    assert schedule.is_periodic and not SaveSchedule(None).is_periodic


def test_steps_that_are_reported_several_at_a_time() -> None:
    schedule = SaveSchedule(10)
    assert schedule.is_due(12, previous=8) and not schedule.is_due(16, previous=12)


def test_every_n_seconds_the_first_task_requests_a_snapshot(requests: list[str]) -> None:
    clock = Clock()
    schedule = SaveSchedule("30s", clock)
    assert schedule.is_periodic and not any(schedule.is_due(n) for n in range(100))
    counts = []
    for seconds in (0, 29, 1, 0, 29, 1):  # the first step may come long after the helper was created
        clock.now += seconds
        schedule.check_time()
        counts.append(len(requests))
    assert counts == [0, 0, 1, 1, 1, 2]


def test_the_time_counts_from_the_last_snapshot_whatever_its_reason(requests: list[str]) -> None:
    clock = Clock()
    schedule = SaveSchedule("30s", clock)
    schedule.check_time()
    clock.now += 20
    schedule.taken()
    clock.now += 20
    schedule.check_time()
    assert requests == []
    clock.now += 10
    schedule.check_time()
    assert requests == ["request"]


@pytest.mark.parametrize(
    ("variables", "count", "takes_it"),
    [
        ({"PACELINE_RANK": "1"}, 0, False),
        ({"PACELINE_RANK": "0", "PACELINE_ROLE": "chief"}, 1, False),
        ({"PACELINE_RANK": "0", "PACELINE_WORLD_SIZE": "1"}, 0, True),
        ({"PACELINE_RANK": "-1", "PACELINE_ROLE": "chief", "PACELINE_WORLD_SIZE": "0"}, 0, True),
        ({"PACELINE_RANK": "-1", "PACELINE_ROLE": "evaluator"}, 0, False),
    ],
)
def test_one_task_requests_snapshots_for_all_or_takes_them_if_it_saves_alone(
    requests: list[str], monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], count: int, takes_it: bool
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    clock = Clock()
    schedule = SaveSchedule("30s", clock)
    answers = []
    for _ in range(2):
        answers.append(schedule.check_time())
        clock.now += 30
    assert (len(requests), answers) == (count, [False, takes_it])


def test_processes_of_a_launcher_do_not_save_by_time_which_a_warning_says(
    requests: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher such as torchrun closes the connection to the agent. Its processes all seem to be the only task."""
    monkeypatch.setattr(report, "_descriptor", -1)
    monkeypatch.setenv("PACELINE_WORLD_SIZE", "1")
    monkeypatch.setenv("PACELINE_SNAPSHOT_DIR", "/snapshots")
    clock = Clock()
    message = "every='30s': this process has no connection to Paceline, .* give a number of steps, such as every=100"
    with pytest.warns(UserWarning, match=message):
        schedule = SaveSchedule("30s", clock)
    schedule.check_time()
    clock.now += 30
    assert not schedule.check_time()


@pytest.mark.parametrize(("every", "folder", "descriptor"), [(10, "/x", -1), ("30s", "", -1), ("30s", "/x", 0)])
def test_other_schedules_do_not_warn(
    monkeypatch: pytest.MonkeyPatch, every: int | str, folder: str, descriptor: int
) -> None:
    monkeypatch.setattr(report, "_descriptor", descriptor)
    monkeypatch.setenv("PACELINE_SNAPSHOT_DIR", folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SaveSchedule(every)


@pytest.mark.parametrize("every", [10, numpy.int64(10), numpy.uint8(10)])
def test_any_integer_is_a_number_of_steps(every: Any) -> None:
    schedule = SaveSchedule(every)
    assert [n for n in range(1, 21) if schedule.is_due(n)] == [10, 20]


@pytest.mark.parametrize("every", ["", "30", "s", "1h 5m", "0s", "10 s", "-1s", "5m1h", "soon"])
def test_a_text_that_is_no_duration_is_rejected(every: str) -> None:
    with pytest.raises(ValueError, match="must be a duration such as '30s', '5m' or '1h30m', or a number of steps"):
        SaveSchedule(every)


@pytest.mark.parametrize("every", [0, -1, 1.5, True, numpy.float64(2)])
def test_a_number_that_is_no_number_of_steps_is_rejected(every: Any) -> None:
    with pytest.raises(ValueError, match="must be at least 1 step, or a duration such as '30s'"):
        SaveSchedule(every)
