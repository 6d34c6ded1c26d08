"""When helpers take snapshots: by steps, or by time."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.runtime import save_schedule
from paceline.runtime.save_schedule import SaveSchedule


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    made: list[str] = []
    monkeypatch.setattr(save_schedule, "save_now", lambda: made.append("request"))
    monkeypatch.setenv("PACELINE_RANK", "0")
    return made


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
    ("variables", "count"),
    [
        ({"PACELINE_RANK": "1"}, 0),
        ({"PACELINE_RANK": "-1", "PACELINE_ROLE": "chief"}, 1),
        ({"PACELINE_RANK": "-1", "PACELINE_ROLE": "evaluator"}, 0),
    ],
)
def test_one_task_requests_snapshots_for_all(
    requests: list[str], monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], count: int
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    clock = Clock()
    schedule = SaveSchedule("30s", clock)
    for _ in range(2):
        schedule.check_time()
        clock.now += 30
    assert len(requests) == count


@pytest.mark.parametrize("every", ["", "30", "s", "1h 5m", "0s", "10 s", "-1s", "5m1h", "soon"])
def test_a_text_that_is_no_duration_is_rejected(every: str) -> None:
    with pytest.raises(ValueError, match="must be a duration such as '30s', '5m' or '1h30m', or a number of steps"):
        SaveSchedule(every)


@pytest.mark.parametrize("every", [0, -1, 1.5, True])
def test_a_number_that_is_no_number_of_steps_is_rejected(every: Any) -> None:
    with pytest.raises(ValueError, match="must be at least 1 step, or a duration such as '30s'"):
        SaveSchedule(every)
