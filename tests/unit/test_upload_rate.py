"""The rate limit of a porter, measured with a fake clock."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from paceline import plan as planned
from paceline.agent.options import Options
from paceline.agent.transfers import requests as req
from paceline.agent.transfers import upload_rate
from paceline.agent.transfers.porter import Porter
from paceline.agent.transfers.porter_client import porter_settings
from paceline.storage.snapshots.manifest import SnapshotId
from paceline.storage.snapshots.repository import SnapshotRepository
from paceline.storage.stores.folder import FolderStore
from support.worlds import make_plan

RUN = "digits-3f9a"
FILES, SIZE = 6, 1000


class Clock:
    """Advances only in sleep()."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake_clock = Clock()
    monkeypatch.setattr(upload_rate, "time", fake_clock)
    return fake_clock


def send_part(tmp_path: Path, rate: float | None, clock: Clock) -> tuple[req.PartSent, float]:
    """Return the answer and how long it took."""
    saved = tmp_path / "saved"
    saved.mkdir(exist_ok=True)
    for number in range(FILES):
        (saved / f"{number}").write_bytes(bytes(SIZE))
    snapshots = SnapshotRepository(FolderStore(str(tmp_path / "store")), RUN)
    sender = Porter(snapshots, snapshots, lambda *_: None, rate, lanes=())
    started = clock.now
    answer = sender.execute(req.SendPart(SnapshotId(10, 1), "worker-0", str(saved)), 1)
    assert isinstance(answer, req.PartSent), answer
    return answer, clock.now - started


def test_the_rate_limit_is_kept(tmp_path: Path, clock: Clock) -> None:
    answer, took = send_part(tmp_path, 250.0, clock)
    assert len(answer.files) == FILES
    seconds = SIZE / 250.0  # per file; the first is sent immediately, and the last check may wait for the last file
    assert (FILES - 1) * seconds <= took + 0.001 and took <= FILES * seconds + 0.001


def test_without_a_rate_nothing_waits(tmp_path: Path, clock: Clock) -> None:
    answer, took = send_part(tmp_path, None, clock)
    assert len(answer.files) == FILES and took == 0.0


def test_slow_periods_do_not_raise_the_rate_later(tmp_path: Path, clock: Clock) -> None:
    """Capacity that was not used in the past is not available later."""
    snapshots = SnapshotRepository(FolderStore(str(tmp_path / "store")), RUN)
    sender = Porter(snapshots, snapshots, lambda *_: None, 250.0, lanes=())
    paced = sender._paced(1)
    assert paced(SIZE)
    clock.now += 60.0
    started = clock.now
    assert paced(SIZE) and clock.now == started
    assert paced(SIZE) and clock.now - started == pytest.approx(SIZE / 250.0)


def test_a_transfer_that_waits_for_the_rate_limit_can_be_canceled(tmp_path: Path, clock: Clock) -> None:
    snapshots = SnapshotRepository(FolderStore(str(tmp_path / "store")), RUN)
    sender = Porter(snapshots, snapshots, lambda *_: None, 1.0, lanes=())
    paced = sender._paced(1)
    assert paced(SIZE)
    sender.ask(0, req.Cancel(1))
    started = clock.now
    assert not paced(SIZE) and clock.now == started


def test_the_rate_of_the_job_reaches_the_porter() -> None:
    plan = replace(make_plan(1), snapshots=planned.Snapshots("s3://bucket/runs", rate=5_000_000))
    assert porter_settings(plan, Options(RUN, "worker-host-0", "", "/run", "", "")).rate == 5_000_000
