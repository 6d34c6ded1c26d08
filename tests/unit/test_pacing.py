"""How fast a porter sends: no more bytes a second than it may, by a clock of the test's own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline import plan as planned
from paceline.agent import porter
from paceline.agent.options import Options
from paceline.agent.porter import Porter
from paceline.agent.porting import errand
from paceline.storage.folder import Folder
from paceline.storage.snapshots import Snapshots
from support.worlds import make_plan

RUN = "digits-3f9a"
FILES, SIZE = 6, 1000


class Clock:
    """Goes on while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(porter, "time", made)
    return made


def sent(tmp_path: Path, rate: float | None, clock: Clock) -> tuple[dict[str, Any], float]:
    """The answer, and how long it took."""
    saved = tmp_path / "saved"
    saved.mkdir(exist_ok=True)
    for number in range(FILES):
        (saved / f"{number}").write_bytes(bytes(SIZE))
    snapshots = Snapshots(Folder(str(tmp_path / "place")), RUN)
    carries = Porter(snapshots, snapshots, lambda _: None, rate, lanes=())
    began = clock.now
    request = {"do": "send", "id": 1, "snapshot": [10, 1], "task": "worker-0", "folder": str(saved)}
    return carries.done(request, 1), clock.now - began


def test_no_more_bytes_a_second_are_sent_than_may_be(tmp_path: Path, clock: Clock) -> None:
    answer, took = sent(tmp_path, 250.0, clock)
    assert len(answer["files"]) == FILES
    seconds = SIZE / 250.0  # for each; the first goes at once, and what is asked at the end may wait for the last
    assert (FILES - 1) * seconds <= took + 0.001 and took <= FILES * seconds + 0.001


def test_without_a_rate_nothing_waits(tmp_path: Path, clock: Clock) -> None:
    answer, took = sent(tmp_path, None, clock)
    assert len(answer["files"]) == FILES and took == 0.0


def test_what_was_sent_slowly_for_another_reason_is_not_made_up_for(tmp_path: Path, clock: Clock) -> None:
    """Bytes that were not sent in the past are no reason to send more of them now."""
    snapshots = Snapshots(Folder(str(tmp_path / "place")), RUN)
    carries = Porter(snapshots, snapshots, lambda _: None, 250.0, lanes=())
    paced = carries._paced({"id": 1})
    assert paced(SIZE)
    clock.now += 60.0
    began = clock.now
    assert paced(SIZE) and clock.now == began
    assert paced(SIZE) and clock.now - began == pytest.approx(SIZE / 250.0)


def test_one_that_waits_for_its_turn_can_be_given_up(tmp_path: Path, clock: Clock) -> None:
    snapshots = Snapshots(Folder(str(tmp_path / "place")), RUN)
    carries = Porter(snapshots, snapshots, lambda _: None, 1.0, lanes=())
    paced = carries._paced({"id": 1})
    assert paced(SIZE)
    carries.ask({"do": "forget", "which": 1})
    began = clock.now
    assert not paced(SIZE) and clock.now == began


def test_the_rate_of_the_job_reaches_the_porter() -> None:
    plan = replace(make_plan(1), snapshots=planned.Snapshots("s3://bucket/runs", rate=5_000_000))
    assert errand(plan, Options(RUN, "worker-host-0", "", "/run", "", "")).rate == 5_000_000
